"""Each source predicted without its rows, and again with one measured row of it and of a device."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published_fit import fit
from meshwright.cost.calibration import ANY, Calibration
from meshwright.cost.measured import Measurement, correct
from meshwright.cost.price import price

# So many rows of a source and device are the measured one in turn; the errors are of all others.
TURNS = 5


@dataclass(frozen=True)
class LeftOut:
    """A row of a source that no constant was fitted to: the logarithms of predicted over measured.

    `plain` is without a measurement, `with_one` with one row of its source and device each.
    """

    source: str
    device: str
    seconds: float
    plain: float
    with_one: tuple[float, ...]


def unfitted(calibration: Calibration) -> Calibration:
    """Return what a fit starts from where no row may have had a say: the constants of any kind."""
    kept = {name: v for name, v in calibration.constants.items() if name.startswith(f"{ANY}.")}
    return Calibration(kept, calibration.date, calibration.source)


def log_errors(rows: Sequence[Any], calibration: Calibration) -> list[float]:
    """Return the logarithm of each row's predicted over its measured seconds."""
    errors = []
    for one in rows:
        setting = replace(one.case.setting, calibration=calibration)
        errors.append(math.log(price(setting, one.case.layout).time.total / one.seconds))
    return errors


def left_out_of(source: str, rows: Sequence[Any], calibration: Calibration) -> list[LeftOut]:
    """Return the rows of a source, by a calibration that was fitted without it."""
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for one in rows:
        setting = one.case.setting
        groups[setting.system.name, setting.cluster.device.name].append(one)
    found = []
    for (_, device), group in groups.items():
        plain = log_errors(group, calibration)
        turns: list[list[float]] = [[] for _ in group]
        for at in _spread(len(group)):
            one = group[at]
            setting = replace(one.case.setting, calibration=calibration)
            known = correct([Measurement(setting, one.case.layout, one.seconds)])
            others = [place for place in range(len(group)) if place != at]
            errors = log_errors([group[place] for place in others], known.applied(calibration))
            for place, error in zip(others, errors, strict=True):
                turns[place].append(error)
        found += [
            LeftOut(source, device, one.seconds, error, tuple(with_one))
            for one, error, with_one in zip(group, plain, turns, strict=True)
        ]
    return found


