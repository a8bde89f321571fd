"""Imports Megatron-LM's arguments, for what `megatron.toml` cannot express, and writes plans.

A plan is written as these arguments, as Megatron-Bridge's overrides, or as Megatron-SWIFT's YAML.

Source of the arguments and defaults: Megatron-LM's megatron/training/arguments.py and the configs
that it takes them from; of experts megatron/core/transformer/moe, router.py and moe_utils.py, whose
router losses have the same scale as Meshwright's: a sum over layers, 1 for each layer if tokens are
balanced. megatron-bridge 0.3.1, training/config.py; ms-swift 4.6.0,
swift/megatron/arguments/megatron_args.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.interop.batch import Names, read_batch, read_split
from meshwright.interop.megatron_model import read_model
from meshwright.interop.megatron_muon import muon_arguments, read_muon
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.source import ImportSource
from meshwright.spec.model import OF_PADDING, ModelSpec
from meshwright.spec.resolve import BUILTIN_VOCAB

_TYPE: Final = "moe-router-load-balancing-type"
_WEIGHT: Final = "moe-aux-loss-coeff"
_CAPACITY: Final = "moe-expert-capacity-factor"
_OF_CAPACITY: Final = ("moe-token-drop-policy", "moe-pad-expert-input-to-capacity")
_FORCED: Final = "moe-router-force-load-balancing"
# Balancing by other means than a loss that `train.router_aux_loss` could be.
_OTHER_TYPES: Final = ("sinkhorn", "quantile_balancing")


def read_experts(source: ImportSource) -> None:
    """Import the arguments on experts that are not part of the architecture."""
    for key, to in (
        ("expert-model-parallel-size", "layout.ep"),
        ("expert-tensor-parallel-size", "layout.etp"),
    ):
        size = source.whole(key)
        if size is not None:
            source.honour(key, {to: size})
    if source.whole("num-experts") is None:
        return
    is_sigmoid = source.get("moe-router-score-function") == "sigmoid"
    _read_balancing(source)
    _read_bias(source, is_sigmoid)
    if is_sigmoid and source.number("moe-z-loss-coeff", 0.0):
        reason = "train.router_z_loss is of a softmax; nearest: 0"
        source.refuse("moe-z-loss-coeff", reason)
    _read_capacity(source)
    if source.get(_FORCED) is True:
        note = "tokens meet experts in turn, there at random"
        source.translate(_FORCED, {"train.routing": "balanced"}, note)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_balancing(source: ImportSource) -> None:
    """Import load-balancing losses: per sequence, or per microbatch if that is one sequence."""
    kinds = [str(kind) for kind in _listed(source.get(_TYPE, "aux_loss"))]
    weights = _listed(source.get(_WEIGHT, 0.0))
    settled = ["train.router_aux_loss"]
    if len(kinds) != len(weights):
        source.contradict([_TYPE, _WEIGHT], f"{len(weights)} weights for {len(kinds)} types")
        return
    total = 0.0
    for kind, weight in zip(kinds, weights, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            source.contradict([_WEIGHT], f"{weight!r} must be a number", settled)
            return
        reason = _unlike(source, kind) if weight or kind in _OTHER_TYPES else ""
        if reason:
            source.refuse(_TYPE, reason, settled_by=settled, default=kind)
            return
        total += weight
    to = {"train.router_aux_loss": total}
    note = "the loss of each sequence"
    source.honour(_WEIGHT, to, note)
    source.honour(_TYPE, note=note if total else "no loss")


def _unlike(source: ImportSource, kind: str) -> str:
    """Return why a kind of balancing is not per sequence, or "" if it is."""
    nearest = "nearest: seq_aux_loss, or train.router_aux_loss"
    if kind in _OTHER_TYPES:
        return f"no {kind}; {nearest}"
    if kind == "global_aux_loss":
        return f"no loss of the global batch; {nearest}"
    micro = source.whole("micro-batch-size") or 1
    if kind == "aux_loss" and micro > 1:
        return f"no loss of {micro} sequences at once; {nearest}, or micro-batch-size 1"
    return ""


def _read_bias(source: ImportSource, is_sigmoid: bool) -> None:
    """Import the update rate of the bias corrections of sigmoid routers."""
    switch, rate = "moe-router-enable-expert-bias", "moe-router-bias-update-rate"
    if source.get(switch, False) is not True:
        source.honour(switch, note="off")
        source.ignore(rate, f"{switch} is not on")
        return
    if not is_sigmoid:
        source.refuse(switch, "of routers with model.router_scores = sigmoid")
        source.ignore(rate, f"of {switch}")
        return
    to = {"train.router_bias_rate": source.number(rate, 1e-3)}
    source.honour(rate, to)
    source.translate(switch, to, f"{rate} = {to['train.router_bias_rate']:g}")


def _read_capacity(source: ImportSource) -> None:
    factor = source.number(_CAPACITY, -1.0)
    if factor < 0:
        source.honour(_CAPACITY, note="no token is dropped")
        for key in _OF_CAPACITY:
            source.ignore(key, f"of {_CAPACITY}")
        return
    settled = ["train.expert_capacity"]
    if source.get("moe-token-drop-policy", "probs") != "position":
        reason = "later tokens are dropped, not those of small probability; nearest: position"
        source.refuse("moe-token-drop-policy", reason, settled_by=settled, default="probs")
    shared = [
        f"{key} {size}"
        for key in ("micro-batch-size", "tensor-model-parallel-size", "context-parallel-size")
        if (size := source.whole(key) or 1) > 1
    ]
    if shared or factor < 1:
        rule = "an expert's share is of a whole sequence, and at least even"
        condition = f" with {', '.join(shared)}" if shared else ""
        reason = (
            f"{rule}, not {factor:g}{condition}; nearest: "
            f"train.expert_capacity = {max(factor, 1):g}"
        )
        source.refuse(_CAPACITY, reason, settled_by=settled)
    source.honour(_CAPACITY, {"train.expert_capacity": factor})
    source.honour("moe-token-drop-policy", note="the first tokens of a sequence have precedence")
    source.ignore("moe-pad-expert-input-to-capacity", "how tokens travel")


BATCH = Names("global-batch-size", "micro-batch-size", "(accumulation)")
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read_megatron(source: ImportSource) -> None:
    """Import Megatron-LM's arguments, giving every one its verdict."""
    _read_launcher(source)
    _read_parallel(source)
    if source.values.keys() & {"num-layers", "hidden-size"}:
        read_model(source)
    _read_precision(source)
    _read_fp8(source)
    _read_sharding(source)
    _read_batch_and_steps(source)
    read_experts(source)
    _read_states(source)
    _read_schedule(source)
    read_muon(source)
    _read_recompute(source)
    _read_data(source)
    minutes = source.number("distributed-timeout-minutes", 0.0)
    if minutes > 0:
        to = {"cluster.timeout": minutes * 60}
        source.translate("distributed-timeout-minutes", to, "in seconds")
    source.finish()


