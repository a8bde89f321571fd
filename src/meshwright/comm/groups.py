"""The process groups of a layout: one for each axis along which a rank communicates."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.flight_recorder import FlightRecorder, Pending
from meshwright.comm.shared import Open, share
from meshwright.comm.world import World
from meshwright.layout import Layout, Mesh
from meshwright.program.messages import goes_by_channel
from meshwright.program.schedule import stage_ranks


@dataclass(frozen=True)
class Link:
    """The ranks along one axis or several, and this rank's index (`rank`) among them.

    `group` is None if there is one rank. `in_pieces`: messages of compiled code overlap with
    matmuls in pieces, see `async_tp`. `channel` is the group's channel through shared memory, None
    without one.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    channel: Open | None = field(default=None, compare=False, repr=False)
    in_pieces: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether messages go through shared memory."""
        return self.channel is not None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The group's name, which torch's functional collectives take."""
        assert self.group is not None
        return self.group.group_name

    @property
    def required(self) -> dist.ProcessGroup:
        """The group; asserts that there is one."""
        assert self.group is not None
        return self.group


@dataclass(frozen=True)
class ExpertGroups:
    """The groups and the mesh of experts' parameters, if ranks divide the experts.

    `parameters` is torch's mesh with the axes `pp, replicate, shard, ep, tp`, on which they are
    placed. `ep` are ranks that together have all experts; `shard` and `replicate` are like those of
    `Groups`, among ranks with the same experts. The mesh's `tp` are the ranks that split an
    expert's width: this rank alone if tp ranks are among those of `ep`.
    """

    parameters: DeviceMesh
    ep: Link
    shard: Link
    replicate: Link


@dataclass(frozen=True)
class Groups:
    """All groups in which a rank communicates; `at` are its coordinates.

    `parameters` is torch's mesh with the axes `pp, replicate, shard, tp` on which parameters are
    placed: `shard` joins dp_shard and cp; without ZeRO, `replicate` joins dp_replicate and cp,
    because ranks of one context group hold gradients of the same weights, and `shard` has one rank.
    The others are process groups, with this rank's place in each: `data` of the ranks that see
    different tokens, dp_replicate x dp_shard x cp, and `ends` of the first and the last pipeline
    rank, which share tied weights. `experts` are those in which tokens go to experts and back; None
    if each rank has all experts. `recorder` is this rank's flight recorder.
    """

    at: Mapping[str, int]
    parameters: DeviceMesh
    tp: Link
    cp: Link
    pp: Link
    shard: Link
    replicate: Link
    data: Link
    ends: Link
    experts: ExpertGroups | None = None
    recorder: FlightRecorder = field(default_factory=FlightRecorder)


def open_groups(layout: Layout, world: World, timeout_s: float = 600.0) -> Groups:
    """Return the groups of a layout; a collective, which every rank of the world must call.

    Reuses groups of earlier layouts: each has threads and connections, which add up over many
    layouts.
    """
    mesh, opener = layout.mesh, _Opener(world, datetime.timedelta(seconds=timeout_s))
    shape = (
        layout.pp,
        layout.replica_ranks,
        layout.shard_ranks,
        layout.tp,
    )
    # The mesh's groups come first, so that equal shapes have equal groups: torch caches by shape.
    parameters = opener.mesh(shape, ("pp", "replicate", "shard", "tp"))

    def link(*axes: str, mesh_axis: str | None = None) -> Link:
        ranks = mesh.group(world.rank, axes)
        group = None
        if len(ranks) > 1:
            everyone = sorted({mesh.group(rank, axes) for rank in range(mesh.size)})
            group = parameters.get_group(mesh_axis) if mesh_axis else opener.open(everyone)
        return Link(group, ranks, ranks.index(world.rank))

    links = {
        "tp": link("tp", mesh_axis="tp"),
        "cp": link("cp"),
        "pp": link("pp", mesh_axis="pp"),
        "shard": link(*(("dp_shard", "cp") if layout.zero else ()), mesh_axis="shard"),
        "replicate": link(
            *(("dp_replicate",) if layout.zero else ("dp_replicate", "cp")), mesh_axis="replicate"
        ),
        "data": link("dp_replicate", "dp_shard", "cp"),
        "ends": _ends(mesh, world, opener),
    }
    links |= {
        axis: _shared(link, world, timeout_s)
        for axis, link in links.items()
        if goes_by_channel(axis)
    }
    coordinates = mesh.coordinates(world.rank)
    experts = None
    if layout.ep > 1:
        experts = _of_experts(layout, world, opener, parameters)
    groups = Groups(coordinates, parameters, **links, experts=experts, recorder=world.recorder)
    _label(groups)
    if world.device.type == "cuda":
        warm(groups, layout, world.device)
    return groups


def _of_experts(layout: Layout, world: World, opener: _Opener, plain: DeviceMesh) -> ExpertGroups:
    """Return the groups of experts, for a layout with expert parallelism."""
    names = ("pp", "replicate", "shard", "ep", "tp")
    sizes = (layout.expert_replica_ranks, layout.expert_shard_ranks, layout.ep)
    shared = ("pp", "tp") if layout.folds == 1 else ("pp",)
    known = {axis: plain.get_group(axis) for axis in shared}
    shape = (layout.pp, *sizes, layout.expert_tp)
    parameters = opener.mesh(shape, names, known)
    ranks = torch.arange(layout.world).view(shape)
    links = {}
    for dim, axis in enumerate(names):
        rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        row = next(row for row in rows if world.rank in row)
        group = parameters.get_group(axis) if len(row) > 1 else None
        links[axis] = Link(group, tuple(row), row.index(world.rank))
    return ExpertGroups(parameters, links["ep"], links["shard"], links["replicate"])


