"""The training loop, readable from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from meshwright.comm.world import World
from meshwright.data import (
    BlendSampler,
    Dataset,
    Sampler,
    StreamedDataset,
    StreamSampler,
    WholeSampler,
)
from meshwright.models.dropout import row_keys
from meshwright.parallel.apply import Parallel
from meshwright.parallel.batch import Batch, Feed
from meshwright.program.model_flops import flops_per_token
from meshwright.spec.learning_rate import learning_rate
from meshwright.spec.loading import Config
from meshwright.spec.parts import parameter_count
from meshwright.training.between_steps import check_replicas, save, sequences_of
from meshwright.training.elastic import Unbroken
from meshwright.training.events import Emit
from meshwright.training.held_out import HeldOut, Interruptible
from meshwright.training.optimizer import set_learning_rate
from meshwright.training.readings import LeftOut, Readings, lag
from meshwright.training.routing import RoutingReport
from meshwright.training.run_folder import Job
from meshwright.training.step_recording import Recording
from meshwright.training.update import evaluate, update


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
    replicas: Unbroken | None = None,
) -> Summary:
    """Train to the last step, to a stop request, or until early stopping ends the run.

    With `resume`, the run continues from its newest valid step; restarted ranks start over if none
    was saved yet. The run is saved as the config says, and always at the end. After a stop request,
    the current step and its save complete, but an evaluation is skipped or interrupted. If
    `replicas` are elastic, raises `Regroup` after a step if one is to join.
    """
    config, steps, clip = job.config, job.config.train.steps, job.config.train.clip_norm
    replicas = replicas or Unbroken()
    trained, progress, saver = replicas.open_run(job, world, dataset, emit, resume)
    parallel, shards, optimizer = trained
    sampler = sampler_at(progress.position, dataset, config)
    indices, read_rows = own_rows(job, world), dataset.reader(sampler.rows, steps)
    if not replicas.carries:
        emit(start_event(job, world, dataset, sampler, progress.step))
    readings = Readings(job, world, parallel, emit, lag(world.device, progress.scale), progress)
    feed = Feed(world.device)
    recording = Recording(job, world, trained, replicas.recorded_from(progress.step))
    replicas.attach(saver, recording)
    scale, routing = progress.scale, RoutingReport(job, world, parallel, emit, progress.step)
    step = progress.step
    stopped = world.anyone(asked_to_stop() and not replicas.carries)  # what they carry is not saved
    held_out = HeldOut(job, world, saver, step)
    keep = partial(save, saver, trained, scale, sampler, job, world, dataset)
    look = partial(evaluated, parallel, job, world, dataset, emit, asked_to_stop, held_out)
    replicas.catch_up(job, world, emit, keep)
    if not stopped and lacks_evaluation(config, step, held_out):
        stopped = not look(step)
    replicas.keep_wanted(job, world, held_out, keep)
    while step < steps and not stopped and not held_out.is_over:
        replicas.leave()
        step += 1
        begin(step, world, recording, readings)
        rows = read_rows(step - 1, indices)
        batch = feed.bring(Batch.of(rows, keys(config, step, indices)))
        readings.data_done(rows)
        lr = learning_rate(step, steps, config.optimizer)
        set_learning_rate(optimizer, lr)
        vote = replicas.vote(step, lr, scale, saver, world)
        done = update(parallel, batch, world, shards, optimizer, scale, clip, vote)
        replicas.commit()
        world.recorder.phase("log")
        readings.add(step, lr, done)
        stopped = log(config, step, asked_to_stop(), recording, readings, routing, replicas)
        if is_due(config.train.check_every, step, last=False):
            check_replicas(parallel, world)
        saver.poll()
        border = (partial(keep, step, readings.loss), look, held_out, asked_to_stop)
        stopped = save_and_evaluate(job, world, step, stopped, *border)
    saver.finish()
    return ended(step, readings.loss, stopped, held_out, job, world, emit)


def log(
    config: Config,
    step: int,
    asked: bool,
    recording: Recording,
    readings: Readings,
    routing: RoutingReport,
    replicas: Unbroken,
) -> bool:
    """Emit the events of a step that are due; return whether any rank is `asked` to stop.

    A collective.
    """
    is_last = step == config.train.steps
    pauses = recording.is_on or is_last or is_pause(config, step)
    stopped = readings.read(asked, everything=pauses)
    recording.end(step)
    readings.tell(last=stopped or is_last)
    replicas.tell(step)
    routing.tell(step, last=stopped or is_last, waits=pauses)
    return stopped


def save_and_evaluate(
    job: Job,
    world: World,
    step: int,
    stopped: bool,
    keep: Callable[[], None],
    look: Callable[[int], bool],
    held_out: HeldOut,
    asked_to_stop: Callable[[], bool],
) -> bool:
    """Save and evaluate a step if it is due; return whether the run stops after it.

    `stopped`: it was asked to before. `keep` saves the step, `look` evaluates it.
    """
    config, steps = job.config, job.config.train.steps
    if saved := stopped or is_due(config.checkpoint.every or steps, step, step == steps):
        keep()
    if not stopped and is_due(config.train.eval_every, step, step == steps):
        stopped = not look(step)
    elif saved and not stopped and step < steps:  # no step begins that would be saved, too
        stopped = world.anyone(asked_to_stop())
    if not saved and (stopped or held_out.wants(step)):
        keep()
        held_out.keep(step)
    return stopped


def begin(step: int, world: World, recording: Recording, readings: Readings) -> None:
    """Start the clocks and the flight recorder for a step, and its recording if one is due."""
    if recording.is_due(step):  # its clock begins on a device that does nothing
        readings.drain()
    recording.begin(step)
    world.recorder.step(step)
    readings.start()


def ended(
    step: int,
    loss: float,
    stopped: bool,
    held_out: HeldOut | None,
    job: Job,
    world: World,
    emit: Emit,
) -> Summary:
    """Emit the end event and return the summary.

    The run counts as stopped only if the stop request left out steps or an evaluation.
    """
    world.recorder.phase("end")
    train = job.config.train
    stopped = stopped and (step < train.steps or train.eval_every > 0)
    fields: dict[str, object] = {}
    if not stopped and held_out is not None and held_out.is_over:
        fields["early"] = held_out.best.told
    emit({"event": "end", "step": step, "loss": loss, "stopped": stopped, **fields})
    return Summary(step, loss, stopped)


def sampler_at(
    position: Mapping[str, Any] | None, dataset: Dataset | StreamedDataset, config: Config
) -> Sampler | BlendSampler | StreamSampler:
    """Return the sampler of the training split; a stream starts at `position`, if given."""
    sampler = dataset.sampler("train", config.train.seq_len, config.train.batch)
    if position is not None and isinstance(sampler, StreamSampler):
        sampler.seek(position)
    return sampler


def keys(config: Config, step: int, rows: range) -> torch.Tensor | None:
    """Return the dropout keys of some sequences of a step's global batch; None without dropout."""
    if not config.model.drops:
        return None
    return row_keys(config.train.seed, step, rows)


