"""What changed between two saved plans, and why the step got faster or slower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Of what a plan was made of, in this order.
_SECTIONS = ("model", "train", "cluster", "optimizer", "data")
# Causes and categories below this share of the whole are not told.
_LEAST = 0.005


class ChangedKey(NamedTuple):
    """A changed key with both values."""

    key: str
    before: Any
    after: Any


class PlanDifference(NamedTuple):
    """The differences of two plans: config keys, layout keys, and both sizes by cause.

    `seconds` and `bytes` map a cause, or a category, to both plans' values, the largest change
    first; `explanation` says it in words.
    """

    asked: list[ChangedKey]
    layout: list[ChangedKey]
    totals: dict[str, tuple[float, float]]
    seconds: dict[str, tuple[float, float]]
    bytes: dict[str, tuple[float, float]]
    explanation: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""

        def both(values: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
            return {key: {"before": a, "after": b} for key, (a, b) in values.items()}

        return {
            "asked": [change._asdict() for change in self.asked],
            "layout": [change._asdict() for change in self.layout],
            **both(self.totals),
            "seconds": both(self.seconds),
            "memory_bytes": both(self.bytes),
            "why": self.explanation,
        }


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> PlanDifference:
    """Return the differences of two plans of `plan --save`; each must have a layout."""
    asked = [
        change
        for section in _SECTIONS
        for change in _changes(before["config"][section], after["config"][section], f"{section}.")
    ]
    asked += _changes({"calibration": before["calibration"]}, {"calibration": after["calibration"]})
    devices = before["cluster"], after["cluster"]
    asked += [
        change
        for change in _changes(*devices, "cluster.")
        if change.key not in {a.key for a in asked}
    ]
    layout = _changes(before["layout"], after["layout"], "layout.")
    first, second = before["ledger"], after["ledger"]
    keys = ("step_time_s", "tokens_per_s", "mfu", "peak_memory_bytes")
    totals = {key: (float(first[key]), float(second[key])) for key in keys}
    seconds = _sizes(first["seconds"], second["seconds"])
    memory = _sizes(first["memory_bytes"], second["memory_bytes"])
    return PlanDifference(asked, layout, totals, seconds, memory, _why(totals, seconds, memory))


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> list[ChangedKey]:
    keys = dict.fromkeys((*before, *after))
    return [
        ChangedKey(f"{prefix}{key}", before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _sizes(
    before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    pairs = {
        name: (float(before.get(name, 0.0)), float(after.get(name, 0.0)))
        for name in dict.fromkeys((*before, *after))
    }
    return dict(sorted(pairs.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


def _why(
    totals: Mapping[str, tuple[float, float]],
    seconds: Mapping[str, tuple[float, float]],
    memory: Mapping[str, tuple[float, float]],
) -> list[str]:
    before, after = totals["step_time_s"]
    sentences = []
    if before != after:
        word = "faster" if after < before else "slower"
        sentences.append(
            f"the step is {abs(after / before - 1):.1%} {word}: {_most(seconds, before, 's')}"
        )
    before, after = totals["peak_memory_bytes"]
    if before != after:
        word = "less" if after < before else "more"
        sentences.append(
            f"the largest rank holds {abs(after / before - 1):.1%} {word}: "
            f"{_most(memory, before, 'GiB')}"
        )
    return sentences or ["nothing that is predicted differs"]


def _most(sizes: Mapping[str, tuple[float, float]], total: float, unit: str) -> str:
    scale = 2**30 if unit == "GiB" else 1
    changes = [
        f"{name} {(after - before) / scale:+.3g} {unit}"
        for name, (before, after) in sizes.items()
        if abs(after - before) > _LEAST * total
    ]
    return ", ".join(changes[:4]) or "a little of each"
