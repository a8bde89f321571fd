"""Correction factors for predictions, from measured steps: only as many as the measurements
determine.

On a cluster without measurements, a prediction is mostly wrong by one factor: the quality of
software, clocks and links. `correct` computes that factor, or two if the measurements determine
both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from meshwright.cost.calibration import Calibration
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import OUTSIDE, RankMemory, worst_memory
from meshwright.cost.step import step_time
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.units import counted, format_bytes, format_seconds

# A factor outside of these says that something else was measured than is priced.
_LEAST: Final = 1 / 16
_MOST: Final = 16.0
# A bisection of the factor's logarithm: to less than a thousandth.
_TURNS: Final = 13
# Rows that it takes to ask for a second factor, and how much better than one it has to predict a
# row that was left out.
_ENOUGH: Final = 4
_BETTER: Final = 0.8
# How often two factors are found anew near those found before, by steps of a tenth.
_SWEEPS: Final = 2
_STEP: Final = 1.1
# The grid of factors: so many places either way, and where it is fine enough.
_PLACES: Final = 4
_FINE: Final = 0.01


class Measurement(NamedTuple):
    """A measured step: cost inputs and layout, its seconds, and the largest rank's bytes; None if
    not measured.

    With `is_allocated`, the bytes are those of tensors, without context and allocator overhead.
    """

    setting: CostInputs
    layout: Layout
    seconds: float | None
    bytes: float | None = None
    is_allocated: bool = False
    name: str = ""


@dataclass(frozen=True)
class Correction:
    """Correction factors of compute seconds, of message seconds, and of activation bytes.

    `kind` names the system and device to which they apply, `text` explains them; `before` and
    `after` are the measurements' median absolute errors (logarithms).
    """

    kind: str
    compute: float
    links: float
    memory: float
    text: tuple[str, ...]
    before: float
    after: float

    @property
    def constants(self) -> dict[str, float]:
        """The factors as constants of a calibration, by name."""
        factors = {"compute": self.compute, "links": self.links, "memory": self.memory}
        return {f"{self.kind}.measured.{name}": factor for name, factor in factors.items()}

    def applied(self, calibration: Calibration) -> Calibration:
        """Return the calibration with these factors added."""
        return replace(calibration, constants={**calibration.constants, **self.constants})


def kind_of(setting: CostInputs) -> str:
    """Return the name of what a correction applies to: training system and kind of device, as
    "system.device"."""
    return f"{setting.system.name}.{setting.cluster.device.kind}"


def correct(measured: Sequence[Measurement]) -> Correction:
    """Return the correction that measurements of one system and kind of device determine.

    One factor of compute seconds explains few measurements. With four or more, message seconds get
    a separate factor if it predicts left-out rows clearly better. One factor of all bytes except
    model states, which are known exactly, explains memory. Raises `ConfigError` for a step that
    cannot be explained because it is many times faster or slower than any of its parts.
    """
    kind = kind_of(measured[0].setting)
    timed = [row for row in measured if row.seconds is not None]
    compute, links = _of_seconds(timed)
    memory = _of_bytes([row for row in measured if row.bytes is not None])
    factors = {"compute": compute, "links": links, "memory": memory}
    before = [abs(_error(row, 1.0, 1.0)) for row in timed]
    after = [abs(_error(row, compute, links)) for row in timed]
    return Correction(
        kind,
        **factors,
        text=tuple(_told(measured, timed, factors)),
        before=statistics.median(before) if before else 0.0,
        after=statistics.median(after) if after else 0.0,
    )


def corrected(measured: Iterable[Measurement], calibration: Calibration) -> list[Correction]:
    """Return a correction for each pair of system and kind of device among the measurements.

    Each is computed with the constants of `calibration`.
    """
    groups: dict[str, list[Measurement]] = {}
    for row in measured:
        plain = replace(row.setting, calibration=calibration)
        groups.setdefault(kind_of(row.setting), []).append(row._replace(setting=plain))
    return [correct(group) for group in groups.values()]


def _of_seconds(timed: Sequence[Measurement]) -> tuple[float, float]:
    if not timed:
        return 1.0, 1.0
    if len(timed) >= _ENOUGH:
        lines = [_Line.at(row, 1.0, 1.0) for row in timed]
        if _left_out(lines, _both) < _BETTER * _left_out(lines, _one):
            factors = _both(lines)
            for _ in range(_SWEEPS):  # what is hidden behind computing makes it no line
                factors = _both([_Line.at(row, *factors) for row in timed])
            return factors
    return _compute(timed, 1.0), 1.0


class _Line(NamedTuple):
    """The predicted seconds of a measurement, linearized in the two factors: fixed + computes *
    compute + sends * links."""

    measured: float
    fixed: float
    computes: float
    sends: float

    @classmethod
    def at(cls, row: Measurement, compute: float, links: float) -> _Line:
        """Return the linearization near two factors, from three predictions."""
        assert row.seconds is not None
        base, slower, longer = (
            math.exp(_error(row, *factors)) * row.seconds
            for factors in ((compute, links), (_STEP * compute, links), (compute, _STEP * links))
        )
        computes = (slower - base) / (_STEP - 1) / compute
        sends = (longer - base) / (_STEP - 1) / links
        return cls(row.seconds, base - computes * compute - sends * links, computes, sends)

    def error(self, compute: float, links: float) -> float:
        """Return the absolute logarithm of predicted over measured seconds."""
        seconds = self.fixed + self.computes * compute + self.sends * links
        return abs(math.log(max(seconds, _LEAST * self.measured) / self.measured))


def _given(lines: Sequence[_Line], links: float) -> float:
    """Return the median over the lines of the compute factor that explains each exactly, for a
    given links factor."""
    factors = [
        (line.measured - line.fixed - line.sends * links) / line.computes
        for line in lines
        if line.computes > 0
    ]
    return min(max(statistics.median(factors), _LEAST), _MOST) if factors else 1.0


def _one(lines: Sequence[_Line]) -> tuple[float, float]:
    return _given(lines, 1.0), 1.0


def _both(lines: Sequence[_Line]) -> tuple[float, float]:
    """Return the compute and links factors with the smallest mean error, by a grid search over
    links that gets finer."""

    def found(links: float) -> tuple[float, float, float]:
        compute = _given(lines, links)
        return sum(line.error(compute, links) for line in lines), compute, links

    best, width = found(1.0), math.log(_MOST)
    while width > _FINE:
        middle, lowest = math.log(best[2]), math.log(_LEAST)
        tried = (middle + width * place / _PLACES for place in range(-_PLACES, _PLACES + 1))
        best = min(
            best, *(found(math.exp(min(max(log_factor, lowest), -lowest))) for log_factor in tried)
        )
        width /= 2
    return best[1], best[2]


def _left_out(
    lines: Sequence[_Line], fit: Callable[[Sequence[_Line]], tuple[float, float]]
) -> float:
    """Return the mean leave-one-out error: each line's error with factors fitted to the others."""
    return statistics.fmean(
        line.error(*fit([*lines[:index], *lines[index + 1 :]])) for index, line in enumerate(lines)
    )


