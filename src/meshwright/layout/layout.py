"""`Layout`: the degrees and policies of one run, resolved and held against the rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from meshwright.errors import ConfigError, nearest_divisors, refusal
from meshwright.layout.mesh import Mesh
from meshwright.spec.loading import Config
from meshwright.spec.model import Spec

# Tokens of one microbatch where none is asked for. On a CPU few are a little faster and take half
# of the memory (docs/log.md has the sweep); a GPU wants enough rows to fill its multiprocessors.
MICROBATCH_TOKENS: Mapping[str, int] = {"cpu": 1024, "cuda": 16384}


class Machine(NamedTuple):
    """The devices of a node: kind, how many, its CPU cores, a name for people.

    `is_fixed` says whether `devices` is a fact; otherwise it is a default, and a layout that asks
    for more ranks gets them, as processes that share a CPU.
    """

    device: Literal["cpu", "cuda"]
    devices: int
    cores: int
    name: str
    is_fixed: bool

    def threads(self, ranks: int) -> int:
        """Return how many CPU threads each of the ranks of a node gets."""
        return max(1, self.cores // ranks)


class Layout(Spec):
    """One layout, complete: the product of its degrees is the number of ranks.

    `microbatch` is in sequences per data-parallel rank.
    """

    pp: int = Field(default=1, gt=0)
    dp_replicate: int = Field(default=1, gt=0)
    dp_shard: int = Field(default=1, gt=0)
    cp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    zero: Literal[0, 1, 2, 3] = 0
    sp: bool = False
    cp_kind: Literal["ring", "ulysses"] = "ring"
    schedule: str = "1f1b"
    virtual_stages: int = Field(default=1, gt=0)
    microbatch: int = Field(default=1, gt=0)
    recompute: Literal["none", "selective", "full"] = "none"
    offload: Literal["none", "optimizer", "params"] = "none"

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout's degrees."""
        return Mesh((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.mesh.size


def resolve_layout(config: Config, machine: Machine) -> Layout:
    """Return the layout that a config asks for on a machine.

    A data-parallel degree that was left out takes the devices that remain, as far as the batch
    divides. Raises `ConfigError` naming the rule, both numbers and the nearest legal values.
    """
    section = config.layout
    devices = machine.devices * config.cluster.nodes
    model_ranks = section.pp * section.cp * section.tp
    fixed = model_ranks * (section.dp_replicate or 1) * (section.dp_shard or 1)
    if not machine.is_fixed:
        devices = max(devices, fixed)
    asked = section.dp_replicate is not None or section.dp_shard is not None
    if fixed > devices or (not asked and devices % model_ranks):
        raise ConfigError(
            refusal(
                f"the layout needs a multiple of {fixed} ranks (pp {section.pp} x dp_replicate "
                f"{section.dp_replicate or 1} x dp_shard {section.dp_shard or 1} x cp {section.cp} "
                f"x tp {section.tp}), but there are {devices} {machine.device} devices",
            )
        )
    free = 1 if asked else _largest_divisor(config.train.batch, devices // model_ranks)
    shards = section.zero > 0
    layout = Layout(
        **section.model_dump(exclude={"auto", "dp_replicate", "dp_shard", "microbatch"}),
        dp_replicate=section.dp_replicate or (1 if shards else free),
        dp_shard=section.dp_shard or (free if shards else 1),
    )
    microbatch = section.microbatch or _microbatch(config, layout, machine)
    layout = layout.model_copy(update={"microbatch": microbatch})
    _check(config, layout)
    return layout


def _microbatch(config: Config, layout: Layout, machine: Machine) -> int:
    """Return the largest divisor of a rank's share of the batch that stays within the budget."""
    local = config.train.batch // layout.dp
    budget = max(1, MICROBATCH_TOKENS[machine.device] // config.train.seq_len)
    return _largest_divisor(max(local, 1), budget)


def _largest_divisor(value: int, at_most: int) -> int:
    return max(d for d in range(1, max(at_most, 1) + 1) if value % d == 0)


def _check(config: Config, layout: Layout) -> None:
    """Raise `ConfigError` for the first rule that the layout breaks."""
    model, train = config.model, config.train
    _divides("layout.tp", layout.tp, "model.n_heads", model.n_heads)
    _divides("layout.tp", layout.tp, "model.n_kv_heads", model.n_kv_heads)
    _divides("layout.tp", layout.tp, "model.ffn_dim", model.ffn_dim)
    _divides("layout.tp", layout.tp, "model.vocab_size", model.vocab_size)
    stages = layout.pp * layout.virtual_stages
    if stages > model.n_layers:
        raise ConfigError(
            refusal(
                f"layout.pp = {layout.pp} x layout.virtual_stages = {layout.virtual_stages} gives "
                f"{stages} stages, but model.n_layers = {model.n_layers}",
                legal=[f"pp = {max(1, model.n_layers // layout.virtual_stages)}"],
            )
        )
    dp = layout.dp
    if train.batch % dp:
        legal = sorted({max(dp, train.batch // dp * dp), (train.batch // dp + 1) * dp})
        raise ConfigError(
            refusal(
                f"train.batch = {train.batch} must be a multiple of the data-parallel degree {dp} "
                f"(dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard})",
                legal=[f"train.batch = {n}" for n in legal],
            )
        )
    _divides("layout.microbatch", layout.microbatch, "train.batch per data rank", train.batch // dp)
    _refuse_unavailable(layout)


def _divides(name: str, value: int, of_name: str, of: int) -> None:
    if of % value:
        legal = [f"{name} = {d}" for d in nearest_divisors(of, value)]
        raise ConfigError(refusal(f"{name} = {value} must divide {of_name} = {of}", legal=legal))


def _refuse_unavailable(layout: Layout) -> None:
    """Refuse what this version describes but does not run yet: all but replicated data."""
    default = Layout(dp_replicate=layout.dp_replicate, microbatch=layout.microbatch)
    for key in Layout.model_fields:
        value, needed = getattr(layout, key), getattr(default, key)
        if value != needed:
            raise ConfigError(
                refusal(
                    f"layout.{key} = {value} is a legal layout, but version 0.1 trains with "
                    f"replicated data parallelism only",
                    legal=[f"layout.{key} = {needed}"],
                )
            )
