"""Elastic replicas: a rank keeps its state in memory while replicas are lost and join again.

A step is agreed on before its update. Its gradients are complete on every rank before any rank
votes, and no rank updates before all have voted. So where a replica is lost, each rank that stays
either has updated, or holds the gradients to do so, or no rank has, and the step is repeated.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.commit import clean, is_there, step_name
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import Trained
from meshwright.comm.generations import Announcements, ReplicaGeneration, replica_of
from meshwright.comm.groups import open_groups
from meshwright.comm.regroup import CONNECT_S, wait_up_to
from meshwright.comm.world import World, exchange
from meshwright.data import Dataset, StreamedDataset
from meshwright.errors import ConfigError, RankFailed
from meshwright.layout import Layout
from meshwright.parallel.apply import Parallel
from meshwright.parsing import parse_json
from meshwright.program.shards import Region
from meshwright.training.between_steps import Progress, assemble, open_run, saver_of
from meshwright.training.events import Emit
from meshwright.training.held_out import HeldOut
from meshwright.training.readings import Lap, LeftOut, StepClock, step_event
from meshwright.training.run_folder import Job
from meshwright.training.step_recording import Recording
from meshwright.training.update import LossScale, Updated, apply_gradients

_NEW: Final = -1  # the step of a rank without state
_NONE: Final = ReplicaGeneration(0, ())  # before the first


class Regroup(Exception):
    """The ranks leave their process groups at a step's border, because a replica joins."""


class Unbroken:
    """How a run trains whose ranks are restarted all together: with nothing to agree on."""

    regroups = False
    carries = False

    def open_run(
        self, job: Job, world: World, dataset: Dataset | StreamedDataset, emit: Emit, resume: bool
    ) -> tuple[Trained, Progress, Saver]:
        """Build this rank's part of a run, see `between_steps.open_run`; a collective."""
        return open_run(job, world, dataset, emit, resume)

    def recorded_from(self, step: int) -> int:
        """Return the step after which the first steps are recorded."""
        return step

    def attach(self, saver: Saver, recording: Recording) -> None:
        """Take note of what has to end where a step is abandoned."""

    def catch_up(
        self, job: Job, world: World, emit: Emit, keep: Callable[[int, float], None]
    ) -> None:
        """Emit and save what of the last step is missing; a collective."""

    def keep_wanted(
        self, job: Job, world: World, held_out: HeldOut, keep: Callable[[int, float], None]
    ) -> None:
        """Save the last step if its held-out loss asks for that, and it is not saved; a
        collective.
        """

    def vote(
        self, step: int, lr: float, scale: LossScale, saver: Saver, world: World
    ) -> Callable[[Updated], None]:
        """Return what is called with a step's gradients before its update."""
        return lambda updated: saver.before_update()

    def commit(self) -> None:
        """Take note that the weights are updated."""

    def tell(self, step: int) -> None:
        """Take note that a step's events are written."""

    def leave(self) -> None:
        """Raise `Regroup` if the ranks have agreed to."""


class Numbers(NamedTuple):
    """What is known of a step: its global loss in nats, norm, learning rate and seconds."""

    step: int
    loss: float
    norm: float
    lr: float
    seconds: float

    def to_json(self) -> list[str]:
        """Return the numbers as texts, since they may not be finite."""
        return [repr(number) for number in self]

    @classmethod
    def from_json(cls, texts: Sequence[str]) -> Numbers:
        """Return the numbers from texts."""
        return cls(int(texts[0]), *(float(text) for text in texts[1:]))


@dataclass
class Prepared:
    """A step whose gradients are complete on this rank, but which it may not have updated with.

    `numbers` has the global loss only once all ranks have voted.
    """

    updated: Updated
    numbers: Numbers
    loss_scale: float


@dataclass
class Carried:
    """What a rank keeps while its process groups are rebuilt.

    `step` is the last one that its weights are updated with, -1 without weights; `told` the last
    one whose events were written; `began` the one after which its attempt began.
    """

    trained: Trained | None = None
    step: int = _NEW
    told: int = _NEW
    began: int = 0
    prepared: Prepared | None = None
    numbers: Numbers | None = None
    seat: int = 0
    replicas: tuple[int, ...] = ()


