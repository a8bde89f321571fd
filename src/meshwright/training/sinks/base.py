"""The interface of experiment trackers, which take the numbers of a run step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class TrackedRun:
    """A run as an experiment tracker records it.

    `identity` stays the same when the run is restarted or resumed, so that a tracker continues its
    record; `setting` is the value of the tracker's config key: a project's name, or true.
    """

    folder: Path
    identity: str
    config: Mapping[str, Any]
    setting: Any = None

    @property
    def name(self) -> str:
        """The displayed name, that of the run folder."""
        return self.folder.name


class Opened(NamedTuple):
    """An open tracker: `write` takes numbers by name and the step; `close` ends the record."""

    write: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


# Opens the tracker's record of a run, or continues it. Raises `ImportError` without its package.
Open = Callable[[TrackedRun], Opened]
