"""Imports the model of a Megatron-LM command line: its family, its layers, its experts.

Source of the defaults and definitions: Megatron-LM's megatron/training/arguments.py, and of
megatron/core transformer/transformer_config.py, transformer/moe and models/gpt/gpt_layer_specs.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, Final

from meshwright.interop.family import ForeignModel, take_family
from meshwright.interop.source import ImportSource
from meshwright.spec.families.layers import StoredLayer
from meshwright.spec.model import MOST_LAYERS

_ROTARY: Final = "use-rotary-position-embeddings"
_LATENT: Final = "multi-latent-attention"
# Sizes of latent attention, and Megatron's defaults; without `q-lora-rank`, queries have no latent.
_LATENT_SIZES: Final = {
    "q_lora_rank": ("q-lora-rank", 0),
    "kv_lora_rank": ("kv-lora-rank", 32),
    "qk_nope_head_dim": ("qk-head-dim", 128),
    "qk_rope_head_dim": ("qk-pos-emb-head-dim", 64),
    "v_head_dim": ("v-head-dim", 128),
}
_KEYS: Final = {
    "norm": ("normalization",),
    "gated_mlp": ("swiglu",),
    "attention_bias": ("disable-bias-linear", "add-qkv-bias"),
    "output_bias": ("add-qkv-bias",),
    "mlp_bias": ("disable-bias-linear",),
    "expert_bias": ("disable-bias-linear",),
    "qk_norm": ("qk-layernorm",),
    "rotary_pct": ("rotary-percent",),
    "rope_interleave": ("rotary-interleaved",),
    "attention_sinks": ("softmax-type",),
    "experts": ("num-experts",),
    "top_k": ("moe-router-topk",),
    "expert_ffn_dim": ("moe-ffn-hidden-size",),
    "norm_top_k": ("moe-router-pre-softmax",),
    "shared_ffn_dim": ("moe-shared-expert-intermediate-size",),
    "shared_gate": ("moe-shared-expert-gate",),
    "router_scores": ("moe-router-score-function",),
    "expert_groups": ("moe-router-num-groups",),
    "top_groups": ("moe-router-group-topk",),
    "routed_scale": ("moe-router-topk-scaling-factor",),
    "window": ("window-size", "window-attn-skip-freq"),
    "rotary": ("no-rope-freq",),
    "dense": ("moe-layer-freq",),
    "n_kv_heads": ("num-query-groups",),
    "rope_scaling": ("use-rope-scaling", "rotary-scaling-factor"),
}


def read_model(source: ImportSource) -> None:
    """Import the arguments of the model's architecture."""
    is_latent = source.get(_LATENT, False) is True
    is_gated = source.get("swiglu", False) is True
    source.honour("swiglu", {"model.activation": "silu"}, "a gated MLP")
    _read_activation(source, is_gated)
    _read_positions(source)
    dim = source.whole("hidden-size")
    width = source.whole("ffn-hidden-size")
    if dim is not None and width is None:
        # arguments.py: 4 h, and with swiglu 2/3 of it in multiples of 64
        width = int(4 * dim * 2 / 3 / 64) * 64 if is_gated else 4 * dim
        source.fill("model.ffn_dim", width, "Megatron's default of ffn-hidden-size")
    experts = source.whole("num-experts") or 0
    features = {
        "norm": _norm(source),
        "gated_mlp": is_gated,
        "rotary_pct": source.number("rotary-percent", 1.0),
        "attention_sinks": source.get("softmax-type") == "learnable",
        **_biases(source, experts),
        **(_latent(source) if is_latent else _heads(source)),
        **(_experts(source, experts, width) if experts else {}),
    }
    if not experts:
        for key in [key for key in source.values if key.startswith("moe-")]:
            source.ignore(key, "num-experts is not set")
    scaling = _scaling(source, is_latent)
    model = ForeignModel(
        features,
        _KEYS | {key: (_LATENT, argument) for key, (argument, _) in _LATENT_SIZES.items()}
        if is_latent
        else _KEYS,
        _layers(source, experts),
        _is_grouped(source) and not is_latent,
        scaling,
    )
    family = take_family(source, model)
    if experts and "moe-ffn-hidden-size" in source.values and "expert_ffn_dim" not in family.free:
        source.ignore("ffn-hidden-size", "every layer has experts: moe-ffn-hidden-size")
    groups = source.whole("num-query-groups")
    source.honour("num-query-groups", {"model.n_kv_heads": groups})
    untied = source.get("untie-embeddings-and-output-weights", False) is True
    source.translate("untie-embeddings-and-output-weights", {"model.tie_embeddings": not untied})
    if not untied:
        source.fill("model.tie_embeddings", True, "Megatron ties the embeddings by default")
    if source.number("attention-dropout", 0.1) != 0:
        reason = "attention drops nothing; nearest: attention-dropout 0, or model.dropout"
        source.refuse("attention-dropout", reason, default=0.1)


