"""Imports GPT-NeoX's YAML, for what the table `gpt_neox.toml` cannot express.

Source of the keys, their defaults and formulas: GPT-NeoX's megatron/neox_arguments/neox_args.py,
arguments.py, model/transformer.py and learning_rates.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.interop.batch import read_batch, read_split
from meshwright.interop.deepspeed import (
    BATCH,
    read_precision,
    read_saved_inputs,
    read_sgd,
    read_zero,
)
from meshwright.interop.family import ForeignModel, take_family
from meshwright.interop.source import ImportSource
from meshwright.spec.families.layers import StoredLayer
from meshwright.spec.model import MOST_LAYERS, OF_PADDING
from meshwright.spec.resolve import BUILTIN_VOCAB, tokenizer_json_size
from meshwright.units import round_up

_GATED = {"swiglu": "silu", "geglu": "gelu"}
_PLAIN = {"gelu": "gelu", "silu": "silu", "swish": "silu"}

_KEYS = {
    "norm": ("norm",),
    "gated_mlp": ("activation",),
    "rotary_pct": ("rotary_pct",),
    "parallel_residual": ("gpt_j_residual",),
    "attention_bias": ("use_bias_in_attn_linear",),
    "mlp_bias": ("use_bias_in_mlp",),
    "expert_bias": ("use_bias_in_mlp",),
    "experts": ("moe_num_experts",),
    "top_k": ("moe_top_k",),
    "expert_ffn_dim": ("moe_num_experts",),
    "norm_top_k": ("moe_router_type",),
    "window": ("sliding_window_width",),
    "dense": ("moe_expert_interval",),
    "n_kv_heads": ("num_kv_heads",),
}


def read_gpt_neox(source: ImportSource) -> None:
    """Import GPT-NeoX configs, giving every key its verdict."""
    _read_parallel(source)
    if source.values.keys() & {"num_layers", "hidden_size"}:  # else another file has the model
        _read_model(source)
        _read_attention(source)
    _read_precision(source)
    read_zero(source)
    read_sgd(source, "weight_decay")
    _read_schedule(source)
    _read_recompute(source)
    _read_data(source)
    _read_log(source)
    _read_gas(source, read_batch(source, BATCH))
    source.finish()


def _read_gas(source: ImportSource, accumulation: int | None) -> None:
    """Report a contradiction if `gas` differs from the accumulation by the other keys.

    Versions that define `gas` read only `gradient_accumulation_steps`, and overwrite `gas` with it.
    """
    gas = source.whole("gas")
    if gas is None or accumulation is None:
        return
    if gas == accumulation:
        source.honour("gas", note=f"{BATCH.accumulation} is as many")
    else:
        reason = (
            f"GPT-NeoX reads {BATCH.accumulation}, not gas, and accumulates {accumulation}; "
            f"nearest: gas = {accumulation}, or {BATCH.accumulation} = {gas}"
        )
        source.contradict(["gas"], reason, ["train.batch"])


def _read_parallel(source: ImportSource) -> None:
    key = "pipe_parallel_size"
    if source.get(key) == 0:
        source.translate(key, {"layout.pp": 1}, "0 means one stage without a pipeline")
    elif (size := source.whole(key)) is not None:
        source.honour(key, {"layout.pp": size})
    size = source.whole("model_parallel_size")
    if size is not None:
        source.honour("model_parallel_size", {"layout.tp": size})


def _read_model(source: ImportSource) -> None:
    norm = str(source.get("norm", "layernorm"))
    activation = str(source.get("activation", "gelu"))
    if norm not in ("layernorm", "rmsnorm", "te_layernorm", "te_rmsnorm"):
        reason = f"no {norm}; nearest: layernorm (model.family = neox) or rmsnorm (llama)"
        source.refuse("norm", reason)
        return
    if activation not in _GATED | _PLAIN:
        source.refuse("activation", f"no {activation}; nearest: {', '.join(_GATED | _PLAIN)}")
        return
    is_rms, is_gated = norm.endswith("rmsnorm"), activation in _GATED
    _read_activation(source, activation)
    _read_norm(source, is_rms)
    width = _read_ffn(source, is_gated)
    heads, kv_heads = source.get("num_attention_heads"), source.get("num_kv_heads")
    experts = source.whole("moe_num_experts") or 0
    experts = experts if experts > 1 else 0
    has_mlp_bias = bool(source.get("use_bias_in_mlp", True))
    features = {
        "norm": "rms" if is_rms else "layer",
        "gated_mlp": is_gated,
        "rotary_pct": source.number("rotary_pct", 1.0),
        "parallel_residual": bool(source.get("gpt_j_residual", False)),
        "attention_bias": bool(source.get("use_bias_in_attn_linear", True)),
        "mlp_bias": has_mlp_bias and not experts,
        **(_experts(source, experts, width) if experts else {}),
    }
    is_grouped = kv_heads not in (None, heads)
    family = take_family(
        source, ForeignModel(features, _KEYS, _layers(source, experts), is_grouped)
    )
    if is_grouped and family.grouped:
        source.honour("num_kv_heads", {"model.n_kv_heads": kv_heads})
    if source.get("use_qk_layernorm", False):
        reason = "one norm of all heads, which queries and keys share; nearest: model.qk_norm"
        source.refuse("use_qk_layernorm", reason)
    if source.get("gpt_j_residual", False):
        reason = "attention and MLP have a norm each; nearest: gpt_j_tied = false"
        if source.get("gpt_j_tied", False):
            source.refuse("gpt_j_tied", reason)
    tied = not source.get("no_weight_tying", False)
    if "no_weight_tying" in source.values:
        source.translate("no_weight_tying", {"model.tie_embeddings": tied})
    else:
        source.fill("model.tie_embeddings", tied, "GPT-NeoX ties the embeddings by default")


def _experts(source: ImportSource, experts: int, width: int | None) -> dict[str, Any]:
    """Return the features of experts; routing other than top-k, as by Sinkhorn, is unsupported."""
    kind = source.get("moe_router_type", "sinkhorn")
    if kind != "topk":
        reason = f"no {kind}; nearest: topk, with train.router_aux_loss"
        source.refuse("moe_router_type", reason, default="sinkhorn")
    if source.number("moe_jitter_eps", 0.0):
        source.refuse("moe_jitter_eps", "no noise at the router; nearest: 0")
    top_k = source.whole("moe_top_k") or 1
    routing = {"experts": experts, "top_k": top_k, "expert_ffn_dim": width}
    return {**routing, "norm_top_k": False}  # model/router.py: shares of the softmax of all


def _layers(source: ImportSource, experts: int) -> list[StoredLayer]:
    """Return the window of each layer, and whether it is dense."""
    width = source.get("sliding_window_width")
    # The kernel's window counts the tokens before a query, ours counts its own, too.
    window = None if width is None else (source.whole("sliding_window_width") or 0) + 1
    interval = source.whole("moe_expert_interval") or 1
    return [
        StoredLayer(window, dense=experts > 0 and layer % interval != 0)
        for layer in range(min(source.whole("num_layers") or 1, MOST_LAYERS))
    ]


def _read_activation(source: ImportSource, activation: str) -> None:
    ours = (_GATED | _PLAIN)[activation]
    is_tanh = activation == "gelu" and source.get("bias_gelu_fusion", False)
    if is_tanh:
        ours = "gelu_tanh"
        note = "the fused kernel computes the tanh form"
        source.translate("bias_gelu_fusion", {"model.activation": ours}, note)
    if activation == ours:
        source.honour("activation", {"model.activation": ours})
    else:
        source.translate("activation", {"model.activation": ours})
    if source.target("model.activation") != ours:
        source.fill("model.activation", ours, "GPT-NeoX's default of activation")


def _read_norm(source: ImportSource, is_rms: bool) -> None:
    eps_key, unused_key = ("rms_norm_epsilon", "layernorm_epsilon")[:: 1 if is_rms else -1]
    source.ignore(unused_key, "of the other norm")
    if source.get(eps_key) is not None:
        source.honour(eps_key, {"model.norm_eps": source.number(eps_key, 1e-5)})
    else:
        source.fill("model.norm_eps", 1e-8 if is_rms else 1e-5, f"GPT-NeoX's default of {eps_key}")
    if is_rms:
        source.honour("use_bias_in_norms", note="RMSNorm has no bias")
    elif source.get("use_bias_in_norms", True) is False:
        source.refuse("use_bias_in_norms", "LayerNorm has a bias")


def _read_ffn(source: ImportSource, is_gated: bool) -> int | None:
    """Set and return the width of the MLP, by the formula of ParallelMLP in model/transformer.py.

    None if the file has no hidden size.
    """
    dim = source.whole("hidden_size")
    if dim is None:
        return None
    width = source.whole("intermediate_size")
    key = "intermediate_size"
    if width is None and source.get("expansion_factor") is not None:
        key, width = "expansion_factor", int(source.number("expansion_factor", 4.0) * dim)
    multiple = source.whole("mlp_multiple_of") or 1
    whole_width = width or 4 * dim
    inner = int(whole_width * 2 / 3) // 2 if is_gated else whole_width
    inner = round_up(inner, multiple)
    formula = f"{whole_width} x 2/3 / 2" if is_gated else f"{whole_width}"
    note = f"{formula} in multiples of {multiple}"
    if key in source.values and inner == whole_width:
        source.honour(key, {"model.ffn_dim": inner})
    elif key in source.values:
        source.translate(key, {"model.ffn_dim": inner}, note)
    else:
        source.fill("model.ffn_dim", inner, f"4 x hidden_size: {note}")
    if "mlp_multiple_of" in source.values:
        source.translate("mlp_multiple_of", {"model.ffn_dim": inner}, note)
    return inner


def _read_attention(source: ImportSource) -> None:
    key, rotary = "pos_emb", source.get("pos_emb", "learned")
    if rotary == "rotary":
        source.honour(key, note="as both families do")
    else:
        reason = f"no {rotary} positions; nearest: rotary"
        source.refuse(key, reason, default="learned")
    kinds = _attention_kinds(source.get("attention_config", []))
    if kinds <= {"global", "flash"}:
        source.honour("attention_config", note="dense and causal; the kernel is torch's choice")
    else:
        unsupported = ", ".join(sorted(kinds - {"global", "flash"}))
        source.refuse("attention_config", f"no {unsupported} layers; nearest: global, flash")


def _attention_kinds(config: Any) -> set[str]:
    """Return the kinds of attention in an `attention_config` such as `[[["flash"], 12], ...]`."""
    kinds: set[str] = set()
    for item in config if isinstance(config, list) else [config]:
        names = item[0] if isinstance(item, list) and item else item
        kinds |= {str(name) for name in (names if isinstance(names, list) else [names])}
    return kinds


def _read_precision(source: ImportSource) -> None:
    names = {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"}
    stated = source.get("precision")
    if stated is None and source.get("fp16.enabled") and source.get("fp16.type") == "bfloat16":
        source.translate("fp16.type", {"train.precision": "bf16"}, "the older way to ask for bf16")
        source.translate("fp16.enabled", {"train.precision": "bf16"}, "fp16.type is bfloat16")
        return
    if stated in names:
        clash = [
            key
            for key, dtype in (("fp16.enabled", "bf16"), ("bf16.enabled", "fp16"))
            if source.get(key) is True and names[stated] in (dtype, "fp32")
        ]
        if clash:
            reason = f"precision = {stated}, but {clash[0]} is true; keep one"
            source.contradict(["precision", *clash], reason, ["train.precision"])
        source.translate("precision", {"train.precision": names[stated]})
    elif stated is not None:
        reason = f"no {stated}; nearest: {', '.join(names)}"
        source.refuse("precision", reason, settled_by=["train.precision"])
    read_precision(source)


def _read_schedule(source: ImportSource) -> None:
    reason = (
        "DeepSpeed's schedule in place of GPT-NeoX's own; nearest: lr_decay_style, warmup, min_lr"
    )
    source.refuse("scheduler.type", reason, settled_by=["optimizer.schedule"])
    for key in [key for key in source.values if key.startswith("scheduler.params.")]:
        source.refuse(key, "of scheduler.type", settled_by=["optimizer.schedule"])
    style = source.get("lr_decay_style", "linear")
    ours = {"cosine": "cosine", "linear": "linear", "constant": "constant"}.get(str(style))
    if ours is None:
        reason = f"no {style} decay; nearest: cosine, linear, constant"
        source.refuse("lr_decay_style", reason, settled_by=["optimizer.schedule"])
    elif "lr_decay_style" in source.values:
        but = "falls straight to min_lr; there to 0, cut off at min_lr" if ours == "linear" else ""
        take = source.translate if but else source.honour
        take("lr_decay_style", {"optimizer.schedule": ours}, but)
    elif source.get("train_iters") is not None:
        source.fill("optimizer.schedule", ours, "GPT-NeoX's default of lr_decay_style")
    lr = source.number("optimizer.params.lr", source.number("lr", 0.0))
    low = source.get("min_lr")
    if low is not None and lr > 0:
        ratio = source.number("min_lr", 0.0) / lr
        source.translate("min_lr", {"optimizer.min_lr_ratio": round(ratio, 12)}, f"of lr = {lr:g}")
    elif low is None and lr > 0:
        source.fill("optimizer.min_lr_ratio", 0.0, "GPT-NeoX's default of min_lr is 0")
    steps, decay = source.whole("train_iters"), source.whole("lr_decay_iters")
    key = "lr_decay_iters"
    if decay is None and steps is not None and source.get("lr_decay_fraction") is not None:
        key, decay = "lr_decay_fraction", int(steps * source.number("lr_decay_fraction", 1.0))
    if decay is not None and steps is not None:
        if decay == steps or ours == "constant":
            source.honour(key, note="the schedule ends where training does")
        elif decay < steps and ours == "cosine":
            reason = (
                f"GPT-NeoX's cosine rises again after {decay} of {steps} steps; nearest: {steps}"
            )
            source.refuse(key, reason, settled_by=["optimizer.schedule_steps"])
        else:
            source.translate(key, {"optimizer.schedule_steps": decay})
    total = decay or steps
    if total is not None:
        share = source.number("warmup", 0.01)
        note = f"{share:g} x {total} steps"
        to = {"optimizer.warmup_steps": round(share * total)}
        source.translate("warmup", to, note)
        if "warmup" not in source.values:
            source.fill("optimizer.warmup_steps", round(share * total), note)


def _read_recompute(source: ImportSource) -> None:
    if source.get("checkpoint_activations", False) is not True:
        source.ignore("checkpoint_in_cpu", "checkpoint_activations is not on")
    read_saved_inputs(source, "checkpoint_in_cpu")
    if "checkpoint_activations" not in source.values:
        return
    is_on = bool(source.get("checkpoint_activations", False))
    to = {"layout.recompute": "full" if is_on else "none"}
    source.translate("checkpoint_activations", to)
    if not is_on:
        for key in ("checkpoint_num_layers", "partition_activations", "synchronize_each_layer"):
            source.ignore(key, "checkpoint_activations is not on")


def _read_data(source: ImportSource) -> None:
    train = source.get("train_data_paths")
    if isinstance(train, list):
        source.honour("train_data_paths", {"data.source": train})
    if source.get("split") is not None:
        read_split(source, "split")
    kind = source.get("tokenizer_type", "GPT2BPETokenizer")
    file = source.get("vocab_file")
    settles = ["data.tokenizer"]
    if kind in ("GPT2BPETokenizer", "HFGPT2Tokenizer"):
        source.translate("tokenizer_type", {"data.tokenizer": "gpt2"})
        source.ignore("vocab_file", "GPT-2's vocabulary is known by its name")
        source.ignore("merge_file", "GPT-2's merges are known by its name")
        if "tokenizer_type" not in source.values and "vocab_file" in source.values:
            source.fill("data.tokenizer", "gpt2", "GPT-NeoX's default of tokenizer_type")
    elif kind == "HFTokenizer":
        source.honour("tokenizer_type", note="a tokenizer.json")
        if file is not None and Path(str(file)).is_file():
            source.honour("vocab_file", {"data.tokenizer": str(file)})
        elif file is not None:
            source.refuse(
                "vocab_file", "no such file here: give data.tokenizer", settled_by=settles
            )
    else:
        reason = f"no {kind}; nearest: gpt2, or a tokenizer.json as data.tokenizer"
        source.refuse("tokenizer_type", reason, settled_by=settles)
        source.miss("vocab_file", f"of {kind}")
    _read_vocabulary(source)


def _read_log(source: ImportSource) -> None:
    if source.get("tensorboard_dir") is not None:
        note = "events go into the run folder"
        source.translate("tensorboard_dir", {"log.tensorboard": True}, note)
    if source.get("use_wandb") is True:
        project = str(source.get("wandb_project", "neox"))
        source.translate("use_wandb", {"log.wandb": project})
        source.honour("wandb_project", {"log.wandb": project})
    else:
        source.honour("use_wandb", note="off")
        source.ignore("wandb_project", "use_wandb is not true")


def _read_vocabulary(source: ImportSource) -> None:
    """Set the padded vocabulary size as GPT-NeoX does, if the tokenizer's size is known."""
    key = "make_vocab_size_divisible_by"
    name = source.target("data.tokenizer")
    size = BUILTIN_VOCAB.get(str(name))
    if size is None and name is not None and Path(str(name)).is_file():
        size = tokenizer_json_size(Path(str(name)))
    if size is None:
        reason = "the vocabulary is the tokenizer's in multiples of 64; nearest: model.vocab_size"
        source.miss(key, reason)
        return
    multiple = (source.whole(key) or 128) * (source.whole("model_parallel_size") or 1)
    padding = {f"model.{OF_PADDING}": multiple} if size % multiple else {}
    source.translate(key, padding, "for each rank of tp")
    if "hidden_size" in source.values:
        source.fill("model.vocab_size", size, f"the size of {name}")
        if padding and key not in source.values:
            source.fill(f"model.{OF_PADDING}", multiple, "GPT-NeoX pads the vocabulary")
