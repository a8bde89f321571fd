"""Fits a calibration's constants to measured step times, by going along one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.predict.calibration import ANY, Calibration
from meshwright.predict.step import step_time

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
# Errors below this are as good as none: what a measurement repeats to.
_SOFT = 0.02


def free_constants(rows: Sequence[Any]) -> dict[str, tuple[tuple[float, float, float], list[int]]]:
    """Return the constants that rows say something about: step, bounds, and the rows' places.

    A constant of a device or a stack needs five rows.
    """
    found: dict[str, tuple[tuple[float, float, float], list[int]]] = {}

    def add(name: str, how: tuple[float, float, float], place: int) -> None:
        found.setdefault(name, (how, []))[1].append(place)

    for place, row in enumerate(rows):
        setting, layout = row.case.setting, row.case.layout
        kind, stack = setting.cluster.device.kind, setting.stack
        add(f"{kind}.products.{setting.products}", PRODUCTS, place)
        add(f"{kind}.attention.{stack.attention}", ATTENTION, place)
        for what, how in OF_DEVICE.items():
            if what == "outer.share" and setting.cluster.nodes == 1:
                continue
            add(f"{kind}.{what}", how, place)
        for what, how in OF_STACK.items():
            if what == "exposed.tp" and layout.tp == 1:
                continue
            if what in ("exposed.pp", "idle") and layout.pp == 1:
                continue
            if what == "data.latency" and (stack.overlaps_data or layout.zero == 3):
                continue
            if what == "overlap" and (layout.world == 1 or not stack.overlaps_data):
                continue
            add(f"{stack.name}.{what}", how, place)
    return {name: value for name, value in found.items() if len(value[1]) >= 5}


def error_of(row: Any, calibration: Calibration) -> float:
    """Return the loss of a row: its error in the logarithm, soft at the bottom."""
    setting = replace(row.case.setting, calibration=calibration)
    seconds = step_time(setting, setting.kernels(), row.case.layout, events=False).total
    return math.hypot(math.log(seconds / row.seconds), _SOFT) - _SOFT


def fit(rows: Sequence[Any], start: Calibration, sweeps: int) -> Calibration:
    """Return a calibration whose constants bring the mean error of the rows down.

    Each constant in turn is moved up or down as long as that helps; the steps shrink by the sweep.
    """
    constants = dict(start.constants)
    free = free_constants(rows)
    for name in free:
        kind, _, what = name.partition(".")
        constants.setdefault(name, start.find(what, kind))
    errors = [error_of(row, Calibration(constants)) for row in rows]
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
                    new = [error_of(rows[place], tried) for place in places]
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