def _read_launcher(source: ImportSource) -> None:
    """Import torchrun's number of ranks, unless the user gave the number of devices."""
    nodes, per_node = source.whole("nnodes"), source.whole("nproc-per-node")
    if per_node is None:
        return
    if not source.setting.is_fixed:
        source.count_devices((nodes or 1) * per_node)
    total = source.setting.devices
    note = f"{total} ranks in all"
    source.translate("nproc-per-node", {"cluster.devices_per_node": per_node}, note)
    source.translate("nnodes", {"cluster.nodes": nodes or 1}, note)


def _read_parallel(source: ImportSource) -> None:
    for name, to in (
        ("tensor-model-parallel-size", "layout.tp"),
        ("pipeline-model-parallel-size", "layout.pp"),
        ("context-parallel-size", "layout.cp"),
    ):
        size = source.whole(name)
        if size is not None:
            source.honour(name, {to: size})
    per, pp = source.whole("num-layers-per-virtual-pipeline-stage"), source.target("layout.pp")
    stages = source.whole("num-virtual-stages-per-pipeline-rank")
    layers, key = source.whole("num-layers"), "num-virtual-stages-per-pipeline-rank"
    if per is not None and layers is not None:
        key = "num-layers-per-virtual-pipeline-stage"
        stages, remainder = divmod(layers, per * (pp or 1))
        if remainder:
            reason = (
                f"{per} x pipeline-model-parallel-size {pp or 1} does not divide {layers} layers"
            )
            source.contradict([key], reason, ["layout.virtual_stages"])
            return
    if stages is not None:
        schedule = "interleaved_1f1b" if stages > 1 else "1f1b"
        settings = {"layout.virtual_stages": stages, "layout.schedule": schedule}
        source.translate(key, settings)


