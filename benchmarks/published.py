"""Predictions against measurements that others published: accuracy, ranking, out of memory.

    python -m benchmarks.published --rows ROWS.jsonl [--fit OUT.toml] [--cross-validate]

A row has the fields that `meshwright predict --rows` reads, and what was measured: step_time_s,
status ("ok" or "oom"), peak_mem_gib, group, tier, source_key. `--fit` fits the constants of a
calibration to the rows of tier A, those of memory first, and writes them; `--cross-validate` fits
without each source in turn and predicts the source that was left out, then again with one measured
row of it for each device.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published_fit import constants_toml, fit, fit_memory
from benchmarks.published_left_out import by_left_out, print_left_out
from meshwright.cost.calibration import Calibration, read_calibration, shipped_calibration
from meshwright.cost.price import RankMemory, memory, price, worst_memory
from meshwright.cost.rows import PricedRow, RowError, read_row
from meshwright.units import GIB

# Predictions against a limit that the verdict may miss by before it is dangerous.
MIN_GROUP = 8


@dataclass(frozen=True)
class Measured:
    """A row with what it asks and what was measured; seconds and GiB, None where unknown."""

    row: Mapping[str, Any]
    case: PricedRow
    seconds: float | None
    gib: float | None

    @property
    def source(self) -> str:
        return str(self.row.get("source_key"))

    @property
    def name(self) -> str:
        return str(self.row.get("id"))


def read(path: Path, calibration: Calibration) -> tuple[list[Measured], dict[str, int]]:
    """Return the rows that can be priced, and how many were refused for which reason."""
    found, refused = [], defaultdict[str, int](int)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("status") not in ("ok", "oom"):
            continue
        try:
            case = read_row(row, calibration)
        except RowError as error:
            refused[f"{row.get('source_key')}: {error}"] += 1
            continue
        found.append(Measured(row, case, _seconds(row, case), row.get("peak_mem_gib")))
    return found, dict(refused)


def _seconds(row: Mapping[str, Any], case: PricedRow) -> float | None:
    """Return the measured step time, from tokens or FLOP/s where a row states only these."""
    if row.get("status") != "ok":
        return None
    if row.get("step_time_s"):
        return float(row["step_time_s"])
    if row.get("tokens_per_s_per_gpu") and case.setting.model.experts:
        devices = case.layout.world
        return float(row["gbs"] * row["seq"] / row["tokens_per_s_per_gpu"] / devices)
    tflops, kind = row.get("tflops_per_gpu"), str(row.get("tflops_kind"))
    if tflops and "96Bslh^2" in kind:  # arXiv:2104.04473, equation 3
        model, batch, seq = case.setting.model, row["gbs"], row["seq"]
        dim, layers = model.dim, model.n_layers
        factor = 1 + seq / (6 * dim) + row["vocab"] / (16 * layers * dim)
        flops = 96 * batch * seq * layers * dim**2 * factor
        return flops / case.layout.world / tflops / 1e12
    return None


def with_calibration(found: Measured, calibration: Calibration) -> PricedRow:
    """Return a row's case with another calibration."""
    case = found.case
    return replace(case, setting=replace(case.setting, calibration=calibration))


def is_stated(found: Measured) -> bool:
    """Whether a row of tier A has a step time and says which layout it ran."""
    return found.row.get("tier") == "A" and found.seconds is not None and bool(found.row.get("mbs"))


def says_of_memory(rows: Sequence[Measured]) -> list[Measured]:
    """Return the rows that state their memory, or whose source reports what ran out."""
    sources = {one.source for one in rows if one.row.get("status") == "oom"}
    return [
        one
        for one in rows
        if (one.gib and one.row.get("tier") != "C")
        or (one.source in sources and one.row.get("tier") == "A")
    ]


