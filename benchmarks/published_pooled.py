"""Constants of systems, shared as far as the errors of left-out sources say.

    python -m benchmarks.published_pooled --rows ROWS.jsonl [MORE.jsonl] [--write OUT.toml]
                                          [--evidence OUT.toml]


The logarithm of a system's constant is that of all systems, plus a part of its family, plus a part
of its own. Parts cost their square, `strength` times. So a constant that few sources speak of stays
near the shared one, as in a hierarchical model (Gelman and Hill, 2007). Errors count by their
absolute size, and a source as the square root of its rows. Constants of devices are those of the
shipped calibration. Of several strengths, the one with the least error of left-out sources is used.
Prints each source's error with the shipped constants, and with those fitted to the other sources.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from benchmarks.published import Measured, rankings, read, spearman
from benchmarks.published_fit import OF_STACK, How, constants_of
from benchmarks.published_left_out import coverage, holding, interval
from benchmarks.published_moe import OF_SYSTEM, expert_constants_of
from meshwright.cost.calibration import ANY, Calibration, shipped_calibration
from meshwright.cost.evidence import SEVERAL, kind_of_layout
from meshwright.cost.row_words import OURS
from meshwright.cost.step import step_time
from meshwright.cost.systems import SYSTEMS

# Constants of a system, with the step of a fit and their bounds.
_FITTED: Final = {**OF_STACK, **OF_SYSTEM}
_STRENGTHS: Final = (1.0, 4.0, 16.0)
# A usual part of one system, in the logarithm, and of what all share beside its start.
_USUAL: Final = 0.3
_USUAL_SHARED: Final = 0.5
# What a usual part costs beside the error of a source of one row.
_COST: Final = 0.3
# The step of a numeric derivative, in the logarithm.
_STEP: Final = 0.05
_ROUNDS: Final = 25
# Errors below this count as squares: what a measurement repeats to.
_SOFT: Final = 0.03
# Seconds are not extrapolated below this part of where they were linearised.
_LEAST: Final = 0.2


@dataclass(frozen=True)
class Linear:
    """Rows' seconds near a calibration, linear in each constant.

    `slopes` has, of each row, the constants it depends on with the seconds that one more of them
    adds.
    """

    sources: tuple[str, ...]
    measured: np.ndarray
    seconds: np.ndarray
    slopes: tuple[Mapping[str, float], ...]
    start: Mapping[str, float]
    bounds: Mapping[str, tuple[float, float]]


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the shared constant, that of a family of kinds, and that of the kind."""
    kind, _, constant = name.partition(".")
    family = kind.partition("-")[0]
    parts = (f"{ANY}.{constant}", f"{family}.{constant}", name)
    return parts if family != kind else (parts[0], name)


def _names_of(row: Measured) -> Iterator[tuple[str, How]]:
    """Yield the constants of its system that a row says something about."""
    yield from ((name, how) for name, how in constants_of(row) if _is_of_system(name))
    if row.case.setting.model.experts:
        yield from ((name, how) for name, how in expert_constants_of(row) if _is_of_system(name))


def _is_of_system(name: str) -> bool:
    return name.partition(".")[0] in SYSTEMS


def linear(rows: Sequence[Measured], center: Calibration) -> Linear:
    """Return the rows' seconds near a calibration, in closed form."""
    seconds, slopes = [], []
    start: dict[str, float] = {}
    bounds: dict[str, tuple[float, float]] = {}
    for row in rows:
        base = _seconds(row, center)
        slope = {}
        for name, (_, low, high) in _names_of(row):
            kind, _, constant = name.partition(".")
            value = min(max(center.find(constant, kind), low), high)
            moved = value * math.exp(_STEP if value * math.exp(_STEP) <= high else -_STEP)
            start[name], bounds[name] = value, (low, high)
            nearby = _seconds(row, replace(center, constants={**center.constants, name: moved}))
            slope[name] = (nearby - base) / (moved - value)
        seconds.append(base)
        slopes.append(slope)
    return Linear(
        tuple(row.source for row in rows),
        np.array([row.seconds for row in rows]),
        np.array(seconds),
        tuple(slopes),
        start,
        bounds,
    )


def _is_shared(part: str) -> bool:
    return part.startswith(f"{ANY}.")


def _seconds(row: Measured, calibration: Calibration) -> float:
    setting = replace(row.case.setting, calibration=calibration)
    return step_time(setting, setting.kernels(), row.case.layout, events=False).total


