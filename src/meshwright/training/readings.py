"""`Readings`: copies the results of steps to the host and emits their events.

A step event has speed, memory and utilization, null where unknown; sudden jumps of the loss are
detected.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.world import World
from meshwright.data import Rows
from meshwright.errors import MeshwrightError
from meshwright.parallel.apply import Parallel
from meshwright.program.model_flops import flops_per_token
from meshwright.training.between_steps import Progress
from meshwright.training.events import Emit, note
from meshwright.training.run_folder import Job
from meshwright.training.update import LossScale, Updated, overflowed

WINDOW: Final = 50
LEAST: Final = 20  # steps before anything is called unusual
RECENT: Final = 9  # a loss is compared with the median of so many, since it falls over more
FACTOR: Final = 10.0  # times what one step usually differs from the next


class SpikeWatch:
    """Detects a loss far above those of the last steps.

    `usual` is the median of a few recent losses.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)
        self.usual = float("nan")

    def is_spike(self, loss: float) -> bool:
        """Record a step's loss in nats; return whether it is far above recent losses, or NaN."""
        spike = loss != loss
        if len(self._last) >= LEAST:
            losses = list(self._last)
            self.usual = statistics.median(losses[-RECENT:])
            change = statistics.median(abs(b - a) for a, b in pairwise(losses))
            spike = spike or loss - self.usual > FACTOR * max(change, 1e-3 * abs(self.usual))
        if not spike:  # one spike must not make the next one usual
            self._last.append(loss)
        return spike


class Lap(NamedTuple):
    """The seconds of one step, and the part of them spent waiting for data."""

    total_s: float
    data_s: float


class StepClock:
    """Times steps: their total, and the time spent waiting for data.

    It runs from a step's start to its end, or to the start of a step that begins earlier, so that
    overlapping steps add up to their total time.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        self.data_s = 0.0
        self._runs = False
        self._since = self._started = time.perf_counter()
        self._data_s = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._started = time.perf_counter()
        if not self._runs:
            self._since, self._runs, self._data_s = self._started, True, 0.0

    def data_done(self) -> None:
        """Record that the batch has arrived."""
        self._data_s += time.perf_counter() - self._started

    def lap(self, seconds: float | None = None) -> Lap:
        """End a step without pausing; `seconds` replaces the host's time by a device's
        measurement.
        """
        end = time.perf_counter()
        lap = Lap(end - self._since if seconds is None else seconds, self._data_s)
        self._since, self._data_s = end, 0.0
        return lap

    def rest(self) -> None:
        """Pause the clock until the next `start`."""
        self._runs = False

    def add(self, lap: Lap) -> None:
        """Add a step's times to the totals."""
        self.steps += 1
        self.total_s += lap.total_s
        self.data_s += lap.data_s

    def stop(self) -> None:
        """End a step, add its times to the totals, and pause."""
        self.add(self.lap())
        self.rest()

    def take(self) -> tuple[float, float]:
        """Return the mean seconds of a step and the share spent waiting for data, and reset."""
        mean, share = self.total_s / max(self.steps, 1), self.data_s / max(self.total_s, 1e-9)
        self.steps, self.total_s, self.data_s = 0, 0.0, 0.0
        return mean, share


class DeviceLaps:
    """Measures the seconds between the ends of steps on a GPU, however late the host reads them.

    It uses CUDA events with timing.
    """

    def __init__(self) -> None:
        self._since: torch.cuda.Event | None = None

    def begin(self, mark: Callable[[], torch.cuda.Event]) -> None:
        """Record the start of a step, unless the previous one is still running."""
        if self._since is None:
            self._since = mark()

    def until(self, end: torch.cuda.Event) -> float:
        """Return the seconds from the previous step's end, or the recorded start, to `end`."""
        assert self._since is not None
        seconds: float = self._since.elapsed_time(end) / 1e3
        self._since = end
        return seconds

    def rest(self) -> None:
        """Record that no step is running on the device."""
        self._since = None


