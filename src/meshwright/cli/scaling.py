"""`plan`'s `--tokens`, `--devices` and `--compare`: cost, scaling, and differences of plans."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from meshwright.cli.common import print_json, say, table
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.parsing import foreign
from meshwright.planner.plan import Plan
from meshwright.planner.saved import ChangedKey, difference, read_plan
from meshwright.planner.scaling import Cost, Point, best_cost, counts_between, curve
from meshwright.planner.space import given
from meshwright.units import format_bytes, format_count, format_money, format_seconds

_MOST_DEVICES: Final = 1 << 17
_COUNT: Final[Mapping[str, float]] = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# Without --tokens, points are told what so many take.
_MILLION: Final = 1e6
# Columns of a bar of the curve.
_BAR: Final = 24


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--tokens", metavar="N", help="what N tokens take, such as 300B or 1T")
    parser.add_argument(
        "--devices", metavar="A..B", help="the best layout of A to B devices, doubling"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("a.json", "b.json"),
        help="what two saved plans differ by, and why; plans nothing",
    )


def tokens_of(text: str) -> float:
    """Read a number of tokens; raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?(?:e\d{1,2})?)\s*([KMBT]?)\s*", text, re.I)
    count = float(match[1]) * _COUNT[match[2].upper()] if match else 0.0
    if not 1 <= count <= 1e18:
        raise ConfigError(f"--tokens {text}: it is a number such as 300B, 1T or 1.5e12")
    return count


def devices_of(text: str) -> list[int]:
    """Read `8..1024`; raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= _MOST_DEVICES:
        raise ConfigError(
            f"--devices {text}: it is A..B with 1 <= A <= B <= {_MOST_DEVICES}, such as 8..1024"
        )
    return counts_between(first, last)


def asked_tokens(text: str, plan: Plan, price: float | None) -> Cost:
    """Return the cost of `--tokens` with a plan's best layout."""
    return best_cost(plan, tokens_of(text), price)


def asked_curve(text: str, tokens: str | None, plan: Plan, price: float | None) -> list[Point]:
    """Return the points of `--devices`."""
    count = _MILLION if tokens is None else tokens_of(tokens)
    pins = given(plan.config)
    return curve(plan.setting, devices_of(text), count, price, plan.margin, pins)


def print_cost(cost: Cost, devices: int) -> None:
    """Print the cost of tokens."""
    money = "" if cost.money is None else f", {cost.money:,.0f} in the currency of the price"
    say(
        f"{format_count(cost.tokens)} tokens: {_days(cost.hours)} on {devices} devices, "
        f"{cost.device_hours:,.0f} device hours{money}"
    )


def print_curve(points: list[Point]) -> None:
    """Print the best layout of each number of devices."""
    rates = [point.prediction.tokens_per_s for point in points if point.prediction is not None]
    known = next((point.cost for point in points if point.cost is not None), None)
    tokens = format_count(_MILLION if known is None else known.tokens)
    has_price = known is not None and known.money is not None
    last = ("cost",) if has_price else ()
    print(f"by the number of devices; {tokens} tokens take:")
    printed = table("devices", "layout", "memory", "tokens/s", "MFU", "time", *last, "")
    for point in points:
        if point.prediction is None or point.cost is None:
            printed.add_row(f"{point.devices}", "no layout fits", *["-"] * (4 + len(last)), "")
            continue
        prediction = point.prediction
        cost = [] if point.cost.money is None else [format_money(point.cost.money)]
        bar = "█" * max(1, round(_BAR * prediction.tokens_per_s / max(rates)))
        printed.add_row(
            f"{point.devices}",
            prediction.layout.label,
            format_bytes(prediction.memory.total),
            format_count(prediction.tokens_per_s),
            f"{prediction.mfu:.1%}",
            _days(point.cost.hours),
            *cost,
            bar if Console().width >= 2 * _BAR + 80 else "",
        )
    Console().print(printed)


def _days(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours >= 48 else format_seconds(hours * 3600)


def compare_plans(paths: list[Path], *, as_json: bool) -> int:
    """Print the differences of two saved plans."""
    with foreign(f"--compare {paths[0]} {paths[1]}", ConfigError):
        changes = difference(*(read_plan(path, "--compare") for path in paths))
    if as_json:
        print_json(changes.as_json())
        return EXIT_DONE
    _print_changes("asked", changes.asked)
    _print_changes("layout", changes.layout)
    printed = table("", "before", "after", "change", wraps=())
    formats = {
        "step_time_s": format_seconds,
        "tokens_per_s": format_count,
        "mfu": "{:.1%}".format,
        "peak_memory_bytes": format_bytes,
    }
    for key, (before, after) in changes.totals.items():
        change = f"{after / before - 1:+.1%}" if before else "-"
        printed.add_row(key, formats[key](before), formats[key](after), change)
    for name, (before, after) in changes.seconds.items():
        if before != after:
            printed.add_row(
                f"  {name}", *map(format_seconds, (before, after)), f"{after - before:+.3g} s"
            )
    Console().print(printed)
    for text in changes.explanation:
        say(text)
    return EXIT_DONE


def _print_changes(section: str, changes: list[ChangedKey]) -> None:
    if not changes:
        print(f"{section}: the same")
    for change in changes:
        say(f"{section}: {change.key} = {_shown(change.before)}, then {_shown(change.after)}")


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
