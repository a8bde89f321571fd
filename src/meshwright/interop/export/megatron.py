"""A plan as Megatron-LM's arguments, as Megatron-Bridge's overrides, and as Megatron-SWIFT's YAML.

Source: Megatron-LM's megatron/training/arguments.py; megatron-bridge 0.3.1, training/config.py;
ms-swift 4.6.0, swift/megatron/arguments/megatron_args.py.
"""

from __future__ import annotations

from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.interop.export.source import PlanSource
from meshwright.spec.model import ModelSpec

_GIVEN: Final = {
    "train.steps": "train-iters",
    "train.clip_norm": "clip-grad",
    "train.seed": "seed",
    "train.router_aux_loss": "moe-aux-loss-coeff",
    "train.router_z_loss": "moe-z-loss-coeff",
    "optimizer.lr": "lr",
    "optimizer.eps": "adam-eps",
    "optimizer.weight_decay": "weight-decay",
    "optimizer.warmup_steps": "lr-warmup-iters",
    "optimizer.momentum": "sgd-momentum",
}
_DECAYS: Final = {"cosine": "cosine", "linear": "linear", "constant": "constant"}
_SHARDING: Final = {2: "optim_grads", 3: "optim_grads_params"}
# Sections of Megatron-Bridge's config; arguments that are in none of these are the model's.
_SECTIONS: Final = {
    "train": ("micro-batch-size", "global-batch-size", "train-iters"),
    "ddp": ("use-distributed-optimizer", "grad-reduce-in-fp32"),
    "optimizer": (
        *("lr", "min-lr", "weight-decay", "adam-beta1", "adam-beta2", "adam-eps", "clip-grad"),
        *("optimizer", "sgd-momentum"),
    ),
    "scheduler": ("lr-warmup-iters", "lr-decay-style", "lr-decay-iters"),
    "rng": ("seed",),
}
_BRIDGE_NAMES: Final = {
    "num-virtual-stages-per-pipeline-rank": "virtual-pipeline-model-parallel-size",
}


def megatron_keys(source: PlanSource) -> dict[str, Any]:
    """Return the arguments of Megatron-LM by name, the model's among them."""
    layout, train = source.layout, source.config.train
    keys = _parallel(source) | model_arguments(source.config.model)
    if layout.zero >= 2:
        keys.pop("use-distributed-optimizer", None)
        keys["use-megatron-fsdp"] = True
        keys["data-parallel-sharding-strategy"] = _SHARDING[layout.zero]
        keys["use-distributed-optimizer"] = True
    if train.precision != "fp32":
        keys[train.precision] = True
    if source.is_stated("train.reduce_dtype") and train.precision == "bf16":
        is_fp32 = train.reduce_dtype == "fp32"
        keys["accumulate-allreduce-grads-in-fp32" if is_fp32 else "grad-reduce-in-bf16"] = True
    keys["seq-length"] = train.seq_len
    keys["nproc-per-node"], keys["nnodes"] = source.per_node, source.nodes
    return keys


def nemo_keys(source: PlanSource) -> dict[str, Any]:
    """Return the overrides of a recipe of Megatron-Bridge, such as `train.global_batch_size`."""
    source.check_named_model()
    if not source.names.bridge:
        raise ConfigError(
            f"Megatron-Bridge has no recipe of model.preset = {source.config.model.preset!r}"
        )
    precision = source.config.train.precision
    if precision == "fp32":
        raise ConfigError("Megatron-Bridge's recipes have no train.precision = fp32; nearest: bf16")
    keys: dict[str, Any] = {"recipe": f"{source.names.bridge}_pretrain_config"}
    parallel = _parallel(source) | _reduced(source)
    parallel.setdefault("use-distributed-optimizer", False)
    for name, value in parallel.items():
        section = next((key for key, names in _SECTIONS.items() if name in names), "model")
        keys[f"{section}.{_underscored(name)}"] = value
    keys["model.seq_length"] = source.config.train.seq_len
    keys["mixed_precision"] = f"{precision}_mixed"
    return keys


def swift_keys(source: PlanSource) -> dict[str, Any]:
    """Return the arguments of Megatron-SWIFT, such as `global_batch_size`."""
    source.check_named_model()
    precision = source.config.train.precision
    keys: dict[str, Any] = {"model": source.hub_name(), "tuner_type": "full"}
    parallel = _parallel(source)
    parallel.setdefault("recompute-granularity", "none")
    parallel.setdefault("use-distributed-optimizer", False)
    keys |= {_underscored(name): value for name, value in parallel.items()}
    keys["max_length"] = source.config.train.seq_len
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    keys["torch_dtype"] = dtypes[precision]
    if source.config.train.reduce_dtype != "fp32":
        raise ConfigError("ms-swift sums gradients in fp32; nearest: train.reduce_dtype = fp32")
    return keys


def _underscored(name: str) -> str:
    return _BRIDGE_NAMES.get(name, name).replace("-", "_")


def _reduced(source: PlanSource) -> dict[str, Any]:
    if not source.is_stated("train.reduce_dtype"):
        return {}
    return {"grad-reduce-in-fp32": source.config.train.reduce_dtype == "fp32"}


def _parallel(source: PlanSource) -> dict[str, Any]:
    """Return the arguments of layout, batch and optimizer, which all three have."""
    layout, train = source.layout, source.config.train
    keys: dict[str, Any] = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "micro-batch-size": layout.microbatch,
        "global-batch-size": train.batch,
    }
    if layout.sp and layout.tp > 1:
        keys["sequence-parallel"] = True
    if layout.cp > 1:
        keys["cp-comm-type"] = "a2a" if layout.cp_kind == "ulysses" else "p2p"
    if layout.virtual_stages > 1:
        keys["num-virtual-stages-per-pipeline-rank"] = layout.virtual_stages
    if source.config.model.experts:
        keys["expert-model-parallel-size"] = layout.ep
        keys["expert-tensor-parallel-size"] = layout.expert_tp
    if layout.zero == 1:
        keys["use-distributed-optimizer"] = True
    if layout.recompute == "full":
        keys |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
    elif layout.recompute == "selective":
        keys["recompute-granularity"] = "selective"
    return keys | source.given(_GIVEN) | _optimizer(source)


