"""Rotation: YaRN, LongRoPE, a base for each kind of layer; each against its definition."""

import json
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.models import build_model, init_model
from meshwright.models.cache import KVCache
from meshwright.models.generate import generate
from meshwright.models.rope import Rope, inverse_frequencies
from meshwright.prove.oracle import _rotation
from meshwright.prove.shrink import shrink
from meshwright.spec.families import FAMILIES
from meshwright.spec.hf import hf_config, spec_from_hf
from meshwright.spec.hf_rotary import read_rotary, rotary_keys, sliding_base
from meshwright.spec.loading import load_config
from meshwright.spec.model import LayerSpec, ModelSpec, RopeScaling, RotaryBase
from meshwright.spec.resolve import model_spec

CPU = torch.device("cpu")
SIZES = {"vocab_size": 96, "dim": 96, "n_layers": 2, "n_heads": 4, "context": 640}  # 12 pairs
SHORT = [1.0 + i / 20 for i in range(12)]
LONG = [1.0 + i * i / 9 for i in range(12)]
YARNS = {
    "plain": {"factor": 4.0, "original_context": 160},
    "real bounds": {"factor": 3.7, "original_context": 100, "truncate": False},
    "mscale": {
        "factor": 40.0,
        "original_context": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 7.5,
        "beta_slow": 2.0,
    },
    "one mscale": {"factor": 8.0, "original_context": 300, "mscale": 0.7},
    "shrinks": {"factor": 0.5, "original_context": 20},
    "nothing turns once": {"factor": 4.0, "original_context": 3},
    "given": {"factor": 8.0, "original_context": 64, "attention_factor": 1.7, "mscale": 2.0},
    "equal bounds": {"factor": 8.0, "original_context": 64, "beta_fast": 2.0, "beta_slow": 2.0},
}
LONGROPES = {
    "plain": {"factor": 4.0, "original_context": 160},
    "shrinks": {"factor": 0.5, "original_context": 20},
    "given": {"factor": 8.0, "original_context": 64, "attention_factor": 1.7},
}
SCALINGS = [
    *(pytest.param("yarn", keys, id=f"yarn {name}") for name, keys in YARNS.items()),
    *(
        pytest.param(
            "longrope", keys | {"short_factor": SHORT, "long_factor": LONG}, id=f"longrope {name}"
        )
        for name, keys in LONGROPES.items()
    ),
]


def longrope(original=24, **more):
    scaling = {"kind": "longrope", "factor": 4.0, "original_context": original}
    return scaling | {"short_factor": SHORT, "long_factor": LONG} | more


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
        frequencies, factor = _rotation(spec, 0, row)
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


# Layers of several kinds. No family here chooses a pattern of them by itself.
def patterned(*layers, **more):
    spec = model_spec(**SIZES | {"n_layers": 6}, init_std=0.2, **more)
    return spec.model_copy(update={"layer_pattern": layers})


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


# config.json
LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LISTS = {"short_factor": [1, 1, 2, 2], "long_factor": [1, 2, 3, 4.5]}
LONGROPE = {"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("dropped", ["rope_scaling", "rope_parameters", "neither"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(("kind", "keys"), SCALINGS)
def test_each_spelling_alone_gives_the_same(kind, keys, family, dropped):
    spec = model_spec(**SIZES, family=family, rope_scaling={"kind": kind, **keys})
    if family == "phi3" and kind == "yarn":
        with pytest.raises(ConfigError, match=r"'yarn' cannot be written as phi3; .* longrope"):
            hf_config(spec)
        return
    config = json.loads(json.dumps(hf_config(spec)))
    config.pop(dropped, None)
    assert spec_from_hf(config) == spec


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("kind", "keys"), SCALINGS)
def test_transformers_reads_the_same(kind, keys, spelling):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec = model_spec(**SIZES, rope_theta=777.0, rope_scaling={"kind": kind, **keys})
    config = hf_config(spec)
    del config["rope_parameters" if spelling == "rope_scaling" else "rope_scaling"]
    for seq_len in (1, 10**6):
        read = transformers.LlamaConfig(**config)
        found, factor = ROPE_INIT_FUNCTIONS[kind](read, "cpu", seq_len=seq_len)
        wanted = inverse_frequencies(spec, is_long=seq_len > 1)
        torch.testing.assert_close(found, wanted, atol=0, rtol=1e-7)
        assert factor == pytest.approx(spec.rope_scaling.cos_sin_factor, abs=1e-12)