def share(batch: int, rank: int, ranks: int) -> range:
    """Return the indices of the global batch's sequences that a data-parallel rank reads."""
    size = batch // ranks
    return range(rank * size, (rank + 1) * size)


def own_rows(job: Job, world: World) -> range:
    """Return the indices of the global batch's sequences that this rank reads."""
    return sequences_of(job.layout, job.config.train.batch, world.rank)


def is_due(interval: int, step: int, last: bool) -> bool:
    """Whether something done at an `interval` of steps (0: never) and at the end is due."""
    return interval > 0 and (step % interval == 0 or last)


def lacks_evaluation(config: Config, step: int, held_out: HeldOut) -> bool:
    """Whether the step that a run continues from should have been evaluated, and was not.

    The run ended between its save and its evaluation.
    """
    train = config.train
    is_evaluated = step > 0 and is_due(train.eval_every, step, last=step == train.steps)
    return is_evaluated and held_out.lacks(step)


def is_pause(config: Config, step: int) -> bool:
    """Whether an evaluation, check or save follows a step, so that the host may wait for its
    results.
    """
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
    """Return the event that describes the run as it starts, or continues after `step`."""
    config = job.config
    drawn: dict[str, object] = {}
    if isinstance(sampler, BlendSampler):
        drawn["blend"] = sampler.passes(config.train.steps * config.train.batch)
    elif isinstance(sampler, WholeSampler):
        drawn["rows"] = sampler.facts()
    elif isinstance(dataset, StreamedDataset) and step == 0:
        rows = dataset.truncation(config.train.seq_len)
        drawn |= {"first_rows": rows} if rows else {}
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


def evaluated(
    parallel: Parallel,
    job: Job,
    world: World,
    dataset: Dataset | StreamedDataset,
    emit: Emit,
    asked_to_stop: Callable[[], bool],
    held_out: HeldOut,
    step: int,
) -> bool:
    """Compute, emit and record the loss on the held-out split, on the same sequences each time.

    Returns whether it completed: not if any rank is asked to stop.
    """
    world.recorder.phase("eval")
    started = time.perf_counter()
    rows = held_out_batches(step, job, world, dataset, emit)
    batches = Interruptible(rows, world, asked_to_stop)
    loss = evaluate(parallel, batches, world)
    if not batches.is_broken_off:
        seconds = time.perf_counter() - started
        emit({"event": "eval", "step": step, "loss": loss, "seconds": seconds})
        held_out.add(step, loss)
    return not batches.is_broken_off


def held_out_batches(
    step: int, job: Job, world: World, dataset: Dataset | StreamedDataset, emit: Emit
) -> Iterator[Batch]:
    """Yield this rank's part of each held-out global batch, on its device.

    First emits their number, because an evaluation may take longer than many steps.
    """
    train = job.config.train
    held_out = dataset.held_out(train.seq_len, train.batch, train.eval_batches)
    indices = own_rows(job, world)
    count = min(train.eval_batches, max(1, held_out.samples // train.batch))
    emit({"event": "evaluating", "step": step, "batches": count})
    read_rows, left_out = dataset.reader(held_out.rows, count), LeftOut()
    for index in range(count):
        rows = read_rows(index, indices)
        left_out.add(rows)
        yield Batch.of(rows).to(world.device)