def _read_precision(source: ImportSource) -> None:
    on = [name for name in ("fp16", "bf16") if source.get(name) is True]
    if len(on) > 1:
        source.contradict(on, "both are given; keep one", ["train.precision"])
    for name in on:
        source.honour(name, {"train.precision": name})
    if source.target("train.precision") is None:
        source.fill("train.precision", "fp32", "Megatron trains in fp32 without fp16 or bf16")
    if "fp16" not in on:
        for name in ("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window"):
            source.ignore(name, "of fp16")
        source.ignore("hysteresis", "of fp16")


def _read_fp8(source: ImportSource) -> None:
    """Import fp8 matmuls; only tensorwise scaling with current, not delayed, factors is known."""
    kind = source.get("fp8-format")
    if kind is None:
        for key in [key for key in source.values if key.startswith("fp8-")]:
            source.ignore(key, "of fp8-format")
        return
    recipe = source.get("fp8-recipe", "delayed")
    settled = ["train.fp8"]
    if kind != "hybrid":
        reason = "gradients are e5m2, the rest e4m3; nearest: hybrid"
        source.refuse("fp8-format", reason, settled_by=settled)
    if recipe != "tensorwise":
        reason = f"no {recipe} scaling, tensors are scaled at each use; nearest: tensorwise"
        source.refuse("fp8-recipe", reason, settled_by=settled, default="delayed")
    for key in ("fp8-format", "fp8-recipe", "fp8-param-gather"):
        source.translate(key, {"train.fp8": True})
    for key in ("fp8-margin", "fp8-interval", "fp8-amax-history-len", "fp8-amax-compute-algo"):
        source.ignore(key, "of delayed scaling")


def _read_ends_rate(source: ImportSource, lr: float, ratio: float) -> None:
    """Import the learning rate of embedding and head.

    In Meshwright all learning rates decay to the same share of their maximum. Megatron's decays to
    decoupled-min-lr or, if that is not given, to min-lr.
    """
    ends_lr = source.number("decoupled-lr", 0.0)
    if ends_lr <= 0:
        return
    is_tied = source.get("untie-embeddings-and-output-weights") is not True
    names = ("embed.weight",) if is_tied else ("embed.weight", "head.weight")
    scale = round(ends_lr / lr, 12)
    groups = [{"match": name, "lr_scale": scale} for name in names]
    source.translate("decoupled-lr", {"optimizer.groups": groups}, f"of lr = {lr:g}")
    lowest = source.number("decoupled-min-lr", ratio * lr)
    if math.isclose(lowest, ratio * ends_lr, rel_tol=1e-6):
        source.honour("decoupled-min-lr", note="the share of decoupled-lr that min-lr is of lr")
        return
    reason = f"all rates fall to the same share of the highest; nearest: {ratio * ends_lr:g}"
    source.refuse("decoupled-min-lr", reason, default=lowest)


def _read_states(source: ImportSource) -> None:
    """Mark different dtypes of the two moments as unsupported; the table has equal ones."""
    keys = ("exp-avg-dtype", "exp-avg-sq-dtype")
    if len({source.get(key, "fp32") for key in keys}) > 1:
        for key in source.values.keys() & keys:
            source.miss(key, "both moments have one dtype; nearest: optimizer.state_dtype")


def _read_sharding(source: ImportSource) -> None:
    zero = 1 if source.get("use-distributed-optimizer") is True else 0
    fsdp = [n for n in ("use-megatron-fsdp", "use-torch-fsdp2") if source.get(n) is True]
    name = "data-parallel-sharding-strategy"
    if fsdp:
        strategy = str(source.get(name, "optim_grads_params"))
        zero = _SHARDING.get(strategy, 3)
        source.translate(name, {"layout.zero": zero})
    else:
        source.ignore(name, "of use-megatron-fsdp")
    for flag in ("use-distributed-optimizer", *fsdp):
        source.translate(flag, {"layout.zero": zero})