@dataclass
class Elastic(Unbroken):
    """A rank's part in a run whose replicas are lost and join again.

    `layout` and `started_as` are the run's layout and this rank's number in it, `digest` that of
    its inputs. `open` is called with each world of a new generation.
    """

    announced: Announcements
    layout: Layout
    started_as: int
    digest: str
    carried: Carried = field(default_factory=Carried)
    generation: ReplicaGeneration = _NONE
    left_at: float = 0.0
    regroups: bool = False
    carries: bool = False
    _attached: tuple[Saver, Recording] | None = None

    def open_run(
        self, job: Job, world: World, dataset: Dataset | StreamedDataset, emit: Emit, resume: bool
    ) -> tuple[Trained, Progress, Saver]:
        """Build this rank's part of a run from what the ranks of the last generation carry.

        Without any, the run starts, or with `resume` on any rank continues from its newest step. A
        collective. Raises `ConfigError` on a rank whose inputs are not those of the first.
        """
        self.regroups, self._attached = False, None
        reports = self._reports(world, resume)
        if reports[world.rank]["digest"] != reports[0]["digest"]:
            raise ConfigError(
                f"rank {self.started_as} reads other files, or runs other code, than the ranks "
                "that it would join"
            )
        self.carries = any(report["step"] != _NEW for report in reports)
        if self.carries:
            opened = self._continued(job, world, reports, emit)
        else:
            wait_up_to(job.config.cluster.timeout)  # ranks verify and load at their own pace
            # Whoever had the state of an earlier generation is gone: it is in the newest step.
            resumes = self.generation.number > 1 or any(report["resume"] for report in reports)
            opened = open_run(job, world, dataset, emit, resumes)
            trained, progress, _ = opened
            step = progress.step
            self.carried = Carried(trained, step, step, step)
        wait_up_to(job.config.cluster.timeout)
        self.carried.seat, self.carried.replicas = world.rank, self.generation.replicas
        return opened

    def _reports(self, world: World, resume: bool) -> list[dict[str, Any]]:
        """Return what each rank carries; a collective."""
        carried = self.carried
        prepared = carried.prepared
        report = {
            "digest": self.digest,
            "resume": resume,
            "replica": replica_of(self.layout, self.started_as),
            "step": carried.step,
            "prepared": _NEW if prepared is None else prepared.numbers.step,
            "numbers": None if carried.numbers is None else carried.numbers.to_json(),
            "told": carried.told if carried.seat == 0 and carried.step != _NEW else _NEW,
            "began": carried.began,
        }
        group = dist.group.WORLD if world.size > 1 else None
        return [dict(parse_json(text)) for text in exchange(json.dumps(report), group)]

    def _continued(
        self, job: Job, world: World, reports: Sequence[Mapping[str, Any]], emit: Emit
    ) -> tuple[Trained, Progress, Saver]:
        """Return the run with the state that the ranks carry, at the same step on all."""
        newest = max(report["step"] for report in reports)
        joined = [rank for rank, report in enumerate(reports) if report["step"] == _NEW]
        refuse_incomplete(job.layout, joined)
        if self.carried.step not in (_NEW, newest):
            self._catch_up_update(newest, job)
        self.agree(reports)
        if world.rank == 0 and isinstance(job.checkpoints, Path):
            clean(job.checkpoints)
        limit_s = min(job.config.cluster.timeout, CONNECT_S)
        groups = open_groups(job.layout, world, limit_s)
        trained = assemble(job, world, groups, _zeros)
        if self.carried.trained is not None:
            take_over(trained, self.carried.trained)
        if joined:
            first = next(i for i, rank in enumerate(groups.replicate.ranks) if rank not in joined)
            share_state(trained, first)
        self.carried.trained, self.carried.step = trained, newest
        loss = math.nan if self.carried.numbers is None else self.carried.numbers.loss
        progress = Progress(newest, LossScale.of(job.config.train), None, loss)
        replicas = {reports[rank]["replica"] for rank in joined}
        emit(self._event(newest, sorted(replicas)))
        return trained, progress, saver_of(job, world, emit, limit_s)

    def agree(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take note of what the ranks that carry the newest step know of it and of the run."""
        carried, newest = self.carried, max(report["step"] for report in reports)
        source = next(report for report in reports if report["step"] == newest)
        numbers = source["numbers"]
        carried.prepared = None
        carried.numbers = None if numbers is None else Numbers.from_json(numbers)
        carried.told = max(report["told"] for report in reports)
        carried.began = source["began"]

    def _catch_up_update(self, newest: int, job: Job) -> None:
        """Update with the gradients of a step that other ranks have updated with already.

        Raises `RankFailed` if this rank does not have them, which the vote excludes.
        """
        carried, prepared = self.carried, self.carried.prepared
        is_next = prepared is not None and prepared.numbers.step == newest == carried.step + 1
        if prepared is None or not is_next or carried.trained is None:
            raise RankFailed(f"rank {self.started_as} has no gradients of step {newest}")
        arguments = (*carried.trained, prepared.updated, prepared.loss_scale)
        apply_gradients(*arguments, job.config.train.clip_norm)
        carried.step, carried.prepared = newest, None

    def _event(self, step: int, joined: Sequence[int]) -> dict[str, object]:
        return {
            "event": "regroup",
            "time": time.time(),
            "step": step,
            "replicas": list(self.generation.replicas),
            "joined": list(joined),
            "seconds": time.monotonic() - self.left_at,
        }

    def recorded_from(self, step: int) -> int:
        """Return the step after which the first steps are recorded: once for an attempt."""
        return self.carried.began

    def attach(self, saver: Saver, recording: Recording) -> None:
        """Take note of what has to end where a step is abandoned."""
        self._attached = saver, recording

    def abandon(self) -> None:
        """End what the abandoned step has under way, once its groups are closed."""
        if self._attached is not None:
            saver, recording = self._attached
            recording.abandon()
            saver.abandon()
            self._attached = None

    def catch_up(
        self, job: Job, world: World, emit: Emit, keep: Callable[[int, float], None]
    ) -> None:
        """Emit and save what of the last step is missing, because a replica was lost meanwhile."""
        carried, config = self.carried, job.config
        step, numbers = carried.step, carried.numbers
        if not self.carries or numbers is None:  # no step since the run began
            return
        is_last = step == config.train.steps
        if carried.told < step and (is_last or step % config.train.log_every == 0):
            clock = StepClock()
            clock.add(Lap(numbers.seconds, 0.0))
            scale = LossScale.of(config.train).value
            read = (step, numbers.loss, numbers.norm, numbers.lr, scale)
            emit(step_event(*read, clock, LeftOut(), job, world))
        carried.told = step
        interval = config.checkpoint.every or config.train.steps
        if (is_last or step % interval == 0) and is_missing(job, world, step):
            keep(step, numbers.loss)

    def keep_wanted(
        self, job: Job, world: World, held_out: HeldOut, keep: Callable[[int, float], None]
    ) -> None:
        """Save the last step if it is the best, or ends the run, and a replica was lost before it
        was saved.
        """
        step, numbers = self.carried.step, self.carried.numbers
        if self.carries and numbers is not None and held_out.wants(step):
            if is_missing(job, world, step):
                keep(step, numbers.loss)
            held_out.keep(step)

    def vote(
        self, step: int, lr: float, scale: LossScale, saver: Saver, world: World
    ) -> Callable[[Updated], None]:
        """Return a collective that is called with complete gradients before the update.

        Where it returns, the gradients of all ranks are complete, so all can update. It also adds
        up the loss, and whether a rank has seen that a newer generation is announced.
        """
        began = time.perf_counter()

        def agree(updated: Updated) -> None:
            saver.before_update()
            norm = float(updated.norm)
            numbers = Numbers(step, math.nan, norm, lr, time.perf_counter() - began)
            prepared = Prepared(updated, numbers, scale.value)
            self.carried.prepared = prepared
            newest = self.announced.newest()
            is_newer = newest is not None and newest.number > self.generation.number
            loss, votes = world.sum_on_host([float(updated.loss), float(is_newer)])
            prepared.numbers = numbers._replace(loss=loss)
            self.regroups = votes > 0

        return agree

    def commit(self) -> None:
        """Take note that the weights are updated."""
        carried, prepared = self.carried, self.carried.prepared
        assert prepared is not None
        carried.step, carried.numbers = prepared.numbers.step, prepared.numbers
        carried.prepared = None

    def tell(self, step: int) -> None:
        """Take note that a step's events are written."""
        self.carried.told = step

    def leave(self) -> None:
        """Raise `Regroup` if the ranks have agreed to let a replica join after this step."""
        if self.regroups:
            if self._attached is not None:
                self._attached[0].finish()
            raise Regroup


def is_missing(job: Job, world: World, step: int) -> bool:
    """Whether a step is not committed, as the first rank sees it; a collective."""
    return world.anyone(world.rank == 0 and not is_there(job.checkpoints / step_name(step)))


def refuse_incomplete(layout: Layout, joined: Sequence[int]) -> None:
    """Raise `RankFailed`, on all ranks alike, if no rank has the state that one of `joined` lacks.

    The last whole replica was lost while others read from it.
    """
    coordinates = [dict(layout.mesh.coordinates(rank)) for rank in range(layout.world)]
    for place in coordinates:
        place.pop("dp_replicate")
    carried = [place for rank, place in enumerate(coordinates) if rank not in joined]
    lacking = [rank for rank in joined if coordinates[rank] not in carried]
    if lacking:
        raise RankFailed(
            f"no replica is left with the weights of rank {lacking[0]}: the last one was lost "
            "while others read from it"
        )


def _zeros(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
    """Return zeros in place of weights that are copied from elsewhere afterwards."""
    return torch.zeros([stop - start for start, stop in region])


@torch.no_grad()
def take_over(new: Trained, old: Trained) -> None:
    """Give weights, buffers and optimizer states of a rank to its part of a newer generation."""
    for source, target in zip(_weights(old.parallel), _weights(new.parallel), strict=True):
        target.copy_(source)
    for before, leaf in zip(old.shards.leaves, new.shards.leaves, strict=True):
        if before in old.optimizer.state:
            # A copy: what is received into it must not be lost to the old one if that breaks off.
            new.optimizer.state[leaf] = dict(old.optimizer.state[before])


def _weights(parallel: Parallel) -> list[Tensor]:
    """Return this rank's shards of all parameters, and its buffers."""
    buffers = [
        buffer for module in parallel.modules.values() for _, buffer in module.named_buffers()
    ]
    return [*(parameter.shard for parameter in parallel.held), *buffers]


@torch.no_grad()
def share_state(trained: Trained, first: int) -> None:
    """Copy weights, buffers and optimizer states of one replica to all; a collective.

    `first` is the index of that replica's rank among those with the same shards.
    """
    link = trained.parallel.groups.replicate
    optimizer, leaves = trained.optimizer, trained.shards.leaves
    texts = exchange(json.dumps([_described(optimizer, leaf) for leaf in leaves]), link.required)
    tensors = _weights(trained.parallel)
    for leaf, states in zip(leaves, parse_json(texts[first]), strict=True):
        for key, state in states.items():
            if link.rank != first:
                optimizer.state[leaf][key] = _like(state)
            value = optimizer.state[leaf][key]
            tensors += [value] if isinstance(value, Tensor) else []
    for tensor in tensors:
        if tensor.numel():
            message = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            dist.broadcast(message, group=link.required, group_src=first)
            if link.rank != first:
                tensor.copy_(message.view(tensor.dtype).view(tensor.shape))


def _described(optimizer: torch.optim.Optimizer, leaf: nn.Parameter) -> dict[str, Any]:
    """Return the states of a parameter by key: numbers, or dtype and shape of tensors."""
    return {
        key: [str(value.dtype).removeprefix("torch."), list(value.shape)]
        if isinstance(value, Tensor)
        else value
        for key, value in optimizer.state.get(leaf, {}).items()
    }


def _like(state: Any) -> Any:
    """Return an empty tensor for a dtype and shape, and a number itself."""
    if not isinstance(state, list):
        return state
    dtype, shape = state
    return torch.empty(shape, dtype=getattr(torch, dtype))
