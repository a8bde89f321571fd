"""`Family`: an architecture's presets of `ModelSpec`, and its form in Hugging Face folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from meshwright.errors import ConfigError, refusal
from meshwright.spec.families.layers import LayerKeys

# What a block is made of, as `ModelSpec` has it, and what Llama has there.
FEATURES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "norm": "rms",
        "gated_mlp": True,
        "attention_bias": False,
        "output_bias": None,
        "attention_sinks": False,
        "mlp_bias": False,
        "qk_norm": "none",
        "rotary_pct": 1.0,
        "parallel_residual": False,
        "embedding_scale": 1.0,
        "attention_scale": None,
        "residual_scale": 1.0,
        "logits_divisor": 1.0,
        "norm_placement": "before",
        "norm_plus_one": False,
        "attention_softcap": None,
        "logits_softcap": None,
        "layer_pattern": (),
        "experts": 0,
        "top_k": 0,
        "expert_ffn_dim": None,
        "norm_top_k": True,
        "expert_bias": False,
        "swiglu_limit": None,
        "swiglu_alpha": 1.0,
        "shared_ffn_dim": 0,
        "shared_gate": False,
        "dense_layers": 0,
        "router_scores": "softmax",
        "expert_groups": 1,
        "top_groups": 1,
        "routed_scale": 1.0,
        "q_lora_rank": 0,
        "kv_lora_rank": 0,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "rope_interleave": False,
        "attention_gate": False,
        "delta_heads": 0,
        "delta_key_heads": 0,
        "delta_key_dim": 0,
        "delta_value_dim": 0,
        "delta_kernel": 0,
        "mamba_heads": 0,
        "mamba_head_dim": 0,
        "mamba_groups": 0,
        "mamba_state": 0,
        "mamba_kernel": 0,
        "mamba_dt_limit": None,
    }
)

# What only experts have: models of a family without any leave it out.
OF_EXPERTS: Final = frozenset({"top_k", "expert_ffn_dim", "shared_ffn_dim", "norm_top_k"})
# Features that became fields of `ModelSpec` when families began to choose them.
LATER: Final = frozenset(FEATURES) - {
    "attention_bias",
    "mlp_bias",
    "rotary_pct",
    "parallel_residual",
}
# Those of `LATER` that came with later families: before these, no model had them.
NEWEST: Final = frozenset(
    {
        *("norm_placement", "norm_plus_one", "attention_softcap", "logits_softcap"),
        *("layer_pattern", "experts", "top_k", "expert_ffn_dim", "norm_top_k"),
        *("shared_ffn_dim", "shared_gate", "dense_layers"),
        *("router_scores", "expert_groups", "top_groups", "routed_scale"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "rope_interleave",
        *("attention_sinks", "expert_bias"),
        *("swiglu_limit", "swiglu_alpha"),
        *("attention_gate", "delta_heads", "delta_key_heads", "delta_key_dim", "delta_value_dim"),
        "delta_kernel",
        *("mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state", "mamba_kernel"),
        "mamba_dt_limit",
    }
)


class Key(NamedTuple):
    """A key of `config.json`: the field of `ModelSpec` that it has, and what its absence means.

    Where `default` is the name of a field, absence means the value of that one. An `optional`
    number may be null, an `inverse root` is a whole number n for `n ** -0.5`. A `count` may be 0,
    an `optional size` is null for 0, `experts` are so many times an expert's width, a key before. A
    `norm of heads` is a flag for a norm over each head. An `expansion` is how many widths all heads
    of Mamba-2 have, a key after their number; a `head of expansion` is the size of one, or "auto".
    `limits` are two numbers, the second of which may be infinite if the first is 0.
    """

    ours: str
    hf_key: str
    kind: Literal[
        "size",
        "count",
        "optional size",
        "number",
        "flag",
        "optional",
        "inverse root",
        "experts",
        "norm of heads",
        "expansion",
        "head of expansion",
        "limits",
    ]
    default: Any


@dataclass(frozen=True)
class Family:
    """One architecture.

    `fixed` are the features that all its models have, where they differ from Llama's; those in
    `free` are a model's own, with `defaults` where a config leaves them out; those in `derived`
    follow from its width. `sizes` are what
    transformers takes for sizes that a `config.json` leaves out; `keys` are its further keys,
    `written` what is only written, `inert` the values under which a key changes nothing. `modules`
    has the stored name of each of our modules, `{}` for the layer, or of a parameter; several with
    one name are stored together, one below the other, or those in `by_head` head by head, of which
    it names the feature that counts them. With
    `fused_experts` a layer's experts are one tensor: "stacked", of each the rows of gate above
    those of up, or transposed, the outputs of gate and up "in turn". `buffers` are stored names
    that are not parameters.
    """

    name: str
    model_type: str
    architecture: str
    modules: Mapping[str, str]
    sizes: Mapping[str, int]
    keys: tuple[Key, ...]
    free: frozenset[str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    inert: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    derived: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    default_activation: str = "silu"
    # Names of activations that mean another one in its files.
    activations: Mapping[str, str] = field(default_factory=dict)
    ties: bool = False
    # Other names of keys, which newer versions write.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # What layers see and rotate; None: all see and rotate all.
    layers: LayerKeys | None = None
    grouped: bool = True
    # Fields that add up to `head_dim`.
    head_dim_parts: tuple[str, ...] = ()
    by_head: Mapping[str, str] = field(default_factory=dict)
    fused_experts: Literal["in turn", "stacked"] | None = None
    buffers: re.Pattern[str] = re.compile(r"(?!)")
    heads: tuple[str, ...] = ("lm_head.weight",)
    # Defaults of the rotated share and the base, and further keys that spell them.
    rotary_pct: float = 1.0
    rotary_keys: tuple[str, ...] = ()
    # A key that has the number of rotated dims instead.
    rotary_dims_key: str | None = None
    rope_theta: float = 10000.0
    theta_keys: tuple[str, ...] = ()
    # The rotary settings of a file that has none.
    rope_absent: Mapping[str, Any] = field(default_factory=dict)
    # The kinds of rope scaling that transformers knows of it, and other names that it has for them.
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "longrope")
    rope_names: Mapping[str, str] = field(default_factory=dict)
    # Methods of quantisation whose files are read, as what they stand for.
    quantised: tuple[str, ...] = ()
    # Default of `original_max_position_embeddings` where that is a key of its config.
    original_context: int | None = None
    # Whether `rope_parameters` are by kind of layer; the base of those with a window where no key
    # has it, and the key that has it in the old spelling.
    kinds_of_layers: bool = False
    sliding_theta: float | None = None
    sliding_theta_key: str | None = None
    # Buffers of a layer, by our names, that stay in fp32 where a model is stored, loaded or
    # converted in half precision: those of transformers' `_keep_in_fp32_modules_strict`.
    kept_in_fp32: tuple[str, ...] = ()
    # Whether files may have layers that predict further tokens, beyond the model's own.
    predicts_ahead: bool = False
    check: Callable[[Mapping[str, Any]], None] = lambda config: None
    check_written: Callable[[Mapping[str, Any]], None] = lambda fields: None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def features(self) -> Mapping[str, Any]:
        """The `FEATURES` that all its models share."""
        return {
            key: self.fixed.get(key, value)
            for key, value in FEATURES.items()
            if key not in self.free and key not in self.derived
        }

    @property
    def can_be_dense(self) -> bool:
        """Whether its files may say that there are no experts."""
        return any(key.ours == "experts" and key.kind == "count" for key in self.keys)

    def of_width(self, dim: int) -> dict[str, float]:
        """Return the features that depend on a model's width."""
        return {key: rule(dim) for key, rule in self.derived.items()}

    def refuse_others(self, fields: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a feature that no model of the family has."""
        for key, value in {**self.features, **self.of_width(fields["dim"])}.items():
            if fields.get(key, value) != value:
                raise ValueError(
                    refusal(
                        f"model.{key} = {_toml(fields[key])} is not of the {self.name} family",
                        legal=[f"model.{key} = {_toml(value)}"],
                    )
                )
        heads, kv_heads = fields["n_heads"], fields["n_kv_heads"]
        if not self.grouped and kv_heads != heads:
            raise ValueError(
                refusal(
                    f"the {self.name} family has one key/value head per head, but "
                    f"model.n_kv_heads = {kv_heads} and model.n_heads = {heads}",
                    legal=[f"model.n_kv_heads = {heads}"],
                )
            )


def preset(
    family: str, vocab: int, dim: int, layers: int, heads: int, **fields: Any
) -> dict[str, Any]:
    """Return a preset: a partial set of `ModelSpec` fields."""
    sizes = {"vocab_size": vocab, "dim": dim, "n_layers": layers, "n_heads": heads}
    return {"family": family, **sizes, **fields}


def llama_modules(**extra: str) -> dict[str, str]:
    """Return the stored name of each of our modules, as Llama and most later models have them.

    `{}` is the number of the layer. So are the results of all functions below that return names:
    parts of `Family.modules`.
    """
    attention = {proj: f"model.layers.{{}}.self_attn.{proj}_proj" for proj in "qkvo"}
    mlp = {proj: f"model.layers.{{}}.mlp.{proj}_proj" for proj in ("gate", "up", "down")}
    return {
        "embed": "model.embed_tokens",
        "attn_norm": "model.layers.{}.input_layernorm",
        **{f"attn.{proj}": name for proj, name in attention.items()},
        "mlp_norm": "model.layers.{}.post_attention_layernorm",
        **{f"mlp.{proj}": name for proj, name in mlp.items()},
        "norm": "model.norm",
        "head": "lm_head",
        **extra,
    }


def llama_keys(
    kv_heads: object = "n_heads", head_dim: object = "dim / n_heads", eps: float = 1e-6
) -> tuple[Key, ...]:
    """Return the keys of Llama's `config.json` that most later models have, with defaults."""
    return (
        Key("n_kv_heads", "num_key_value_heads", "size", kv_heads),
        Key("head_dim", "head_dim", "size", head_dim),
        Key("norm_eps", "rms_norm_eps", "number", eps),
    )


def gemma_modules(**extra: str) -> dict[str, str]:
    """Return the stored name of each of our modules, with norms before and after each sublayer, as
    in Gemma 2.
    """
    names = llama_modules(**extra)
    for ours, hf_name in (
        ("attn_post", "post_attention"),
        ("mlp", "pre_feedforward"),
        ("mlp_post", "post_feedforward"),
    ):
        names[f"{ours}_norm"] = f"model.layers.{{}}.{hf_name}_layernorm"
    return names


def expert_modules(module: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the stored names of a router and of experts, by our names; the second `{}` is an
    expert's number.

    `module` contains them; `gate`, `up` and `down` are the names of an expert's projections.
    """
    inside = f"model.layers.{{}}.{module}"
    names = {"gate": gate, "up": up, "down": down}
    experts = {
        f"mlp.experts.{ours}": f"{inside}.experts.{{}}.{proj}" for ours, proj in names.items()
    }
    return {"mlp.router": f"{inside}.gate", **experts}


def qwen_experts() -> dict[str, str]:
    """Return the stored names of a router and of experts in Qwen and OLMoE, by our names."""
    return expert_modules("mlp", *(f"{proj}_proj" for proj in ("gate", "up", "down")))


def shared_experts() -> dict[str, str]:
    """Return the stored names of a shared expert's layers in DeepSeek-V3 and its followers, by our
    names.
    """
    inside = "model.layers.{}.mlp.shared_experts"
    return {f"mlp.shared.{proj}": f"{inside}.{proj}_proj" for proj in ("gate", "up", "down")}


def routed_keys(
    experts: int, top_k: int, width: int, dense: int, *, normalises: bool = True
) -> tuple[Key, ...]:
    """Return the keys of experts behind a router of sigmoids, in files like DeepSeek-V3's."""
    return (
        *expert_keys(experts, top_k, hf_key="n_routed_experts"),
        Key("expert_ffn_dim", "moe_intermediate_size", "size", width),
        Key("shared_ffn_dim", "n_shared_experts", "experts", 1),
        Key("dense_layers", "first_k_dense_replace", "count", dense),
        Key("norm_top_k", "norm_topk_prob", "flag", normalises),
        Key("expert_groups", "n_group", "size", 1),
        Key("top_groups", "topk_group", "size", 1),
        Key("routed_scale", "routed_scaling_factor", "number", 1.0),
    )


def expert_keys(
    count: int, top_k: int, *, hf_key: str = "num_experts", kind: Literal["size", "count"] = "size"
) -> tuple[Key, ...]:
    """Return the keys for the numbers of experts, total and per token, with defaults."""
    return (
        Key("experts", hf_key, kind, count),
        Key("top_k", "num_experts_per_tok", "size", top_k),
    )


def head_norms() -> dict[str, str]:
    """Return the stored names of norms of queries and keys, by our names."""
    return {f"attn.{proj}_norm": f"model.layers.{{}}.self_attn.{proj}_norm" for proj in "qk"}


def one_bias(family: str) -> Callable[[Mapping[str, Any]], None]:
    """Return a check that all linear layers have a bias or none: one key says so."""

    def check(fields: Mapping[str, Any]) -> None:
        attention, output, mlp = (
            fields[key] for key in ("attention_bias", "output_bias", "mlp_bias")
        )
        if mlp != attention or output not in (None, attention):
            raise ConfigError(
                f"model.mlp_bias = {_toml(mlp)} and model.attention_bias = {_toml(attention)} "
                f"cannot be written as {family}: one key is of all its biases; set both alike, "
                "and model.output_bias not at all"
            )

    return check


# The correction of a router's scores, in files like DeepSeek-V3's.
CORRECTION: Final = {
    "mlp.router.correction": "model.layers.{}.mlp.gate.e_score_correction_bias",
}
BIASES: Final = (
    Key("attention_bias", "attention_bias", "flag", False),
    Key("mlp_bias", "mlp_bias", "flag", False),
)


def sizes_of(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, context: int
) -> Mapping[str, int]:
    """Return transformers' defaults for sizes that a file leaves out."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
    }


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else repr(value)
