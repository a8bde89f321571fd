"""The legal layouts for a number of devices that have the layout keys that a config sets.

Keys that are set are pins. If no layout can have them, `refuse` says why. A rule may exclude an
axis, such as tp for an odd number of heads: `removed_axes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from meshwright.cost.inputs import CostInputs
from meshwright.errors import ConfigError, refusal
from meshwright.layout import AXES, Layout, broken, unsharded
from meshwright.layout.rules import divisors, most_stages, nearest_legal
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.spec.loading import Config
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import ContextKind, Offload, Recompute, TrainSpec, Zero

# A microbatch of more tokens fills a device no better, and larger ones only need more memory.
_MICROBATCH_TOKENS = 131072
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "ulysses")


# Schedules that others beat wherever these are legal, too, and why.
_DOMINATED = {
    "naive": (("1f1b", "gpipe"), "one microbatch at a time: 1F1B and GPipe are never slower"),
    "gpipe": (("1f1b",), "GPipe holds all microbatches and takes as long as 1F1B"),
    "looped_bfs": (
        ("interleaved_1f1b",),
        "breadth-first holds all microbatches and takes as long as interleaved 1F1B",
    ),
}

# Keys of a layout that a division has; a core adds microbatch and recomputation. The others are the
# sharding's and the schedule's.
OF_DIVISION = ("pp", "cp", "tp", "ep", "etp", "cp_kind")
OF_SHARDING = ("dp_replicate", "dp_shard", "zero", "offload")
OF_SCHEDULE = ("schedule", "virtual_stages")
Pins = Mapping[str, object]


def admits(pinned: object, value: object) -> bool:
    """Whether a pin allows a value; a frozenset allows each of its elements."""
    return value in pinned if isinstance(pinned, frozenset) else value == pinned


def obeys(pins: Pins, layout: Layout, keys: Collection[str]) -> bool:
    """Whether those of `keys` that are pinned have a value in the layout that their pin allows."""
    return all(admits(pins[key], getattr(layout, key)) for key in keys if key in pins)


class Core(NamedTuple):
    """The layout keys that determine the time of a microbatch: degrees, microbatch and
    recomputation.

    Schedule, ZeRO stage and offload are still open: `layout` has their simplest values. `degrees`
    are pp, dp, cp, tp, ep and expert tp. `microbatches` is their number per step; `expert_data`
    must divide the number of ranks that ZeRO shards over.
    """

    layout: Layout
    degrees: tuple[int, ...]
    microbatches: int
    expert_data: int


class Division(NamedTuple):
    """Legal parallel degrees, with the way of context parallelism.

    `layout` has them, with the simplest value of every other key. `sequences` are those of a
    data-parallel rank in a step, and `microbatches` the numbers of sequences to choose a microbatch
    from. `degrees` and `expert_data` are those of its cores. Divisions with the same degrees but
    for those of experts have the same `group`, and are numbered by `number`.
    """

    layout: Layout
    degrees: tuple[int, ...]
    expert_data: int
    sequences: int
    microbatches: tuple[int, ...]
    group: int
    number: int

    def core(self, microbatch: int, recompute: Recompute, offload: Offload = "none") -> Core:
        """Return the core with this microbatch, in sequences, and this recomputation."""
        keys = {"microbatch": microbatch, "recompute": recompute, "offload": offload}
        layout = self.layout.model_copy(update=keys)
        return Core(layout, self.degrees, self.sequences // microbatch, self.expert_data)


class Schedule(NamedTuple):
    """A pipeline schedule by name, with its number of stages per rank."""

    name: str
    virtual: int


class ZeroSharding(NamedTuple):
    """A ZeRO stage, and the number of data-parallel ranks (`dp_shard`) that it shards over."""

    zero: Zero
    shards: int


def divisions(model: ModelSpec, train: TrainSpec, devices: int) -> Iterator[Division]:
    """Yield the legal divisions of `devices` devices."""
    group = 0
    for tp in divisors(devices):
        for cp in divisors(devices // tp):
            for pp in divisors(devices // tp // cp):
                dp = devices // tp // cp // pp
                if pp > most_stages(model.n_layers) or train.batch % dp:
                    continue
                for kind in _CONTEXT_KINDS if cp > 1 else _CONTEXT_KINDS[:1]:
                    sp = tp > 1 and not train.seq_len // cp % tp
                    plain = Layout(dp_replicate=dp, cp=cp, tp=tp, cp_kind=kind, sp=sp)
                    if broken(model, train, plain) is None:
                        yield from _of_degrees(model, train, plain, pp, group)
                        group += 1


def _of_degrees(
    model: ModelSpec, train: TrainSpec, plain: Layout, pp: int, group: int
) -> Iterator[Division]:
    """Yield the divisions with the degrees of `plain` and `pp` stages: those of experts differ."""
    dp, cp, tp = plain.dp_replicate, plain.cp, plain.tp
    sequences = train.batch // dp
    largest = most_sequences(train, cp)
    microbatches = tuple(size for size in divisors(sequences) if size <= largest)
    for number, (ep, etp) in enumerate(_shared_out(model, plain)):
        layout = plain.model_copy(update={"pp": pp, "ep": ep, "etp": etp})
        degrees = pp, dp, cp, tp, ep, layout.expert_tp
        yield Division(layout, degrees, layout.expert_data, sequences, microbatches, group, number)


def _shared_out(model: ModelSpec, plain: Layout) -> Iterator[tuple[int, int | None]]:
    """Yield the legal pairs of `ep` and `etp` for a layout without expert parallelism.

    `etp` is None, or 1 where the expert-parallel ranks include those of tensor parallelism.
    """
    alike = plain.dp * plain.cp
    yield from ((ep, None) for ep in divisors(math.gcd(model.experts or 1, alike)))
    if not model.experts or not plain.sp:
        return
    folded = divisors(math.gcd(model.experts, alike * plain.tp))
    yield from ((ep, 1) for ep in folded if ep % plain.tp == 0 and alike % (ep // plain.tp) == 0)


def most_sequences(train: TrainSpec, cp: int) -> int:
    """Return the most sequences of a microbatch that are considered: one, or few enough tokens per
    rank."""
    return max(((_MICROBATCH_TOKENS + 1) * cp - 1) // train.seq_len, 1)


@lru_cache(maxsize=4096)
def schedules(pp: int, layers: int, microbatches: int) -> tuple[Schedule, ...]:
    """Return the legal pipeline schedules, each with every legal number of stages per rank.

    For `pp` = 1, a single trivial one.
    """
    if pp == 1:
        return (Schedule("1f1b", 1),)
    max_stages = most_stages(layers) // pp
    return tuple(
        Schedule(traits.name, virtual)
        for traits in SCHEDULES.values()
        for virtual in range(
            traits.min_virtual, min(max_stages, traits.max_virtual or max_stages) + 1
        )
        if microbatch_rule(traits.name, pp, virtual, microbatches) is None
    )


def dominated(
    schedule: Schedule, layers: int, pp: int, microbatches: int, *, is_even: bool
) -> str | None:
    """Return why a schedule need not be priced: another legal one is never worse; None if none is.

    `is_even` says that the training system requires stages with the same number of layers.
    """
    stages = pp * schedule.virtual
    if schedule.virtual > 1 and layers % stages and (is_even or stages <= layers):
        return "stages of unequal numbers of layers"
    better, reason = _DOMINATED.get(schedule.name, ((), ""))
    for name in better:
        if microbatch_rule(name, pp, schedule.virtual, microbatches) is None:
            return reason
    return None


@lru_cache(maxsize=4096)
def shardings(dp: int, cp: int, expert_data: int = 1) -> tuple[ZeroSharding, ...]:
    """Return the ZeRO stages with each legal number of sharding ranks, and no ZeRO.

    `expert_data` must divide the sharding ranks (shards x `cp`), since these also shard the
    experts.
    """
    options = [ZeroSharding(0, 1)]
    stages: tuple[Zero, ...] = (1, 2, 3)
    legal = [
        shards for shards in divisors(dp) if shards * cp > 1 and shards * cp % expert_data == 0
    ]
    for zero in stages:
        options += (ZeroSharding(zero, shards) for shards in legal)
    return tuple(options)


@lru_cache(maxsize=4096)
def offloads(zero: int, among: tuple[Offload, ...]) -> tuple[Offload, ...]:
    """Return those values of `layout.offload` that are legal with a ZeRO stage: "params" needs
    sharding."""
    return tuple(offload for offload in among if zero or offload != "params")


class Counts:
    """Counts the legal layouts that have the values of `pins`.

    `layers` is the number of the model's layers.
    """

    def __init__(self, layers: int, pins: Pins) -> None:
        self._layers, self._pins = layers, pins
        self.recomputes = tuple(value for value in RECOMPUTES if self._admits("recompute", value))
        self._schedules: dict[tuple[int, int], int] = {}
        self._of_microbatches: dict[tuple[int, int, int], int] = {}
        self._shardings: dict[tuple[object, ...], int] = {}

    def of_division(self, division: Division, offloaded: tuple[Offload, ...]) -> int:
        """Return the number of layouts of a division; `offloaded` are the values of
        `layout.offload` to count."""
        pp, sizes = division.degrees[0], division.microbatches
        key = pp, division.sequences, len(sizes)
        if key not in self._of_microbatches:
            self._of_microbatches[key] = sum(
                self._orders(pp, division.sequences // size)
                for size in sizes
                if self._admits("microbatch", size)
            )
        orders = self._of_microbatches[key] * len(self.recomputes)
        return orders * self._per_order(division, offloaded)

    def of_core(self, core: Core, offloaded: tuple[Offload, ...]) -> int:
        """Return the number of layouts with the keys of a core; `offloaded` as in
        `of_division`."""
        return self._orders(core.degrees[0], core.microbatches) * self._per_order(core, offloaded)

    def _orders(self, pp: int, count: int) -> int:
        key = pp, count
        if key not in self._schedules:
            self._schedules[key] = len(as_fixed(self._pins, schedules(pp, self._layers, count)))
        return self._schedules[key]

    def _per_order(self, choice: Core | Division, offloaded: tuple[Offload, ...]) -> int:
        """Return the number of layouts for each pipeline schedule: ZeRO, offload, and sequence
        parallelism or none."""
        _, dp, cp, *_ = choice.degrees
        key = dp, cp, choice.expert_data, offloaded
        if key not in self._shardings:
            self._shardings[key] = sum(
                all(self._admits(*pair) for pair in _of_sharding(choice.layout, sharding, offload))
                for sharding in shardings(dp, cp, choice.expert_data)
                for offload in offloads(sharding.zero, offloaded)
            )
        is_free = choice.layout.sp and choice.layout.folds == 1 and "sp" not in self._pins
        return self._shardings[key] * (2 if is_free else 1)

    def _admits(self, key: str, value: object) -> bool:
        return key not in self._pins or admits(self._pins[key], value)


def as_fixed(pins: Pins, chains: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    """Return the schedules that match the pins of schedule and stages per rank."""
    if pins.keys().isdisjoint(OF_SCHEDULE):
        return chains
    return tuple(
        schedule
        for schedule in chains
        if all(
            key not in pins or admits(pins[key], value)
            for key, value in zip(OF_SCHEDULE, (schedule.name, schedule.virtual), strict=True)
        )
    )


def with_schedule(layout: Layout, schedule: Schedule) -> Layout:
    """Return the layout with this schedule and its number of stages per rank."""
    changes = {"schedule": schedule.name, "virtual_stages": schedule.virtual}
    return layout.model_copy(update=changes)


def with_sharding(layout: Layout, sharding: ZeroSharding, offload: Offload) -> Layout:
    """Return the layout with its replicas sharded by a ZeRO stage, and with an offload."""
    return layout.model_copy(update=dict(_of_sharding(layout, sharding, offload)))


def _of_sharding(
    layout: Layout, sharding: ZeroSharding, offload: Offload
) -> tuple[tuple[str, object], ...]:
    """Return the layout keys that a ZeRO sharding and an offload set, with their values."""
    zero, shards = sharding
    replicas = layout.dp_replicate // shards
    return (
        ("dp_replicate", replicas),
        ("dp_shard", shards),
        ("zero", zero),
        ("offload", offload),
    )


def is_given(config: Config, key: str) -> bool:
    """Whether a layout key was set, in a file or on the command line."""
    return config.origins.get(f"layout.{key}", "default") != "default"


def given(config: Config) -> Pins:
    """Return the layout keys that the config sets, with their values."""
    values = config.layout.model_dump(exclude={"auto"})
    return {key: value for key, value in values.items() if is_given(config, key)}


def degree_of(pins: Pins) -> int:
    """Return the product of the pinned parallel degrees: the fewest ranks that have them."""
    return math.prod(int(str(pins[key])) for key in AXES if key in pins)


def words(pins: Pins) -> str:
    """Return the pinned keys as text, such as "layout.tp = 2, layout.sp = true"."""
    return ", ".join(
        f"layout.{key} = {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in pins.items()
    )


def refuse(setting: CostInputs, pins: Pins) -> ConfigError:
    """Return the error that says why no layout of the cluster has the pins, with the nearest legal
    ones."""
    devices, train = setting.cluster.devices, setting.train
    if not pins:
        if (rule := broken(setting.model, train, Layout())) is not None:  # whatever the layout
            return ConfigError(refusal(rule, legal=nearest_legal(setting.model, train, Layout())))
        text = f"no layout of {devices} devices is legal with train.batch = {train.batch}"
        return ConfigError(text)
    values: dict[str, Any] = dict(pins)
    if values.get("dp_shard", 1) > 1 or values.get("offload") == "params":
        values.setdefault("zero", 1)  # it is free to shard
    plain = Layout(**values)
    rule = broken(setting.model, train, plain)
    if rule is not None and (plain.dp == 1 or devices % degree_of(pins) == 0):
        return ConfigError(refusal(rule, legal=nearest_legal(setting.model, train, plain)))
    degrees = degree_of(pins)
    if devices % degrees:
        fixed = words({key: pins[key] for key in AXES if key in pins})
        rule = f"{fixed}: {degrees} ranks do not divide the cluster's {devices} devices"
        return ConfigError(refusal(rule, legal=[f"{n} ranks" for n in divisors(devices)[::-1][:3]]))
    hint = "Leave one of the keys out, and the planner chooses it"
    if degrees == devices and (idle := unsharded(plain)) is not None:
        return ConfigError(refusal(idle, legal=["layout.zero = 0"], hint=hint))
    rule = f"no layout of {devices} devices with train.batch = {train.batch} has {words(pins)}"
    return ConfigError(refusal(rule, hint=hint))


# The axes of a layout, by their names, with what else a layout that uses them may have.
_AXES: Final[Mapping[str, tuple[str, tuple[Mapping[str, Any], ...]]]] = {
    "dp_replicate": ("data parallelism", ({},)),
    "tp": ("tensor parallelism", ({},)),
    "cp": ("context parallelism", ({"cp_kind": "ring"}, {"cp_kind": "ulysses"})),
    "pp": ("pipeline parallelism", ({},)),
}


class RemovedAxis(NamedTuple):
    """A parallel axis without a legal degree above 1: its key, its name, a rule, and what would
    help.

    `rule` is the one that the smallest degree breaks, `nearest` are changes of other keys than the
    layout's that would make it legal.
    """

    axis: str
    name: str
    rule: str
    nearest: tuple[str, ...]

    def __str__(self) -> str:
        helps = f"; {' or '.join(self.nearest)} would allow it" if self.nearest else ""
        return f"no {self.name}: {self.rule}{helps}"


def removed_axes(setting: CostInputs, devices: int, pins: Pins | None = None) -> list[RemovedAxis]:
    """Return the parallel axes for which every degree above 1 that divides the devices breaks a
    rule.

    Axes that `pins` fixes are left out.
    """
    return [
        removed
        for axis in _AXES
        if axis not in (pins or {})
        for removed in [_removed(setting, devices, axis)]
        if removed is not None
    ]


def _removed(setting: CostInputs, devices: int, axis: str) -> RemovedAxis | None:
    model, train = setting.model, setting.train
    first: tuple[str, Layout] | None = None
    for layout in _layouts(devices, axis):
        rule = broken(model, train, layout)
        if rule is None:
            return None
        first = first or (rule, layout)
    if first is None:  # a single device
        return None
    rule, layout = first
    changes = nearest_legal(model, train, layout)
    helps = tuple(change for change in changes if not change.startswith("layout."))
    return RemovedAxis(axis, _AXES[axis][0], rule, helps)


def _layouts(devices: int, axis: str) -> Iterator[Layout]:
    """Yield layouts with each degree above 1 of one axis that divides the devices, the smallest
    first."""
    for degree in divisors(devices):
        for further_keys in _AXES[axis][1] if degree > 1 else ():
            yield Layout(**{axis: degree, **further_keys})