def _compute(timed: Sequence[Measurement], links: float) -> float:
    return _middle(timed, lambda row, factor: _error(row, factor, links))


def _middle(timed: Sequence[Measurement], error: Callable[[Measurement, float], float]) -> float:
    """Return the median of the factors that explain each measurement by itself."""
    return math.exp(statistics.median(math.log(_root(row, error)) for row in timed))


def _root(row: Measurement, error: Callable[[Measurement, float], float]) -> float:
    """Return the factor for which `error` is zero, by bisection; at a bound if there is none."""
    low, high = math.log(_LEAST), math.log(_MOST)
    for _ in range(_TURNS):
        middle = (low + high) / 2
        low, high = (low, middle) if error(row, math.exp(middle)) > 0 else (middle, high)
    return math.exp((low + high) / 2)


def _error(row: Measurement, compute: float, links: float) -> float:
    """Return the logarithm of predicted over measured seconds with these two factors."""
    assert row.seconds is not None
    kind, setting = kind_of(row.setting), row.setting
    constants = {f"{kind}.measured.compute": compute, f"{kind}.measured.links": links}
    calibration = replace(
        setting.calibration, constants={**setting.calibration.constants, **constants}
    )
    setting = replace(setting, calibration=calibration)
    return math.log(step_time(setting, setting.kernels(), row.layout).total / row.seconds)


def _of_bytes(measured: Sequence[Measurement]) -> float:
    """Return the median factor of measured over predicted activation bytes; 1 without
    measurements."""
    factors = []
    for row in measured:
        assert row.bytes is not None
        memory = worst_memory(row.setting, row.layout)
        states = memory.states
        reserve = 1.0 + _share_wasted(memory)
        outside = 0.0 if row.is_allocated else _beside(memory)
        activations = memory.allocated - states
        scale = 1.0 if row.is_allocated else reserve
        left = (row.bytes - outside) / scale - states
        factors.append(min(max(left / activations, _LEAST), _MOST) if activations > 0 else 1.0)
    return statistics.median(factors) if factors else 1.0


def _beside(memory: RankMemory) -> float:
    """Return the bytes of CUDA context and communicators."""
    names = set(OUTSIDE) - {"allocator"}
    return sum(term.bytes for term in memory.terms if term.category in names)


def _share_wasted(memory: RankMemory) -> float:
    wasted = memory.by_category().get("allocator", 0.0)
    return wasted / memory.allocated if memory.allocated else 0.0


def _told(
    measured: Sequence[Measurement], timed: Sequence[Measurement], factors: dict[str, float]
) -> list[str]:
    """Return sentences that explain the factors; raises `ConfigError` for a compute factor at its
    bounds."""
    compute, links, memory = factors["compute"], factors["links"], factors["memory"]
    lines = []
    if len(timed) == 1:
        row, setting = timed[0], timed[0].setting
        predicted = step_time(setting, setting.kernels(), row.layout).total
        lines.append(
            f"{row.layout.label} took {format_seconds(row.seconds or 0.0)} a step, where "
            f"{format_seconds(predicted)} was predicted"
        )
    device = measured[0].setting.cluster.device.name
    if timed:
        lines.append(
            f"from {counted(len(timed), 'step time')}: this cluster computes "
            f"at {1 / compute:.2f} of the rate that is predicted for {device}"
        )
        if not 1.01 * _LEAST < compute < 0.99 * _MOST:
            raise ConfigError(
                f"{'; '.join(lines)}: that is not an efficiency; check the layout, the batch, the "
                "sequence length and the number of devices of what was measured"
            )
    if links != 1:
        lines.append(f"your links pass bytes at {1 / links:.2f} of what they pass elsewhere")
    sized = [row for row in measured if row.bytes is not None]
    if sized:
        sizes = ", ".join(sorted({format_bytes(row.bytes or 0.0) for row in sized})[:3])
        lines.append(
            f"from {counted(len(sized), 'peak')} of memory ({sizes}): activations take "
            f"{memory:.2f} of what the program counts"
        )
    return lines
