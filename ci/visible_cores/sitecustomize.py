"""Shows a Python process more cores than the machine has: as many as the file beside it says.

`ci.processors` puts a copy of this file and its number into PYTHONPATH. Fewer cores need no such
thing: `taskset` takes the others away.
"""

import os
from pathlib import Path

_cores = int(Path(__file__).with_name("cores").read_text())
_affinity = os.sched_getaffinity


def sched_getaffinity(pid: int) -> set[int]:
    """Return the cores of this process, or the real ones of another."""
    return set(range(_cores)) if pid in (0, os.getpid()) else _affinity(pid)


def cpu_count() -> int:
    """Return the number of cores."""
    return _cores


os.sched_getaffinity = sched_getaffinity
os.cpu_count = cpu_count