def _spread(count: int) -> list[int]:
    """Return places that lie evenly in so many rows; none where the measured one is the only."""
    if count < 2:
        return []
    turns = min(TURNS, count)
    return [(2 * turn + 1) * count // (2 * turns) for turn in range(turns)]


def by_left_out(stated: Sequence[Any], calibration: Calibration, sweeps: int) -> list[LeftOut]:
    """Return all rows, each by constants that were fitted to the other sources."""
    found = []
    for source in sorted({one.source for one in stated}):
        kept = [one for one in stated if one.source != source]
        own = [one for one in stated if one.source == source]
        found += left_out_of(source, own, fit(kept, unfitted(calibration), sweeps))
    return found


def print_left_out(rows: Sequence[LeftOut], rank: Any) -> None:
    """Print the errors by source, without a measurement and with one; `rank` correlates."""
    by_source: Mapping[str, list[LeftOut]] = defaultdict(list)
    for one in rows:
        by_source[one.source].append(one)
    print("left out            rows   median  mean  Spearman   with one: median  mean  Spearman")
    for name, own in [*by_source.items(), ("all", list(rows))]:
        print(f"{name:18} {len(own):5}   {_line(own, rank)}")
    print_intervals(rows)


def interval(pairs: Sequence[tuple[str, float]], tail: float = 0.1) -> tuple[float, float]:
    """Return two percentiles of errors, of pairs of source and error: `tail`, and 1 less `tail`.

    A source counts as the square root of its rows: its errors go together.
    """
    counts = Counter(source for source, _ in pairs)
    weighted = sorted((error, counts[source] ** -0.5) for source, error in pairs)
    whole = sum(weight for _, weight in weighted)
    bounds, passed = [], 0.0
    for error, weight in weighted:
        passed += weight
        if passed >= (tail, 1 - tail)[len(bounds)] * whole:
            bounds.append(error)
            if len(bounds) == 2:
                break
    return bounds[0], bounds[1]


def coverage(pairs: Sequence[tuple[str, float]], tail: float = 0.1) -> float:
    """Return the share of errors inside the interval of all other sources."""
    inside = 0
    for source in {name for name, _ in pairs}:
        low, high = interval([one for one in pairs if one[0] != source], tail)
        inside += sum(low <= error <= high for name, error in pairs if name == source)
    return inside / len(pairs)


def holding(pairs: Sequence[tuple[str, float]], share: float = 0.8) -> float:
    """Return the largest tail, in hundredths, whose intervals hold a share of left-out errors."""
    tails = [hundredths / 100 for hundredths in range(10, 0, -1)]
    return next((tail for tail in tails if coverage(pairs, tail) >= share), tails[-1])


def print_intervals(rows: Sequence[LeftOut]) -> None:
    """Print the intervals of 80% in predicted times, and how much of left-out sources they hold."""
    plain = [(one.source, one.plain) for one in rows]
    with_one = [(one.source, error) for one in rows for error in one.with_one]
    for name, pairs in (("plain", plain), ("measured", with_one)):
        low, high = interval(pairs)
        print(
            f"interval.{name}: {math.exp(-high):.3f} to {math.exp(-low):.3f} predicted times; of "
            f"sources left out it holds {coverage(pairs):.1%}"
        )


def widened(pairs: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """Return the interval, made as wide as it takes to hold 80% of left-out sources' errors.

    Of few sources the percentiles say little of the next one. So each error is measured from the
    middle of the other sources' interval, in halves of its width; the 80th percentile of these
    multiplies the width of all sources' interval: conformal prediction, arXiv:2107.07511.
    """
    low, high = interval(pairs)
    middle, half, times = (low + high) / 2, (high - low) / 2, widening(pairs)
    return middle - times * half, middle + times * half


def widening(pairs: Sequence[tuple[str, float]]) -> float:
    """Return how many times wider intervals have to be to hold 80% of left-out sources' errors."""
    return sorted(_widths(pairs))[math.ceil(0.8 * len(pairs)) - 1]


def coverage_widened(pairs: Sequence[tuple[str, float]]) -> float:
    """Return the share of errors inside the interval of all other sources, so widened."""
    return sum(one <= widening(pairs) for one in _widths(pairs)) / len(pairs)


def _widths(pairs: Sequence[tuple[str, float]]) -> Iterator[float]:
    for source in {name for name, _ in pairs}:
        low, high = interval([one for one in pairs if one[0] != source])
        middle, half = (low + high) / 2, (high - low) / 2
        yield from (abs(error - middle) / half for name, error in pairs if name == source)


def log_error(predicted: float, states: float, measured: float) -> float:
    """Return the logarithm of predicted over measured bytes of all but model states.

    States are known. What is left of the measured bytes is a sixteenth of the predicted at least.
    """
    rest = predicted - states
    return math.log(rest / max(measured - states, rest / 16))


def _line(rows: Sequence[LeftOut], rank: Any) -> str:
    plain = [math.exp(one.plain) - 1 for one in rows]
    many = [(one.seconds, error) for one in rows for error in one.with_one]
    found = [
        _summary(plain, [one.seconds for one in rows], rank),
        _summary([math.exp(e) - 1 for _, e in many], [s for s, _ in many], rank) if many else "-",
    ]
    return "   ".join(found)


def _summary(errors: Sequence[float], seconds: Sequence[float], rank: Any) -> str:
    sizes = [abs(error) for error in errors]
    predicted = [s * (1 + error) for s, error in zip(seconds, errors, strict=True)]
    correlation = rank(list(seconds), predicted)
    return f"{statistics.median(sizes):6.1%} {statistics.fmean(sizes):6.1%} {correlation:6.2f}"
