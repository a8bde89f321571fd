"""TensorBoard: event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.training.sinks.base import Opened, TrackedRun


def open_tracker(run: TrackedRun) -> Opened:
    """Open the run's folder of event files.

    A resumed run writes another file, which hides the earlier files' entries from its first step
    on: those steps were trained again.
    """
    from torch.utils.tensorboard import SummaryWriter

    writers: list[SummaryWriter] = []

    def write(numbers: Mapping[str, float], step: int) -> None:
        if not writers:
            writers.append(SummaryWriter(run.folder / "tensorboard", purge_step=step))
        for name, value in numbers.items():
            writers[0].add_scalar(name, value, step)
        writers[0].flush()

    def close() -> None:
        for writer in writers:
            writer.close()

    return Opened(write, close)