def test_phi3_is_written_as_transformers_4_takes_it():
    spec = model_spec(**SIZES, family="phi3", rope_scaling=longrope(160))
    config = hf_config(spec)
    assert config["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    assert config["original_max_position_embeddings"] == 160


ABSENT = {
    "yarn": (YARN, {}),
    "yarn, null factor": (YARN | {"factor": None}, {"factor": 4.0}),
    "yarn, no original": (
        {"rope_type": "yarn", "factor": 4.0},
        {"original_context": 64},
    ),
    "yarn, zeros": (YARN | {"beta_fast": 0, "mscale": 0}, {}),
    "yarn, null truncate": (YARN | {"truncate": None}, {"truncate": False}),
    "longrope": (LONGROPE, {"factor": 4.0}),
    "longrope, factor": (LONGROPE | {"factor": 8}, {"factor": 8.0}),
}


@pytest.mark.parametrize("case", sorted(ABSENT))
def test_absent_keys_mean_what_transformers_says(case):
    keys, expected = ABSENT[case]
    spec = spec_from_hf({**LLAMA, "rope_parameters": keys})
    found = spec.rope_scaling.model_dump()
    wanted = {"factor": 4.0, "original_context": 16} | expected
    assert {key: found[key] for key in wanted} == wanted
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**LLAMA, rope_parameters={"rope_theta": 1e4, **keys})
    frequencies, factor = ROPE_INIT_FUNCTIONS[keys["rope_type"]](config, "cpu")
    torch.testing.assert_close(inverse_frequencies(spec), frequencies, atol=0, rtol=1e-7)
    assert spec.rope_scaling.cos_sin_factor == pytest.approx(factor, abs=1e-12)


PHI3 = LLAMA | {"model_type": "phi3"}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_has_its_own_original_context_and_names(name):
    config = PHI3 | {"max_position_embeddings": 8192, "rope_scaling": {"type": name, **LISTS}}
    scaling = spec_from_hf(config).rope_scaling
    assert (scaling.kind, scaling.original_context, scaling.factor) == ("longrope", 4096, 2.0)
    told = spec_from_hf(config | {"original_max_position_embeddings": 2048}).rope_scaling
    assert (told.original_context, told.factor) == (2048, 4.0)


