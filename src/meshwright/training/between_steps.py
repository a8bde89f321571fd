"""What a run does between steps: start or resume, save, and compare replicas of weights."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.adapters import AdapterSource, both
from meshwright.checkpoint.commit import clean
from meshwright.checkpoint.identity import identity_of, refuse_changed
from meshwright.checkpoint.restore import Good, StoredSource, newest_good, restore
from meshwright.checkpoint.saver import Saved, Saver
from meshwright.checkpoint.state import Trained, chunks_of, scalars_of
from meshwright.checkpoint.weights import spec_text, weights_from
from meshwright.comm.groups import Groups, open_groups
from meshwright.comm.world import World, exchange
from meshwright.data import Dataset, StreamedDataset, StreamPosition, StreamSampler
from meshwright.errors import CheckpointError, RankFailed
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.layout import Layout
from meshwright.parallel.apply import Parallel
from meshwright.parallel.build import Source, build, region_of, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.spec import hub
from meshwright.spec.stored import SPEC
from meshwright.training.events import Emit
from meshwright.training.optimizer import build_optimizer
from meshwright.training.run_folder import Job
from meshwright.training.update import LossScale

# Places are told apart by a number from 1 to this, a prime; so many periods of it at a time.
_PERIOD: Final = 8191
_PERIODS: Final = 512


@torch.no_grad()
def check_replicas(parallel: Parallel, world: World) -> None:
    """Raise `RankFailed` on every rank if copies of a shard differ; a collective.

    The error names the first tensor and the ranks that differ from the majority.
    """
    if world.size == 1:
        return
    digests = {
        f"{parameter.name} {region_of(parameter, parallel)}": bits(parameter.shard)
        for parameter in parallel.held
    }
    for module in parallel.modules.values():
        digests |= {f"{name} of its stage": bits(buffer) for name, buffer in module.named_buffers()}
    everyone = [json.loads(text) for text in exchange(json.dumps(digests), dist.group.WORLD)]
    for key in dict.fromkeys(key for reported in everyone for key in reported):
        holders = {rank: reported[key] for rank, reported in enumerate(everyone) if key in reported}
        usual, count = Counter(holders.values()).most_common(1)[0]
        if count == len(holders):
            continue
        odd = [rank for rank, digest in holders.items() if digest != usual]
        name = key.split(" ", 1)[0]
        where = f"on rank {', '.join(map(str, odd))}"
        if 2 * count <= len(holders):
            where = f"between ranks {', '.join(map(str, holders))}"
        raise RankFailed(
            f"replicas differ: {name} is not the same {where}. A device or a transfer is broken, "
            "or the ranks run different code; the last checkpoint is older than that"
        )


def bits(shard: Tensor) -> int:
    """Return a checksum of an fp32 tensor, which changes if any single bit flips."""
    flat = shard.contiguous().view(-1).view(torch.int32)
    weights = torch.arange(1, _PERIOD + 1, device=flat.device, dtype=torch.int64)
    total = torch.zeros((), device=flat.device, dtype=torch.int64)
    # By pieces: in int64 the whole of a large shard would not fit beside it.
    for piece in torch.split(flat, _PERIOD * _PERIODS):
        aligned = len(piece) // _PERIOD * _PERIOD
        rows, tail = piece[:aligned].view(-1, _PERIOD), piece[aligned:]
        total += (rows.to(torch.int64) * weights).sum() + (tail * weights[: len(tail)]).sum()
    return int(total)


class Progress(NamedTuple):
    """Where a run stands: its last step, the next step's loss scale, and the data stream's
    position.

    `position` is None unless the data is streamed. `loss` is that of the step in nats, NaN if
    unknown.
    """

    step: int
    scale: LossScale
    position: Mapping[str, Any] | None = None
    loss: float = math.nan


def open_run(
    job: Job, world: World, dataset: Dataset | StreamedDataset, emit: Emit, resume: bool
) -> tuple[Trained, Progress, Saver]:
    """Build this rank's part of a run, or with `resume` restore it from its newest valid step.

    A collective. Raises `CheckpointError` if another run has written that step.
    """
    config, started = job.config, time.perf_counter()
    good = _found(job, world, dataset, emit) if resume else None
    if world.rank == 0 and isinstance(job.checkpoints, Path):  # a store at the first save
        clean(job.checkpoints)
    groups = open_groups(job.layout, world, config.cluster.timeout)
    source = weights_source(job, world) if good is None else StoredSource(good.folder)
    trained = assemble(job, world, groups, source)
    progress = Progress(0, LossScale.of(config.train))
    if good is not None:
        restore(trained, good, same_optimizer=_is_same_optimizer(job, good))
        progress = _progress(job, good)
        seconds = time.perf_counter() - started
        fields = {"step": progress.step, "path": str(good.folder), "seconds": seconds}
        emit({"event": "resume", **fields, "layout": good.manifest["layout"]})
    return trained, progress, saver_of(job, world, emit, config.cluster.timeout)


def assemble(job: Job, world: World, groups: Groups, source: Source) -> Trained:
    """Return this rank's part of the model with weights from `source`, and its optimizer.

    The number of microbatches is that of this rank's sequences, see `sequences_of`.
    """
    config, layout = job.config, job.layout
    packed = config.data.packing == "documents"
    target = target_of(config.train, world.device, packed=packed)
    local_batch = len(sequences_of(layout, config.train.batch, world.rank)) * layout.dp
    train = config.train
    if local_batch != train.batch:  # this replica has more or fewer sequences than others
        train = train.model_copy(update={"batch": local_batch})
    parallel = build(
        lower(config.model, train, config.optimizer, layout, target),
        groups,
        world.device,
        source,
        compiled=train.is_compiled,
    )
    shards = Shards(parallel.trained, on_host=layout.offload == "optimizer")
    matrices = shards.matrices(parallel.groups, parallel.device, layout)
    optimizer = build_optimizer(shards.leaves, shards.parts, config.optimizer, matrices)
    return Trained(parallel, shards, optimizer)


def sequences_of(layout: Layout, batch: int, rank: int) -> range:
    """Return the indices of the global batch's sequences that a rank reads.

    Every replica gets the same number of microbatches on each of its ranks, or if that is not
    possible one more or less. Ranks of a replica always have equally many.
    """
    replica, shard = divmod(layout.mesh.data_rank(rank), layout.dp_shard)
    of_replica = layout.dp_shard * layout.microbatch  # sequences in a microbatch of all its ranks
    microbatches = batch // of_replica
    first, end = (microbatches * (replica + n) // layout.dp_replicate for n in (0, 1))
    size = (end - first) * layout.microbatch
    start = first * of_replica + shard * size
    return range(start, start + size)


def saver_of(job: Job, world: World, emit: Emit, timeout_s: float) -> Saver:
    """Return what saves the steps of a run, as its config says; a collective."""
    config = job.config
    return Saver(
        job.checkpoints,
        world,
        config.checkpoint.keep,
        lambda saved: emit(saved_event(saved)),
        run=job.run,
        during_training=config.checkpoint.is_async,
        mark=world.recorder.saving,
        timeout_s=timeout_s,
    )


def _found(job: Job, world: World, dataset: Dataset | StreamedDataset, emit: Emit) -> Good | None:
    """Return the newest valid step of this run; None if a restarted run has saved none yet."""

    def on_bad(problem: str) -> None:
        emit({"event": "bad_checkpoint", "problem": problem})

    good = newest_good(job.checkpoints, world, on_bad)
    if good is None and job.resume:
        raise CheckpointError(f"{job.checkpoints} holds no step to resume from")
    if good is not None:
        identity = identity_of(job.config, dataset.identity)
        refuse_changed(good.manifest, identity, job.run, job.allowed)
    return good


def _is_same_optimizer(job: Job, good: Good) -> bool:
    return bool(good.manifest["identity"]["optimizer"] == job.config.optimizer.name)


def _progress(job: Job, good: Good) -> Progress:
    """Return the progress saved in a step; a dynamic fp16 loss scale continues from its value."""
    scale = LossScale.of(job.config.train)
    if scale.is_dynamic and good.manifest["loss_scale"]["is_dynamic"]:
        scale = LossScale(**good.manifest["loss_scale"])
    loss = float(good.manifest.get("loss", math.nan))
    return Progress(int(good.manifest["step"]), scale, good.manifest.get("position"), loss)


def weights_source(job: Job, world: World) -> Source:
    """Return the source of the initial weights: the model in `model.init_from`, or the seed.

    Adapters come from the PEFT folder in `lora.init_from`, or the seed.
    """
    model, seed, adapters = job.config.model, job.config.train.seed, job.config.lora.init_from
    source: Source = seeded(model, seed, world.recorder.beat)
    if model.init_from is not None:
        source = both(weights_from(hub.folder_with_weights(model.init_from), model), source)
    if model.lora is not None and adapters is not None:
        source = both(source, AdapterSource(hub.folder_with_weights(adapters), model))
    return source


def save(
    saver: Saver,
    trained: Trained,
    scale: LossScale,
    sampler: object,
    job: Job,
    world: World,
    dataset: Dataset | StreamedDataset,
    step: int,
    loss: float,
) -> None:
    """Save a step, or start to if saves are asynchronous; `loss` is its loss in nats. A
    collective.
    """
    world.recorder.phase("save")
    config, position = job.config, position_of(sampler, world)
    facts = {
        "layout": job.layout.label,
        "world": job.layout.world,
        "samples": step * config.train.batch,
        "tokens": step * config.train.batch * config.train.seq_len,
        "identity": identity_of(config, dataset.identity),
        "tokenizer": config.data.tokenizer,
        "loss_scale": asdict(scale),
        "scalars": _scalars(trained, world),
        "loss": str(loss),  # also one that is not finite
    }
    if position is not None:
        facts["position"] = position
    saver.save(step, chunks_of(trained), facts, {SPEC: spec_text(config.model)})


def _scalars(trained: Trained, world: World) -> dict[str, float]:
    """Return the optimizer's scalar states from the first rank that has any; a collective."""
    by_rank = _everyones(dict(scalars_of(trained)), world)
    return next(filter(None, by_rank), {})


def _everyones(value: Any, world: World) -> list[Any]:
    """All-gather a JSON-serializable value; return those of all ranks. A collective."""
    group = dist.group.WORLD if world.size > 1 else None
    return [json.loads(text) for text in exchange(json.dumps(value), group)]


def position_of(sampler: object, world: World) -> dict[str, Any] | None:
    """Return the data stream's position for the whole global batch; a collective.

    None if the step number alone determines it. It is the same for every layout, so any can resume
    from it.
    """
    if not isinstance(sampler, StreamSampler):
        return None
    positions = map(StreamPosition.from_json, _everyones(sampler.position().to_json(), world))
    return StreamPosition.joined(list(positions)).to_json()


def saved_event(saved: Saved) -> dict[str, object]:
    """Return the event of the run's log that says that a step was saved."""
    return {
        "event": "save",
        "step": saved.step,
        "path": str(saved.path),
        "bytes": saved.bytes,
        "seconds": saved.seconds,
        "stall_s": saved.stall_s,
    }
