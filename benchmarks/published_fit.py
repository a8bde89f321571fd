"""Fits a calibration's constants to measured times and memory, one constant after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshwright.cost.calibration import ANY, Calibration
from meshwright.cost.price import worst_memory
from meshwright.cost.step import step_time
from meshwright.cost.systems import CAUSAL
from meshwright.units import GIB

# Constants that are fitted, with the step in their logarithm and the bounds: by what they are of.
PRODUCTS = (0.2, 0.25, 0.98)
OF_DEVICE = {
    "products.half": (0.5, 4.0, 600.0),
    "inner.share": (0.3, 0.2, 0.95),
    "outer.share": (0.3, 0.1, 0.95),
}
OF_STACK = {
    "moves": (0.3, 0.5, 12.0),
    "launch": (0.5, 5e-7, 4e-5),
    "data.latency": (0.7, 1e-10, 1e-4),
    "overlap": (0.2, 0.05, 1.0),
    "idle": (0.2, 0.8, 4.0),
    "exposed.tp": (0.3, 0.05, 2.0),
    "exposed.pp": (0.4, 0.01, 8.0),
}
ATTENTION = (0.3, 0.1, 0.95)
# Bytes of an element that a system keeps beside the program's, in layers, logits and scores.
OF_MEMORY = {
    "kept_bytes": (0.4, 0.25, 40.0),
    "loss_bytes": (0.3, 2.0, 24.0),
    "gathered_loss_bytes": (0.3, 1.0, 16.0),
    "score_bytes": (0.3, 0.5, 8.0),
}
# How much worse it is to promise memory that is not there than to refuse what would fit.
_DANGER = 5.0
# Errors below this are as good as none: what a measurement repeats to.
_SOFT = 0.02


# The step in the logarithm of a fitted constant, and its bounds.
How = tuple[float, float, float]
Free = dict[str, tuple[How, list[int]]]


def constants_of(row: Any) -> Iterator[tuple[str, How]]:
    """Yield the constants that a row's step time says something about."""
    setting, layout = row.case.setting, row.case.layout
    kind, system = setting.cluster.device.kind, setting.system
    yield f"{kind}.products.{setting.products}", PRODUCTS
    yield f"{kind}.attention.{system.attention}", ATTENTION
    for constant, how in OF_DEVICE.items():
        if constant != "outer.share" or setting.cluster.nodes > 1:
            yield f"{kind}.{constant}", how
    silent = {
        "exposed.tp": layout.tp == 1,
        "exposed.pp": layout.pp == 1,
        "idle": layout.pp == 1,
        "data.latency": system.overlaps_data or layout.zero == 3,
        "overlap": layout.world == 1 or not system.overlaps_data,
    }
    for constant, how in OF_STACK.items():
        if not silent.get(constant, False):
            yield f"{system.name}.{constant}", how


def free_constants(rows: Sequence[Any]) -> Free:
    """Return the constants that rows say something about: step, bounds, and the rows' places.

    A constant of a device or a system needs five rows.
    """
    places: Free = {}
    for place, row in enumerate(rows):
        for name, how in constants_of(row):
            places.setdefault(name, (how, []))[1].append(place)
    return {name: value for name, value in places.items() if len(value[1]) >= 5}


def error_of(row: Any, calibration: Calibration) -> float:
    """Return the loss of a row: its error in the logarithm, soft at the bottom."""
    setting = replace(row.case.setting, calibration=calibration)
    seconds = step_time(setting, setting.kernels(), row.case.layout, events=False).total
    return math.hypot(math.log(seconds / row.seconds), _SOFT) - _SOFT


def fit(rows: Sequence[Any], start: Calibration, sweeps: int) -> Calibration:
    """Return a calibration whose constants bring the mean error of the rows' step times down."""
    return descend(rows, start, sweeps, free_constants(rows), error_of)


