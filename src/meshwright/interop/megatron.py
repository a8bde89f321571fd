"""Megatron-LM's arguments: what the table `megatron.toml` cannot say row by row.

Source of the arguments and defaults: Megatron-LM's megatron/training/arguments.py and the configs
that it takes them from.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.interop.batch import Names, read_batch
from meshwright.interop.documents import read_split
from meshwright.interop.megatron_experts import read_experts
from meshwright.interop.megatron_model import read_model
from meshwright.interop.source import ImportSource
from meshwright.spec.model import OF_PADDING
from meshwright.spec.resolve import BUILTIN_VOCAB

BATCH = Names("global-batch-size", "micro-batch-size", "(accumulation)")
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read_megatron(source: ImportSource) -> None:
    """Give every argument of a Megatron command line its verdict."""
    _read_launcher(source)
    _read_parallel(source)
    if source.values.keys() & {"num-layers", "hidden-size"}:
        read_model(source)
    _read_precision(source)
    _read_fp8(source)
    _read_sharding(source)
    _read_batch_and_steps(source)
    read_experts(source)
    _read_schedule(source)
    _read_recompute(source)
    _read_data(source)
    minutes = source.number("distributed-timeout-minutes", 0.0)
    if minutes > 0:
        to = {"cluster.timeout": minutes * 60}
        source.translate("distributed-timeout-minutes", to, "in seconds")
    source.finish()


def _read_launcher(source: ImportSource) -> None:
    """Take torchrun's number of ranks, where `--devices` does not say it."""
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
    """Take fp8 products whose tensors are scaled one by one at each use, as torchao does."""
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
    """Take the flags that keep documents of a sample apart: in attention and loss, or neither."""
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
