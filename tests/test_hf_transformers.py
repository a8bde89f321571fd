"""The same weights give the same logits in transformers, in both directions."""

import json

import pytest
import torch
from safetensors.torch import load_file

from meshwright.models import build_model, init_model
from meshwright.models.hf import load_hf, save_hf
from meshwright.spec.resolve import model_spec

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMAS = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3": {"rope_parameters": LLAMA3, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 24, "num_key_value_heads": 2},
    "gelu": {"hidden_act": "gelu"},
    "large eps": {"rms_norm_eps": 0.1},
}
NEOXES = {
    "parallel": {},
    "sequential": {"use_parallel_residual": False},
    "fully rotary": {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}},
    "half rotary": {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 100.0}},
    "linear": {
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    },
    "tied": {"tie_word_embeddings": True},
    "gelu_new": {"hidden_act": "gelu_new"},
    "gelu_fast": {"hidden_act": "gelu_fast"},
    "no attention bias": {"attention_bias": False},
    "large eps": {"layer_norm_eps": 0.1},
}
CASES = [pytest.param("llama", keys, id=f"llama {name}") for name, keys in LLAMAS.items()]
CASES += [pytest.param("neox", keys, id=f"neox {name}") for name, keys in NEOXES.items()]


def theirs(family, keys):
    """Return their model, with biases and norms that are not the zeros and ones of a new one."""
    torch.manual_seed(0)
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **keys))
    else:
        # A quarter of 12 dims is odd: 64 / 4 heads gives 16.
        sizes = {**SIZES, "hidden_size": 64}
        model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **keys))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tokens():
    return torch.randint(0, 99, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("family", "keys"), CASES)
def test_logits_are_those_of_transformers(family, keys, tmp_path):
    reference = theirs(family, keys)
    reference.save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    with torch.no_grad():
        expected, found = reference(tokens()).logits, model(tokens())
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "keys"), CASES)
def test_transformers_loads_what_is_saved(family, keys, tmp_path):
    theirs(family, keys).save_pretrained(tmp_path / "a")
    model = load_hf(tmp_path / "a")
    save_hf(model, tmp_path / "b", max_shard_bytes=40_000)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.eval()(tokens()).logits, model(tokens()), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_a_round_trip_is_bitwise(family, tmp_path):
    theirs(family, {}).to(torch.bfloat16).save_pretrained(tmp_path / "a")
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
