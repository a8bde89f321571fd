"""After 20 steps of a run on known GPUs, corrects its predicted step time in the background.

`correction` runs as a separate process, so that no rank waits for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

from meshwright.program.events import Event
from meshwright.runtime.pricing.measured import kept_of_cluster
from meshwright.training.run_folder import Job

# The step after which a run corrects its prediction.
AT: Final = 20
# Seconds that the end of a run waits for it.
_PATIENCE_S: Final = 60.0


class Correcting:
    """An event sink that starts the correction at the 20th step since the start."""

    def __init__(self, begin: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._begin, self._steps = begin, 0
        self._started: subprocess.Popen[bytes] | None = None

    def write(self, event: Event) -> None:
        """Count an event if it is a step, and start the correction at the 20th."""
        self._steps += event["event"] == "step"
        if self._started is None and self._steps == AT:
            self._started = self._begin()

    def close(self) -> None:
        """Wait for the correction to end, so that the run's report includes it."""
        if self._started is not None:
            try:
                self._started.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._started.kill()


def correcting(job: Job, environ: Mapping[str, str]) -> list[Correcting]:
    """Return the sink that corrects predictions, in a list that is empty for unknown devices."""
    is_on_it = job.machine.device == "cuda" and kept_of_cluster(job.config, environ) is not None
    if not is_on_it:
        return []
    command = [sys.executable, "-m", "meshwright.runtime.pricing.correction", str(job.folder.path)]
    null = subprocess.DEVNULL
    return [Correcting(lambda: subprocess.Popen(command, stdin=null, stdout=null, stderr=null))]
