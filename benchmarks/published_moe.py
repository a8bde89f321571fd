"""Predictions of mixtures of experts against step times that others published.

    python -m benchmarks.published_moe --rows ROWS.jsonl [--fit OUT.toml] [--sweeps N]
    python -m benchmarks.published_moe --imbalance

Prints the errors by source and by model, how well the order of layouts of one model and device is
kept, and the errors of models that were left out of the fit, one after the other. `--fit` fits the
constants of experts alone, and writes them into a calibration: others stay as dense models gave
them. `--imbalance` prints the imbalance of ranks that explains what natural routing costs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from benchmarks.published import Measured, is_stated, read, spearman, summary, time_errors
from benchmarks.published_fit import Free, How, constants_toml, descend, error_of
from meshwright.cost.calibration import Calibration, shipped_calibration
from meshwright.cost.rows import PricedRow, read_row
from meshwright.cost.step import step_time

# Step in the logarithm and bounds, as in `published_fit`.
OF_DEVICE = {"times.once": (0.4, 0.05, 3.0), "experts.products": (0.2, 0.2, 1.5)}
OF_SYSTEM = {"exposed.ep": (0.3, 0.05, 1.5), "experts.launch": (0.5, 1e-6, 3e-3)}
# Qwen3-235B on 256 H100s in the same layout, TFLOPS by tokens of a sequence: with balance forced,
# and with natural routing.
_BALANCES = {16384: (295, 237), 32768: (335, 277), 65536: (368, 320), 131072: (389, 357)}
# The layouts that it is priced in: the source's ep 32 goes over ranks of tp too, ours does not.
_SPREADS = ({"tp": 2, "ep": 16}, {"tp": 1, "ep": 32})
# A group of layouts whose order says something.
MIN_GROUP = 5
# Layouts whose measured times differ by more than this part have an order.
APART = 0.05


def family(found: Measured) -> str:
    """Return the model of a row without its variants."""
    name = str(found.row.get("model")).lower().replace("_", "").replace("-", "").replace(" ", "")
    known = ("grok1", "gptoss", "deepseekv3", "kimik2", "qwen330b", "qwen3235b", "llama4")
    return next((one for one in known if one in name), re.sub(r"\W.*", "", name))


def expert_constants_of(row: Measured) -> Iterator[tuple[str, How]]:
    """Yield the constants of experts that a row says something about."""
    setting, layout = row.case.setting, row.case.layout
    kind, system = setting.cluster.device.kind, setting.system.name
    is_there = {
        "times.once": layout.ep > 1 and setting.system.sends_once,
        "exposed.ep": layout.ep > 1,
    }
    for of, constants in ((kind, OF_DEVICE), (system, OF_SYSTEM)):
        for constant, how in constants.items():
            if is_there.get(constant, True):
                yield f"{of}.{constant}", how


def free_constants(rows: Sequence[Measured]) -> Free:
    """Return the constants of experts that rows say something about, those of five rows or more."""
    places: Free = {}
    for place, row in enumerate(rows):
        for name, how in expert_constants_of(row):
            places.setdefault(name, (how, []))[1].append(place)
    return {name: value for name, value in places.items() if len(value[1]) >= 5}


def fitted(rows: Sequence[Measured], start: Calibration, sweeps: int) -> Calibration:
    """Return a calibration with the constants of experts fitted to rows."""
    return descend(rows, start, sweeps, free_constants(rows), error_of)


def left_out(
    rows: Sequence[Measured],
    start: Calibration,
    sweeps: int,
    key: Callable[[Measured], str],
) -> dict[str, float]:
    """Return each row's error by constants that were fitted without the rows of its key."""
    errors: dict[str, float] = {}
    for name in sorted({key(row) for row in rows}):
        others = [row for row in rows if key(row) != name]
        mine = [row for row in rows if key(row) == name]
        errors |= time_errors(mine, fitted(others, start, sweeps) if others else start)
    return errors


