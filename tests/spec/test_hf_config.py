"""Reading and writing `config.json`: defaults, both spellings, refusals."""

import json
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.spec.hf import hf_config, spec_from_hf
from meshwright.spec.presets import PRESETS
from meshwright.spec.resolve import model_spec

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NEOX = {**LLAMA, "model_type": "gpt_neox"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_absent_llama_keys_mean_what_transformers_says():
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.LlamaConfig(), spec_from_hf({"model_type": "llama"})
    assert ours == spec_from_hf(theirs.to_dict())
    assert ours.norm_eps == 1e-6
    assert ours.n_kv_heads == 32
    assert not ours.tie_embeddings


def test_absent_neox_keys_mean_what_transformers_says():
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.GPTNeoXConfig(), spec_from_hf({"model_type": "gpt_neox"})
    assert ours == spec_from_hf(theirs.to_dict())
    assert ours.rotary_pct == 0.25
    assert ours.parallel_residual
    assert ours.attention_bias
    assert ours.norm_eps == 1e-5


@pytest.mark.parametrize("family", ["gemma", "glm4_moe", "minimax_m2", "seed_oss", "starcoder2"])
def test_absent_keys_of_newer_families_mean_what_transformers_says(family):
    transformers = pytest.importorskip("transformers")
    # The defaults of GLM have no whole size of a head, and StarCoder2's first weights their own.
    given = {"initializer_range": 0.02, **({"head_dim": 128} if family == "glm4_moe" else {})}
    theirs = transformers.AutoConfig.for_model(family, **given)
    assert spec_from_hf({"model_type": family, **given}) == spec_from_hf(theirs.to_dict())


def test_published_settings_of_newer_families_are_read():
    """Dropout of a pretraining, rotated dims as a number, a router's settings for its own code."""
    seed = {**LLAMA, "model_type": "seed_oss", "num_key_value_heads": 4}
    assert not spec_from_hf({**seed, "residual_dropout": 0.1}).drops
    starcoder2 = {**LLAMA, "model_type": "starcoder2", "embedding_dropout": 0.1}
    assert not spec_from_hf({**starcoder2, "attention_dropout": 0.1, "use_bias": False}).mlp_bias
    minimax = {**LLAMA, "model_type": "minimax_m2", "head_dim": 16, "rotary_dim": 8}
    minimax |= {"num_key_value_heads": 4, "scoring_func": "sigmoid", "use_qk_norm": True}
    spec = spec_from_hf(minimax | {"attn_type_list": [1, 1]})
    assert (spec.rotary_pct, spec.rotary_dim) == (0.5, 8)
    assert hf_config(spec)["rotary_dim"] == 8
    assert (
        spec_from_hf(
            {**LLAMA, "model_type": "gemma", "num_key_value_heads": 4, "hidden_act": "gelu"}
        ).activation
        == "gelu_tanh"
    )


def test_null_means_absent():
    keys = ("num_key_value_heads", "head_dim", "rope_scaling", "rope_theta", "sliding_window")
    assert spec_from_hf({**LLAMA, **dict.fromkeys(keys)}) == spec_from_hf(LLAMA)


ROTARY = {
    "v4 theta": (LLAMA, {"rope_theta": 5e5}, {"rope_theta": 5e5}),
    "v5 theta": (LLAMA, {"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
    "integer theta": (LLAMA, {"rope_theta": 10000}, {"rope_theta": 1e4}),
    "v4 neox": (
        NEOX,
        {"rotary_pct": 0.5, "rotary_emb_base": 2000},
        {"rotary_pct": 0.5, "rope_theta": 2000.0},
    ),
    "v4.57 neox": (
        NEOX,
        {"rotary_pct": 1.0, "partial_rotary_factor": 1.0, "rope_theta": 7.0, "rotary_emb_base": 7},
        {"rotary_pct": 1.0, "rope_theta": 7.0},
    ),
    "v5 neox": (
        NEOX,
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 9.0}},
        {"rotary_pct": 0.5, "rope_theta": 9.0},
    ),
}


@pytest.mark.parametrize("case", sorted(ROTARY))
def test_rotary_spellings(case):
    base, keys, expected = ROTARY[case]
    spec = spec_from_hf({**base, **keys})
    assert {key: getattr(spec, key) for key in expected} == expected


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_scaling_spellings(key, kind):
    spec = spec_from_hf({**LLAMA, key: {kind: "linear", "factor": 2}})
    assert spec.rope_scaling.model_dump(include={"kind", "factor"}) == {
        "kind": "linear",
        "factor": 2.0,
    }
    scaling = spec_from_hf({**LLAMA, key: {kind: "llama3", **LLAMA3}}).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("llama3", 8.0, 32)
    absent = {name: v for name, v in LLAMA3.items() if name != "original_max_position_embeddings"}
    assert spec_from_hf({**LLAMA, key: {kind: "llama3", **absent}}).rope_scaling == (
        scaling.model_copy(update={"original_context": 64})
    )


REFUSED = [
    (LLAMA, {"model_type": "qwen33"}, "model_type = 'qwen33' .* qwen3"),
    (LLAMA, {"model_type": "bloom"}, "model_type = 'bloom' .* gpt_oss, granite, granitemoe"),
    (LLAMA, {"model_type": "deepseek_v32"}, "like deepseek_v3, with sparse attention"),
    (LLAMA, {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 0},
     "sliding_window = 0 must be at least 1"),
    (LLAMA, {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": "16"},
     "sliding_window = '16' must be a whole number"),
    (LLAMA, {"model_type": "qwen3", "num_key_value_heads": 4, "layer_types": ["sliding_attention"]},
     "layer_types must be a list with one of each of 2 layers, not 1"),
    (LLAMA, {"model_type": "qwen3", "num_key_value_heads": 4,
     "layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention, but"),
    (LLAMA, {"model_type": "qwen3", "num_key_value_heads": 4,
     "layer_types": [["full_attention"]] * 2}, "layer_types has .*full_attention"),
    (LLAMA, {"model_type": "qwen3", "num_key_value_heads": 4,
     "layer_types": ["chunked_attention"] * 2}, "has .'chunked_attention'.*full_attention"),
    (LLAMA, {"model_type": "gemma3_text", "num_key_value_heads": 4,
     "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    (LLAMA, {"model_type": "smollm3", "num_key_value_heads": 4, "no_rope_layers": [1, 2]},
     "no_rope_layers = .* must be a list of 1"),
    (LLAMA, {"model_type": "smollm3", "num_key_value_heads": 4, "no_rope_layer_interval": 0},
     "no_rope_layer_interval = 0"),
    (LLAMA, {"model_type": "gemma3_text", "sliding_window_pattern": 0},
     "sliding_window_pattern = 0"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": float("inf")}},
     "factor = inf is beyond any"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
     "rope_parameters.full_attention is a table"),
    (LLAMA, {"model_type": "nemotron"}, "like neox, with a LayerNorm of 1 . weight"),
    (LLAMA, {"model_type": "hunyuan_v1_dense"}, "like qwen3, with norms of heads after the rot"),
    (LLAMA, {"model_type": "minimax_m2", "num_key_value_heads": 4, "rotary_dim": 8,
     "head_dim": None}, "rotary_dim = 8 needs the key 'head_dim'"),
    (LLAMA, {"model_type": "minimax_m2", "num_key_value_heads": 4, "attn_type_list": [1, 0]},
     "attn_type_list must be 1"),
    (LLAMA, {"model_type": "minimax_m2", "scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    (LLAMA, {"model_type": "starcoder2", "norm_type": "rms_norm"}, "norm_type = 'rms_norm' must"),
    (LLAMA, {"model_type": "dots1"}, "needs the key 'n_routed_experts'"),
    (LLAMA, {"model_type": None}, "model_type = None"),
    (LLAMA, {"model_type": ["llama"]}, "model_type = "),
    (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096"),
    (LLAMA, {"pretraining_tp": 2}, "pretraining_tp = 2 .* 1"),
    (LLAMA, {"is_causal": False}, "is_causal = False .* True"),
    (LLAMA, {"model_type": "mistral", "sliding_window": 8,
     "layer_types": ["sliding_attention", "full_attention"]}, "layer_types differs from slid"),
    (LLAMA, {"model_type": "mistral", "sliding_window": None,
     "layer_types": ["sliding_attention"] * 2}, 'layer_types .* = None.*"full_attention" for all'),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config = .*bits"),
    (LLAMA, {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    (LLAMA, {"hidden_act": {}}, "hidden_act = {}"),
    (LLAMA, {"hidden_act": "relu"}, "hidden_act = 'relu' .* silu"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
     "rope_scaling.type = 'dynamic' .* default, linear, llama3"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "needs the key 'factor'"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", **LLAMA3,
     "original_max_position_embeddings": 2**63}},
     "_embeddings = 9.22337e.* up to 2147483647"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0"),
    (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs the key 'low_freq"),
    (LLAMA, {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
     "low_freq_factor < high_freq_factor"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling = 'linear' must be a table"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (LLAMA, {"num_attention_heads": 5}, "num_attention_heads = 5 must divide hidden_size = 32"),
    (LLAMA, {"num_key_value_heads": 3}, "n_kv_heads = 3 must divide"),
    (LLAMA, {"hidden_size": "32"}, "hidden_size = '32' must be a whole number"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers = True must be a whole number"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers = 0 must be"),
    (LLAMA, {"rms_norm_eps": "tiny"}, "rms_norm_eps = 'tiny' must be a number"),
    (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be true or false"),
    (LLAMA, {"initializer_range": float("nan")}, "initializer_range = nan"),
    (NEOX, {"num_key_value_heads": 2}, "num_key_value_heads = 2 .* 4"),
    (NEOX, {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    (NEOX, {"hidden_dropout": 1.0}, "dropout: .* less than 1"),
    (LLAMA, {"hidden_dropout": 0.1}, "hidden_dropout = 0.1"),
    (NEOX, {"rotary_pct": 1.5}, "rotary_pct"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "keys", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_refusals_name_the_key_and_the_value(base, keys, message):
    with pytest.raises(ConfigError, match=message):
        spec_from_hf({**base, **keys})


DISAGREEING = [
    (LLAMA, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000.0", "500000.0"),
    (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}},
     "llama3", "linear"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0},
             "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "2.0", "4.0"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0},
             "rope_parameters": {"rope_type": "default"}}, "linear", "default"),
    (NEOX, {"rotary_pct": 0.25, "rope_parameters": {"partial_rotary_factor": 1.0}}, "1.0", "0.25"),
    (NEOX, {"rotary_emb_base": 10000, "rope_theta": 20000}, "20000.0", "10000.0"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "keys", "first", "second"), DISAGREEING)
def test_spellings_that_disagree_are_both_named(base, keys, first, second):
    with pytest.raises(ConfigError, match="must agree") as caught:
        spec_from_hf({**base, **keys})
    assert first in str(caught.value)
    assert second in str(caught.value)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_come_back(name):
    spec = model_spec(preset=name)
    config = json.loads(json.dumps(hf_config(spec)))
    assert spec_from_hf(config) == spec.model_copy(update={"preset": None})


NEW = {"rope_parameters"}
V457 = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
V4 = {"rotary_emb_base", "rotary_pct"}
SPELLINGS = {
    "llama 5": ({}, V457),
    "llama 4": ({}, NEW),
    "neox 5": ({"family": "neox", "rotary_pct": 0.5}, V457 | V4),
    "neox 4.57": ({"family": "neox", "rotary_pct": 0.5}, NEW | V4),
    "neox 4": ({"family": "neox", "rotary_pct": 0.5}, NEW | V457),
}


@pytest.mark.parametrize("case", sorted(SPELLINGS))
def test_each_spelling_alone_gives_the_same(case):
    fields, dropped = SPELLINGS[case]
    if not fields:
        fields = {"rope_scaling": {"kind": "llama3", "factor": 4.0, "original_context": 32}}
    spec = model_spec(vocab_size=96, dim=32, n_heads=4, rope_theta=777.0, **fields)
    config = hf_config(spec)
    kept = {key: value for key, value in config.items() if key not in dropped}
    assert kept != config
    assert spec_from_hf(kept) == spec.model_copy(update={"preset": None})


def test_what_transformers_cannot_build_is_not_written():
    sizes = {"vocab_size": 96, "dim": 32, "n_heads": 4, "family": "neox"}
    with pytest.raises(ConfigError, match="mlp_bias = false"):
        hf_config(model_spec(**sizes, mlp_bias=False))
    with pytest.raises(ConfigError, match="head_dim = 16"):
        hf_config(model_spec(**sizes, head_dim=16))


def test_dropout_is_read_and_written_for_neox():
    spec = spec_from_hf({**NEOX, "hidden_dropout": 0.1})
    assert spec.dropout == 0.1
    assert hf_config(spec)["hidden_dropout"] == 0.1
    assert spec_from_hf(hf_config(spec)) == spec
    llama = model_spec(dropout=0.1)
    assert "hidden_dropout" not in hf_config(llama)
    assert spec_from_hf(hf_config(llama)) == llama.model_copy(update={"dropout": 0.0})


def test_tokens_and_dtype_are_written():
    config = hf_config(model_spec(), dtype="bfloat16", bos_token_id=1, eos_token_id=(2, 3))
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2, 3])


GOLDEN = Path(__file__).parents[2].parent / "shared" / "data" / "golden"


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden folders in {GOLDEN}")
@pytest.mark.parametrize("name", ["llama_gqa_theta500k", "llama_tied_mha", "neox_parallel_rot25"])
def test_both_versions_of_a_golden_config_are_the_same_model(name):
    new, old = (
        spec_from_hf(json.loads((GOLDEN / name / file).read_text()))
        for file in ("config.json", "config.v4.json")
    )
    assert new == old