REFUSED = [
    (LLAMA, {"rope_type": "yarn"}, "rope_parameters.rope_type = 'yarn' needs the key 'factor'"),
    (LLAMA, YARN | {"factor": -2}, "factor = -2.0 must be above 0"),
    (LLAMA, YARN | {"attention_factor": -1.0}, "attention_factor = -1.0: .* greater than 0"),
    (LLAMA, YARN | {"beta_fast": -1}, "beta_fast = -1.0: .* greater than 0"),
    (LLAMA, YARN | {"beta_slow": 64}, "beta_fast = 32.0 is below beta_slow = 64"),
    (LLAMA, YARN | {"truncate": "no"}, "truncate = 'no' must be true or false"),
    (LLAMA, YARN | {"mscale": "x"}, "mscale = 'x' must be a number"),
    (LLAMA, YARN | {"rope_theta": 1.0}, "rope_theta = 1.0 must be above 1"),
    (LLAMA, YARN | {"original_max_position_embeddings": 16.5}, "16.5 of yarn .* whole number"),
    (LLAMA, {"rope_type": "longrope", "short_factor": [1] * 4}, "needs the key 'long_factor'"),
    (LLAMA, LONGROPE | {"short_factor": [1, 2, 3]}, "short_factor has 3 numbers.* 4 pairs"),
    (LLAMA, LONGROPE | {"long_factor": 3}, "long_factor = 3 must be a list"),
    (LLAMA, LONGROPE | {"long_factor": "1111"}, "long_factor = '1111' must be a list"),
    (LLAMA, LONGROPE | {"long_factor": [1, 2, "3", 4]}, "long_factor.2 = '3' must be a number"),
    (LLAMA, LONGROPE | {"short_factor": [1, 2, -3, 4]}, "short_factor.2 = -3.0: .* greater than 0"),
    (LLAMA, LONGROPE | {"short_factor": []}, "needs short_factor, a list"),
    (LLAMA, LONGROPE | {"original_max_position_embeddings": 1}, "= 1 is too short for longrope"),
    (PHI3, {"rope_type": "yarn", "factor": 2.0}, "'longrope' needs the key 'short_factor'"),
    (PHI3, {"rope_type": "linear", "factor": 2.0}, "'linear' is not supported; .* longrope"),
    (PHI3, LONGROPE, "= 4096.0 and rope_parameters.original.* = 16.0 must agree"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "keys", "message"), REFUSED, ids=lambda v: str(v)[:60])
def test_refusals_name_the_key_and_the_value(base, keys, message):
    with pytest.raises(ConfigError, match=message):
        spec_from_hf({**base, "rope_parameters": keys})


def test_spellings_that_disagree_are_both_named():
    old = LONGROPE | {"long_factor": [1, 2, 3, 4]}
    with pytest.raises(ConfigError, match=r"rope_scaling.long_factor = .* must agree"):
        spec_from_hf({**LLAMA, "rope_scaling": old, "rope_parameters": LONGROPE})
    with pytest.raises(ConfigError, match=r"^original_max.* = 8.0 and .* = 16.0 must agree"):
        spec_from_hf({**LLAMA, "original_max_position_embeddings": 8, "rope_parameters": YARN})


# By kind of layer. No family here has such files by itself.
KINDS = ("sliding_attention", "sliding_attention", "full_attention")
OLMO3 = replace(FAMILIES["llama"], kinds_of_layers=True, rope_theta=500000.0)
GEMMA3 = replace(
    FAMILIES["llama"],
    kinds_of_layers=True,
    rope_theta=1e6,
    sliding_theta=1e4,
    sliding_theta_key="rope_local_base_freq",
)
NESTED = {
    "gemma3 default": ("Gemma3TextConfig", GEMMA3, {}),
    "gemma3 of 4": (
        *("Gemma3TextConfig", GEMMA3),
        {
            "rope_theta": 2e6,
            "rope_local_base_freq": 3e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "olmo3 default": ("Olmo3Config", OLMO3, {}),
    "olmo3 of 4": ("Olmo3Config", OLMO3, {"rope_theta": 5e5, "rope_scaling": YARN}),
    "olmo3 of 5": (
        *("Olmo3Config", OLMO3),
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 7e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 4e5},
            }
        },
    ),
    "alike": (
        *("Olmo3Config", OLMO3),
        {"rope_parameters": {kind: {**YARN, "rope_theta": 7e5} for kind in KINDS}},
    ),
}
LAYERS = {"num_hidden_layers": 3, "layer_types": list(KINDS), "hidden_size": 32}
LAYERS |= {"num_attention_heads": 4, "max_position_embeddings": 64}


def nested_spec(config, family):
    """Return the model of a config by kinds of layers, as a family that has them would."""
    fields = read_rotary(config, family, 64)
    base = sliding_base(config, family)
    pattern = [LayerSpec(window=16, rope_theta=base), LayerSpec(window=16, rope_theta=base)]
    spec = model_spec(**{**SIZES, "dim": 32, "n_layers": 3, "context": 64}, **fields)
    return spec.model_copy(update={"layer_pattern": (*pattern, LayerSpec())})