def time_errors(rows: Iterable[Measured], calibration: Calibration) -> dict[str, float]:
    """Return the relative error of each row's step time, by id."""
    errors = {}
    for found in rows:
        case = with_calibration(found, calibration)
        predicted = price(case.setting, case.layout).time.total
        assert found.seconds is not None
        errors[found.name] = predicted / found.seconds - 1
    return errors


def summary(errors: Iterable[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median {statistics.median(sizes):.1%}  mean {statistics.fmean(sizes):.1%}"


def by_source(rows: Sequence[Measured], errors: Mapping[str, float]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for found in rows:
        if found.name in errors:
            groups[found.source].append(errors[found.name])
    return groups


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    a, b = ranks(first), ranks(second)
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    cov = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    size = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return cov / size if size else 1.0


@dataclass(frozen=True)
class Ranking:
    """A group: how far the predicted best is from the measured best, and the rank correlation."""

    group: str
    layouts: int
    loss: float
    correlation: float


def rankings(rows: Iterable[Measured], errors: Mapping[str, float]) -> list[Ranking]:
    """Return the ranking of each group of eight or more measured layouts; repeats are averaged."""
    groups: dict[tuple[object, ...], dict[object, list[Measured]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for found in rows:
        if found.name in errors:
            row = found.row
            key = (row.get("group"), row.get("gbs"), row.get("seq"), row.get("precision"))
            groups[key][found.case.layout.label, found.case.setting.system].append(found)
    rankings = []
    for key, layouts in groups.items():
        if len(layouts) < MIN_GROUP:
            continue
        measured = [statistics.fmean(f.seconds or 0 for f in same) for same in layouts.values()]
        predicted = [
            statistics.fmean((f.seconds or 0) * (1 + errors[f.name]) for f in same)
            for same in layouts.values()
        ]
        best = measured[predicted.index(min(predicted))]
        loss = best / min(measured) - 1
        rankings.append(Ranking(str(key[0]), len(layouts), loss, spearman(predicted, measured)))
    return rankings


@dataclass(frozen=True)
class Verdicts:
    """Out-of-memory verdicts: how many right, and the wrong ones of both kinds.

    `dangerous`: said to fit but ran out, by how much of the limit it seemed to be free.
    """

    total: int
    dangerous: dict[str, float]
    cautious: dict[str, float]

    @property
    def right(self) -> float:
        return 1 - (len(self.dangerous) + len(self.cautious)) / max(self.total, 1)


def verdicts(rows: Iterable[Measured], calibration: Calibration) -> Verdicts:
    """Return the verdicts on rows with an out-of-memory report in their source."""
    rows = list(rows)
    sources = {found.source for found in rows if found.row.get("status") == "oom"}
    total, dangerous, cautious = 0, {}, {}
    for found in rows:
        if found.source not in sources or found.row.get("tier") != "A":
            continue
        case = with_calibration(found, calibration)
        held = worst_memory(case.setting, case.layout)
        total += 1
        share = held.total / held.limit
        if found.row["status"] == "oom" and held.fits:
            dangerous[found.name] = 1 - share
        elif found.row["status"] == "ok" and not held.fits:
            cautious[found.name] = share - 1
    return Verdicts(total, dangerous, cautious)


def memory_errors(rows: Iterable[Measured], calibration: Calibration) -> dict[str, float]:
    """Return the relative error of each row's stated memory, by id.

    Reserved memory has the allocator's waste and not the context; allocated memory neither, and
    some rows say that it is the last rank's.
    """
    errors = {}
    for found in rows:
        if found.gib and found.row.get("tier") != "C":
            held, times = stated_memory(found, calibration)
            errors[found.name] = times * held.allocated / GIB / found.gib - 1
    return errors


def stated_memory(found: Measured, calibration: Calibration) -> tuple[RankMemory, float]:
    """Return the rank whose memory a row states, and how many times its tensors' bytes that is."""
    case = with_calibration(found, calibration)
    kind = str(found.row.get("mem_kind"))
    if "LAST rank" in kind:
        held = memory(case.setting, case.layout, case.layout.pp - 1)
    else:
        held = worst_memory(case.setting, case.layout)
    wasted = 0.0 if "allocated" in kind else held.by_category()["allocator"]
    return held, 1 + wasted / held.allocated


REASONS: tuple[tuple[Callable[[Measured], bool], str], ...] = (
    (lambda f: not f.row.get("recompute"), "recomputation is not stated and taken as none"),
    (lambda f: f.source == "megatron_ci", "a functional test in deterministic mode, few steps"),
    (lambda f: (f.row.get("tp") or 1) > (f.row.get("gpus_per_node") or 8), "tp across nodes"),
    (
        lambda f: f.source == "hagemann2023" and (f.row.get("pp") or 1) > 1,
        "the pipeline's idle time is several times that of 1F1B",
    ),
    (lambda f: (f.row.get("hidden") or 0) < 1200, "a small model, bound by launches"),
    (lambda f: True, "not explained"),
)


def report(rows: Sequence[Measured], calibration: Calibration) -> None:
    """Print all tables."""
    stated = [found for found in rows if is_stated(found)]
    errors = time_errors(stated, calibration)
    print(f"constants: {len(calibration.constants)}")
    print(
        f"step time, {len(stated)} rows of tier A with stated layouts: {summary(errors.values())}"
    )
    for source, values in sorted(by_source(stated, errors).items(), key=lambda i: -len(i[1])):
        bias = statistics.median(values)
        print(f"  {source:18} {len(values):4} rows  {summary(values)}  bias {bias:+.1%}")
    found = rankings(stated, errors)
    if found:
        loss = statistics.fmean(one.loss for one in found)
        correlation = statistics.median(one.correlation for one in found)
        print(
            f"ranking, {len(found)} groups: the predicted best is {loss:.1%} slower than the best"
        )
        print(f"  (mean); Spearman {correlation:.2f} (median)")
        for one in found:
            text = f"loss {one.loss:.1%}  Spearman {one.correlation:.2f}"
            print(f"  {one.group:45} {one.layouts:3}  {text}")
    oom = verdicts(rows, calibration)
    if oom.total:
        worst = max(oom.dangerous.values(), default=0.0)
        wrong = f"{len(oom.dangerous)} said to fit that ran out (by {worst:.1%} at most)"
        print(f"out of memory, {oom.total} rows: {oom.right:.1%} right; {wrong},")
        print(f"  {len(oom.cautious)} the other way")
    sizes = memory_errors(rows, calibration)
    if sizes:
        print(f"memory, {len(sizes)} rows: {summary(sizes.values())}")
        for name, error in sizes.items():
            print(f"  {name:25} {error:+.1%}")
    print("worst ten:")
    names = {found.name: found for found in rows}
    for name in sorted(errors, key=lambda n: -abs(math.log(1 + errors[n])))[:10]:
        one = names[name]
        reason = next(text for holds, text in REASONS if holds(one))
        print(f"  {name:22} {errors[name]:+.1%}  {one.case.layout.label}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--sweeps", type=int, default=6)
    parser.add_argument("--cross-validate", action="store_true")
    args = parser.parse_args()
    calibration = read_calibration(args.calibration) if args.calibration else shipped_calibration()
    rows, refused = read(args.rows, calibration)
    for reason, count in refused.items():
        print(f"refused {count}: {reason}")
    stated = [found for found in rows if is_stated(found)]
    if args.fit:
        calibration = fit_memory(says_of_memory(rows), calibration, args.sweeps)
        calibration = fit(stated, calibration, args.sweeps)
        args.fit.write_text(constants_toml(calibration), encoding="utf-8")
    if args.cross_validate:
        print_left_out(by_left_out(stated, calibration, args.sweeps), spearman)
        return
    report(rows, calibration)


if __name__ == "__main__":
    main()
