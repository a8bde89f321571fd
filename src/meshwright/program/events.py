"""Reads the events of a run: one JSON object per line, some perhaps damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from meshwright.parsing import parse_json

Event = Mapping[str, Any]

# What readers look up in the events of a kind. All versions write it.
_HAS: Final[Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    "step": {"step": int, "step_time_s": (int, float), "loss": (int, float, str)},
    "eval": {"step": int, "loss": (int, float, str)},
    "experts": {"step": int, "layers": list, "tokens": list, "dead": list},
    "save": {"step": int},
    "resume": {"step": int},
    "overflow": {"step": int},
    "loss_spike": {"step": int},
    "slow_rank": {"rank": int, "step": int},
    "replica_lost": {"replicas": list, "left": list, "cause": str},
    "regroup": {"step": int, "replicas": list, "joined": list},
    "restart": {"attempt": int, "cause": str, "lost_steps": int},
    "measured": {"says": str},
    "failed": {"cause": str},
    "end": {"step": int, "stopped": bool},
}


def dropped_share(event: Mapping[str, Any]) -> float:
    """Return the share of (token, expert) pairs that capacity dropped, from an `experts` event."""
    total = sum(map(sum, event["tokens"]))
    return sum(event.get("dropped", ())) / total if total else 0.0


def read_event(line: str | bytes) -> dict[str, Any] | None:
    """Return the event in a line of JSON; None if it is damaged or lacks the keys of its kind."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    has = _HAS.get(event["event"], {})
    return event if all(isinstance(event.get(key), kind) for key, kind in has.items()) else None


class Events(list[dict[str, Any]]):
    """The events of a run, in order; `bad` counts the lines that are cut off or damaged."""

    bad = 0

    @classmethod
    def read(cls, path: Path) -> Events:
        """Read an `events.jsonl`; raises `OSError` where there is none."""
        events = cls()
        for line in path.read_bytes().splitlines():
            if (event := read_event(line)) is None:
                events.bad += 1
            else:
                events.append(event)
        return events


def ending(events: Sequence[Event]) -> Event | None:
    """Return the event `end` or `failed` of a run; None if it is running or was killed."""
    kinds = ("start", "restart", "failed", "end")
    last = next((event for event in reversed(events) if event["event"] in kinds), None)
    return last if last is not None and last["event"] in ("failed", "end") else None