def _shared(link: Link, world: World, timeout_s: float) -> Link:
    """Return the link with a shared-memory channel added, if its CPU ranks are on one machine."""
    on_gloo = world.device.type == "cpu" and "gloo" in dist.get_backend()
    nodes = {world.node(rank) for rank in link.ranks}
    if link.group is None or not on_gloo or len(nodes) > 1:
        return link
    return replace(link, channel=share(link.group, world.recorder, timeout_s))


def _label(groups: Groups) -> None:
    """Record the axis of each group in the flight recorder."""
    by_axis = {"world": cast(dist.ProcessGroup, dist.group.WORLD)}
    for axis in ("replicate", "shard", "tp", "cp", "pp", "data", "ends"):
        link: Link = getattr(groups, axis)
        if link.group is not None:
            by_axis[axis] = link.group
    if groups.experts is not None:
        of_experts = {
            "ep": groups.experts.ep,
            "expert_shard": groups.experts.shard,
            "expert_replicate": groups.experts.replicate,
        }
        by_axis |= {axis: link.group for axis, link in of_experts.items() if link.group is not None}
    for axis, group in by_axis.items():
        if group.size() > 1:
            groups.recorder.group(group.group_name, dist.get_process_group_ranks(group), axis)


def pairs_of(ranks_of_stage: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of pipeline ranks that send to each other, sorted, the lower rank first."""
    pairs = {(min(pair), max(pair)) for pair in pairwise(ranks_of_stage)}
    return sorted(pair for pair in pairs if pair[0] != pair[1])


def warm(groups: Groups, layout: Layout, device: torch.device) -> None:
    """Create the communicators of all groups and pairs before they are needed; a collective.

    NCCL creates one at its first use, and blocks the host until all its ranks have arrived: one for
    each group, and one for each pair of ranks that send to each other. In a step, the ranks of a
    pipeline reach their pairs in different orders, and some would wait forever. Here, all reach
    them in the same order, and a broken link shows before the first step.

    Each group is one of several that partition the world, so every rank uses the same groups first.
    Pairs are used in sorted order; the first pair that doesn't exist yet never waits.
    """
    message = torch.zeros(1, device=device)
    for group in _collective(groups):
        dist.all_reduce(message, group=group)
    for pair in pairs_of(stage_ranks(layout.schedule, layout.pp, layout.virtual_stages)):
        if groups.pp.rank not in pair:
            continue
        lower, higher = (groups.pp.ranks[place] for place in pair)
        is_lower = groups.pp.rank == pair[0]
        work = (
            dist.isend(message, higher, groups.pp.group)
            if is_lower
            else dist.irecv(message, lower, groups.pp.group)
        )
        Pending(groups.recorder, work).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collective(groups: Groups) -> Iterator[dist.ProcessGroup]:
    """Yield this rank's groups of more than one rank, each once, in the same order on all ranks."""
    links = [groups.tp, groups.cp, groups.pp, groups.shard, groups.replicate, groups.data]
    if groups.experts is not None:
        links += [groups.experts.ep, groups.experts.shard, groups.experts.replicate]
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    candidates = [world, *(link.group for link in (*links, groups.ends))]
    by_name = {group.group_name: group for group in candidates if group is not None}
    yield from (group for group in by_name.values() if group.size() > 1)


def _ends(mesh: Mesh, world: World, opener: _Opener) -> Link:
    """Return the link between the first and the last pipeline rank; other ranks are alone in
    theirs."""
    columns = {mesh.group(rank, ("pp",)) for rank in range(mesh.size)}
    pairs = sorted({(column[0], column[-1]) for column in columns if column[0] != column[-1]})
    joined = [pair for pair in pairs if world.rank in pair]
    if not pairs:
        return Link(None, (world.rank,), 0)
    group = opener.open(pairs)
    return (
        Link(group, joined[0], joined[0].index(world.rank))
        if joined
        else Link(None, (world.rank,), 0)
    )


class _Opener:
    """Opens the groups of one layout, or reuses those of the world; no two axes share a group.

    If two axes of the same ranks shared a group, the transfers of one would wait for the other's.
    """

    def __init__(self, world: World, timeout: datetime.timedelta) -> None:
        self._world, self._timeout = world, timeout
        self._uses: Counter[tuple[tuple[int, ...], ...]] = Counter()

    def open(self, everyone: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """Open a group for each set of ranks, in the same order on all ranks; return the one with
        this rank."""
        parts = tuple(everyone)
        key = (parts, self._uses[parts])
        if any(len(ranks) > 1 for ranks in parts):  # a rank alone sends nothing
            self._uses[parts] += 1
        opened = self._world.opened
        if key not in opened:
            group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                [list(ranks) for ranks in parts], self._timeout
            )
            opened[key] = group
        return opened[key]

    def mesh(
        self,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        known: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> DeviceMesh:
        """Return a device mesh over all ranks; `known` has existing groups for some of its axes."""
        ranks = torch.arange(math.prod(shape)).view(shape)
        groups = []
        for dim, size in enumerate(shape):
            if known and names[dim] in known:
                groups.append(known[names[dim]])
                continue
            rows = ranks.movedim(dim, -1).reshape(-1, size).tolist()
            groups.append(cast(dist.ProcessGroup, self.open([tuple(row) for row in rows])))
        return DeviceMesh.from_group(groups, self._world.device.type, ranks, mesh_dim_names=names)
