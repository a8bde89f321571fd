"""The other answers of `plan`: fewest devices, largest batch, longest context, cost."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from meshwright.cli.common import say, table
from meshwright.cli.scaling import (
    add_scaling,
    asked_curve,
    asked_tokens,
    print_cost,
    print_curve,
)
from meshwright.cost.price import Prediction
from meshwright.errors import ConfigError
from meshwright.planner.fine_tuning import FineTuning
from meshwright.planner.plan import Plan, prediction_json
from meshwright.planner.questions import LargestBatch, Offer
from meshwright.planner.ways_to_fit import WayToFit
from meshwright.units import format_bytes, format_count, format_money, format_seconds


@dataclass(frozen=True)
class Answer:
    """An answer as a document, and a function that prints it."""

    name: str
    document: Any
    print: Callable[[], None]
    seconds: float


def add_questions(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the questions."""
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


def answers(args: argparse.Namespace, made: Plan) -> list[Answer]:
    """Return the answers to the questions in the arguments; raises `ConfigError`."""
    asked: list[tuple[str, Callable[[], tuple[Any, Callable[[], None]]]]] = []
    if args.fewest:
        asked.append(("fewest_devices", lambda: _fewest(made)))
    if args.largest_batch:
        asked.append(("largest_batch", lambda: _largest(made)))
    if args.longest_context:
        asked.append(("longest_context", lambda: _longest(made)))
    if args.fine_tune:
        asked.append(("fine_tuning", lambda: _fine_tuning(made)))
    if args.cheapest:
        prices = _prices(args.price, made)
        asked.append(("cheapest", lambda: _cheapest(made, prices)))
    elif args.price and not (args.tokens or args.devices):
        raise ConfigError("--price is for --cheapest, --tokens and --devices")
    price = None
    if args.tokens or args.devices:
        price = _prices(args.price, made).get(made.setting.cluster.device.name)
    if args.tokens:
        asked.append(("tokens", lambda: _tokens(args.tokens, made, price)))
    if args.devices:
        asked.append(("devices", lambda: _curve(args, made, price)))
    found = []
    for name, answer in asked:
        started = time.perf_counter()
        document, show = answer()
        found.append(Answer(name, document, show, time.perf_counter() - started))
    return found


def _tokens(text: str, made: Plan, price: float | None) -> tuple[Any, Callable[[], None]]:
    found = asked_tokens(text, made, price)
    return found.as_json(), lambda: print_cost(found, made.setting.cluster.devices)


def _curve(
    args: argparse.Namespace, made: Plan, price: float | None
) -> tuple[Any, Callable[[], None]]:
    found = asked_curve(args.devices, args.tokens, made, price)
    return [one.as_json() for one in found], lambda: print_curve(found)


def _prices(words: list[str], made: Plan) -> Mapping[str, float]:
    prices = {}
    if made.config.cluster.price is not None:
        prices[made.setting.cluster.device.name] = made.config.cluster.price
    for word in words:
        name, equals, number = word.partition("=")
        try:
            prices[name] = float(number)
        except ValueError:
            prices[name] = 0.0
        if not equals or not 0 < prices[name] < float("inf"):
            raise ConfigError(f"--price {word} is not of the form h100-sxm=2.5, above 0")
    return prices


def _fewest(made: Plan) -> tuple[dict[str, Any] | None, Callable[[], None]]:
    found, devices = made.fewest_devices(), made.setting.cluster.devices

    def show() -> None:
        text = f"more than {devices}" if found is None else str(found[0])
        say(f"fewest devices that fit without offload: {text}")
        if found is not None:
            label, memory, rate = _row(found[1])
            step = format_seconds(found[1].time.total)
            say(f"{label}: {memory}, {step} a step, {rate} tokens/s, {found[1].mfu:.1%} MFU", "  ")

    return None if found is None else {"devices": found[0], **prediction_json(found[1])}, show


def _row(found: Prediction) -> tuple[str, str, str]:
    rate = format_count(found.tokens_per_s)
    return found.layout.label, format_bytes(found.memory.total), rate


def _largest(made: Plan) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    found = made.largest_batches()

    def show() -> None:
        if not found:
            length = made.setting.train.seq_len
            say(f"largest batch: not even one sequence of {length} tokens fits")
            return
        say(
            "largest batch at once, by what is recomputed; larger ones accumulate these without "
            "more memory:"
        )
        rows = table("recompute", "sequences", "batch", "layout", "memory", "tokens/s")
        for one in found:
            policy = one.recompute if one.at_speed else "any speed"
            rows.add_row(policy, f"{one.sequences}", f"{one.batch}", *_row(one.prediction))
        Console().print(rows)

    return [_batch(one) for one in found], show


