"""Rotation: YaRN, LongRoPE, a base for each kind of layer; each against its definition."""

import json

import pytest
import torch
from pydantic import ValidationError

from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.models import build_model, init_model
from meshwright.models.cache import KVCache
from meshwright.models.generate import generate
from meshwright.models.rope import Rope, inverse_frequencies
from meshwright.prove.rotation import rotation
from meshwright.prove.shrink import shrink
from meshwright.spec.hf import hf_config
from meshwright.spec.loading import load_config
from meshwright.spec.model import LayerSpec, ModelSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.rotary import RopeScaling, RotaryBase
from rotary_cases import SCALINGS, SIZES, longrope, patterned

CPU = torch.device("cpu")


def theirs(kind, keys, theta):
    """Return transformers' frequencies of rows that fit and of longer ones, and its factor."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    renamed = {("original_max_position_embeddings" if k == "original_context" else k): v
               for k, v in keys.items()}  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=96,
        num_attention_heads=4,
        max_position_embeddings=640,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **renamed},
    )
    init = ROPE_INIT_FUNCTIONS[kind]
    (fits, factor), (longer, _) = (init(config, "cpu", seq_len=n) for n in (1, 10**6))
    return fits, longer, factor


@pytest.mark.parametrize("theta", [10000.0, 777.0])
@pytest.mark.parametrize(("kind", "keys"), SCALINGS)
def test_frequencies_and_factors_are_those_of_transformers(kind, keys, theta):
    fits, longer, factor = theirs(kind, keys, theta)
    spec = model_spec(**SIZES, rope_theta=theta, rope_scaling={"kind": kind, **keys})
    torch.testing.assert_close(inverse_frequencies(spec), fits, atol=0, rtol=1e-7)
    torch.testing.assert_close(inverse_frequencies(spec, is_long=True), longer, atol=0, rtol=1e-7)
    assert torch.equal(fits, longer) == (kind == "yarn")
    assert spec.rope_scaling.cos_sin_factor == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(("kind", "keys"), SCALINGS)
def test_the_reference_rotates_so_too(kind, keys):
    spec = model_spec(**SIZES, rope_theta=777.0, rope_scaling={"kind": kind, **keys})
    for row in (2, 10_000):
        frequencies, factor = rotation(spec, 0, row)
        is_long = row > spec.rope_scaling.original_context
        wanted = inverse_frequencies(spec, is_long=is_long)
        torch.testing.assert_close(frequencies, wanted, atol=0, rtol=1e-6)
        assert factor == pytest.approx(spec.rope_scaling.cos_sin_factor, abs=1e-12)


def test_cosines_are_those_of_transformers_at_every_length():
    transformers = pytest.importorskip("transformers")
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    spec = model_spec(**SIZES | {"context": 96}, family="phi3", rope_scaling=longrope())
    reference = Phi3RotaryEmbedding(transformers.Phi3Config(**hf_config(spec)))
    rope = Rope(spec)
    for stop in (24, 25, 60, 10, 24, 61):  # longer and shorter again
        rope.reach(stop, CPU)
        found = rope.tables(0, stop)
        wanted = reference(torch.zeros(1), torch.arange(stop)[None])
        for ours, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, one[0], atol=1e-6, rtol=0)


def test_a_share_of_a_row_is_rotated_as_the_whole_row():
    """As a rank of cp or sp sees it: the length that the model is built for decides."""
    spec = model_spec(**SIZES, rope_scaling=longrope())
    whole = Rope(spec)
    whole.reach(32, CPU)
    at = torch.tensor([0, 1, 30, 31])
    for length, same in ((32, True), (24, False)):
        model = build_model(spec, max_seq_len=length)
        model.init_tables("cpu")
        model.rope.reach(4, CPU)
        if length == 32:
            found = model.rope.tables(0, 4, at)
            assert all(
                torch.equal(a, b) for a, b in zip(found, whole.tables(0, 4, at), strict=True)
            )
        assert torch.equal(model.rope.tables(0, 4)[1], whole.tables(0, 4)[1]) == same


def built(spec):
    return init_model(build_model(spec, device="cpu"), spec, seed=0)


def tokens(count, seed=0):
    return torch.randint(0, 96, (1, count), generator=torch.Generator().manual_seed(seed))


def test_generation_begins_anew_where_longrope_changes():
    spec = model_spec(**SIZES, rope_scaling=longrope(), init_std=0.2)
    model, row = built(spec), tokens(20)
    found = generate(model, row, 9, temperature=0)
    with torch.no_grad():
        for _ in range(9):
            row = torch.cat((row, model(row)[:, -1].argmax(-1)[:, None]), 1)
    assert torch.equal(found, row)


def test_a_cache_does_not_go_on_where_longrope_changes():
    model, cache = built(model_spec(**SIZES, rope_scaling=longrope())), KVCache(40)
    with torch.no_grad():
        model(tokens(24), cache=cache)
        with pytest.raises(ConfigError, match=r"more than 24 tokens .* cache of 24 .* to 25"):
            model(tokens(1), cache=cache)
        cache = KVCache(40)
        model(tokens(25), cache=cache)
        model(tokens(1), cache=cache)


def test_a_greedy_continuation_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from meshwright.models.hf import save_hf

    sizes = SIZES | {"context": 96}
    spec = model_spec(**sizes, family="phi3", rope_scaling=longrope(), init_std=0.2)
    model = built(spec)
    save_hf(model, tmp_path, bos_token_id=None, eos_token_id=None)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    row = tokens(20)
    wanted = reference.generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=9, do_sample=False
    )
    assert torch.equal(generate(model, row, 9, temperature=0), wanted)


def test_layers_of_one_base_share_a_table():
    own, plain, none = LayerSpec(rope_theta=300.0), LayerSpec(), LayerSpec(rotary=False)
    spec = patterned(own, own, plain, none, rope_scaling={"kind": "yarn", "factor": 4.0})
    assert spec.rotary_bases == (RotaryBase(300.0, False), RotaryBase(10000.0, True))
    model = built(spec)
    assert [block.attn.table for block in model.blocks] == [0, 0, 1, None, 0, 0]
    model.rope.reach(16, CPU)
    for index, fields in enumerate(
        ({"rope_theta": 300.0}, {"rope_scaling": {"kind": "yarn", "factor": 4.0}})
    ):
        alone = Rope(model_spec(**SIZES, **fields), 16)
        alone.reach(16, CPU)
        found = model.rope.tables(0, 16, index=index)
        assert all(torch.equal(a, b) for a, b in zip(found, alone.tables(0, 16), strict=True))


def test_a_base_of_their_own_is_that_of_the_model_without_scaling():
    ids, scaling = tokens(32), {"kind": "linear", "factor": 4.0}
    scaled = patterned(LayerSpec(rope_theta=300.0), rope_scaling=scaling)
    alike = patterned(LayerSpec(), rope_theta=300.0)
    with torch.no_grad():
        assert torch.equal(built(scaled)(ids), built(alike)(ids))
        assert not torch.equal(built(patterned(LayerSpec()))(ids), built(alike)(ids))


def test_layers_without_rotation_do_not_know_positions():
    ids = tokens(8)
    model = built(patterned(LayerSpec(rotary=False)))
    with torch.no_grad():
        model.init_tables("cpu", 64)
        assert torch.equal(model(ids), model(ids, positions=3 * torch.arange(8)))
    assert model.spec.rotary_bases == ()


@pytest.mark.slow
def test_blocks_compile_whole_and_once_whichever_table_they_look_up():
    kinds = LayerSpec(rope_theta=300.0), LayerSpec(), LayerSpec(rotary=False)
    spec = patterned(*kinds, rope_scaling=longrope())
    model, reference, graphs = built(spec), built(spec), []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    for count in (12, 20, 30, 24, 25, 18):
        found, wanted = model(tokens(count)), reference(tokens(count))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # Six blocks: one of each kind for a length, one for any; none for longrope's other table.
    assert graphs == [3, 6, 6, 6, 6, 6]


# The spec itself
def test_a_dump_of_an_earlier_version_stays_what_it_was():
    keys = {"kind", "factor", "low_freq_factor", "high_freq_factor", "original_context"}
    for kind in ("linear", "llama3"):
        scaling = RopeScaling(kind=kind, factor=4.0, original_context=64)
        assert scaling.model_dump(mode="json").keys() == keys
        assert json.loads(scaling.model_dump_json()).keys() == keys
        spec = model_spec(**SIZES, rope_scaling=scaling.model_dump())
        assert spec.identity()["rope_scaling"].keys() == keys
        assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(("kind", "keys"), SCALINGS)
def test_a_dump_comes_back(kind, keys):
    spec = model_spec(**SIZES, rope_scaling={"kind": kind, **keys})
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    assert ModelSpec(**spec.model_dump(mode="json")) == spec
    one = model_spec(**SIZES, rope_scaling={"kind": kind, **keys, "factor": 4.5})
    assert one.identity() != spec.identity()


def test_a_config_file_comes_back(tmp_path):
    from meshwright.spec.dump import to_toml

    words = ["model.head_dim=4", "model.n_heads=4", "model.n_kv_heads=2"]
    words += ['model.rope_scaling={kind="longrope", factor=4, short_factor=[1, 1.5], '
              "long_factor=[2, 3], original_context=64}"]  # fmt: skip
    config = load_config(None, words)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml").model == config.model


BAD = {
    "lists of another kind": (
        {"kind": "yarn", "factor": 2.0, "long_factor": [1.0]},
        r"long_factor = \(1.0,\) is not of .*'yarn'; nearest legal: kind = 'longrope'",
    ),
    "bounds of another kind": (
        longrope(beta_fast=8.0),
        "beta_fast = 8.0 is not of .*'longrope'; nearest legal: kind = 'yarn'",
    ),
    "llama3's": ({"kind": "yarn", "factor": 2.0, "low_freq_factor": 2.0}, "kind = 'llama3'"),
    "a short list": (longrope(short_factor=[1.0]), "has 1 numbers, .* 12 pairs.* 12 numbers"),
    "no list": ({"kind": "longrope", "factor": 2.0}, "needs short_factor"),
    "negative": ({"kind": "yarn", "factor": -2.0}, "greater than 0"),
    "a negative one": (longrope(long_factor=[-1.0] * 12), "long_factor.0"),
    "bounds": ({"kind": "yarn", "factor": 2.0, "beta_slow": 33.0}, "beta_slow = 32.0"),
    "too short": (longrope(original=1), "too short for longrope; nearest legal: 2"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_scalings_that_do_not_hold(case):
    keys, message = BAD[case]
    with pytest.raises((ConfigError, ValidationError), match=message):
        model_spec(**SIZES, rope_scaling=keys)


@pytest.mark.parametrize("original", [24, 300, 4096])
def test_a_proof_on_small_rows_keeps_the_side_that_longrope_is_on(original):
    config = load_config(None, ["train.seq_len=256", "train.batch=8"])
    spec = model_spec(**SIZES, rope_scaling=longrope(original))
    (case, *_) = shrink(spec, config.train, Layout(tp=2, dp_replicate=4))
    small = case.model.rope_scaling
    assert len(small.long_factor) == case.model.rotary_dim // 2
    assert (case.train.seq_len > small.original_context) == (original < 256)
