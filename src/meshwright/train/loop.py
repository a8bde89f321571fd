"""The training loop. It reads from top to bottom; everything that it calls is named for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from meshwright.data import BlendSampler, Dataset, Sampler, StreamedDataset, StreamSampler
from meshwright.execute.batch import Batch, Feed
from meshwright.execute.parallel import Parallel
from meshwright.execute.world import World
from meshwright.models.dropout import row_keys
from meshwright.program.parts import flops_per_token, parameter_count
from meshwright.spec.loading import Config
from meshwright.spec.schedule import learning_rate
from meshwright.train.events import Emit
from meshwright.train.optimizer import set_learning_rate
from meshwright.train.readings import Readings, lag
from meshwright.train.recording import Recording
from meshwright.train.replicas import check_replicas
from meshwright.train.run import Progress, open_run, position_of, save
from meshwright.train.run_folder import Job
from meshwright.train.update import evaluate, update


class Summary(NamedTuple):
    """How a run ended: steps done, the last loss in nats, and whether it was asked to stop."""

    steps: int
    loss: float
    stopped: bool


def train(
    job: Job,
    world: World,
    dataset: Dataset | StreamedDataset,
    emit: Emit,
    asked_to_stop: Callable[[], bool],
    resume: bool = False,
) -> Summary:
    """Train to the last step, or to the step at which any rank was asked to stop.

    With `resume` the run goes on from its newest good step, or begins anew where it has none. It is
    saved on the way as the config says, and always at the end.
    """
    config, layout = job.config, job.layout
    steps, batch_size = config.train.steps, config.train.batch
    trained, progress, saver = open_run(job, world, dataset, emit, resume)
    parallel, shards, optimizer = trained
    sampler = dataset.sampler("train", config.train.seq_len, batch_size)
    if progress.position is not None and isinstance(sampler, StreamSampler):
        sampler.seek(progress.position)
    mine = share(batch_size, layout.mesh.data_rank(world.rank), layout.dp)
    emit(start_event(job, world, dataset, sampler, progress.step))

    scale, clip = progress.scale, config.train.clip_norm
    readings = Readings(job, world, parallel, scale, emit, lag(world.device, scale))
    recording, feed = Recording(job, world, trained, progress.step), Feed(world.device)
    step, stopped = progress.step, False
    for step in range(progress.step + 1, steps + 1):
        if recording.is_due(step):  # its clock begins on a device that does nothing
            readings.drain()
        recording.begin(step)
        world.ledger.step(step)
        readings.start()
        batch = feed.bring(Batch.of(sampler.rows(step - 1, mine), keys(config, step, mine)))
        readings.clock.data_done()

        lr = learning_rate(step, steps, config.optimizer)
        set_learning_rate(optimizer, lr)
        done = update(parallel, batch, world, shards, optimizer, scale, clip, saver.before_update)

        world.ledger.phase("log")
        readings.add(step, lr, done)
        pauses = recording.is_on or step == steps or is_pause(config, step)
        stopped = readings.read(asked_to_stop(), everything=pauses)
        recording.end(step)
        last = stopped or step == steps
        readings.tell(last=last)
        if is_due(config.train.check_every, step, last=False):
            check_replicas(parallel, world)
        if is_due(config.train.eval_every, step, last):
            emit(evaluation_event(step, parallel, job, world, dataset))
        saver.poll()
        if is_due(config.checkpoint.every, step, last) or last:
            world.ledger.phase("save")
            position = position_of(sampler, world)
            save(saver, trained, Progress(step, scale, position), job, dataset)
        if stopped:
            break
    saver.finish()
    world.ledger.phase("end")
    emit({"event": "end", "step": step, "loss": readings.loss, "stopped": stopped})
    return Summary(step, readings.loss, stopped)


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


def is_pause(config: Config, step: int) -> bool:
    """Whether a step is followed by what takes longer than to read it."""
    train, save_every = config.train, config.checkpoint.every
    return any(
        is_due(n, step, last=False) for n in (train.eval_every, train.check_every, save_every)
    )


def start_event(
    job: Job,
    world: World,
    dataset: Dataset | StreamedDataset,
    sampler: Sampler | BlendSampler | StreamSampler,
    step: int,
) -> dict[str, object]:
    """Return the event that describes the run, or its continuation after a step."""
    config = job.config
    drawn: dict[str, object] = {}
    if isinstance(sampler, BlendSampler):
        drawn["blend"] = sampler.passes(config.train.steps * config.train.batch)
    return {
        "event": "start",
        "time": time.time(),
        "steps": config.train.steps,
        "from_step": step,
        "world": world.size,
        "nodes": list(world.nodes),
        "device": job.machine.name,
        "layout": job.layout.model_dump(mode="json"),
        "parameters": parameter_count(config.model),
        "tokens_per_step": config.train.batch * config.train.seq_len,
        "flops_per_token": flops_per_token(config.model, config.train.seq_len),
        "train_samples": sampler.samples,
        "train_tokens": dataset.tokens("train"),
        "unigram_entropy": dataset.unigram_entropy,
        **drawn,
        "torch": torch.__version__,
    }


def evaluation_event(
    step: int, parallel: Parallel, job: Job, world: World, dataset: Dataset | StreamedDataset
) -> dict[str, object]:
    """Return the loss on the held-out split; the same rows each time."""
    config = job.config
    world.ledger.phase("eval")
    wanted = config.train.eval_batches
    held_out = dataset.held_out(config.train.seq_len, config.train.batch, wanted)
    mine = share(config.train.batch, job.layout.mesh.data_rank(world.rank), job.layout.dp)
    count = min(wanted, max(1, held_out.samples // config.train.batch))
    started = time.perf_counter()
    batches = [Batch.of(held_out.rows(at, mine)).to(world.device) for at in range(count)]
    loss = evaluate(parallel, batches, world)
    return {"event": "eval", "step": step, "loss": loss, "seconds": time.perf_counter() - started}