def _norm(source: ImportSource) -> str:
    norm = str(source.get("normalization", "LayerNorm"))
    if norm not in ("LayerNorm", "RMSNorm"):
        source.refuse("normalization", f"no {norm}; nearest: LayerNorm, RMSNorm")
    return "rms" if norm == "RMSNorm" else "layer"


def _read_activation(source: ImportSource, is_gated: bool) -> None:
    if is_gated:
        return
    # The fused kernel, which the default and biases take, has the tanh form of GELU.
    off = ("no-bias-gelu-fusion", "disable-bias-linear")
    is_fused = not any(source.get(key) is True for key in off)
    reason = "Megatron's default: its fused kernel" if is_fused else "Megatron's default unfused"
    source.fill("model.activation", "gelu_tanh" if is_fused else "gelu", reason)
    source.honour("no-bias-gelu-fusion", note="GELU without the tanh approximation")


def _read_positions(source: ImportSource) -> None:
    kind = source.get("position-embedding-type", "learned_absolute")
    if source.get(_ROTARY) is True or kind == "rope":
        for key in ("position-embedding-type", _ROTARY):
            source.honour(key, note="as all families do")
        return
    reason = f"no {kind} positions; nearest: rope"
    source.refuse("position-embedding-type", reason, default="learned_absolute")


def _biases(source: ImportSource, experts: int) -> dict[str, Any]:
    """Return, as model features, which linear layers have biases."""
    has_bias = source.get("disable-bias-linear", False) is not True
    has_qkv = source.get("add-qkv-bias", False) is True
    return {
        "attention_bias": has_bias or has_qkv,
        "output_bias": None if has_bias or not has_qkv else False,
        "mlp_bias": has_bias and not experts,
        "expert_bias": has_bias and experts > 0,
    }


def _is_grouped(source: ImportSource) -> bool:
    """Return whether heads share keys and values (GQA)."""
    groups = source.whole("num-query-groups")
    is_on = source.get("group-query-attention", False) is True and groups is not None
    return is_on and groups != source.whole("num-attention-heads")


def _heads(source: ImportSource) -> dict[str, Any]:
    """Import the heads of ordinary (not latent) attention, and return its model features."""
    heads, groups = source.whole("num-attention-heads"), source.whole("num-query-groups")
    is_grouped = source.get("group-query-attention", False) is True
    if is_grouped and groups is not None:
        source.honour("group-query-attention", note="num-query-groups says it")
    elif groups is not None:
        source.ignore("num-query-groups", "group-query-attention is not on")
    if heads is not None and not is_grouped:
        source.fill("model.n_kv_heads", heads, "a key/value head per head")
    for argument, _ in _LATENT_SIZES.values():
        source.ignore(argument, f"of {_LATENT}")
    source.honour(_LATENT, note="off")
    return {
        "qk_norm": "head" if source.get("qk-layernorm", False) is True else "none",
        "rope_interleave": source.get("rotary-interleaved", False) is True,
    }


