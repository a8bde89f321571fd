"""Computes the layout of a config on a machine, and says why devices stay unused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from meshwright.errors import ConfigError, refusal
from meshwright.layout.layout import AXES, Layout
from meshwright.layout.rules import broken, divisors, nearest_legal
from meshwright.layout.schedules import microbatch_rule
from meshwright.spec.loading import Config
from meshwright.spec.model import OF_PADDING, padded
from meshwright.spec.training import TrainSpec

# Tokens of a microbatch on a rank where none is asked for. On a CPU few are a little faster and
# take half of the memory (docs/records/log.md); a GPU wants enough rows to fill its processors.
MICROBATCH_TOKENS: Mapping[str, int] = {"cpu": 1024, "cuda": 16384}


class Machine(NamedTuple):
    """The devices of a node: their kind, number, CPU cores, and a name for people.

    `load` is the number of processes that wanted a core in the last minute. If `is_fixed`, there
    are exactly `devices` devices; otherwise it is a default, and a layout with more ranks runs them
    as processes that share a CPU.
    """

    device: Literal["cpu", "cuda"]
    devices: int
    cores: int
    name: str
    is_fixed: bool
    load: float = 0.0

    def threads(self, ranks: int) -> int:
        """Return the number of CPU threads for each rank of a node with `ranks` ranks."""
        return max(1, self.cores // ranks)


_MOST_MICROBATCHES: Final = 2**16  # each has entries in the table of actions


_DATA_DEGREES = ("dp_replicate", "dp_shard")


def with_padding(config: Config, layout: Layout) -> Config:
    """Return the config with its vocabulary padded to a multiple that the layout's tp divides, if
    needed."""
    model = padded(config.model, layout.tp)
    if model is config.model:
        return config
    origins = {**config.origins, f"model.{OF_PADDING}": f"derived: layout.tp = {layout.tp}"}
    return config.model_copy(update={"model": model, "origins": origins})


def resolve_layout(config: Config, machine: Machine) -> Layout:
    """Return the layout of a config on a machine.

    If both data-parallel degrees are missing, `dp_shard` (with `zero` = 0 `dp_replicate`) uses the
    remaining devices, as far as they divide the batch. A single missing one is 1. Raises
    `ConfigError` naming the rule, both numbers and the nearest legal values.
    """
    section = config.layout
    left_out = {key for key in (*_DATA_DEGREES, "microbatch") if getattr(section, key) is None}
    stated = Layout(**section.model_dump(exclude={"auto", *left_out}))

    def settle(train: TrainSpec, layout: Layout, changed: Collection[str]) -> Layout | None:
        free = {key for key in left_out if f"layout.{key}" not in changed}
        return _complete(train, layout, free, machine, config.cluster.nodes)

    def fits(layout: Layout) -> bool:
        complete = settle(config.train, layout, ())
        return complete is not None and broken(config.model, config.train, complete) is None

    layout = settle(config.train, stated, ())
    if layout is None:
        raise ConfigError(
            refusal(
                f"the layout needs a multiple of {stated.world} ranks (pp {stated.pp} x "
                f"dp_replicate {stated.dp_replicate} x dp_shard {stated.dp_shard} x cp {stated.cp} "
                f"x tp {stated.tp}), but there are {machine.devices * config.cluster.nodes} "
                f"{machine.device} devices",
                legal=_smaller(stated, fits),
            )
        )
    rule = broken(config.model, config.train, layout)
    if rule is not None:
        legal = nearest_legal(config.model, config.train, layout, settle=settle)
        raise ConfigError(refusal(rule, legal=legal))
    sequences = layout.dp * layout.microbatch
    if config.train.batch > sequences * _MOST_MICROBATCHES:
        problem = (
            f"train.batch = {config.train.batch} is {config.train.batch // sequences} microbatches"
        )
        legal = [f"train.batch = {sequences * _MOST_MICROBATCHES}"]
        raise ConfigError(
            refusal(f"{problem}; a step has at most {_MOST_MICROBATCHES}", legal=legal)
        )
    return layout


def _smaller(layout: Layout, fits: Callable[[Layout], bool]) -> list[str]:
    """Return, for each axis, the largest smaller degree with which the layout fits the devices."""
    legal = []
    for axis in AXES:
        degrees = range(getattr(layout, axis) - 1, 0, -1)
        for degree in (n for n in degrees if fits(layout.model_copy(update={axis: n}))):
            legal.append(f"layout.{axis} = {degree}")
            break
    return legal


def _complete(
    train: TrainSpec, layout: Layout, left_out: set[str], machine: Machine, nodes: int
) -> Layout | None:
    """Return the layout with the keys in `left_out` filled in; None if it does not fit the
    devices."""
    bare = layout.model_copy(update=dict.fromkeys(left_out, 1))
    devices = machine.devices * nodes
    if not machine.is_fixed:
        devices = max(devices, bare.world)
    takes_rest = left_out.issuperset(_DATA_DEGREES)
    if bare.world > devices or (takes_rest and devices % bare.model_ranks):
        return None
    # Alone on its axis, a rank has no one to split a sequence with.
    changes: dict[str, Any] = {"sp": bare.sp and bare.tp > 1}
    if takes_rest:
        data_ranks = devices // bare.model_ranks
        degree = max(d for d in divisors(train.batch) if d <= data_ranks)
        changes["dp_shard" if bare.zero else "dp_replicate"] = degree
    filled = bare.model_copy(update=changes)
    if "microbatch" not in left_out:
        return filled
    return filled.model_copy(update={"microbatch": _microbatch(train, filled, machine)})


def _microbatch(train: TrainSpec, layout: Layout, machine: Machine) -> int:
    """Return the largest microbatch that divides a rank's share of the batch and is within the
    token budget.

    The budget counts the tokens on a rank, after splitting sequences over cp and sp. A pipeline
    needs a legal number of microbatches, and prefers at least four per pipeline rank, which leaves
    a fifth to the bubble of 1F1B, or else one per rank.
    """
    local = max(train.batch // layout.dp, 1)
    cut = layout.cp * (layout.tp if layout.sp else 1)
    budget = max(1, MICROBATCH_TOKENS[machine.device] * cut // train.seq_len)
    sizes = [size for size in reversed(divisors(local)) if size <= budget]
    if not layout.is_pipelined:
        return sizes[0]

    def obeys(size: int) -> bool:
        count = local // size
        return microbatch_rule(layout.schedule, layout.pp, layout.virtual_stages, count) is None

    legal = [size for size in sizes if obeys(size)]
    busy = [[size for size in legal if local // size >= n * layout.pp] for n in (4, 1)]
    return next(iter(busy[0] or busy[1] or legal), 1)


_DATA = ("dp_replicate", "dp_shard")


class Unused(NamedTuple):
    """Why some devices are unused, and changes (`legal`) each of which would use all of them."""

    used: int
    devices: int
    reason: str
    legal: tuple[str, ...]

    @property
    def text(self) -> str:
        """The reason as a sentence."""
        advice = f"; {' or '.join(self.legal)} would use all" if self.legal else ""
        return f"{self.used} of {self.devices} devices are used: {self.reason}{advice}"


def left_over(config: Config, layout: Layout, devices: int) -> Unused | None:
    """Return why a config's layout has fewer ranks than there are devices; None if it uses all.

    The layout is the result of `resolve_layout` for `devices` devices. If both data-parallel
    degrees are missing, the reason is `train.batch`, from which they follow; otherwise the given
    degrees.
    """
    if layout.world >= devices:
        return None
    section, batch = config.layout, config.train.batch
    data = [key for key in _DATA if getattr(section, key) is not None]
    if not data:
        data_ranks = devices // layout.model_ranks
        lower = batch // data_ranks * data_ranks
        reason = f"train.batch = {batch} does not divide among {data_ranks} data-parallel ranks"
        legal = [f"train.batch={n}" for n in (lower, lower + data_ranks) if n]
        return Unused(layout.world, devices, reason, tuple(legal))
    stated = [key for key in AXES if key in data or (key not in _DATA and getattr(layout, key) > 1)]
    degrees = " and ".join(f"layout.{key} = {getattr(layout, key)}" for key in stated)
    reason = f"{degrees} {'is' if len(stated) == 1 else 'are'} given"
    return Unused(layout.world, devices, reason, tuple(_with_all(config, layout, devices)))


def _with_all(config: Config, layout: Layout, devices: int) -> Iterator[str]:
    """Yield changes of one degree that use all devices: of a data-parallel one, or if none does, of
    tp, cp or pp."""
    for axes in (_DATA, ("tp", "cp", "pp")):
        changes = [text for axis in axes if (text := _grown(config, layout, axis, devices))]
        if changes:
            yield from changes
            return


def _grown(config: Config, layout: Layout, axis: str, devices: int) -> str | None:
    """Return a change of `axis` that uses all devices, with a larger batch if needed.

    None if no degree does, if it breaks a rule, or if ZeRO would then shard nothing.
    """
    degree, odd = divmod(devices * getattr(layout, axis), layout.world)
    free = {"microbatch": 1} if config.layout.microbatch is None else {}
    grown = layout.model_copy(update={axis: degree, **free})
    if odd or (axis in _DATA and unsharded(grown)):
        return None
    batch = -(-config.train.batch // grown.dp) * grown.dp
    if broken(config.model, config.train.model_copy(update={"batch": batch}), grown) is not None:
        return None
    grows = f" train.batch={batch}" if batch != config.train.batch else ""
    return f"layout.{axis}={degree}{grows}"


def unsharded(layout: Layout) -> str | None:
    """Return a sentence about a layout whose ZeRO stage shards nothing; None for others."""
    if not layout.zero or layout.shard_ranks > 1 or layout.offload == "params":
        return None
    problem = f"layout.zero = {layout.zero} shards nothing"
    if layout.dp_replicate == 1:
        return f"{problem}: there is one data-parallel rank, which holds all states of its layers"
    return (
        f"{problem}: layout.dp_shard = 1, and each of {layout.dp_replicate} ranks holds the same; "
        f"layout.dp_shard={layout.dp_replicate} layout.dp_replicate=1 shards over them"
    )