def _optimizer(source: PlanSource) -> dict[str, Any]:
    optimizer, keys = source.config.optimizer, dict[str, Any]()
    if source.is_stated("optimizer.name"):
        keys["optimizer"] = source.optimizer_name("megatron")
    if source.is_stated("optimizer.betas"):
        keys["adam-beta1"], keys["adam-beta2"] = optimizer.betas
    if source.is_stated("optimizer.lr") and source.is_stated("optimizer.min_lr_ratio"):
        keys["min-lr"] = optimizer.lr * optimizer.min_lr_ratio
    if source.is_stated("optimizer.schedule"):
        if optimizer.schedule not in _DECAYS:
            raise ConfigError(
                f"optimizer.schedule = {optimizer.schedule!r} falls otherwise there; nearest: "
                f"{', '.join(_DECAYS)}"
            )
        keys["lr-decay-style"] = _DECAYS[optimizer.schedule]
    return keys


def model_arguments(model: ModelSpec) -> dict[str, Any]:
    """Return Megatron-LM's arguments of an architecture; what it lacks is found by reading back."""
    is_gated = model.gated_mlp
    keys: dict[str, Any] = {
        "num-layers": model.n_layers,
        "hidden-size": model.dim,
        "num-attention-heads": model.n_heads,
        "ffn-hidden-size": model.ffn_dim,
        "max-position-embeddings": model.context,
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "norm-epsilon": model.norm_eps,
        "position-embedding-type": "rope",
        "rotary-base": _whole(model.rope_theta),
        "init-method-std": model.init_std,
        "attention-dropout": 0.0,
        "hidden-dropout": model.dropout,
        "vocab-size": model.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "swiglu": is_gated or None,
        "rotary-percent": model.rotary_pct if model.rotary_pct != 1 else None,
        "untie-embeddings-and-output-weights": (not model.tie_embeddings) or None,
        "disable-bias-linear": (not (model.mlp_bias or model.expert_bias)) or None,
        "add-qkv-bias": (model.attention_bias and not model.mlp_bias) or None,
        "qk-layernorm": (model.qk_norm == "head" or bool(model.kv_lora_rank)) or None,
    }
    if not is_gated and model.activation == "gelu":
        keys["no-bias-gelu-fusion"] = True
    if model.is_latent:
        keys |= _latent(model)
    else:
        keys["kv-channels"] = model.head_dim
        if model.n_kv_heads != model.n_heads:
            keys |= {"group-query-attention": True, "num-query-groups": model.n_kv_heads}
    if model.experts:
        keys |= _experts(model)
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        keys |= {"use-rope-scaling": True, "rope-scaling-factor": scaling.factor}
    elif scaling is not None and scaling.kind == "linear":
        keys["rotary-seq-len-interpolation-factor"] = scaling.factor
    return {key: value for key, value in keys.items() if value is not None}


def _whole(theta: float) -> int:
    """Return a rotary base as Megatron-LM takes it; raises `ConfigError` for a fraction."""
    if not theta.is_integer():
        rule = f"Megatron-LM's --rotary-base is a whole number, model.rope_theta = {theta}"
        raise ConfigError(f"{rule}; nearest: {round(theta)}")
    return int(theta)


def _latent(model: ModelSpec) -> dict[str, Any]:
    keys = {
        "multi-latent-attention": True,
        "q-lora-rank": model.q_lora_rank or None,
        "kv-lora-rank": model.kv_lora_rank,
        "qk-head-dim": model.qk_nope_head_dim,
        "qk-pos-emb-head-dim": model.qk_rope_head_dim,
        "v-head-dim": model.v_head_dim,
        "rotary-scaling-factor": 1.0,
        "mscale": 1.0,
        "mscale-all-dim": 0.0,
    }
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "yarn":
        keys["rotary-scaling-factor"] = scaling.factor
        keys["mscale"] = getattr(scaling, "mscale", None) or 1.0
        keys["mscale-all-dim"] = getattr(scaling, "mscale_all_dim", None) or 0.0
    return keys


def _experts(model: ModelSpec) -> dict[str, Any]:
    is_sigmoid = model.router_scores == "sigmoid"
    dense = model.dense_layers
    return {
        "num-experts": model.experts,
        "moe-router-topk": model.top_k,
        "moe-ffn-hidden-size": model.expert_ffn_dim or model.ffn_dim,
        "moe-grouped-gemm": True,
        "moe-router-dtype": "fp32",
        "moe-router-load-balancing-type": "seq_aux_loss",
        "moe-router-score-function": model.router_scores,
        "moe-router-pre-softmax": True if not model.norm_top_k and not is_sigmoid else None,
        "moe-shared-expert-intermediate-size": model.shared_ffn_dim or None,
        "moe-shared-expert-gate": model.shared_gate or None,
        "moe-router-num-groups": model.expert_groups if model.expert_groups > 1 else None,
        "moe-router-group-topk": model.top_groups if model.expert_groups > 1 else None,
        "moe-router-topk-scaling-factor": model.routed_scale if model.routed_scale != 1 else None,
        "moe-router-enable-expert-bias": is_sigmoid or None,
        "moe-layer-freq": f"[0]*{dense}+[1]*{model.n_layers - dense}" if dense else None,
    }
