"""The same weights give the same logits in transformers, in both directions."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from meshwright.models import build_model, init_model
from meshwright.models.cache import KVCache
from meshwright.models.hf import load_hf, save_hf
from meshwright.models.hf_names import to_hf
from meshwright.spec.resolve import model_spec

transformers = pytest.importorskip("transformers")
from hf_models import KINDS, SIZES  # noqa: E402
from hf_newer import NEWER  # noqa: E402

CASES = [
    pytest.param(family, keys, id=f"{family} {name}")
    for family, (_, _, kinds) in KINDS.items()
    for name, keys in kinds.items()
]


def theirs(family, keys):
    """Return their model, with biases and norms that are not the zeros and ones of a new one."""
    torch.manual_seed(0)
    kind, config, _ = KINDS[family]
    # A quarter of 12 dims is odd: 64 / 4 heads gives 16.
    sizes = {**SIZES, "hidden_size": 64} if family == "neox" else SIZES
    model = kind(config(**{**sizes, **keys}, attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # enough to change what is picked
                buffer.normal_(std=0.3)
    return model.eval()


def stored_gradients(model, folder):
    """Return a model's gradients under the names that its weights have in files."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def tokens():
    return torch.randint(0, 99, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.often(8)
@pytest.mark.parametrize(("family", "keys"), CASES)
def test_transformers_loads_what_is_saved(family, keys, tmp_path):
    theirs(family, keys).save_pretrained(tmp_path / "a")
    model = load_hf(tmp_path / "a")
    save_hf(model, tmp_path / "b", max_shard_bytes=40_000)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.eval()(tokens()).logits, model(tokens()), atol=1e-5, rtol=0
        )


@pytest.mark.often(10)
@pytest.mark.parametrize(("family", "keys"), CASES)
def test_logits_and_gradients_are_those_of_transformers(family, keys, tmp_path):
    reference = theirs(family, keys)
    reference.save_pretrained(tmp_path)
    model, ids = load_hf(tmp_path), tokens()
    wanted, logits = reference(ids).logits, model(ids)
    assert wanted.std() > 0.05
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)
    for one in (wanted, logits):
        F.cross_entropy(one[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    stored = to_hf(model.spec, grads | dict(model.named_buffers()))
    expected = stored_gradients(reference, tmp_path / "gradients")
    assert stored.keys() == expected.keys()
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        off = (stored[name] - grad).norm()
        assert off <= 1e-5 * max(grad.norm(), 1e-3 * whole), name


@pytest.mark.often(6)
@pytest.mark.parametrize("family", sorted(NEWER))
@pytest.mark.parametrize("length", [7, 33, 64])
def test_documents_of_a_row_and_padded_rows_are_those_of_transformers(family, length, tmp_path):
    """A row of two documents has the logits of both alone; padding after a row changes nothing."""
    reference = theirs(family, next(iter(NEWER[family][2].values())))
    reference.save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    ids = torch.randint(0, 99, (1, length), generator=torch.Generator().manual_seed(length))
    first = length // 3
    segments = (torch.arange(length) >= first).long()[None]
    padded = F.pad(ids, (0, 5))
    with torch.no_grad():
        alone = [reference(part).logits for part in (ids[:, :first], ids[:, first:])]
        mask = torch.arange(length + 5)[None] < length
        wanted = reference(padded, attention_mask=mask.long()).logits[:, :length]
        packed, filled = model(ids, segments), model(padded)[:, :length]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(filled, wanted, atol=1e-5, rtol=0)


@pytest.mark.often(8)
@pytest.mark.parametrize("family", sorted(KINDS))
def test_cached_generation_computes_the_same(family, tmp_path):
    keys = list(KINDS[family][2].values())[1]
    theirs(family, keys).save_pretrained(tmp_path)
    model, ids = load_hf(tmp_path), tokens()
    cache = KVCache(40)
    with torch.no_grad():
        whole = model(ids)
        parts = [model(ids[:, at], cache=cache) for at in (slice(0, 33), slice(33, 34))]
        parts += [model(ids[:, at : at + 1], cache=cache) for at in range(34, 40)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


@pytest.mark.often(12)
@pytest.mark.parametrize("family", sorted(KINDS))
def test_a_round_trip_is_bitwise(family, tmp_path):
    keys = next(iter(KINDS[family][2].values()))
    theirs(family, keys).to(torch.bfloat16).save_pretrained(tmp_path / "a")
    save_hf(load_hf(tmp_path / "a"), tmp_path / "b")
    before = load_file(tmp_path / "a" / "model.safetensors")
    after = load_file(tmp_path / "b" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == torch.bfloat16 for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_a_config_written_by_hand_in_the_old_style(family, tmp_path):
    rope = {"rope_theta": 300.0}
    if family == "neox":
        rope["partial_rotary_factor"] = 0.5
    reference = theirs(family, {"rope_parameters": {"rope_type": "default", **rope}})
    reference.save_pretrained(tmp_path)
    config = {key: value for key, value in SIZES.items() if value is not None}
    if family == "llama":
        config |= {"model_type": "llama", "rope_theta": 300.0, "rope_scaling": None}
        config |= {"rms_norm_eps": 1e-6, "num_key_value_heads": 4}
    else:
        config |= {"model_type": "gpt_neox", "rotary_emb_base": 300, "rotary_pct": 0.5}
        config |= {"layer_norm_eps": 1e-5, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    with torch.no_grad():
        torch.testing.assert_close(
            load_hf(tmp_path)(tokens()), reference(tokens()).logits, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"n_kv_heads": 2},
        {"tie_embeddings": True},
        {"family": "neox", "parallel_residual": True, "activation": "gelu_tanh"},
        {"family": "qwen2"},
        {"family": "qwen3", "head_dim": 16, "tie_embeddings": True},
        {"family": "mistral", "n_kv_heads": 1},
        {"family": "phi3", "rotary_pct": 0.5},
        {"family": "granite", "residual_scale": 0.3, "attention_scale": 0.1, "logits_divisor": 4.0},
        # Families with windows, of which no layer has one.
        *({"family": one, "layer_pattern": ({},)} for one in ("gemma2", "gemma3", "olmo3")),
        {"family": "gpt_oss", "experts": 3, "top_k": 2, "layer_pattern": ({},)},
    ],
)
def test_a_model_of_our_own_loads_in_transformers(fields, tmp_path):
    spec = model_spec(vocab_size=99, dim=32, n_layers=2, n_heads=4, init_std=0.1, **fields)
    model = init_model(build_model(spec, device="cpu"), spec, seed=0)
    save_hf(model, tmp_path, bos_token_id=1, eos_token_id=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (1, 2)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()).logits, model(tokens()), atol=1e-5, rtol=0)