def free_memory_constants(rows: Sequence[Any]) -> Free:
    """Return the constants of memory that rows say something about, as `free_constants` does."""
    found: Free = {}

    def add(name: str, how: tuple[float, float, float], place: int) -> None:
        found.setdefault(name, (how, []))[1].append(place)

    for place, row in enumerate(rows):
        layout, system = row.case.layout, row.case.setting.system
        for what, how in OF_MEMORY.items():
            if what == "gathered_loss_bytes" and (system.splits_loss or layout.tp == 1):
                continue
            if what == "score_bytes" and CAUSAL[system.attention]:
                continue
            if what == "kept_bytes" and layout.recompute == "full":
                continue
            add(f"{system.name}.{what}", how, place)
    return {name: value for name, value in found.items() if len(value[1]) >= 5}


def memory_error_of(row: Any, calibration: Calibration) -> float:
    """Return the loss of a row's memory: of what it states, and of a wrong out-of-memory verdict.

    A layout that ran out and is said to fit is the worse error of the two: it counts for more.
    """
    setting = replace(row.case.setting, calibration=calibration)
    held = worst_memory(setting, row.case.layout)
    error = 0.0
    if row.gib and "LAST rank" not in str(row.row.get("mem_kind")):
        size = held.allocated
        if "allocated" not in str(row.row.get("mem_kind")):
            size += held.by_category()["allocator"]
        error += math.hypot(math.log(size / GIB / row.gib), _SOFT) - _SOFT
    share = math.log(held.total / held.limit)
    if row.row.get("status") == "oom":
        error += _DANGER * max(-share, 0.0)
    elif row.row.get("status") == "ok" and not row.gib:
        error += max(share, 0.0)
    return error


def fit_memory(rows: Sequence[Any], start: Calibration, sweeps: int) -> Calibration:
    """Return a calibration whose constants of memory bring the error of the rows' memory down."""
    return descend(rows, start, sweeps, free_memory_constants(rows), memory_error_of)


def descend(
    rows: Sequence[Any],
    start: Calibration,
    sweeps: int,
    free: Free,
    loss: Callable[[Any, Calibration], float],
) -> Calibration:
    """Move each constant in turn up or down as long as that helps; steps shrink by the sweep."""
    constants = dict(start.constants)
    for name, ((_, low, _), _places) in free.items():
        kind, _, what = name.partition(".")
        constants[name] = max(constants.get(name, start.find(what, kind)), low)
    errors = [loss(row, Calibration(constants)) for row in rows]
    scale = 1.0
    for _ in range(sweeps):
        for name, ((step, low, high), places) in free.items():
            for way in (1, -1):
                moved = 0
                while moved < 3:
                    value = min(max(constants[name] * math.exp(way * step * scale), low), high)
                    if value == constants[name]:
                        break
                    tried = Calibration({**constants, name: value})
                    new = [loss(rows[place], tried) for place in places]
                    if sum(new) >= sum(errors[place] for place in places) - 1e-9:
                        break
                    constants[name] = value
                    for place, error in zip(places, new, strict=True):
                        errors[place] = error
                    moved += 1
                if moved:
                    break
        scale *= 0.65
        print(f"  mean error {sum(errors) / len(errors):.4f}, {len(free)} constants", flush=True)
    return Calibration(constants, start.date, start.source)


def constants_toml(calibration: Calibration) -> str:
    """Return a calibration as TOML, to three digits."""
    kinds: dict[str, list[str]] = {}
    for name, value in calibration.constants.items():
        kind, _, what = name.partition(".")
        kinds.setdefault(kind, []).append(f"{what} = {value:.3g}")
    text = f'[about]\ndate = "{calibration.date}"\nsource = "{calibration.source}"\n'
    for kind in sorted(kinds, key=lambda kind: (kind != ANY, kind)):
        text += f"\n[{kind}]\n" + "\n".join(sorted(kinds[kind])) + "\n"
    return text
