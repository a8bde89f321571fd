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
from meshwright.planner.differences import ChangedKey, difference
from meshwright.planner.pins import given
from meshwright.planner.plan import Plan
from meshwright.planner.saved import read_plan
from meshwright.planner.scaling import Cost, Point, best_cost, counts_between, curve
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
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?(?:e\d{1,2})?)\s*([KMBT]?)\s*", text, re.I)
    count = float(found[1]) * _COUNT[found[2].upper()] if found else 0.0
    if not 1 <= count <= 1e18:
        raise ConfigError(f"--tokens {text}: it is a number such as 300B, 1T or 1.5e12")
    return count


def devices_of(text: str) -> list[int]:
    """Read `8..1024`; raises `ConfigError`."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last <= _MOST_DEVICES:
        raise ConfigError(
            f"--devices {text}: it is A..B with 1 <= A <= B <= {_MOST_DEVICES}, such as 8..1024"
        )
    return counts_between(first, last)


def asked_tokens(text: str, made: Plan, price: float | None) -> Cost:
    """Return the cost of `--tokens` with a plan's best layout."""
    return best_cost(made, tokens_of(text), price)


def asked_curve(text: str, tokens: str | None, made: Plan, price: float | None) -> list[Point]:
    """Return the points of `--devices`."""
    count = _MILLION if tokens is None else tokens_of(tokens)
    pins = given(made.config)
    return curve(made.setting, devices_of(text), count, price, made.margin, pins)


def print_cost(found: Cost, devices: int) -> None:
    """Print the cost of tokens."""
    money = "" if found.money is None else f", {found.money:,.0f} in the currency of the price"
    say(
        f"{format_count(found.tokens)} tokens: {_days(found.hours)} on {devices} devices, "
        f"{found.device_hours:,.0f} device hours{money}"
    )


def print_curve(points: list[Point]) -> None:
    """Print the best layout of each number of devices."""
    rates = [one.prediction.tokens_per_s for one in points if one.prediction is not None]
    known = next((one.cost for one in points if one.cost is not None), None)
    tokens = format_count(_MILLION if known is None else known.tokens)
    has_price = known is not None and known.money is not None
    last = ("cost",) if has_price else ()
    print(f"by the number of devices; {tokens} tokens take:")
    rows = table("devices", "layout", "memory", "tokens/s", "MFU", "time", *last, "")
    for one in points:
        if one.prediction is None or one.cost is None:
            rows.add_row(f"{one.devices}", "no layout fits", *["-"] * (4 + len(last)), "")
            continue
        found = one.prediction
        cost = [] if one.cost.money is None else [format_money(one.cost.money)]
        bar = "█" * max(1, round(_BAR * found.tokens_per_s / max(rates)))
        rows.add_row(
            f"{one.devices}",
            found.layout.label,
            format_bytes(found.memory.total),
            format_count(found.tokens_per_s),
            f"{found.mfu:.1%}",
            _days(one.cost.hours),
            *cost,
            bar if Console().width >= 2 * _BAR + 80 else "",
        )
    Console().print(rows)


def _days(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours >= 48 else format_seconds(hours * 3600)


def compare_plans(paths: list[Path], *, as_json: bool) -> int:
    """Print the differences of two saved plans."""
    with foreign(f"--compare {paths[0]} {paths[1]}", ConfigError):
        found = difference(*(read_plan(path, "--compare") for path in paths))
    if as_json:
        print_json(found.as_json())
        return EXIT_DONE
    _print_changes("asked", found.asked)
    _print_changes("layout", found.layout)
    rows = table("", "before", "after", "change", wraps=())
    words = {
        "step_time_s": format_seconds,
        "tokens_per_s": format_count,
        "mfu": "{:.1%}".format,
        "peak_memory_bytes": format_bytes,
    }
    for key, (before, after) in found.totals.items():
        change = f"{after / before - 1:+.1%}" if before else "-"
        rows.add_row(key, words[key](before), words[key](after), change)
    for name, (before, after) in found.seconds.items():
        if before != after:
            rows.add_row(
                f"  {name}", *map(format_seconds, (before, after)), f"{after - before:+.3g} s"
            )
    Console().print(rows)
    for text in found.explanation:
        say(text)
    return EXIT_DONE


def _print_changes(what: str, changes: list[ChangedKey]) -> None:
    if not changes:
        print(f"{what}: the same")
    for one in changes:
        say(f"{what}: {one.key} = {_shown(one.before)}, then {_shown(one.after)}")


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
