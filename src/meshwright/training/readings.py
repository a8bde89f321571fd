"""`Readings`: the results of steps, read by the host and reported once.

On a GPU, a step's numbers are read while the next step computes, so the device never waits for the
host. On a CPU, they are available at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.world import World
from meshwright.parallel.apply import Parallel
from meshwright.training.events import Emit
from meshwright.training.loss_scale import LossScale
from meshwright.training.metrics import DeviceLaps, Lap, StepClock, step_event
from meshwright.training.run import Progress
from meshwright.training.run_folder import Job
from meshwright.training.spikes import SpikeWatch
from meshwright.training.update import Updated, overflowed


def mark() -> torch.cuda.Event:
    """Return an event of the device's progress."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class ArrivingNumbers:
    """fp64 numbers being copied to the host; on CUDA, an event says when they are `there`."""

    def __init__(self, numbers: Tensor) -> None:
        """Begin to copy them, after what the device is still to compute."""
        self._numbers, self.there = numbers, None
        if numbers.is_cuda:
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self.there = mark()

    def read(self) -> list[float]:
        """Return them after waiting."""
        if self.there is not None:
            self.there.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


@dataclass
class _Step:
    """A step that was begun; what it computed is there once it is read."""

    step: int
    lr: float
    numbers: ArrivingNumbers
    lap: Lap | None = None
    loss: float = math.nan
    norm: float = math.nan
    first: float = math.nan


def lag(device: torch.device, scale: LossScale) -> int:
    """Return how many further steps may start before one is read.

    A dynamic fp16 scale depends on the previous step, so then it is none.
    """
    return 1 if device.type == "cuda" and not scale.is_dynamic else 0


class Readings:
    """Reads the steps of a run in order, `lag` steps behind, and emits their events.

    Every rank creates one and makes the same calls. `loss` is the last one read, in nats.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        parallel: Parallel,
        emit: Emit,
        lag: int,
        progress: Progress,
    ) -> None:
        """Begin after the last step of `progress`, whose loss scale follows the gradients."""
        self._job, self._world, self._parallel, self._emit = job, world, parallel, emit
        self._scale, self._lag = progress.scale, lag
        self._watch = SpikeWatch()
        self._begun: deque[_Step] = deque()
        self._read: deque[_Step] = deque()
        self.clock, self._laps = StepClock(), DeviceLaps()
        self.loss = progress.loss

    def start(self) -> None:
        """Note the beginning of a step."""
        self.clock.start()
        if self._world.device.type == "cuda":
            self._laps.begin(mark)

    def add(self, step: int, lr: float, done: Updated) -> None:
        """Add a step that has been enqueued on the device."""
        self._begun.append(_Step(step, lr, ArrivingNumbers(done.numbers())))

    def read(self, stop: bool, *, everything: bool) -> bool:
        """Read the steps that are due, or all; returns whether any rank asks to stop.

        A collective. If one does, all steps are read.
        """
        stops = self._take(0 if everything else self._lag, stop)
        if stops and self._begun:
            self._take(0, stop)
        if not self._begun:
            self._rest()
        return stops

    def _rest(self) -> None:
        self.clock.rest()
        self._laps.rest()

    def _take(self, left: int, stop: bool) -> bool:
        """Read all steps but the last `left`."""
        due = [self._begun.popleft() for _ in range(len(self._begun) - left)]
        shares = []
        for step in due:
            share, step.norm, step.first = step.numbers.read()
            arrival = step.numbers.there
            step.lap = self.clock.lap(None if arrival is None else self._laps.until(arrival))
            shares.append(share)
        *losses, votes = self._world.sum_on_host([*shares, float(stop)])
        for step, step.loss in zip(due, losses, strict=True):
            self._read.append(step)
        return votes > 0

    def drain(self) -> None:
        """Read and report all steps that have begun, so that the device becomes idle."""
        if self._begun:
            self._take(0, False)
            self._rest()
            self.tell(last=False)

    def tell(self, *, last: bool) -> None:
        """Emit the events of the steps that were read, always including the run's last one.

        Raises `MeshwrightError` on every rank for a non-finite gradient, unless such steps are
        skipped.
        """
        scale = self._scale
        for step in self._told():
            arguments = (step.norm, int(step.first), self._parallel, self._world)
            tensor = overflowed(*arguments, scale, step=step.step)
            if tensor is not None:
                overflow = {"tensor": tensor, "loss_scale": scale.value}
                self._emit({"event": "overflow", "step": step.step, **overflow})
            is_last = last and not self._read and not self._begun
            if is_last or step.step % self._job.config.train.log_every == 0:
                read = (step.step, self.loss, step.norm, step.lr, scale.value)
                self._emit(step_event(*read, self.clock, self._job, self._world))
            if self._watch.is_spike(self.loss):
                usual = self._watch.usual
                spike = {"step": step.step, "loss": self.loss, "usual": usual}
                self._emit({"event": "loss_spike", **spike})

    def _told(self) -> Iterator[_Step]:
        while self._read:
            step = self._read.popleft()
            assert step.lap is not None
            self.clock.add(step.lap)
            self.loss = step.loss
            yield step