class LeftOut:
    """Counts the rows that a rank left out of its batches, because their data is damaged.

    The rank's log names each damaged block once.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._noted: set[str] = set()

    def add(self, rows: Rows) -> None:
        """Count the rows of a batch that were left out."""
        self._rows += len(rows.left_out)
        for line in rows.left_out:
            if line not in self._noted:
                self._noted.add(line)
                note(f"rows are left out (data.on_error = 'skip'): {line}")

    def take(self) -> int:
        """Return the number of rows since the last call."""
        count, self._rows = self._rows, 0
        return count


def peak_memory(device: torch.device) -> int:
    """Return this rank's peak memory in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def step_event(
    step: int,
    loss: float,
    norm: float,
    lr: float,
    loss_scale: float,
    clock: StepClock,
    left_out: LeftOut,
    job: Job,
    world: World,
) -> dict[str, object]:
    """Return a step event with speed, memory and utilization over all ranks; a collective.

    `loss_scale` is included only under fp16, `rows_left_out` only if there are any. `mfu` is null
    if the device's peak is not set: a peak is never guessed. Raises `MeshwrightError` for a
    utilization above 1, which can only mean a wrong peak.
    """
    train = job.config.train
    seconds, data_share = clock.take()
    numbers = [float(peak_memory(world.device)), data_share, seconds, float(left_out.take())]
    gathered = world.gather_on_host(numbers)
    data_rank = job.layout.mesh.data_rank  # ranks that share it read the same rows
    rows_left_out = sum(
        {data_rank(rank): int(row[3]) for rank, row in enumerate(gathered)}.values()
    )
    slowest = max(row[2] for row in gathered)
    tokens_per_s = train.batch * train.seq_len / slowest
    per_device = tokens_per_s / world.size
    tflops = per_device * flops_per_token(job.config.model, train.seq_len) / 1e12
    peak = job.config.cluster.peak_tflops
    if peak is not None and tflops > peak:
        raise MeshwrightError(
            f"{tflops:.1f} TFLOP/s per device is above cluster.peak_tflops = {peak}: "
            "the stated peak is wrong"
        )
    return {
        "event": "step",
        "step": step,
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        **({"loss_scale": loss_scale} if train.precision == "fp16" else {}),
        "step_time_s": slowest,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": per_device,
        "tflops_per_device": tflops,
        "mfu": None if peak is None else tflops / peak,
        "peak_memory_bytes": {str(rank): int(row[0]) for rank, row in enumerate(gathered)},
        "data_time_share": max(row[1] for row in gathered),
        **({"rows_left_out": rows_left_out} if rows_left_out else {}),
    }


def mark() -> torch.cuda.Event:
    """Record and return a CUDA event with timing on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class ArrivingNumbers:
    """fp64 numbers being copied to the host; on a GPU, the event `there` marks their arrival."""

    def __init__(self, numbers: Tensor) -> None:
        """Start to copy `numbers`, on a GPU after all work enqueued so far."""
        self._numbers, self.there = numbers, None
        if numbers.is_cuda:
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self.there = mark()

    def read(self) -> list[float]:
        """Wait for the copy and return the numbers."""
        if self.there is not None:
            self.there.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


@dataclass
class _Step:
    """A step that has started; its results are NaN until they are read."""

    step: int
    lr: float
    numbers: ArrivingNumbers
    lap: Lap | None = None
    loss: float = math.nan
    norm: float = math.nan
    first: float = math.nan


def lag(device: torch.device, scale: LossScale) -> int:
    """Return how many further steps may start before a step's results are read.

    It is 0 on a CPU, and with a dynamic fp16 scale, which depends on the previous step.
    """
    return 1 if device.type == "cuda" and not scale.is_dynamic else 0


class Readings:
    """Reads the results of steps in order, `lag` steps behind, and emits their events.

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
        """Start after the last step of `progress`, whose loss scale is updated by each step
        read.
        """
        self._job, self._world, self._parallel, self._emit = job, world, parallel, emit
        self._scale, self._lag = progress.scale, lag
        self._watch = SpikeWatch()
        self._begun: deque[_Step] = deque()
        self._read: deque[_Step] = deque()
        self.clock, self._laps = StepClock(), DeviceLaps()
        self._left_out = LeftOut()
        self.loss = progress.loss

    def start(self) -> None:
        """Record the beginning of a step."""
        self.clock.start()
        if self._world.device.type == "cuda":
            self._laps.begin(mark)

    def data_done(self, rows: Rows) -> None:
        """Record that the batch of these rows has arrived."""
        self.clock.data_done()
        self._left_out.add(rows)

    def add(self, step: int, lr: float, done: Updated) -> None:
        """Add a step that has been enqueued on the device, with its learning rate and results."""
        self._begun.append(_Step(step, lr, ArrivingNumbers(done.numbers())))

    def read(self, stop: bool, *, everything: bool) -> bool:
        """Read the steps that are due, or all; return whether any rank asks to stop.

        A collective. If a rank asks to stop, all steps are read.
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
        """Read and report all started steps, so that the device becomes idle."""
        if self._begun:
            self._take(0, False)
            self._rest()
            self.tell(last=False)

    def tell(self, *, last: bool) -> None:
        """Emit the events of the steps read; with `last`, always one of the run's last step.

        Raises `Diverged` on every rank for a non-finite gradient, unless such steps are skipped.
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
                event = step_event(*read, self.clock, self._left_out, self._job, self._world)
                self._emit(event)
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
