"""Rotation in `config.json`: both spellings, by kind of layer, as transformers reads them."""

import json
from dataclasses import replace

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.models.rope import inverse_frequencies
from meshwright.spec.families import FAMILIES
from meshwright.spec.hf import hf_config, read_rotary, rotary_keys, sliding_base, spec_from_hf
from meshwright.spec.model import LayerSpec
from meshwright.spec.resolve import model_spec
from rotary_cases import SCALINGS, SIZES, longrope, patterned

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