class _Problem(NamedTuple):
    """Constants as sums of parts, and what rows' seconds add up to with them."""

    base: np.ndarray
    chain: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ridge: np.ndarray
    start: np.ndarray
    slope: np.ndarray
    seconds: np.ndarray
    measured: np.ndarray
    weight: np.ndarray

    def solved(self) -> np.ndarray:
        """Return the parts with the least error and cost, by Gauss and Newton's method."""
        moved = np.zeros(len(self.ridge))
        for turn in range(_ROUNDS):
            logs = self.base + self.chain @ moved
            inside = np.clip(logs, self.low, self.high)
            values = np.exp(inside)
            total = self.seconds + self.slope @ (values - self.start)
            total = np.maximum(total, _LEAST * self.seconds)
            error = np.log(total / self.measured)
            scale = self.weight / np.sqrt(error**2 + _SOFT**2)
            # A constant beyond its bound moves no row; every fifth round looks whether it would.
            free = (logs == inside) | (turn % 5 == 0)
            slopes = (self.slope * (values * free) / total[:, None]) @ self.chain
            normal = slopes.T @ (scale[:, None] * slopes) + np.diag(self.ridge)
            gradient = slopes.T @ (scale * error) + self.ridge * moved
            step = np.clip(np.linalg.solve(normal, gradient), -0.5, 0.5)
            moved = moved - step * (1.0 if turn < _ROUNDS / 2 else 0.5)
        return moved


def pooled(near: Linear, left_out: str, strength: float, prior: Calibration) -> Calibration:
    """Return the constants that the sources but `left_out` (none if empty) give.

    `prior` has the shared constants that the fit stays near.
    """
    places = [place for place, name in enumerate(near.sources) if name != left_out]
    names = sorted({name for place in places for name in near.slopes[place]})
    parts = sorted({part for name in names for part in parts_of(name)})
    counts = Counter(near.sources[place] for place in places)
    shared, apart = _COST / _USUAL_SHARED**2, _COST * strength / _USUAL**2
    low, high = (np.log([near.bounds[name][end] for name in names]) for end in (0, 1))
    problem = _Problem(
        np.array([math.log(_prior(prior, name, near.bounds[name])) for name in names]),
        np.array([[float(part in parts_of(name)) for part in parts] for name in names]),
        low,
        high,
        np.array([shared if _is_shared(part) else apart for part in parts]),
        np.array([near.start[name] for name in names]),
        np.array([[near.slopes[place].get(name, 0.0) for name in names] for place in places]),
        near.seconds[places],
        near.measured[places],
        np.array([counts[near.sources[place]] ** -0.5 for place in places]),
    )
    return _calibration(prior, parts, problem.solved(), dict(near.bounds), names)


def _prior(prior: Calibration, name: str, bounds: tuple[float, float]) -> float:
    """Return the shared constant that a fit starts from, inside the bounds."""
    return min(max(prior.find(name.partition(".")[2]), bounds[0]), bounds[1])


def _calibration(
    prior: Calibration,
    parts: Sequence[str],
    moved: np.ndarray,
    bounds: Mapping[str, tuple[float, float]],
    names: Sequence[str],
) -> Calibration:
    """Return the prior with the fitted constants, each inside its bounds."""
    shift = dict(zip(parts, moved.tolist(), strict=True))
    limits: dict[str, tuple[float, float]] = {}
    for name in names:
        for part in parts_of(name):
            limits[part] = bounds[name]
    constants = dict(prior.constants)
    for part in parts:
        above = (part,) if _is_shared(part) else parts_of(part)
        total = math.log(_prior(prior, part, limits[part])) + sum(shift.get(p, 0.0) for p in above)
        low, high = limits[part]
        constants[part] = min(max(math.exp(total), low), high)
    return Calibration(constants, prior.date, prior.source)


def shared_only(calibration: Calibration) -> Calibration:
    """Return a calibration without the fitted constants of other systems' steps."""
    kept = {
        name: value
        for name, value in calibration.constants.items()
        if not _is_of_system(name)
        or name.startswith(f"{OURS}.")
        or name.partition(".")[2] not in _FITTED
    }
    return replace(calibration, constants=kept)


def left_out(
    rows: Sequence[Measured], near: Linear, strength: float, prior: Calibration
) -> list[float]:
    """Return the logarithm of each row's predicted over measured seconds, without its source."""
    fits = {source: pooled(near, source, strength, prior) for source in set(near.sources)}
    return log_errors(rows, lambda row: fits[row.source])


def log_errors(
    rows: Sequence[Measured], calibration_of: Callable[[Measured], Calibration]
) -> list[float]:
    """Return the logarithm of each row's predicted over its measured seconds, in closed form."""
    return [math.log(_seconds(row, calibration_of(row)) / (row.seconds or 0.0)) for row in rows]


