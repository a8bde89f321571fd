"""Waits for gloo's threads to release the tensors of completed messages.

`Work.wait` returns when a message has arrived, but gloo's thread that carried it releases its
tensors only afterwards; how much memory that holds, and how long, depends on when the system runs
the thread. Code that measures a rank's memory therefore waits.
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
    """Wait until every gloo thread sleeps, and return whether they all did within `longest_s`
    seconds.

    A sleeping thread waits for its next message, or for other ranks of a message under way.
    """
    deadline = time.monotonic() + longest_s
    while any(state != "S" for state in _states(tasks)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def _states(tasks: Path) -> Iterator[str]:
    """Yield the state of each gloo thread as in /proc; nothing on other systems than Linux."""
    for path in tasks.glob("*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        if before.endswith(f"({_NAME}"):
            yield after.split()[0]