def _latent(source: ImportSource) -> dict[str, Any]:
    """Import the sizes of multi-head latent attention, and return its model features."""
    sizes = {
        ours: source.whole(argument) or default
        for ours, (argument, default) in _LATENT_SIZES.items()
    }
    heads = source.whole("num-attention-heads")
    if heads is not None:
        source.fill("model.n_kv_heads", heads, "latent attention has a key and value per head")
    head_dim = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    source.fill("model.head_dim", head_dim, "qk-head-dim + qk-pos-emb-head-dim")
    for key in ("group-query-attention", "num-query-groups", "kv-channels"):
        source.ignore(key, "latent attention has sizes of its own")
    if source.get("qk-layernorm", False) is True:
        source.honour("qk-layernorm", note="norms of the latent vectors, as the family has them")
    else:
        reason = "latent vectors without norms are of no family; nearest: qk-layernorm"
        source.refuse("qk-layernorm", reason, default=False)
    return {**sizes, "rope_interleave": True}


def _experts(source: ImportSource, experts: int, width: int | None) -> dict[str, Any]:
    """Return the model features of experts and of their router."""
    top_k = source.whole("moe-router-topk") or 2
    scores = str(source.get("moe-router-score-function", "softmax"))
    if scores not in ("softmax", "sigmoid"):
        reason = f"no scores by {scores}; nearest: softmax, sigmoid"
        source.refuse("moe-router-score-function", reason)
    if scores == "sigmoid":
        # Sigmoids are weighed by their sum either way, unless there is one expert alone.
        source.honour("moe-router-pre-softmax", note="of the softmax")
        norms = top_k > 1
    else:
        norms = source.get("moe-router-pre-softmax", False) is not True
    groups, top_groups = (
        source.whole("moe-router-num-groups"),
        source.whole("moe-router-group-topk"),
    )
    if top_groups is not None and top_k // top_groups != 2:
        reason = (
            f"groups are scored by their best {top_k} // {top_groups} = {top_k // top_groups} "
            f"experts, here by two; nearest: moe-router-group-topk {max(top_k // 2, 1)}"
        )
        source.refuse("moe-router-group-topk", reason)
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_ffn_dim": source.whole("moe-ffn-hidden-size") or width,
        "norm_top_k": norms,
        "shared_ffn_dim": source.whole("moe-shared-expert-intermediate-size") or 0,
        "shared_gate": source.get("moe-shared-expert-gate", False) is True,
        "router_scores": scores if scores == "sigmoid" else "softmax",
        "expert_groups": (groups if top_groups else None) or 1,
        "top_groups": top_groups or 1,
        "routed_scale": source.number("moe-router-topk-scaling-factor", 1.0) or 1.0,
    }


def _layers(source: ImportSource, experts: int) -> list[StoredLayer]:
    """Return for each layer its window, whether it rotates (RoPE), and whether it is dense."""
    count = min(source.whole("num-layers") or 1, MOST_LAYERS)  # more are refused as a number
    window = _window(source)
    has_window = [window is not None] * count
    if window is not None:
        # An N is a layer without the window after N - 1 with it; layers count from 1.
        by_number = _each(
            source, "window-attn-skip-freq", count, lambda layer, n: (layer + 1) % n != 0
        )
        has_window = by_number or has_window
    skips = _each(source, "no-rope-freq", count, lambda layer, n: (layer + 1) % n == 0)
    has_experts = [experts > 0] * count
    if experts:
        by_number = _each(source, "moe-layer-freq", count, lambda layer, n: layer % n == 0)
        has_experts = by_number or has_experts
    rows = zip(has_window, skips or [False] * count, has_experts, strict=True)
    return [
        StoredLayer(window if windowed else None, not skip, dense=experts > 0 and not mixed)
        for windowed, skip, mixed in rows
    ]


def _window(source: ImportSource) -> int | None:
    """Return the tokens that a query attends to, including its own; None means all."""
    key = "window-size"
    value = source.get(key)
    if value is None:
        source.ignore("window-attn-skip-freq", "window-size is not set")
        return None
    parts = value if isinstance(value, list) else str(value).strip("()").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        source.contradict([key], f"{value!r} must be two whole numbers, such as 4095,0")
        return None
    if right > 0:
        reason = f"a query sees no later token: nearest {left},0"
        source.contradict([key], reason, ["model.layer_pattern"])
    if left < 0:
        source.honour(key, note="-1: all tokens")
        return None
    return left + 1