def layouts_by_group(
    rows: Sequence[Measured], errors: Mapping[str, float]
) -> dict[str, list[tuple[float, float]]]:
    """Return measured and predicted device seconds per token of layouts, by model and device.

    Of repeats of a layout it is the mean that counts.
    """
    groups: dict[str, dict[object, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        assert row.seconds is not None
        setting, layout = row.case.setting, row.case.layout
        found = row.seconds * layout.world / (setting.train.batch * setting.train.seq_len)
        asked = layout.label, layout.world, setting.train, setting.products
        group = groups[f"{family(row)} {row.row.get('gpu')}"]
        group[asked].append((found, found * (1 + errors[row.name])))
    return {
        name: [
            (statistics.fmean(a for a, _ in same), statistics.fmean(b for _, b in same))
            for same in layouts.values()
        ]
        for name, layouts in sorted(groups.items())
    }


def orders(layouts: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, tuple[int, float]]:
    """Return the number of layouts of a group, and Spearman's correlation, for large groups."""
    return {
        name: (len(some), spearman(*map(list, zip(*some, strict=True))))
        for name, some in layouts.items()
        if len(some) >= MIN_GROUP
    }


def kept_pairs(layouts: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[int, int]:
    """Return how many pairs of a group's layouts are in the measured order, and how many there are.

    Pairs count whose measured times are apart: of the others, noise decides.
    """
    pairs = [
        (one, other)
        for some in layouts.values()
        for one, other in combinations(some, 2)
        if abs(one[0] - other[0]) > APART * min(one[0], other[0])
    ]
    kept = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs]
    return sum(kept), len(kept)


def imbalances(calibration: Calibration) -> dict[tuple[int, int], float]:
    """Return the imbalance that explains what natural routing costs, by ep and sequence length."""
    found = {}
    for spread in _SPREADS:
        for seq, (forced, natural) in _BALANCES.items():
            asked = {"model": "Qwen3-235B-A22B", "gpu": "H100", "framework": "Megatron-Core"}
            sizes = {"n_gpus": 256, "pp": 8, "vp": 4, "cp": seq // 8192, "seq": seq, "gbs": 256}
            case = read_row({**asked, **sizes, **spread, "recompute": "moe_act"}, calibration)
            found[spread["ep"], seq] = _explaining(case, forced / natural)
    return found


def _explaining(case: PricedRow, ratio: float) -> float:
    """Return the imbalance with which a step takes so many times as long as without."""

    def seconds(imbalance: float) -> float:
        setting = replace(case.setting, imbalance=imbalance)
        return step_time(setting, setting.kernels(), case.layout).total

    even, found = seconds(1.0), 1.0
    for _ in range(2):  # a step is all but linear in it
        slope = (seconds(found + 0.5) - seconds(found)) / 0.5
        found += (ratio * even - seconds(found)) / slope
    return found


def table(title: str, rows: Sequence[Measured], errors: Mapping[str, float]) -> None:
    """Print the errors of all rows, by source, by model and by device, and the orders."""
    print(f"{title}, {len(rows)} rows: {summary(errors.values())}")
    keys: tuple[Callable[[Measured], str], ...] = (lambda row: row.source, family)
    for key in (*keys, lambda row: str(row.row.get("gpu"))):
        for name in sorted({key(row) for row in rows}):
            some = [errors[row.name] for row in rows if key(row) == name]
            bias = statistics.median(some)
            print(f"  {name:16} {len(some):4} rows  {summary(some)}  bias {bias:+.1%}")
    layouts = layouts_by_group(rows, errors)
    found = orders(layouts)
    middle = statistics.median(one for _, one in found.values())
    print(f"  order, {len(found)} models and devices: Spearman {middle:.2f} (median)")
    for name, (count, correlation) in found.items():
        print(f"    {name:24} {count:3} layouts  {correlation:.2f}")
    kept, pairs = kept_pairs(layouts)
    print(f"  {kept} of {pairs} pairs that are {APART:.0%} apart are in the measured order")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--imbalance", action="store_true")
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--sweeps", type=int, default=4)
    parser.add_argument("--leave-out", action="store_true")
    args = parser.parse_args()
    calibration = shipped_calibration()
    if args.imbalance:
        each = imbalances(calibration)
        for (ep, seq), found in each.items():
            print(f"ep {ep}, {seq} tokens: {found:.2f}")
        print(f"median {statistics.median(each.values()):.2f}")
    if args.rows is None:
        return
    rows, refused = read(args.rows, calibration)
    for reason, count in sorted(refused.items()):
        print(f"refused {count}: {reason}")
    stated = [one for one in rows if is_stated(one) and one.case.setting.model.experts]
    if args.fit:
        calibration = fitted(stated, calibration, args.sweeps)
        args.fit.write_text(constants_toml(calibration), encoding="utf-8")
        names = free_constants(stated)
        print(json.dumps({name: f"{calibration.constants[name]:.3g}" for name in sorted(names)}))
    table("step time", stated, time_errors(stated, calibration))
    if args.leave_out:
        for title, key in (("model", family), ("source", lambda row: row.source)):
            errors = left_out(stated, shipped_calibration(), args.sweeps, key)
            table(f"of each {title} by constants fitted without it", stated, errors)


if __name__ == "__main__":
    main()