def _batch(one: LargestBatch) -> dict[str, Any]:
    sizes = {"at_speed": one.at_speed, "sequences_at_once": one.sequences, "batch": one.batch}
    return {**sizes, **prediction_json(one.prediction)}


def _longest(made: Plan) -> tuple[dict[str, Any] | None, Callable[[], None]]:
    found = made.longest_context()

    def show() -> None:
        if found is None:
            say("longest context: not even the shortest sequences fit")
            return
        label, memory, rate = _row(found[1])
        say(f"longest context with train.batch = {made.setting.train.batch}: {found[0]:,} tokens")
        say(f"{label}: {memory}, {rate} tokens/s", "  ")

    return None if found is None else {"seq_len": found[0], **prediction_json(found[1])}, show


def _fine_tuning(made: Plan) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    found = made.fine_tunings()

    def show() -> None:
        train = made.setting.train
        say(f"fine-tuning {train.batch} sequences of {train.seq_len} tokens, and the longest ones:")
        for one in found:
            if one.refused is not None:
                say(f"{one.trained}: {one.refused}", "  ")
                continue
            told = "nothing fits"
            if one.prediction is not None:
                told = "{}: {}, {} tokens/s".format(*_row(one.prediction))
            say(f"{one.trained}: {told}", "  ")
            if one.longest is not None:
                length, longest = one.longest
                say(f"up to {length:,} tokens: {longest.layout.label}", "    ")

    return [_way(one) for one in found], show


def _way(one: FineTuning) -> dict[str, Any]:
    longest = one.longest
    return {
        "trained": one.trained,
        "refused": one.refused,
        "fastest": None if one.prediction is None else prediction_json(one.prediction),
        "longest": longest and {"seq_len": longest[0], **prediction_json(longest[1])},
    }


def _cheapest(
    made: Plan, prices: Mapping[str, float]
) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    found, devices = made.cheapest(prices), made.setting.cluster.devices

    def show() -> None:
        if not found:
            say(f"cheapest: nothing fits on up to {devices} devices")
            return
        say("cost of a million tokens, in the currency of the prices:")
        rows = table("devices", "cost", "layout", "memory", "tokens/s")
        for one in found:
            rows.add_row(
                f"{one.devices} {one.device}", format_money(one.cost), *_row(one.prediction)
            )
        Console().print(rows)

    return [_offer(one) for one in found], show


def _offer(one: Offer) -> dict[str, Any]:
    of = {"device": one.device, "devices": one.devices, "price_per_hour": one.price_per_hour}
    return {**of, "cost_of_a_million_tokens": one.cost, **prediction_json(one.prediction)}


def print_answers(found: Sequence[Answer]) -> None:
    """Print answers, each with the seconds that it took."""
    for one in found:
        print()
        one.print()
        print(f"  answered in {one.seconds:.2f} s")


def ways_to_fit_json(now: Prediction, found: list[WayToFit]) -> dict[str, Any]:
    """Return the changes that help after an out-of-memory error as JSON."""
    return {
        "ran_out": prediction_json(now),
        "fits": [
            {
                "change": one.text,
                "saved_bytes": round(one.saved),
                "slower": one.slower,
                **prediction_json(one.prediction),
            }
            for one in found
        ],
    }


def print_ways_to_fit(now: Prediction, found: list[WayToFit], seconds: float) -> None:
    """Print the changes that help after an out-of-memory error."""
    held = now.memory
    said = ": by the prediction it fits, so that is too low" if held.fits else ""
    say(
        f"{now.layout.label} needs {format_bytes(held.total)} on pipeline rank {held.rank}, and a "
        f"device has {format_bytes(held.limit)}{said}"
    )
    if not found:
        say("no change, and no pair of changes, of this layout fits: see `meshwright plan`")
        return
    say(f"what fits, the cheapest in time first ({seconds:.2f} s):")
    rows = table("change", "saves", "needs", "time a token")
    for one in found:
        saved, needed = format_bytes(one.saved), format_bytes(one.prediction.memory.total)
        rows.add_row(one.text, saved, needed, f"{one.slower:+.1%}")
    Console().print(rows)
