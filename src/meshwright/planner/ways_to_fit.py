"""After an out-of-memory error: the smallest changes with which the training fits, and their
costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple, get_args

from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction, estimated, price
from meshwright.layout import Layout, broken
from meshwright.layout.rules import divisors
from meshwright.planner.lightest import with_train
from meshwright.planner.questions import on_devices
from meshwright.planner.rank import MARGIN
from meshwright.spec.training import Offload, Recompute

# Of pairs of changes so many are shown: the fastest.
_PAIRS = 5


class Change(NamedTuple):
    """A change as an override, such as "layout.zero=1", with the keys that it sets.

    `layout` has the layout keys; `seq_len` and `devices` are None if the change does not set them.
    """

    text: str
    layout: Mapping[str, Any]
    seq_len: int | None = None
    devices: int | None = None


@dataclass(frozen=True)
class WayToFit:
    """A change that fits: the bytes that it saves on the largest rank, and its cost in time.

    `slower` is 0.1 if the device time per token grows by 10%.
    """

    text: str
    prediction: Prediction
    saved: float
    slower: float


def ways_to_fit(
    setting: CostInputs, layout: Layout, margin: float = MARGIN
) -> tuple[Prediction, list[WayToFit]]:
    """Return the price of a layout that ran out of memory, and the changes with which it fits.

    Lists the smallest change of each kind that fits, fastest first; then shorter sequences, which
    change what is trained. Pairs of changes are listed if they are faster than any single one. If
    the prediction says that the layout fits, it is too low by an unknown amount, so a change must
    save at least the share `margin`.
    """
    current, guess = price(setting, layout), estimated(setting, layout)
    limit = min(current.memory.limit, current.memory.total) * (1 - margin)
    kinds = [list(kind) for kind in _kinds(setting, layout)]

    def tried(*changes: Change) -> _Tried | None:
        return _tried(setting, layout, changes, guess, limit)

    def priced(attempt: _Tried | None) -> WayToFit | None:
        return None if attempt is None else _priced(attempt, current, limit)

    single = [
        next((way for change in kind if (way := priced(tried(change))) is not None), None)
        for kind in kinds
    ]
    listed = [way for way in single if way is not None]
    least_slowdown = min((way.slower for way in listed), default=float("inf"))
    pairs = []
    for first, second in combinations(kinds, 2):
        attempts = (
            tried(first_change, second_change)
            for first_change in first
            for second_change in second
            if not set(first_change.layout) & set(second_change.layout)
        )
        fits = sorted(
            (
                attempt
                for attempt in attempts
                if attempt is not None and attempt.slower < least_slowdown
            ),
            key=lambda attempt: attempt[:2],
        )
        ways = (priced(attempt) for attempt in fits)
        pairs += [way for way in ways if way is not None and way.slower < least_slowdown][:1]
    listed += sorted(pairs, key=_cheapest_first)[:_PAIRS]
    shorter = (priced(tried(change)) for change in _shorter(setting))
    fitting = next((way for way in shorter if way is not None), None)
    return current, sorted(listed, key=_cheapest_first) + ([] if fitting is None else [fitting])


def _cheapest_first(way: WayToFit) -> tuple[float, str]:
    return way.slower, way.text


class _Tried(NamedTuple):
    """Changes priced in closed form: how much slower they are, their text, layout and cost
    inputs."""

    slower: float
    text: str
    layout: Layout
    setting: CostInputs


def _tried(
    setting: CostInputs,
    layout: Layout,
    changes: tuple[Change, ...],
    current: Prediction,
    limit: float,
) -> _Tried | None:
    """Return the closed-form price of some changes together; None if they are illegal or do not
    fit.

    `current` is the prediction to which speed is compared, `limit` the bytes of a device.
    """
    values: dict[str, Any] = {}
    changed_setting = setting
    for change in changes:
        values |= change.layout
        if change.seq_len is not None:
            changed_setting = with_train(changed_setting, seq_len=change.seq_len)
        if change.devices is not None:
            changed_setting = replace(
                changed_setting, cluster=on_devices(changed_setting.cluster, change.devices)
            )
    changed = layout.model_copy(update=values)
    if (
        broken(changed_setting.model, changed_setting.train, changed) is not None
        or changed.world != changed_setting.cluster.devices
    ):
        return None
    prediction = estimated(changed_setting, changed)
    if prediction.memory.total > limit:
        return None
    return _Tried(
        _slower(prediction, current),
        " and ".join(change.text for change in changes),
        changed,
        changed_setting,
    )


def _priced(attempt: _Tried, current: Prediction, limit: float) -> WayToFit | None:
    """Return the exact price of a change; None if it exceeds `limit` bytes."""
    prediction = price(attempt.setting, attempt.layout)
    if prediction.memory.total > limit:
        return None
    saved = current.memory.total - prediction.memory.total
    return WayToFit(attempt.text, prediction, saved, _slower(prediction, current))


def _slower(prediction: Prediction, current: Prediction) -> float:
    """Return the relative increase in device time per token, such as 0.1 for 10% more."""
    rate = prediction.tokens_per_s / prediction.devices
    return current.tokens_per_s / current.devices / rate - 1


def _kinds(setting: CostInputs, layout: Layout) -> Iterator[Iterator[Change]]:
    """Yield iterators over changes, one per kind; each goes from the smallest change to the
    largest."""
    yield _smaller_microbatches(layout)
    yield _recomputation(layout)
    yield _sharding(layout)
    yield _sequence_parallelism(layout)
    yield _schedules(layout)
    for axis in ("tp", "pp", "cp"):
        yield _wider(setting, layout, axis)
    yield _offload(layout)
    yield _more_devices(setting, layout)


def _smaller_microbatches(layout: Layout) -> Iterator[Change]:
    for size in reversed(divisors(layout.microbatch)[:-1]):
        yield Change(f"layout.microbatch={size}", {"microbatch": size})


def _recomputation(layout: Layout) -> Iterator[Change]:
    policies = get_args(Recompute)
    for policy in policies[policies.index(layout.recompute) + 1 :]:
        yield Change(f"layout.recompute={policy}", {"recompute": policy})


def _sharding(layout: Layout) -> Iterator[Change]:
    """Yield higher ZeRO stages, over the present sharding ranks and then over all data-parallel
    ranks."""
    if layout.dp * layout.cp == 1:
        return
    for shards in sorted({layout.dp_shard, layout.dp}):
        if shards * layout.cp == 1:
            continue
        values = {"dp_shard": shards, "dp_replicate": layout.dp // shards}
        degrees = "" if shards == layout.dp_shard else _words(values)
        for zero in range(1, 4):
            if (zero, shards) > (layout.zero, layout.dp_shard) and zero >= layout.zero:
                yield Change(f"layout.zero={zero}{degrees}", {**values, "zero": zero})


def _words(values: Mapping[str, int]) -> str:
    return "".join(f" layout.{key}={value}" for key, value in values.items())


def _sequence_parallelism(layout: Layout) -> Iterator[Change]:
    if layout.tp > 1 and not layout.sp:
        yield Change("layout.sp=true", {"sp": True})


def _schedules(layout: Layout) -> Iterator[Change]:
    """Yield schedules that hold fewer activations: fewer stages per rank, then plain 1F1B."""
    if layout.pp == 1:
        return
    for virtual in range(layout.virtual_stages - 1, 1, -1):
        yield Change(f"layout.virtual_stages={virtual}", {"virtual_stages": virtual})
    if (layout.schedule, layout.virtual_stages) != ("1f1b", 1):
        values = {"schedule": "1f1b", "virtual_stages": 1}
        yield Change("layout.schedule=1f1b layout.virtual_stages=1", values)


def _wider(setting: CostInputs, layout: Layout, axis: str) -> Iterator[Change]:
    """Yield higher degrees of an axis on the same devices, with fewer data-parallel ranks."""
    for factor in divisors(layout.dp)[1:]:
        values = {axis: getattr(layout, axis) * factor}
        for data in ("dp_replicate", "dp_shard"):
            if getattr(layout, data) % factor == 0:
                values[data] = getattr(layout, data) // factor
                break
        else:
            continue
        if axis == "tp" and values["tp"] > setting.cluster.per_node:
            return
        text = _words(values)[1:]
        sp = {"sp": True} if axis == "tp" else {}
        yield Change(text + (" layout.sp=true" if sp else ""), {**values, **sp})


def _offload(layout: Layout) -> Iterator[Change]:
    kinds = get_args(Offload)
    for offload in kinds[kinds.index(layout.offload) + 1 :]:
        yield Change(f"layout.offload={offload}", {"offload": offload})


def _shorter(setting: CostInputs) -> Iterator[Change]:
    length = setting.train.seq_len // 2
    while length >= 64:
        yield Change(f"train.seq_len={length}", {}, seq_len=length)
        length //= 2


def _more_devices(setting: CostInputs, layout: Layout) -> Iterator[Change]:
    """Yield 2, 4 and 8 times the devices, all added to the sharding ranks, if ZeRO is on."""
    if not layout.zero:
        return
    for factor in (2, 4, 8):
        shards, devices = layout.dp_shard * factor, layout.world * factor
        text = f"{devices} devices, layout.dp_shard={shards}"
        yield Change(text, {"dp_shard": shards}, devices=devices)
