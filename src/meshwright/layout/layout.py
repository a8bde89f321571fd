"""`Layout`: the parallel degrees and policies of a run. `Mesh`: its named axes in their fixed
order."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from pydantic import Field, ValidationInfo, field_validator

from meshwright.errors import ConfigError, nearest, refusal
from meshwright.spec.kinds import Spec
from meshwright.spec.training import (
    ContextKind,
    Offload,
    Recompute,
    Schedule,
    Zero,
)

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The numbers of ranks along the axes `pp, dp_replicate, dp_shard, cp, tp`; the rank varies
    fastest along the last."""

    shape: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, **degrees: int) -> Mesh:
        """Return the mesh with the given degrees; a missing axis has degree 1."""
        unknown = set(degrees) - set(AXES)
        if unknown:
            raise ValueError(f"unknown mesh axes {sorted(unknown)}; axes are {AXES}")
        pp, replicate, shard, cp, tp = (degrees.get(axis, 1) for axis in AXES)
        return cls((pp, replicate, shard, cp, tp))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.shape[AXES.index(axis)]

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return the coordinates of a rank, by axis name; raises `ValueError` outside the mesh."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.size} ranks")
        by_axis = {}
        for axis, degree in reversed(list(zip(AXES, self.shape, strict=True))):
            rank, by_axis[axis] = divmod(rank, degree)
        return {axis: by_axis[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at some coordinates, by axis name; a missing axis counts as 0."""
        rank = 0
        for axis, degree in zip(AXES, self.shape, strict=True):
            rank = rank * degree + coordinates.get(axis, 0)
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along the given axes, including itself."""
        own_coordinates = self.coordinates(rank)
        choices = product(*(range(self.degree(axis)) for axis in axes))
        return tuple(
            self.rank({**own_coordinates, **dict(zip(axes, indices, strict=True))})
            for indices in choices
        )

    def data_rank(self, rank: int) -> int:
        """Return a rank's index among the shares of the global batch: its index along both dp
        axes."""
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.degree("dp_shard") + coordinates["dp_shard"]


class Layout(Spec):
    """One complete layout: the product of pp, both dp degrees, cp and tp is the number of ranks.

    `microbatch` is in sequences per data-parallel rank. `ep` is not an axis of the mesh: it divides
    the experts over ranks that would hold the same ones, see `alike_ranks`. `etp` is the number of
    tp ranks that split an expert's width: all (None), or 1, then `ep` spans tp ranks as well
    (arXiv:2504.14960, section 3).
    """

    pp: int = Field(default=1, gt=0)
    dp_replicate: int = Field(default=1, gt=0)
    dp_shard: int = Field(default=1, gt=0)
    cp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0)
    etp: int | None = Field(default=None, gt=0)
    zero: Zero = 0
    sp: bool = False
    cp_kind: ContextKind = "ring"
    schedule: Schedule = "1f1b"
    virtual_stages: int = Field(default=1, gt=0)
    microbatch: int = Field(default=1, gt=0)
    recompute: Recompute = "none"
    offload: Offload = "none"

    @field_validator("etp")
    @classmethod
    def _once(cls, etp: int | None, info: ValidationInfo) -> int | None:
        """Store a value equal to tp as None, so that equal layouts compare equal."""
        return None if etp == info.data.get("tp") else etp

    @property
    def mesh(self) -> Mesh:
        """The mesh with the layout's degrees."""
        return Mesh((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def model_ranks(self) -> int:
        """Ranks that together process one sequence: pp x cp x tp."""
        return self.pp * self.cp * self.tp

    @property
    def world(self) -> int:
        """The total number of ranks."""
        return self.dp * self.model_ranks

    @property
    def stages(self) -> int:
        """The number of pipeline stages into which the layers are divided."""
        return self.pp * self.virtual_stages

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO shards the states of one parameter, or of its tp shard; 1 without
        ZeRO.

        Context ranks hold the same weights, so they are included.
        """
        return self.dp_shard * self.cp if self.zero else 1

    def microbatches(self, batch: int) -> int:
        """Return the microbatches of a data-parallel rank in a step with a global batch of `batch`
        sequences."""
        return batch // self.dp // self.microbatch

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold the same shards and sum their gradients: the data and context ranks that
        ZeRO does not shard over."""
        return self.dp_replicate * (1 if self.zero else self.cp)

    @property
    def states_on_host(self) -> bool:
        """Whether the optimizer's states are in host memory."""
        return self.offload in ("optimizer", "params")

    @property
    def alike_ranks(self) -> int:
        """Data and context ranks over which `ep` may divide experts: with ZeRO those that it shards
        over, else all with the same weights.

        Ranks 0 to `ep` - 1 of them together have all experts.
        """
        return self.shard_ranks if self.zero else self.replica_ranks

    @property
    def expert_tp(self) -> int:
        """The number of tp ranks that split an expert's width."""
        return self.tp if self.etp is None else self.etp

    @property
    def folds(self) -> int:
        """The number of tp ranks among those of `ep`; if above 1, each routes its own part of a
        sequence."""
        return 1 if self.etp is None else max(self.tp // self.etp, 1)

    @property
    def expert_data(self) -> int:
        """The number of data and context ranks among those of `ep`."""
        return self.ep // self.folds

    @property
    def expert_shard_ranks(self) -> int:
        """Ranks over which ZeRO shards the states of an expert."""
        return self.shard_ranks // self.expert_data if self.zero else 1

    @property
    def expert_replica_ranks(self) -> int:
        """Ranks that hold the same states of an expert and sum their gradients."""
        return self.replica_ranks if self.zero else self.replica_ranks // self.expert_data

    @property
    def is_pipelined(self) -> bool:
        """Whether microbatches pass through several ranks."""
        return self.pp > 1

    @property
    def label(self) -> str:
        """The layout in a few words, such as `dp2 tp2 sp pp2 1f1b mb4`; `parse` reads it.

        Defaults are left out, except for the microbatch, and the schedule of a pipeline.
        """
        terms = [
            (f"dp{self.dp_replicate}", self.dp_replicate > 1),
            (f"shard{self.dp_shard}", self.dp_shard > 1),
            (f"zero{self.zero}", self.zero > 0),
            (f"tp{self.tp}", self.tp > 1),
            ("sp", self.sp),
            (f"ep{self.ep}", self.ep > 1),
            (f"etp{self.expert_tp}", self.expert_tp != self.tp),
            (f"cp{self.cp}-{self.cp_kind}", self.cp > 1 or self.cp_kind != "ring"),
            (f"pp{self.pp}", self.pp > 1),
            (self.schedule, self.pp > 1 or self.schedule != "1f1b"),
            (f"v{self.virtual_stages}", self.virtual_stages > 1),
            (f"mb{self.microbatch}", True),
            (f"recompute-{self.recompute}", self.recompute != "none"),
            (f"offload-{self.offload}", self.offload != "none"),
        ]
        return " ".join(word for word, is_shown in terms if is_shown)

    @classmethod
    def parse(cls, label: str) -> Layout:
        """Return the layout that a label describes; its words may come in any order.

        Raises `ConfigError` naming a word that is unknown or repeated.
        """
        values: dict[str, Any] = {}
        for word in label.split():
            fields = _read_word(word)
            if not fields:
                legal = nearest(word, _KNOWN_WORDS, 2) or _KNOWN_WORDS[:3]
                rule = f"unknown word {word} in the layout '{label}'"
                raise ConfigError(refusal(rule, legal=legal))
            twice = next((key for key in fields if key in values), None)
            if twice is not None:
                raise ConfigError(f"the layout '{label}' gives layout.{twice} twice")
            values |= fields
        return cls(**values)


_DEGREES = {
    "dp": "dp_replicate",
    "shard": "dp_shard",
    "tp": "tp",
    "ep": "ep",
    "etp": "etp",
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
    """Return the layout keys that a word of a label sets; empty if the word is unknown."""
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
