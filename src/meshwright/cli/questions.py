"""Options of `plan` for other questions: fewest devices, largest batch, longest context, cost."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from meshwright.cli.common import print_json, say, table
from meshwright.cost.price import Prediction
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.parsing import foreign
from meshwright.planner.plan import Plan, prediction_json
from meshwright.planner.questions import FineTuning, LargestBatch, Offer
from meshwright.planner.saved import ChangedKey, difference, read_plan
from meshwright.planner.scaling import Cost, Point, best_cost, counts_between, curve
from meshwright.planner.space import given
from meshwright.planner.ways_to_fit import WayToFit
from meshwright.units import format_bytes, format_count, format_money, format_seconds

_MOST_DEVICES: Final = 1 << 17
_COUNT: Final[Mapping[str, float]] = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# Without --tokens, points are told what so many take.
_MILLION: Final = 1e6
# Columns of a bar of the curve.
_BAR: Final = 24


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Add the options `--tokens`, `--devices` and `--compare` to a parser."""
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
    """Return the number of tokens in a text such as `300B`; raises `ConfigError` if invalid."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?(?:e\d{1,2})?)\s*([KMBT]?)\s*", text, re.I)
    count = float(match[1]) * _COUNT[match[2].upper()] if match else 0.0
    if not 1 <= count <= 1e18:
        raise ConfigError(f"--tokens {text}: it is a number such as 300B, 1T or 1.5e12")
    return count


def devices_of(text: str) -> list[int]:
    """Return the numbers of devices in a range such as `8..1024`, doubling.

    Raises `ConfigError` if it is invalid.
    """
    match = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= _MOST_DEVICES:
        raise ConfigError(
            f"--devices {text}: it is A..B with 1 <= A <= B <= {_MOST_DEVICES}, such as 8..1024"
        )
    return counts_between(first, last)


def asked_tokens(text: str, plan: Plan, price: float | None) -> Cost:
    """Return the cost of training on `text` tokens with the plan's best layout.

    `price` is that of a device hour, or None.
    """
    return best_cost(plan, tokens_of(text), price)


def asked_curve(text: str, tokens: str | None, plan: Plan, price: float | None) -> list[Point]:
    """Return the best layout and its cost for each number of devices in a range such as `8..1024`.

    `tokens` is the number of tokens to price, by default a million; `price` that of a device hour.
    """
    count = _MILLION if tokens is None else tokens_of(tokens)
    pins = given(plan.config)
    return curve(plan.setting, devices_of(text), count, price, plan.margin, pins)


def question_flags(args: argparse.Namespace) -> Iterator[str]:
    """Yield the options that asked for answers besides the ranking, as arguments."""
    for flag, value in (("--devices", args.devices), ("--tokens", args.tokens)):
        if value is not None:
            yield from (flag, value)
    for price in args.price:
        yield from ("--price", price)
    for name in ("fewest", "largest_batch", "longest_context", "fine_tune", "cheapest"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')}"


def print_cost(cost: Cost, devices: int) -> None:
    """Print the time and cost of training on some tokens."""
    money = "" if cost.money is None else f", cost {cost.money:,.0f} at your price"
    say(
        f"{format_count(cost.tokens)} tokens: {_days(cost.hours)} on {devices} devices, "
        f"{cost.device_hours:,.0f} device hours{money}"
    )


def print_curve(points: list[Point]) -> None:
    """Print a table of the best layout for each number of devices."""
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
    """Print the differences of two saved plans; returns the exit code."""
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


@dataclass(frozen=True)
class Answer:
    """The answer to a question: a JSON document, and a function that prints it."""

    name: str
    document: Any
    print: Callable[[], None]
    seconds: float


def add_questions(parser: argparse.ArgumentParser) -> None:
    """Add the options for questions besides the ranking to a parser."""
    add_scaling(parser)
    parser.add_argument("--fewest", action="store_true", help="the fewest devices that fit")
    parser.add_argument(
        "--largest-batch", action="store_true", help="the most sequences that fit at once"
    )
    parser.add_argument(
        "--longest-context", action="store_true", help="the longest sequences that fit"
    )
    parser.add_argument(
        "--fine-tune",
        action="store_true",
        help="what fits of training all weights, adapters, or adapters on 4-bit weights, with the "
        "longest sequences",
    )
    parser.add_argument(
        "--cheapest",
        action="store_true",
        help="numbers and kinds of devices by what a token costs; see cluster.price and --price",
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="DEVICE=PRICE",
        help="of one device for an hour, for costs; may be given again",
    )


def answers(args: argparse.Namespace, plan: Plan) -> list[Answer]:
    """Return the answers to the questions in the arguments; raises `ConfigError`."""
    asked: list[tuple[str, Callable[[], tuple[Any, Callable[[], None]]]]] = []
    if args.fewest:
        asked.append(("fewest_devices", lambda: _fewest(plan)))
    if args.largest_batch:
        asked.append(("largest_batch", lambda: _largest(plan)))
    if args.longest_context:
        asked.append(("longest_context", lambda: _longest(plan)))
    if args.fine_tune:
        asked.append(("fine_tuning", lambda: _fine_tuning(plan)))
    if args.cheapest:
        prices = _prices(args.price, plan)
        asked.append(("cheapest", lambda: _cheapest(plan, prices)))
    elif args.price and not (args.tokens or args.devices):
        raise ConfigError("--price is for --cheapest, --tokens and --devices")
    price = None
    if args.tokens or args.devices:
        price = _prices(args.price, plan).get(plan.setting.cluster.device.name)
    if args.tokens:
        asked.append(("tokens", lambda: _tokens(args.tokens, plan, price)))
    if args.devices:
        asked.append(("devices", lambda: _curve(args, plan, price)))
    answered = []
    for name, answer in asked:
        started = time.perf_counter()
        document, show = answer()
        answered.append(Answer(name, document, show, time.perf_counter() - started))
    return answered


def _tokens(text: str, plan: Plan, price: float | None) -> tuple[Any, Callable[[], None]]:
    cost = asked_tokens(text, plan, price)
    return cost.as_json(), lambda: print_cost(cost, plan.setting.cluster.devices)


def _curve(
    args: argparse.Namespace, plan: Plan, price: float | None
) -> tuple[Any, Callable[[], None]]:
    points = asked_curve(args.devices, args.tokens, plan, price)
    return [point.as_json() for point in points], lambda: print_curve(points)


def _prices(given: list[str], plan: Plan) -> Mapping[str, float]:
    prices = {}
    if plan.config.cluster.price is not None:
        prices[plan.setting.cluster.device.name] = plan.config.cluster.price
    for word in given:
        name, equals, number = word.partition("=")
        try:
            prices[name] = float(number)
        except ValueError:
            prices[name] = 0.0
        if not equals or not 0 < prices[name] < float("inf"):
            raise ConfigError(f"--price {word} is not of the form h100-sxm=2.5, above 0")
    return prices


def _fewest(plan: Plan) -> tuple[dict[str, Any] | None, Callable[[], None]]:
    fewest, devices = plan.fewest_devices(), plan.setting.cluster.devices

    def show() -> None:
        text = f"more than {devices}" if fewest is None else str(fewest[0])
        say(f"fewest devices that fit without offload: {text}")
        if fewest is not None:
            label, memory, rate = _row(fewest[1])
            step = format_seconds(fewest[1].time.total)
            say(f"{label}: {memory}, {step} a step, {rate} tokens/s, {fewest[1].mfu:.1%} MFU", "  ")

    return None if fewest is None else {"devices": fewest[0], **prediction_json(fewest[1])}, show


def _row(prediction: Prediction) -> tuple[str, str, str]:
    rate = format_count(prediction.tokens_per_s)
    return prediction.layout.label, format_bytes(prediction.memory.total), rate


def _largest(plan: Plan) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    batches = plan.largest_batches()

    def show() -> None:
        if not batches:
            length = plan.setting.train.seq_len
            say(f"largest batch: not even one sequence of {length} tokens fits")
            return
        say(
            "largest batch at once, by what is recomputed; larger ones accumulate these without "
            "more memory:"
        )
        printed = table("recompute", "sequences", "batch", "layout", "memory", "tokens/s")
        for batch in batches:
            policy = batch.recompute if batch.at_speed else "any speed"
            printed.add_row(policy, f"{batch.sequences}", f"{batch.batch}", *_row(batch.prediction))
        Console().print(printed)

    return [_batch(batch) for batch in batches], show


def _batch(batch: LargestBatch) -> dict[str, Any]:
    sizes = {"at_speed": batch.at_speed, "sequences_at_once": batch.sequences, "batch": batch.batch}
    return {**sizes, **prediction_json(batch.prediction)}


def _longest(plan: Plan) -> tuple[dict[str, Any] | None, Callable[[], None]]:
    longest = plan.longest_context()

    def show() -> None:
        if longest is None:
            say("longest context: not even the shortest sequences fit")
            return
        label, memory, rate = _row(longest[1])
        say(f"longest context with train.batch = {plan.setting.train.batch}: {longest[0]:,} tokens")
        say(f"{label}: {memory}, {rate} tokens/s", "  ")

    return None if longest is None else {"seq_len": longest[0], **prediction_json(longest[1])}, show


def _fine_tuning(plan: Plan) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    ways = plan.fine_tunings()

    def show() -> None:
        train = plan.setting.train
        say(f"fine-tuning {train.batch} sequences of {train.seq_len} tokens, and the longest ones:")
        for way in ways:
            if way.refused is not None:
                say(f"{way.trained}: {way.refused}", "  ")
                continue
            fastest = "nothing fits"
            if way.prediction is not None:
                fastest = "{}: {}, {} tokens/s".format(*_row(way.prediction))
            say(f"{way.trained}: {fastest}", "  ")
            if way.longest is not None:
                length, longest = way.longest
                say(f"up to {length:,} tokens: {longest.layout.label}", "    ")

    return [_way(way) for way in ways], show


def _way(way: FineTuning) -> dict[str, Any]:
    longest = way.longest
    return {
        "trained": way.trained,
        "refused": way.refused,
        "fastest": None if way.prediction is None else prediction_json(way.prediction),
        "longest": longest and {"seq_len": longest[0], **prediction_json(longest[1])},
    }


def _cheapest(
    plan: Plan, prices: Mapping[str, float]
) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    offers, devices = plan.cheapest(prices), plan.setting.cluster.devices

    def show() -> None:
        if not offers:
            say(f"cheapest: nothing fits on up to {devices} devices")
            return
        say("cost per million tokens, at your prices:")
        printed = table("devices", "cost", "layout", "memory", "tokens/s")
        for offer in offers:
            printed.add_row(
                f"{offer.devices} {offer.device}", format_money(offer.cost), *_row(offer.prediction)
            )
        Console().print(printed)

    return [_offer(offer) for offer in offers], show


def _offer(offer: Offer) -> dict[str, Any]:
    fields = {
        "device": offer.device,
        "devices": offer.devices,
        "price_per_hour": offer.price_per_hour,
    }
    return {**fields, "cost_of_a_million_tokens": offer.cost, **prediction_json(offer.prediction)}


def print_answers(answered: Sequence[Answer]) -> None:
    """Print answers, each with the seconds that it took."""
    for answer in answered:
        print()
        answer.print()
        print(f"  answered in {answer.seconds:.2f} s")


def ways_to_fit_json(current: Prediction, ways: list[WayToFit]) -> dict[str, Any]:
    """Return the changes that help after an out-of-memory error as JSON values.

    `current` is the prediction for the layout that ran out of memory.
    """
    return {
        "ran_out": prediction_json(current),
        "fits": [
            {
                "change": way.text,
                "saved_bytes": round(way.saved),
                "slower": way.slower,
                **prediction_json(way.prediction),
            }
            for way in ways
        ],
    }


def print_ways_to_fit(current: Prediction, ways: list[WayToFit], seconds: float) -> None:
    """Print the changes that help after an out-of-memory error, and how long the search took."""
    memory = current.memory
    verdict = ": by the prediction it fits, so that is too low" if memory.fits else ""
    say(
        f"{current.layout.label} needs {format_bytes(memory.total)} on pipeline rank "
        f"{memory.rank}, and a device has {format_bytes(memory.limit)}{verdict}"
    )
    if not ways:
        say("no change, and no pair of changes, of this layout fits: see `meshwright plan`")
        return
    say(f"what fits, the cheapest in time first ({seconds:.2f} s):")
    printed = table("change", "saves", "needs", "time per token")
    for way in ways:
        saved, needed = format_bytes(way.saved), format_bytes(way.prediction.memory.total)
        printed.add_row(way.text, saved, needed, f"{way.slower:+.1%}")
    Console().print(printed)
