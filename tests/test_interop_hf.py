"""Configs of Hugging Face models, and what is accepted of unknown ones."""

from meshwright.interop.importing import refusal_text
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
