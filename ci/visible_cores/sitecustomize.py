"""Shows a Python process more cores than the machine has: as many as CI_VISIBLE_CORES says.

`ci.processors` puts this folder into PYTHONPATH. Fewer cores need no such thing: `taskset` takes
the others away.
"""

import os

_cores = int(os.environ["CI_VISIBLE_CORES"])
_affinity = os.sched_getaffinity


def sched_getaffinity(pid: int) -> set[int]:
    """Return the cores of this process, or the real ones of another."""
    return set(range(_cores)) if pid in (0, os.getpid()) else _affinity(pid)


def cpu_count() -> int:
    """Return the number of cores."""
    return _cores


os.sched_getaffinity = sched_getaffinity
os.cpu_count = cpu_count
