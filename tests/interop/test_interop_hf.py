"""Configs of Hugging Face models, and what is accepted of unknown ones."""

import pytest

from meshwright.interop.importing import refusal_text
from meshwright.spec.families import FAMILIES
from meshwright.spec.hf import hf_config
from meshwright.spec.resolve import model_spec
from test_interop import config_of, entry, imported

HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "sliding_window": None,
}


def test_hugging_face(tmp_path):
    found = imported(tmp_path, HF, "config.json")
    config = config_of(found)
    assert (config.model.n_kv_heads, config.model.rope_theta) == (2, 500000.0)
    assert config.model.norm_eps == 1e-6  # transformers' default
    assert entry(found, "architectures").verdict == "ignored"
    assert entry(found, "hidden_size").to == {"model.dim": 64}
    refused = imported(tmp_path, {**HF, "sliding_window": 128}, "config.json").report.refused
    assert [e.key for e in refused] == ["sliding_window"]
    refused = imported(tmp_path, {**HF, "qk_norms": True}, "config.json").report.refused
    assert [e.key for e in refused] == ["qk_norms"]


def test_an_unknown_model_is_no_config_even_if_it_is_accepted(tmp_path):
    for content in (
        {**HF, "model_type": "mamba"},
        {key: value for key, value in HF.items() if key != "model_type"},
    ):
        for accepted in (["model_type"], ["all"]):
            report = imported(tmp_path, content, "config.json", accepted=accepted).report
            assert report.refused
            assert "--accept" not in refusal_text(report)


def test_what_is_accepted_leaves_the_rest_of_the_model(tmp_path):
    content = {**HF, "sliding_window": 128, "attention_dropout": 0.1, "qk_norms": True}
    refused = [one.key for one in imported(tmp_path, content, "config.json").report.refused]
    assert "sliding_window" in refused
    found = imported(tmp_path, content, "config.json", accepted=refused)
    assert not found.report.refused
    model = config_of(found).model
    assert (model.dim, model.n_layers, model.n_kv_heads, model.vocab_size) == (64, 2, 2, 512)
    plain = config_of(imported(tmp_path, HF, "config.json")).model
    assert model == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_a_family_writes_is_known(family, tmp_path):
    more = {"attention_bias": True, "mlp_bias": True} if family == "neox" else {}
    spec = model_spec(family=family, dim=64, n_layers=12, n_heads=4, vocab_size=96, **more)
    found = imported(tmp_path, hf_config(spec), "config.json")
    assert not found.report.refused
    assert config_of(found).model == spec.model_copy(update={"dropout": 0.0})


def test_keys_of_old_files_of_gemma_and_smollm(tmp_path):
    sizes = {**HF, "num_hidden_layers": 4, "head_dim": 16}
    old = {
        "model_type": "gemma3_text",
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1e6,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "cache_implementation": "hybrid",
    }
    found = imported(tmp_path, sizes | old, "config.json")
    assert not found.report.refused
    windows = [one.window for one in config_of(found).model.layer_pattern]
    assert windows == [512, None]
    own = {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0], "no_rope_layer_interval": 4}
    found = imported(tmp_path, sizes | own | {"max_window_layers": 28}, "config.json")
    assert [one.rotary for one in config_of(found).model.layer_pattern] == [True, False]


@pytest.mark.parametrize(
    ("model_type", "table", "sets"),
    [
        ("llama", {"rope_theta": 1e6}, {"rope_theta"}),
        (
            "gpt_neox",
            {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
            {"rope_theta", "rotary_pct"},
        ),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"},
            },
            {"rope_theta", "layer_pattern"},
        ),
    ],
)
def test_what_rotary_tables_state_is_no_default(tmp_path, model_type, table, sets):
    content = {key: value for key, value in HF.items() if key not in ("rope_theta", "hidden_act")}
    content |= {"model_type": model_type, "num_key_value_heads": 4, "rope_parameters": table}
    found = imported(tmp_path, content, "config.json")
    assert config_of(found).model.rope_theta == 1e6
    assert entry(found, "rope_parameters").to.keys() == {
        f"model.{field}" for field in ("rope_scaling", *sets)
    }
    filled = {one.key for one in found.report.filled}
    assert not filled & {f"model.{field}" for field in sets}
    assert config_of(found).origins["model.rope_theta"] == "config.json: rope_parameters"
