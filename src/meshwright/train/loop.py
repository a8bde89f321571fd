"""The training loop. It reads from top to bottom; everything that it calls is named for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.checkpoint.weights import save_weights
from meshwright.data import Dataset, Sampler
from meshwright.execute.batch import Batch
from meshwright.execute.build import Source, build, seeded
from meshwright.execute.groups import open_groups
from meshwright.execute.optimize import Shards
from meshwright.execute.parallel import Parallel
from meshwright.execute.world import World
from meshwright.models.dropout import row_keys
from meshwright.models.hf import hf_source
from meshwright.program.lower import lower
from meshwright.program.parts import flops_per_token, parameter_count
from meshwright.spec.loading import Config
from meshwright.train.events import Emit
from meshwright.train.loss_scale import LossScale
from meshwright.train.metrics import StepClock, step_event
from meshwright.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from meshwright.train.run_folder import Job
from meshwright.train.update import Updated, evaluate, update


class Summary(NamedTuple):
    """How a run ended: steps done, the last loss in nats, and whether it was asked to stop."""

    steps: int
    loss: float
    stopped: bool


def train(
    job: Job, world: World, dataset: Dataset, emit: Emit, asked_to_stop: Callable[[], bool]
) -> Summary:
    """Train to the last step, or to the step at which any rank was asked to stop.

    Weights are saved on the way as the config says, and always at the end.
    """
    config, layout = job.config, job.layout
    steps, batch_size = config.train.steps, config.train.batch
    program = lower(config.model, config.train, layout)
    parallel = build(
        program,
        open_groups(layout, world),
        world.device,
        weights_source(job),
        compiled=config.train.compile,
    )
    shards = Shards(parallel.held, on_host=layout.offload == "optimizer")
    optimizer = build_optimizer(shards.leaves, config.optimizer)
    scale = LossScale.of(config.train)
    sampler = dataset.sampler("train", config.train.seq_len, batch_size)
    mine = share(batch_size, layout.mesh.data_rank(world.rank), layout.dp)
    emit(start_event(job, world, dataset, sampler))

    clock = StepClock()
    loss, step, stopped = float("nan"), 0, False
    for step in range(1, steps + 1):
        clock.start()
        batch = Batch.of(sampler.rows(step - 1, mine), world.device, keys(config, step, mine))
        clock.data_done()

        lr = learning_rate(step - 1, steps, config.optimizer)
        set_learning_rate(optimizer, lr)
        done = update(parallel, batch, world, shards, optimizer, scale, config.train.clip_norm)

        loss, stop_votes = world.sum_on_host([done.loss.item(), float(asked_to_stop())])
        clock.stop()
        stopped = stop_votes > 0
        last = stopped or step == steps
        if done.overflow is not None:
            emit(overflow_event(step, done, scale))
        if last or step % config.train.log_every == 0:
            emit(step_event(step, loss, done.norm, lr, scale.value, clock, job, world))
        if is_due(config.train.eval_every, step, last):
            emit(evaluation_event(step, parallel, job, world, dataset))
        if is_due(config.checkpoint.every, step, last) or last:
            save(step, parallel, scale, job, world, emit)
        if stopped:
            break
    emit({"event": "end", "step": step, "loss": loss, "stopped": stopped})
    return Summary(step, loss, stopped)


def weights_source(job: Job) -> Source:
    """Return where the first weights come from: an HF folder, or the seed."""
    folder = job.config.model.init_from
    if folder is not None:
        return hf_source(Path(folder), job.config.model)
    return seeded(job.config.model, job.config.train.seed)


def keys(config: Config, step: int, rows: range) -> torch.Tensor | None:
    """Return the dropout keys of some rows of a step's global batch, where the model drops."""
    if config.model.dropout == 0:
        return None
    return row_keys(config.train.seed, step, rows)


def share(batch: int, rank: int, ranks: int) -> range:
    """Return the rows of the global batch that a data-parallel rank reads."""
    size = batch // ranks
    return range(rank * size, (rank + 1) * size)


def is_due(every: int, step: int, last: bool) -> bool:
    """Whether something done `every` steps (0: never) and at the end is due."""
    return every > 0 and (step % every == 0 or last)


def start_event(job: Job, world: World, dataset: Dataset, sampler: Sampler) -> dict[str, object]:
    """Return the event that describes the run."""
    config = job.config
    return {
        "event": "start",
        "time": time.time(),
        "steps": config.train.steps,
        "world": world.size,
        "device": job.machine.name,
        "layout": job.layout.model_dump(mode="json"),
        "parameters": parameter_count(config.model),
        "tokens_per_step": config.train.batch * config.train.seq_len,
        "flops_per_token": flops_per_token(config.model, config.train.seq_len),
        "train_samples": sampler.samples,
        "train_tokens": dataset.tokens("train"),
        "unigram_entropy": dataset.unigram_entropy,
        "torch": torch.__version__,
    }


def overflow_event(step: int, done: Updated, scale: LossScale) -> dict[str, object]:
    """Return the event of an fp16 step that was skipped, with the scale of the next one."""
    return {
        "event": "overflow",
        "step": step,
        "tensor": done.overflow,
        "loss_scale": scale.value,
    }


def evaluation_event(
    step: int, parallel: Parallel, job: Job, world: World, dataset: Dataset
) -> dict[str, object]:
    """Return the loss on the held-out split; the same rows each time."""
    config = job.config
    held_out = dataset.sampler("validation", config.train.seq_len, config.train.batch)
    mine = share(config.train.batch, job.layout.mesh.data_rank(world.rank), job.layout.dp)
    count = min(config.train.eval_batches, max(1, held_out.samples // config.train.batch))
    started = time.perf_counter()
    batches = [Batch.of(held_out.rows(at, mine), world.device) for at in range(count)]
    loss = evaluate(parallel, batches, world)
    return {"event": "eval", "step": step, "loss": loss, "seconds": time.perf_counter() - started}


def save(
    step: int, parallel: Parallel, scale: LossScale, job: Job, world: World, emit: Emit
) -> None:
    """Save the weights on rank 0 and say so."""
    started = time.perf_counter()
    root = Path(job.config.checkpoint.dir) if job.config.checkpoint.dir else job.folder.checkpoints
    path = save_weights(parallel, job.config, step, root, {"loss_scale": asdict(scale)})
    world.barrier()
    seconds = time.perf_counter() - started
    emit({"event": "save", "step": step, "path": str(path), "seconds": seconds})