def _read_batch_and_steps(source: ImportSource) -> None:
    read_batch(source, BATCH)
    samples, batch = source.whole("train-samples"), source.target("train.batch")
    if samples is not None and batch:
        note = f"{samples} samples / {batch} a step"
        source.translate("train-samples", {"train.steps": samples // int(batch)}, note)


def _read_schedule(source: ImportSource) -> None:
    batch, steps = int(source.target("train.batch") or 1), source.target("train.steps")
    steps = source.whole("train-iters") or steps
    decay = source.whole("lr-decay-iters")
    decay_key = "lr-decay-iters"
    if (samples := source.whole("lr-decay-samples")) is not None:
        decay, decay_key = samples // batch, "lr-decay-samples"
    if decay is not None and decay == steps:
        source.honour(decay_key, note="the schedule ends where training does")
    elif decay is not None:
        source.translate(decay_key, {"optimizer.schedule_steps": decay})
    for key, warmup in (
        ("lr-warmup-iters", source.number("lr-warmup-iters", 0.0)),
        ("lr-warmup-samples", source.number("lr-warmup-samples", 0.0) // batch),
        ("lr-warmup-fraction", source.number("lr-warmup-fraction", 0.0) * (decay or steps or 0)),
    ):
        source.translate(key, {"optimizer.warmup_steps": round(warmup)})
    if source.target("optimizer.warmup_steps") is None:
        source.fill("optimizer.warmup_steps", 0, "Megatron's default: no warm-up")
    lr = source.number("lr", 0.0)
    if lr > 0:
        ratio = round(source.number("min-lr", 0.0) / lr, 12)
        source.translate("min-lr", {"optimizer.min_lr_ratio": ratio}, f"of lr = {lr:g}")
        if "min-lr" not in source.values:
            source.fill("optimizer.min_lr_ratio", 0.0, "Megatron's default of min-lr is 0")
        _read_ends_rate(source, lr, ratio)
    if source.get("optimizer") == "sgd" and "sgd-momentum" not in source.values:
        source.fill("optimizer.momentum", 0.9, "Megatron's default of sgd-momentum")
    if source.get("lr-decay-style") == "WSD":
        reason = "the last steps fall straight; nearest: linear"
        if source.get("lr-wsd-decay-style", "exponential") != "linear":
            source.refuse("lr-wsd-decay-style", reason, default="exponential")
    betas = [source.number("adam-beta1", 0.9), source.number("adam-beta2", 0.999)]
    for name in ("adam-beta1", "adam-beta2"):
        source.translate(name, {"optimizer.betas": betas})
    if source.target("optimizer.betas") is None:
        source.fill("optimizer.betas", betas, "Megatron's default of adam-beta1, adam-beta2")


def _read_recompute(source: ImportSource) -> None:
    kind = source.get("recompute-granularity")
    if source.get("recompute-activations") is True:
        source.translate("recompute-activations", {"layout.recompute": "selective"})
    if kind in ("selective", "full"):
        source.honour("recompute-granularity", {"layout.recompute": kind})


def _read_documents(source: ImportSource) -> None:
    """Import the flags that separate documents in attention and in the loss; both or neither."""
    keys = ("reset-attention-mask", "eod-mask-loss")
    on = [key for key in keys if source.get(key) is True]
    if len(on) == len(keys):
        for key in on:
            source.translate(key, {"data.packing": "documents"})
        source.honour("reset-position-ids", note="only differences of rotary positions matter")
    elif on:
        (missing,) = (key for key in keys if key not in on)
        reason = (
            f"data.packing = documents keeps both attention and targets apart; nearest: {missing}"
        )
        source.refuse(on[0], reason, settled_by=["data.packing"])
    if source.get("reset-position-ids") is True:
        reason = "documents that see each other have positions of one sequence; nearest: "
        source.refuse(
            "reset-position-ids", reason + " and ".join(keys), settled_by=["data.packing"]
        )


def _read_data(source: ImportSource) -> None:
    _read_documents(source)
    kind, model = source.get("tokenizer-type"), source.get("tokenizer-model")
    settles = ["data.tokenizer"]
    if kind == "GPT2BPETokenizer" or (kind is None and source.get("vocab-file") is not None):
        source.translate("tokenizer-type", {"data.tokenizer": "gpt2"})
        for name in ("vocab-file", "merge-file"):
            source.ignore(name, "GPT-2's tokenizer is known by its name")
        if kind is None:
            source.fill("data.tokenizer", "gpt2", "vocab-file and merge-file are GPT-2's")
    elif kind == "HuggingFaceTokenizer":
        source.honour("tokenizer-type", note="a tokenizer.json")
        if model is not None and Path(str(model)).exists():
            source.honour("tokenizer-model", {"data.tokenizer": str(model)})
        else:
            reason = "no such folder or tokenizer.json here: give data.tokenizer"
            source.refuse("tokenizer-model", reason, settled_by=settles)
    elif kind is not None:
        reason = f"no {kind}; nearest: gpt2, or a tokenizer.json as data.tokenizer"
        source.refuse("tokenizer-type", reason, settled_by=settles)
    if source.get("split") is not None:
        read_split(source, "split")
    if source.get("tensorboard-dir") is not None:
        note = "events go into the run folder"
        source.translate("tensorboard-dir", {"log.tensorboard": True}, note)
    size = source.whole("vocab-size") or BUILTIN_VOCAB.get(str(source.target("data.tokenizer")))
    if size is not None:
        multiple = source.whole("make-vocab-size-divisible-by") or 128
        multiple *= source.whole("tensor-model-parallel-size") or 1
        padding = {f"model.{OF_PADDING}": multiple} if size % multiple else {}
        source.translate("vocab-size", {"model.vocab_size": size})
        source.translate("make-vocab-size-divisible-by", padding, "for each rank of tp")
        for key, value in {"model.vocab_size": size, **padding}.items():
            if source.target(key) is None:
                source.fill(key, value, "Megatron-LM pads the vocabulary")


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
_WRITTEN_SHARDING: Final = {2: "optim_grads", 3: "optim_grads_params"}
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
    """Return a plan as Megatron-LM's arguments by name, including those of the model."""
    layout, train = source.layout, source.config.train
    keys = _parallel(source) | model_arguments(source.config.model)
    if source.config.optimizer.name == "muon":
        keys |= muon_arguments(source)
    if layout.zero >= 2:
        keys.pop("use-distributed-optimizer", None)
        keys["use-megatron-fsdp"] = True
        keys["data-parallel-sharding-strategy"] = _WRITTEN_SHARDING[layout.zero]
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
    """Return a plan as overrides of a Megatron-Bridge recipe, such as `train.global_batch_size`."""
    source.check_named_model()
    _check_no_muon(source, "Megatron-Bridge's recipes have")
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
    """Return a plan as arguments of Megatron-SWIFT, such as `global_batch_size`."""
    source.check_named_model()
    _check_no_muon(source, "ms-swift has")
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


def _check_no_muon(source: PlanSource, system: str) -> None:
    if source.config.optimizer.name == "muon":
        raise ConfigError(f"{system} no optimizer.name = muon; nearest: adamw, or for: megatron")


def _underscored(name: str) -> str:
    return _BRIDGE_NAMES.get(name, name).replace("-", "_")


def _reduced(source: PlanSource) -> dict[str, Any]:
    if not source.is_stated("train.reduce_dtype"):
        return {}
    return {"grad-reduce-in-fp32": source.config.train.reduce_dtype == "fp32"}


def _parallel(source: PlanSource) -> dict[str, Any]:
    """Return the arguments for layout, batch and optimizer, which all three writers share."""
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
    given = source.given(_GIVEN)
    if source.config.optimizer.name != "sgd":
        given.pop("sgd-momentum", None)
    return keys | given | _optimizer(source)


def _optimizer(source: PlanSource) -> dict[str, Any]:
    optimizer, keys = source.config.optimizer, dict[str, Any]()
    if source.is_stated("optimizer.name"):
        keys["optimizer"] = source.optimizer_name("megatron")
    if source.is_stated("optimizer.betas"):
        keys["adam-beta1"], keys["adam-beta2"] = optimizer.betas
    if optimizer.state_dtype != "fp32":
        dtype = optimizer.state_dtype
        if dtype == "int8":
            raise ConfigError("Megatron-LM has no optimizer.state_dtype = int8; nearest: bf16")
        keys |= {"use-precision-aware-optimizer": True, "exp-avg-dtype": dtype}
        keys["exp-avg-sq-dtype"] = dtype
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
    """Return a model as Megatron-LM's arguments.

    Features that these cannot express are found when they are imported again.
    """
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
    if not is_gated and model.activation == "relu2":
        keys["squared-relu"] = True
    if model.is_latent:
        keys |= _latent(model)
    else:
        keys["rotary-interleaved"] = model.rope_interleave or None
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
    """Return a rotary base as an int for Megatron-LM; raises `ConfigError` for a fraction."""
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
