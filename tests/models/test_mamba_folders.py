"""Folders and presets of families with layers of Mamba-2, beside transformers' classes."""

import json

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.models.hf import load_hf
from meshwright.spec.hf import hf_config, spec_from_hf
from meshwright.spec.parts import parameter_count
from meshwright.spec.resolve import model_spec

transformers = pytest.importorskip("transformers")
from hf_mamba import MAMBAS  # noqa: E402

# Their published sizes.
PRESETS = {
    "granite-4.0-h-micro": 3_191_396_096,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    "bamba-9b": 9_780_235_392,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_parameters_of_transformers(preset):
    spec = model_spec(preset=preset)
    config = json.loads(json.dumps(hf_config(spec)))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(spec) == count == PRESETS[preset]
    assert spec_from_hf(config).layer_pattern == spec.layer_pattern


def config_of(family="granitemoehybrid", **changes):
    _, config, kinds = MAMBAS[family]
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "vocab_size": 99}
    keys = next(iter(kinds.values()))
    return json.loads(config(**{**sizes, **keys}).to_json_string()) | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mamba_proj_bias": True}, "mamba_proj_bias = True is not supported"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias = False is not supported"),
        ({"mamba_d_head": 17}, "mamba_d_head = 17 must be mamba_expand x hidden_size"),
        ({"mamba_n_groups": 4}, "mamba_groups = 4 must divide"),
        ({"layer_types": ["mamba", "sliding_attention"] * 2}, "layer_types has"),
        ({"time_step_limit": [0.1]}, "must be a list of 2 numbers"),
        ({"time_step_limit": [0.1, "Infinity"]}, "must be a number"),
    ],
)
def test_what_a_config_cannot_have_is_refused(changes, why):
    with pytest.raises(ConfigError, match=why):
        spec_from_hf(config_of(**changes))


@pytest.mark.parametrize("infinity", [float("inf"), "Infinity", {"__float__": "Infinity"}])
def test_steps_without_limits_are_read_in_each_spelling(infinity):
    assert spec_from_hf(config_of(time_step_limit=[0.0, infinity])).mamba_dt_limit is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mamba_head_dim": 48}, "cannot be written as mamba_expand"),
        ({"layer_pattern": [{"window": 8}]}, "none of its layers has a window"),
        ({"layer_pattern": [{"mamba": True}, {}, {"rotary": False}]}, "all or none rotate"),
    ],
)
def test_what_no_config_can_have_is_not_written(change, why):
    with pytest.raises(ConfigError, match=why):
        hf_config(model_spec(preset="granite-4.0-h-micro", **change))


def test_stored_experts_are_those_that_transformers_fuses(tmp_path):
    """Rows of a gate above those of its up projection, an expert after the other."""
    kind, config, kinds = MAMBAS["granitemoehybrid"]
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "vocab_size": 99}
    model = kind(config(**{**sizes, **next(iter(kinds.values()))}))
    model.save_pretrained(tmp_path)
    fused = model.model.layers[1].block_sparse_moe.experts.gate_up_proj
    state = load_hf(tmp_path).state_dict()
    torch.testing.assert_close(state["layers.1.mlp.experts.gate.weight"], fused[:, :20])
    torch.testing.assert_close(state["layers.1.mlp.experts.up.weight"], fused[:, 20:])
