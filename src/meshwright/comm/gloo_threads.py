"""Waits for gloo's threads to let go of messages that are over.

`Work.wait` returns when a message has arrived. The thread of gloo that has carried it lets go of
its tensors only afterwards, so until then memory is held that nothing needs: by how much, and for
how long, depends on when the system runs that thread. What counts a rank's memory waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# What torch calls the threads that carry the messages of a process group.
_NAME: Final = "pt_gloo_runloop"
_TASKS: Final = Path("/proc/self/task")
# Seconds after which a thread is left to what it does: it carries another message.
_LONGEST_S: Final = 1.0
_PAUSE_S: Final = 5e-5


def wait_for_gloo_threads(tasks: Path = _TASKS, longest_s: float = _LONGEST_S) -> bool:
    """Return once every thread of gloo sleeps; whether they all did within `longest_s`.

    A thread that sleeps waits for its next message, or for the other ranks of one on the way.
    """
    deadline = time.monotonic() + longest_s
    while any(state != "S" for state in _states(tasks)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def _states(tasks: Path) -> Iterator[str]:
    """Yield the state of each thread of gloo as /proc names it; nothing on other systems."""
    for path in tasks.glob("*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        if before.endswith(f"({_NAME}"):
            yield after.split()[0]
