"""The contents of a step event: speed, memory and utilization, measured or null with the reason."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from meshwright.comm.world import World
from meshwright.errors import MeshwrightError
from meshwright.program.model_flops import flops_per_token
from meshwright.training.run_folder import Job


class Lap(NamedTuple):
    """Seconds of a step, and of these the seconds spent waiting for data."""

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
        """Note that the batch is here."""
        self._data_s += time.perf_counter() - self._started

    def lap(self, seconds: float | None = None) -> Lap:
        """End a step and keep running; `seconds` is its time if a device has measured it."""
        end = time.perf_counter()
        lap = Lap(end - self._since if seconds is None else seconds, self._data_s)
        self._since, self._data_s = end, 0.0
        return lap

    def rest(self) -> None:
        """Pause until the next start."""
        self._runs = False

    def add(self, lap: Lap) -> None:
        """Count a step."""
        self.steps += 1
        self.total_s += lap.total_s
        self.data_s += lap.data_s

    def stop(self) -> None:
        """End a step, and pause."""
        self.add(self.lap())
        self.rest()

    def take(self) -> tuple[float, float]:
        """Return the mean seconds of a step and the data's share, and reset."""
        mean, share = self.total_s / max(self.steps, 1), self.data_s / max(self.total_s, 1e-9)
        self.steps, self.total_s, self.data_s = 0, 0.0, 0.0
        return mean, share


class DeviceLaps:
    """Seconds between the ends of steps on a device, however late the host reads them.

    Marks are CUDA events with timing.
    """

    def __init__(self) -> None:
        self._since: torch.cuda.Event | None = None

    def begin(self, mark: Callable[[], torch.cuda.Event]) -> None:
        """Start a step: it is timed from here if none was running."""
        if self._since is None:
            self._since = mark()

    def until(self, end: torch.cuda.Event) -> float:
        """Return the seconds since the last end, or since the beginning."""
        assert self._since is not None
        seconds: float = self._since.elapsed_time(end) / 1e3
        self._since = end
        return seconds

    def rest(self) -> None:
        """Note that no step is running."""
        self._since = None


def peak_memory(device: torch.device) -> int:
    """Return the peak of this rank in bytes: allocated on a GPU, resident on a CPU."""
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
    job: Job,
    world: World,
) -> dict[str, object]:
    """Return a step event; a collective, so every rank calls it.

    `loss_scale` is only there under fp16. `mfu` is null if the device's peak is not set: a peak is
    never guessed. Raises `MeshwrightError` for a utilization above 1, which can only mean a wrong
    peak.
    """
    train = job.config.train
    seconds, data_share = clock.take()
    gathered = world.gather_on_host([float(peak_memory(world.device)), data_share, seconds])
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
    }
