"""`Layout`: the degrees and policies of one run, resolved and compared with the rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

from pydantic import Field

from meshwright.errors import ConfigError, nearest, refusal
from meshwright.layout.candidates import divisors
from meshwright.layout.mesh import Mesh
from meshwright.layout.rules import broken, nearest_legal
from meshwright.layout.schedules import microbatch_rule
from meshwright.spec.base import Spec
from meshwright.spec.loading import Config
from meshwright.spec.training import (
    ContextKind,
    Offload,
    Recompute,
    Schedule,
    TrainSpec,
    Zero,
)

# Tokens of a microbatch on a rank where none is asked for. On a CPU few are a little faster and
# take half of the memory (docs/log.md); a GPU wants enough rows to fill its multiprocessors.
MICROBATCH_TOKENS: Mapping[str, int] = {"cpu": 1024, "cuda": 16384}


class Machine(NamedTuple):
    """The devices of a node: kind, how many, its CPU cores, a name for people.

    `load` is how many processes wanted a core in the minute before.

    `is_fixed` says whether `devices` is a fact; otherwise it is a default, and a layout that asks
    for more ranks gets them, as processes that share a CPU.
    """

    device: Literal["cpu", "cuda"]
    devices: int
    cores: int
    name: str
    is_fixed: bool
    load: float = 0.0

    def threads(self, ranks: int) -> int:
        """Return how many CPU threads each of the ranks of a node gets."""
        return max(1, self.cores // ranks)


_MOST_MICROBATCHES: Final = 2**16  # each has entries in the table of actions


class Layout(Spec):
    """One layout, complete: the product of its degrees is the number of ranks.

    `microbatch` is in sequences per data-parallel rank. `ep` is no axis of the mesh: it divides the
    ranks that would hold the same experts, see `alike_ranks`.
    """

    pp: int = Field(default=1, gt=0)
    dp_replicate: int = Field(default=1, gt=0)
    dp_shard: int = Field(default=1, gt=0)
    cp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0)
    zero: Zero = 0
    sp: bool = False
    cp_kind: ContextKind = "ring"
    schedule: Schedule = "1f1b"
    virtual_stages: int = Field(default=1, gt=0)
    microbatch: int = Field(default=1, gt=0)
    recompute: Recompute = "none"
    offload: Offload = "none"

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout's degrees."""
        return Mesh((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def model_ranks(self) -> int:
        """Ranks that work on one sequence together."""
        return self.pp * self.cp * self.tp

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.model_ranks

    @property
    def stages(self) -> int:
        """Parts that the model is cut into by layers."""
        return self.pp * self.virtual_stages

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO spreads the states of one parameter (of one tensor-parallel part).

        Context ranks hold the same weights, so they share them too.
        """
        return self.dp_shard * self.cp if self.zero else 1

    def microbatches(self, batch: int) -> int:
        """Return the microbatches of a data-parallel rank in a step of so many sequences."""
        return batch // self.dp // self.microbatch

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold the same states and sum their gradients: the rest of the data ranks."""
        return self.dp_replicate * (1 if self.zero else self.cp)

    @property
    def alike_ranks(self) -> int:
        """Ranks of data that hold the same weights, or ZeRO's shards of them: `ep` divides these.

        Neighbours first: rank 0 to `ep` - 1 of them have all experts between them.
        """
        return self.shard_ranks if self.zero else self.replica_ranks

    @property
    def expert_shard_ranks(self) -> int:
        """Ranks over which ZeRO spreads the states of an expert."""
        return self.shard_ranks // self.ep if self.zero else 1

    @property
    def expert_replica_ranks(self) -> int:
        """Ranks that hold the same states of an expert and sum their gradients."""
        return self.replica_ranks if self.zero else self.replica_ranks // self.ep

    @property
    def is_pipelined(self) -> bool:
        """Whether microbatches pass through several ranks."""
        return self.pp > 1

    @property
    def label(self) -> str:
        """The layout in a few words, such as `dp2 tp2 sp pp2 1f1b mb4`; `parse` reads it.

        Defaults are left out, but for the microbatch, and the schedule of a pipeline.
        """
        words = [
            (f"dp{self.dp_replicate}", self.dp_replicate > 1),
            (f"shard{self.dp_shard}", self.dp_shard > 1),
            (f"zero{self.zero}", self.zero > 0),
            (f"tp{self.tp}", self.tp > 1),
            ("sp", self.sp),
            (f"ep{self.ep}", self.ep > 1),
            (f"cp{self.cp}-{self.cp_kind}", self.cp > 1 or self.cp_kind != "ring"),
            (f"pp{self.pp}", self.pp > 1),
            (self.schedule, self.pp > 1 or self.schedule != "1f1b"),
            (f"v{self.virtual_stages}", self.virtual_stages > 1),
            (f"mb{self.microbatch}", True),
            (f"recompute-{self.recompute}", self.recompute != "none"),
            (f"offload-{self.offload}", self.offload != "none"),
        ]
        return " ".join(word for word, is_shown in words if is_shown)

    @classmethod
    def parse(cls, label: str) -> Layout:
        """Return the layout that a label describes; its words may come in any order.

        Raises `ConfigError` naming the word that is unknown or says something twice.
        """
        values: dict[str, Any] = {}
        for word in label.split():
            found = _read_word(word)
            if not found:
                legal = nearest(word, _KNOWN_WORDS, 2) or _KNOWN_WORDS[:3]
                rule = f"unknown word {word} in the layout '{label}'"
                raise ConfigError(refusal(rule, legal=legal))
            twice = next((key for key in found if key in values), None)
            if twice is not None:
                raise ConfigError(f"the layout '{label}' gives layout.{twice} twice")
            values |= found
        return cls(**values)


_DEGREES = {
    "dp": "dp_replicate",
    "shard": "dp_shard",
    "tp": "tp",
    "ep": "ep",
    "cp": "cp",
    "pp": "pp",
    "v": "virtual_stages",
    "mb": "microbatch",
}
_WORDS: Mapping[str, Mapping[str, Any]] = {
    "sp": {"sp": True},
    **{f"zero{stage}": {"zero": stage} for stage in get_args(Zero)},
    **{name: {"schedule": name} for name in get_args(Schedule)},
    **{f"recompute-{name}": {"recompute": name} for name in get_args(Recompute)},
    **{f"offload-{name}": {"offload": name} for name in get_args(Offload)},
}
_CP_KINDS = get_args(ContextKind)
_KNOWN_WORDS = [*(f"{name}2" for name in _DEGREES), *(f"cp2-{k}" for k in _CP_KINDS), *_WORDS]


def _read_word(word: str) -> Mapping[str, Any]:
    """Return the values that a word of a label gives; none where it is unknown."""
    if word in _WORDS:
        return _WORDS[word]
    name, dash, kind = word.partition("-")
    degree = re.fullmatch(r"([a-z]+)([1-9][0-9]{0,99})", name)
    if degree is None or degree[1] not in _DEGREES:
        return {}
    values: dict[str, Any] = {_DEGREES[degree[1]]: int(degree[2])}
    if dash:
        if degree[1] != "cp" or kind not in _CP_KINDS:
            return {}
        values["cp_kind"] = kind
    return values


_DATA_DEGREES = ("dp_replicate", "dp_shard")


def resolve_layout(config: Config, machine: Machine) -> Layout:
    """Return the layout that a config asks for on a machine.

    Where both data-parallel degrees were left out, `dp_shard` (with `zero` 0 `dp_replicate`) takes
    the devices that remain, as far as the batch divides. One that is left out alone is 1.
    Raises `ConfigError` naming the rule, both numbers and the nearest legal values.
    """
    section = config.layout
    left_out = {key for key in (*_DATA_DEGREES, "microbatch") if getattr(section, key) is None}
    given = Layout(**section.model_dump(exclude={"auto", *left_out}))

    def settle(train: TrainSpec, layout: Layout, changed: Collection[str]) -> Layout | None:
        free = {key for key in left_out if f"layout.{key}" not in changed}
        return _complete(train, layout, free, machine, config.cluster.nodes)

    layout = settle(config.train, given, ())
    if layout is None:
        raise ConfigError(
            refusal(
                f"the layout needs a multiple of {given.world} ranks (pp {given.pp} x dp_replicate "
                f"{given.dp_replicate} x dp_shard {given.dp_shard} x cp {given.cp} "
                f"x tp {given.tp}), but there are {machine.devices * config.cluster.nodes} "
                f"{machine.device} devices",
            )
        )
    rule = broken(config.model, config.train, layout)
    if rule is not None:
        legal = nearest_legal(config.model, config.train, layout, settle=settle)
        raise ConfigError(refusal(rule, legal=legal))
    each = layout.dp * layout.microbatch
    if config.train.batch > each * _MOST_MICROBATCHES:
        what = f"train.batch = {config.train.batch} is {config.train.batch // each} microbatches"
        legal = [f"train.batch = {each * _MOST_MICROBATCHES}"]
        raise ConfigError(refusal(f"{what}; a step has at most {_MOST_MICROBATCHES}", legal=legal))
    return layout


def _complete(
    train: TrainSpec, layout: Layout, left_out: set[str], machine: Machine, nodes: int
) -> Layout | None:
    """Return the layout with what was left out filled in, or None if the devices do not fit it."""
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
        rest = devices // bare.model_ranks
        degree = max(d for d in divisors(train.batch) if d <= rest)
        changes["dp_shard" if bare.zero else "dp_replicate"] = degree
    filled = bare.model_copy(update=changes)
    if "microbatch" not in left_out:
        return filled
    return filled.model_copy(update={"microbatch": _microbatch(train, filled, machine)})


def _microbatch(train: TrainSpec, layout: Layout, machine: Machine) -> int:
    """Return the largest divisor of a rank's share of the batch that stays within the budget.

    The budget is of the tokens that a rank has itself, of a sequence cut over cp or sp its part.
    A pipeline gets as many microbatches as its schedule asks for, and four for each of its ranks if
    it can, which leaves a fifth to the bubble of 1F1B, or one for each.
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