def _each(
    source: ImportSource, key: str, count: int, by_number: Callable[[int, int], bool]
) -> list[bool] | None:
    """Return a flag per layer, from a number or from a list such as `[0]*3+[1]*58`.

    `by_number` maps (layer, number) to the flag. None if the key is absent or invalid, which is
    reported.
    """
    value = source.get(key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return [by_number(layer, value) for layer in range(count)]
    flags = value if isinstance(value, list) else _listed(str(value))
    if flags is None or len(flags) != count or not all(flag in (0, 1) for flag in flags):
        reason = f"{value!r} must be a number, or a list of 0 and 1 for {count} layers"
        source.contradict([key], reason)
        return None
    return [bool(flag) for flag in flags]


def _listed(text: str) -> list[Any] | None:
    """Return the value of a list expression with + and *, such as `[0]*3+[1]*58`, or None."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
            few, times = (left, right) if isinstance(left, list) else (right, left)
            is_multiple = isinstance(few, list) and isinstance(times, int)
            if is_multiple and len(few) * times <= MOST_LAYERS:
                return few * times
        raise ValueError(text)

    try:
        listed = value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return listed if isinstance(listed, list) else None


def _scaling(source: ImportSource, is_latent: bool) -> str | None:
    """Import the rope scaling and return its kind, or None."""
    llama, linear = "use-rope-scaling", "rotary-seq-len-interpolation-factor"
    if is_latent:
        for key in (llama, "rope-scaling-factor", linear):
            source.ignore(key, "latent attention does not read it")
        return _yarn(source)
    for key in ("rotary-scaling-factor", "mscale", "mscale-all-dim", "rope-type"):
        source.ignore(key, f"of {_LATENT}")
    has_llama = source.get(llama, False) is True
    factor = source.get(linear)
    if has_llama and factor is not None:
        source.refuse(linear, f"one kind of scaling alone; nearest: {llama}")
    if has_llama:
        factor = source.number("rope-scaling-factor", 8.0)
        _set_scaling(source, (llama, "rope-scaling-factor"), {"kind": "llama3", "factor": factor})
        return "llama3"
    source.ignore("rope-scaling-factor", f"{llama} is not on")
    source.honour(llama, note="off")
    if factor is None:
        return None
    table = {"kind": "linear", "factor": source.number(linear, 1.0)}
    _set_scaling(source, (linear,), table)
    return "linear"


def _yarn(source: ImportSource) -> str | None:
    """Import YaRN, which Megatron's latent attention uses unless its factor is 1.

    Returns the kind of scaling, or None.
    """
    keys = ("rotary-scaling-factor", "mscale", "mscale-all-dim")
    factor, scale, scale_all = (
        source.number(key, n) for key, n in zip(keys, (1, 1, 0), strict=True)
    )
    if factor <= 1:
        for key in (*keys, "rope-type"):
            source.honour(key, note="a factor of 1 scales nothing")
        return None
    if source.get("rope-type", "yarn") != "yarn":
        if scale_all:
            reason = "scores are scaled with the rotation or not at all; nearest: mscale-all-dim 0"
            source.refuse("mscale-all-dim", reason)
        for key in (*keys, "rope-type"):
            source.honour(key, note="rope-type = rope scales nothing")
        return None
    table = {"kind": "yarn", "factor": factor, "original_context": 4096}
    if scale > 0 and scale_all > 0:
        table |= {"mscale": scale, "mscale_all_dim": scale_all}
    elif scale_all or scale != 1:
        reason = "YaRN's lengths are scaled by both or by its own rule; nearest: mscale 1.0"
        source.refuse("mscale", reason, default=scale)
    source.honour("rope-type", note="YaRN")
    _set_scaling(source, keys, table)
    return "yarn"


def _set_scaling(source: ImportSource, keys: tuple[str, ...], table: dict[str, Any]) -> None:
    for key in keys:
        source.translate(key, {"model.rope_scaling": table})