def mean_of_sources(rows: Sequence[Measured], errors: Sequence[float]) -> float:
    """Return the mean, over sources, of the median error."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        by_source[row.source].append(abs(math.expm1(error)))
    return statistics.fmean(map(statistics.median, by_source.values()))


def systems_toml(calibration: Calibration) -> str:
    """Return the fitted constants of each system but ours, all of them, as TOML."""
    lines: list[str] = []
    for system in sorted(set(SYSTEMS) - {OURS}):
        lines += ["", f"[{system}]"]
        for constant in sorted(_FITTED):
            low, high = _FITTED[constant][1:]
            value = min(max(calibration.find(constant, system), low), high)
            lines.append(f"{constant} = {value:.3g}")
    return "\n".join(lines).lstrip() + "\n"


def evidence_toml(rows: Sequence[Measured]) -> str:
    """Return how many sources there are of each system, device and kind of layout, as TOML."""
    tables: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        for table, name in _evidence_of(row):
            tables[table][name].add(row.source)
    lines = ["# Sources of published step times; benchmarks/published_pooled.py wrote this."]
    for table, names in sorted(tables.items()):
        lines += ["", f"[{table}]"]
        lines += [f"{json.dumps(name)} = {len(names[name])}" for name in sorted(names)]
    return "\n".join(lines) + "\n"


def show(rows: Sequence[Measured], shipped: Sequence[float], others: Sequence[float]) -> None:
    """Print each source's errors with two sets of constants, and how well both rank."""
    pairs = [(row.source, error) for row, error in zip(rows, others, strict=True)]
    print("source               rows  shipped: median  left out: median  mean  Spearman  in 80%")
    for source in [*sorted({row.source for row in rows}), "all"]:
        places = [at for at, row in enumerate(rows) if source in (row.source, "all")]
        before = [abs(math.expm1(shipped[at])) for at in places]
        after = [abs(math.expm1(others[at])) for at in places]
        measured = [rows[at].seconds or 0.0 for at in places]
        predicted = [rows[at].seconds * math.exp(others[at]) for at in places]
        if source == "all":
            inside = coverage(pairs)
        else:
            low, high = interval([pair for pair in pairs if pair[0] != source])
            inside = statistics.fmean(low <= others[at] <= high for at in places)
        print(
            f"{source:20} {len(places):4} {statistics.median(before):12.1%} "
            f"{statistics.median(after):15.1%} {statistics.fmean(after):9.1%} "
            f"{spearman(measured, predicted):6.2f} {inside:9.0%}"
        )
    for name, errors in (("shipped", shipped), ("left out", others)):
        by_name = {row.name: math.expm1(e) for row, e in zip(rows, errors, strict=True)}
        groups = rankings(rows, by_name)
        if groups:
            loss = statistics.fmean(group.loss for group in groups)
            correlation = statistics.median(group.correlation for group in groups)
            print(f"{name}: mean of sources {mean_of_sources(rows, errors):.1%}; of ", end="")
            print(f"{len(groups)} groups, regret {loss:.1%}, Spearman {correlation:.2f}")
    low, high = interval(pairs)
    print(f"interval.plain: {math.exp(-high):.3f} to {math.exp(-low):.3f}")
    show_by_evidence(rows, pairs)


def show_by_evidence(rows: Sequence[Measured], pairs: Sequence[tuple[str, float]]) -> None:
    """Print the intervals of rows that few other sources are near, and of those with several."""
    near = near_others(rows)
    for name, has_several in (("few", False), ("several", True)):
        counted = zip(pairs, near, strict=True)
        kept = [pair for pair, count in counted if (count >= SEVERAL) == has_several]
        tail = holding(kept)
        low, high = interval(kept, tail)
        sources = len({source for source, _ in kept})
        print(
            f"interval.{name}: {math.exp(-high):.3f} to {math.exp(-low):.3f}, tails of {tail:.0%}; "
            f"{len(kept)} rows of {sources} sources; left out it holds {coverage(kept, tail):.1%}"
        )


def near_others(rows: Sequence[Measured]) -> list[int]:
    """Return the least number of other sources of each row's system, device and kind of layout."""
    sources: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        for kind in _evidence_of(row):
            sources[kind].add(row.source)
    return [min(len(sources[kind] - {row.source}) for kind in _evidence_of(row)) for row in rows]


def _evidence_of(row: Measured) -> tuple[tuple[str, str], ...]:
    setting = row.case.setting
    return (
        ("systems", setting.system.name),
        ("devices", setting.cluster.device.kind),
        ("layouts", kind_of_layout(row.case.layout)),
    )


def stated_rows(paths: Sequence[Path]) -> list[Measured]:
    """Return the rows of files that state a step time and its microbatch, each once.

    A row of tier B counts where its source has no other.
    """
    rows: dict[tuple[str, str], Measured] = {}
    for path in paths:
        for row in read(path, shipped_calibration())[0]:
            if row.seconds and row.row.get("mbs") and row.row.get("tier") in ("A", "B"):
                rows.setdefault((row.source, row.name), row)
    best = {row.source for row in rows.values() if row.row["tier"] == "A"}
    return [row for row in rows.values() if row.row["tier"] == "A" or row.source not in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--evidence", type=Path)
    args = parser.parse_args()
    rows, shipped = stated_rows(args.rows), shipped_calibration()
    if args.evidence:
        args.evidence.write_text(evidence_toml(rows), encoding="utf-8")
        return
    prior = shared_only(shipped)
    near = linear(rows, prior)
    by_strength = {strength: left_out(rows, near, strength, prior) for strength in _STRENGTHS}
    sizes = {strength: mean_of_sources(rows, errors) for strength, errors in by_strength.items()}
    best = min(sizes, key=lambda strength: sizes[strength])
    print(json.dumps({f"strength {name:g}": f"{size:.1%}" for name, size in sizes.items()}))
    show(rows, log_errors(rows, lambda row: shipped), by_strength[best])
    if args.write:
        fitted = pooled(near, "", best, prior)
        args.write.write_text(systems_toml(fitted), encoding="utf-8")


if __name__ == "__main__":
    main()
