"""The best layout on more or fewer devices, and the time and money for a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction
from meshwright.errors import ConfigError
from meshwright.planner.plan import Plan, prediction_json
from meshwright.planner.questions import on_devices
from meshwright.planner.rank import MARGIN, Search
from meshwright.planner.space import Pins


@dataclass(frozen=True)
class Cost:
    """The cost of training on a number of tokens: hours of the run, device hours, and money.

    `money` is None without a price.
    """

    tokens: float
    hours: float
    device_hours: float
    money: float | None

    @classmethod
    def of(cls, prediction: Prediction, tokens: float, price: float | None) -> Cost:
        """Return the cost of `tokens` tokens at a predicted speed; `price` is of one device for an
        hour."""
        hours = tokens / prediction.tokens_per_s / 3600
        device_hours = hours * prediction.devices
        return cls(tokens, hours, device_hours, None if price is None else device_hours * price)

    def as_json(self) -> dict[str, Any]:
        """Return the cost as JSON, with days instead of hours."""
        return {
            "tokens": self.tokens,
            "days": self.hours / 24,
            "device_hours": self.device_hours,
            "cost": self.money,
        }


@dataclass(frozen=True)
class Point:
    """A number of devices with its best layout and cost, both None if no layout fits."""

    devices: int
    prediction: Prediction | None
    cost: Cost | None

    def as_json(self) -> dict[str, Any]:
        """Return the number of devices with its prediction and cost as JSON."""
        prediction_fields = {} if self.prediction is None else prediction_json(self.prediction)
        cost_fields = None if self.cost is None else self.cost.as_json()
        return {
            "devices": self.devices,
            "fits": self.prediction is not None,
            **prediction_fields,
            "takes": cost_fields,
        }


def counts_between(first: int, last: int) -> list[int]:
    """Return `first` and its doublings below `last`, then `last`."""
    counts, count = [], first
    while count < last:
        counts.append(count)
        count *= 2
    return [*counts, last]


def curve(
    setting: CostInputs,
    counts: list[int],
    tokens: float,
    price: float | None = None,
    margin: float = MARGIN,
    pins: Pins | None = None,
) -> list[Point]:
    """Return the best layout for each number of devices, and the cost of the tokens with it.

    The global batch and the fixed layout keys (`pins`) stay the same. `price` is of one device for
    an hour. The point of a number of devices without a legal layout that fits has no prediction.
    """
    points = []
    for count in counts:
        tried = replace(setting, cluster=on_devices(setting.cluster, count))
        ranked = Search(tried, count, margin, pins).run(1).ranked
        best = ranked[0] if ranked else None
        cost = None if best is None else Cost.of(best, tokens, price)
        points.append(Point(count, best, cost))
    return points


def best_cost(plan: Plan, tokens: float, price: float | None) -> Cost:
    """Return the cost of `tokens` tokens with a plan's best layout; `price` is per device and hour.

    Raises `ConfigError` if no layout fits.
    """
    if plan.best is None:
        raise ConfigError("--tokens: no layout fits, so that nothing is trained")
    return Cost.of(plan.best, tokens, price)
