"""The process groups of a layout: one for each axis that a rank communicates along."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.execute.world import World
from meshwright.layout import Layout, Mesh


@dataclass(frozen=True)
class Link:
    """The ranks along one axis or some, and this rank's place among them; `size` 1 has no group."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The group's name, as torch's functional collectives want it."""
        assert self.group is not None
        return self.group.group_name

    @property
    def required(self) -> dist.ProcessGroup:
        """The group, where there is known to be one."""
        assert self.group is not None
        return self.group


@dataclass(frozen=True)
class Groups:
    """All that a rank communicates through.

    `parameters` is torch's mesh with the axes `pp, replicate, shard, tp` on which the parameters
    lie: `shard` joins dp_shard and cp, or `replicate` joins dp_replicate and cp without ZeRO, since
    ranks of one context group hold gradients of the same weights. `data` are the ranks that see
    different tokens. `ends` are the first and the last pipeline rank, which share tied weights.
    """

    at: Mapping[str, int]
    parameters: DeviceMesh
    tp: Link
    cp: Link
    pp: Link
    data: Link
    ends: Link


def open_groups(layout: Layout, world: World, timeout_s: float = 600.0) -> Groups:
    """Return the groups of a layout; a collective, which every rank of the world must call."""
    shape = (
        layout.pp,
        layout.dp_replicate * (1 if layout.zero else layout.cp),
        layout.dp_shard * layout.cp if layout.zero else 1,
        layout.tp,
    )
    parameters = init_device_mesh(
        world.device.type, shape, mesh_dim_names=("pp", "replicate", "shard", "tp")
    )
    timeout = datetime.timedelta(seconds=timeout_s)
    for name in ("pp", "replicate", "shard", "tp"):
        # A group of a mesh does not inherit the time-out of the world; gloo's own is 30 minutes.
        dist.distributed_c10d._set_pg_timeout(timeout, parameters.get_group(name))
    mesh = layout.mesh

    def link(*axes: str, of: str | None = None) -> Link:
        ranks = mesh.group(world.rank, axes)
        group = None
        if len(ranks) > 1:
            everyone = sorted({mesh.group(rank, axes) for rank in range(mesh.size)})
            group = parameters.get_group(of) if of else _create(everyone, timeout)
        return Link(group, ranks, ranks.index(world.rank))

    return Groups(
        mesh.coordinates(world.rank),
        parameters,
        tp=link("tp", of="tp"),
        cp=link("cp"),
        pp=link("pp", of="pp"),
        data=link("dp_replicate", "dp_shard", "cp"),
        ends=_ends(mesh, world, timeout),
    )


def _ends(mesh: Mesh, world: World, timeout: datetime.timedelta) -> Link:
    """Return the link between the first and the last stage; a rank between them is alone."""
    columns = {mesh.group(rank, ("pp",)) for rank in range(mesh.size)}
    pairs = sorted({(column[0], column[-1]) for column in columns if column[0] != column[-1]})
    mine = [pair for pair in pairs if world.rank in pair]
    if not pairs:
        return Link(None, (world.rank,), 0)
    group = _create(pairs, timeout)
    return Link(group, mine[0], mine[0].index(world.rank)) if mine else Link(None, (world.rank,), 0)


def _create(
    everyone: Sequence[tuple[int, ...]], timeout: datetime.timedelta
) -> dist.ProcessGroup | None:
    """Return this rank's group of those that every rank creates together, in one order."""
    group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        [list(ranks) for ranks in everyone], timeout
    )
    return cast(dist.ProcessGroup | None, group)