@pytest.mark.parametrize("case", sorted(NESTED))
def test_kinds_of_layers_rotate_as_in_transformers(case):
    transformers = pytest.importorskip("transformers")
    name, family, keys = NESTED[case]
    kind = getattr(transformers, name)
    given = {**LAYERS, **json.loads(json.dumps(keys))}
    spec = nested_spec(LAYERS | keys, family)
    config = kind(**given, head_dim=8)
    # What it writes of itself, and what we write, are the same model too.
    assert nested_spec({**LAYERS, "rope_parameters": config.rope_parameters}, family) == spec
    written = rotary_keys(spec, family)
    again = kind(**{**LAYERS, "head_dim": 8}, **json.loads(json.dumps(written)))
    assert nested_spec(LAYERS | written, family) == spec
    for read in (config, again):
        rope = rotary_of(name)(read)
        for layer, layer_type in ((0, "sliding_attention"), (2, "full_attention")):
            base = spec.rotary_base(spec.layer(layer))
            factor = spec.rope_scaling.cos_sin_factor if base.scaled else 1.0
            found = getattr(rope, f"{layer_type}_inv_freq")
            torch.testing.assert_close(inverse_frequencies(spec, base), found, atol=0, rtol=1e-7)
            assert getattr(rope, f"{layer_type}_attention_scaling") == pytest.approx(factor)


def rotary_of(name):
    if name == "Olmo3Config":
        from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding as Theirs
    else:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding as Theirs
    return Theirs


def test_layers_that_are_alike_have_no_base_of_their_own():
    assert sliding_base(LAYERS | NESTED["alike"][2], OLMO3) is None
    assert sliding_base(LAYERS | NESTED["olmo3 of 4"][2], OLMO3) == 5e5  # that of all, unscaled
    assert sliding_base(LAYERS, OLMO3) is None
    assert sliding_base(LAYERS, GEMMA3) == 1e4
    assert sliding_base(LAYERS, FAMILIES["llama"]) is None


FULL, SLIDING = ({"rope_type": "default", "rope_theta": theta} for theta in (1e6, 1e4))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_theta": 1e6}, r"has \['rope_theta'\] outside of a kind of layer; .*full_attention"),
        ({"full_attention": 3}, "full_attention = 3 must be a table"),
        ({"sliding_attention": {**SLIDING, "rope_type": "linear", "factor": 2.0}},
         "rope_parameters.sliding_attention with rope_type = 'linear' is not that of full"),
        ({"full_attention": {**FULL, **YARN, "truncate": False}}, "truncate = True and .* = False"),
    ],
)  # fmt: skip
def test_refusals_of_kinds_of_layers(keys, message):
    with pytest.raises(ConfigError, match=message):
        sliding_base(LAYERS | {"rope_parameters": keys}, GEMMA3)


def test_real_bounds_are_written_where_transformers_looks_for_them():
    scaling = {"kind": "yarn", "factor": 4.0, "truncate": False}
    spec = patterned(LayerSpec(window=4, rope_theta=9.0), LayerSpec(), rope_scaling=scaling)
    written = rotary_keys(spec, OLMO3)
    assert written["rope_parameters"]["truncate"] is False
    assert read_rotary(written, OLMO3, 640)["rope_scaling"] == spec.rope_scaling


@pytest.mark.parametrize(
    ("family", "pattern", "which"),
    [
        ("llama", (LayerSpec(rope_theta=9.0), LayerSpec()), "all layers"),
        (OLMO3, (LayerSpec(rope_theta=9.0), LayerSpec(window=4)), "layers without a window"),
        (
            *(OLMO3, (LayerSpec(window=4), LayerSpec(window=4, rope_theta=9.0))),
            "layers with a window",
        ),
    ],
)
def test_patterns_that_a_config_cannot_say(family, pattern, which):
    family = FAMILIES[family] if isinstance(family, str) else family
    with pytest.raises(ConfigError, match=f"it has one rope_theta of {which}, but .*9.0"):
        rotary_keys(patterned(*pattern), family)


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
