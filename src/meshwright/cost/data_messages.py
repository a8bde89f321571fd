"""Seconds of data-parallel messages: ZeRO's gathers and reductions of each microbatch, and the
messages sent once per step.

The messages are those of `program.zero_collectives`; tests compare the sums. A unit is a group of
weights that ZeRO gathers together: a layer, the embedding, or the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.cost.elements import elements_of, gathered_elements, gathered_weights, weights
from meshwright.cost.inputs import CostInputs
from meshwright.cost.kernels import Kernels, Seconds
from meshwright.cost.microbatch import MicrobatchTimes
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout
from meshwright.program.float8 import LARGEST_BYTES, float8_weights, gathers_float8
from meshwright.program.messages import CollectiveKind


class EndWaits(NamedTuple):
    """Seconds that the embedding or the head waits for ZeRO's messages in a forward and in a
    backward."""

    forward: float = 0.0
    backward: float = 0.0


class Waits(NamedTuple):
    """Seconds that a microbatch waits for ZeRO's messages, in a forward and in a backward.

    `forward` and `backward` have a layer of each kind, `first` has the embedding, `last` the final
    norm and the head. `is_joined`: on a rank that has both, the embedding is gathered with the
    head.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    first: EndWaits = EndWaits()
    last: EndWaits = EndWaits()
    is_joined: bool = False

    def passes(self, held_layers: RankLayers) -> tuple[float, float]:
        """Return the seconds of waiting in a forward and in a backward of a pipeline rank with
        these layers."""
        forward = backward = 0.0
        if held_layers.has_head:
            forward, backward = self.last
        if held_layers.has_embedding and not (self.is_joined and held_layers.has_head):
            forward, backward = forward + self.first.forward, backward + self.first.backward
        return held_layers.total(self.forward) + forward, held_layers.total(
            self.backward
        ) + backward

    def of(self, held_layers: RankLayers) -> float:
        """Return the seconds of waiting in forward and backward together."""
        return sum(self.passes(held_layers))


class _Peers(NamedTuple):
    """The ranks with which a rank exchanges `elements` elements of weights or gradients.

    For sharding and for replication: the name of the axis, the number of ranks, and the distance
    between their numbers.
    """

    elements: float
    shard: str
    shards: int
    shard_stride: int
    replicate: str
    replicas: int
    replica_stride: int


def _peers(layout: Layout, plain: float, experts: float) -> Iterator[_Peers]:
    """Yield the data-parallel ranks for `plain` elements, and those for the elements of `experts`,
    which differ with expert parallelism."""
    tp, ranks, replicas = layout.tp, layout.shard_ranks, layout.replica_ranks
    yield _Peers(plain, "shard", ranks, tp, "replicate", replicas, tp * ranks)
    if experts:
        ranks, replicas = layout.expert_shard_ranks, layout.expert_replica_ranks
        apart = layout.expert_tp * layout.ep
        names = "expert_shard", "expert_replicate"
        yield _Peers(experts, names[0], ranks, apart, names[1], replicas, apart * ranks)


class EndSeconds(NamedTuple):
    """Seconds of ZeRO's messages for the embedding or the head: a gather in each pass, and a
    reduction."""

    forward: float = 0.0
    backward: float = 0.0
    reduce: float = 0.0


class UnitSeconds(NamedTuple):
    """Seconds of ZeRO's messages of a microbatch: the gather and the reduction of a layer, and
    those of the ends.

    `host` is the host's overhead of a layer in one pass. `first`, `last` and `is_joined` are as in
    `Waits`.
    """

    gather: float
    reduce: float
    host: float
    first: EndSeconds = EndSeconds()
    last: EndSeconds = EndSeconds()
    is_joined: bool = False

    @property
    def is_none(self) -> bool:
        """Whether layers have no such messages."""
        return not self.gather and not self.reduce

    @property
    def largest(self) -> tuple[float, ...]:
        """The seconds of a layer, of the embedding and of the head, by which ZeRO choices are
        compared."""
        return self.gather + self.reduce, sum(self.first), sum(self.last)


def unit_messages(setting: CostInputs, kernels: Kernels, layout: Layout) -> UnitSeconds:
    """Return the seconds of ZeRO's messages in a microbatch; 0 below ZeRO-2, or with a single
    sharding rank."""
    ranks, zero = layout.shard_ranks, layout.zero
    if ranks == 1 or zero < 2:
        return UnitSeconds(0.0, 0.0, 0.0)
    model, network, gather, reduce = setting.model, kernels.network, 0.0, 0.0
    unit_weights = gathered_weights(setting, layout)
    experts, kind = max(unit_weights.experts), gathering(setting, layout)
    for peers in _peers(layout, unit_weights.layer - experts, experts) if zero == 3 else ():
        among = peers.shards, peers.shard_stride, peers.shard
        gather += network.seconds(kind, peers.elements * setting.element, *among)
    unit_weights = weights(model, layout.tp, ranks, layout.ep, layout.etp, which="trained")
    for peers in _peers(
        layout, unit_weights.layer - max(unit_weights.experts), max(unit_weights.experts)
    ):
        among = peers.shards, peers.shard_stride, peers.shard
        size = peers.elements * setting.reduced_bytes
        reduce += network.seconds(reduction(setting, layout), size, *among)
    by_fsdp2 = setting.target.uses_fsdp2(layout)  # takes up a unit in either pass
    is_joined = model.tie_embeddings and by_fsdp2
    ends = _ends(setting, kernels, layout)
    return UnitSeconds(gather, reduce, kernels.per_unit / 2 if by_fsdp2 else 0.0, *ends, is_joined)


def _ends(setting: CostInputs, kernels: Kernels, layout: Layout) -> tuple[EndSeconds, EndSeconds]:
    """Return the seconds of ZeRO's messages for the embedding, and for the last norm and the head.

    Without FSDP2, the ends are gathered once per step (`program.zero_collectives`) and not here.
    Unless `System.parts_ends`, both passes gather an end.
    """
    model, zero, network = setting.model, layout.zero, kernels.network
    by_fsdp2 = setting.target.uses_fsdp2(layout)
    among = layout.shard_ranks, layout.tp, "shard"

    def gather(*units: int) -> float:
        if zero < 3 or not by_fsdp2:
            return 0.0
        kind = gathering(setting, layout)
        return sum(network.seconds(kind, elements * setting.element, *among) for elements in units)

    def reduce(*units: int) -> float:
        kind, element_bytes = reduction(setting, layout), setting.reduced_bytes
        return sum(network.seconds(kind, elements * element_bytes, *among) for elements in units)

    cut = weights(model, layout.tp, layout.shard_ranks, layout.ep, layout.etp)
    trained = weights(model, layout.tp, layout.shard_ranks, layout.ep, layout.etp, which="trained")
    if not by_fsdp2 or model.tie_embeddings or not setting.system.parts_ends:
        # The last end's own, and what is tied to it where FSDP2 has both in one unit.
        joined = model.tie_embeddings and by_fsdp2
        last_end, sums = (
            part.norm + part.head + part.embedding * joined for part in (cut, trained)
        )
        first, last = gather(cut.embedding), gather(last_end)
        return (
            EndSeconds(first, first, reduce(trained.embedding)),
            EndSeconds(last, last, reduce(sums)),
        )
    return (
        EndSeconds(gather(cut.embedding), 0.0, reduce(trained.embedding)),
        EndSeconds(
            gather(cut.norm), gather(cut.norm, cut.head), reduce(trained.norm, trained.head)
        ),
    )


def gathering(setting: CostInputs, layout: Layout) -> str:
    """Return the kind of collective in `cost.network` by which ZeRO gathers the weights of a
    unit."""
    return "all_gather" if setting.target.uses_fsdp2(layout) else "rows"


def reduction(setting: CostInputs, layout: Layout) -> CollectiveKind:
    """Return the kind of collective that reduces gradients over the ranks that ZeRO shards over."""
    return "reduce_scatter" if setting.target.uses_fsdp2(layout) else "all_to_all"


def unit_waits(kernels: Kernels, unit: UnitSeconds, parts: MicrobatchTimes) -> Waits:
    """Return the seconds that the layers and ends of a microbatch wait for ZeRO's gathers and
    reductions.

    A unit is gathered while the previous one computes, and reduced while the next one does, so the
    longer of the two counts (FSDP2's prefetch, arXiv:2304.11277, section 3.3). The embedding is
    gathered before anything computes, and its reduction overlaps with a layer's forward of the next
    microbatch.
    """
    gather, reduce, host, first, last, is_joined = unit
    if unit.is_none:
        nothing = (0.0,) * len(parts.layers)
        return Waits(nothing, nothing)

    def wait(sent: float, computed: float) -> float:
        return sent - kernels.overlap * min(sent, computed)

    def backward(seconds: Seconds) -> float:
        return seconds.backward + seconds.recompute + seconds.tp_backward + seconds.tp_recompute

    before, after = parts.layers[0], parts.last
    return Waits(
        tuple(
            wait(gather, seconds.forward + seconds.tp_forward) + host for seconds in parts.layers
        ),
        tuple(wait(gather + reduce, backward(seconds)) + host for seconds in parts.layers),
        EndWaits(first.forward, wait(first.backward + first.reduce, before.forward)),
        EndWaits(
            wait(last.forward, after.forward + after.tp_forward),
            wait(last.backward + last.reduce, backward(after)),
        ),
        is_joined,
    )


def data_messages(
    setting: CostInputs, kernels: Kernels, layout: Layout, held_layers: RankLayers
) -> float:
    """Return the seconds of the data-parallel messages that a rank sends once per step.

    These are gradient reductions of ZeRO 0 and 1, weight gathers of ZeRO 1 and 2, sums over
    replicas, and the scales of weights gathered in float8; for ZeRO 3 without FSDP2, also the
    gathers of embedding and head. Adds a measured latency per layer and turn of a ring over all
    data ranks, which grows with the square of the number of further nodes, as messages of all nodes
    compete.
    """
    trained = elements_of(setting.model, layout, held_layers, which="trained")
    gathered = gathered_elements(setting, layout, held_layers)
    network, reduced = kernels.network, setting.reduced_bytes
    turns = held_layers.layers * (layout.shard_ranks * layout.replica_ranks - 1)
    seconds = _scales(setting, kernels, layout, held_layers)
    for peers, sent in zip(_peers(layout, *trained), _peers(layout, *gathered), strict=True):
        among = peers.shards, peers.shard_stride, peers.shard
        if peers.shards > 1 and layout.zero <= 2:
            if layout.zero == 1:
                kind = reduction(setting, layout)
                seconds += network.seconds(kind, peers.elements * reduced, *among)
            gather = gathering(setting, layout)
            seconds += network.seconds(gather, sent.elements * setting.element, *among)
        if peers.replicas > 1:
            size = peers.elements * reduced / peers.shards
            copies = peers.replicas, peers.replica_stride, peers.replicate
            seconds += network.seconds("all_reduce", size, *copies)
    if layout.zero == 3 and not setting.target.uses_fsdp2(layout):
        ends = elements_of(
            setting.model, layout, held_layers._replace(kinds=(0,) * len(held_layers.kinds))
        )
        size, among = ends.plain * setting.element, (layout.shard_ranks, layout.tp, "shard")
        seconds += network.seconds(gathering(setting, layout), size, *among)
    return seconds + turns * (setting.cluster.nodes - 1) ** 2 * kernels.data_latency


def _scales(
    setting: CostInputs, kernels: Kernels, layout: Layout, held_layers: RankLayers
) -> float:
    """Return the seconds of the all-reduce of the maxima from which float8 gathers compute their
    scales."""
    if not gathers_float8(setting.train, layout, setting.target):
        return 0.0
    kinds = setting.model.layer_kinds
    count = held_layers.total(float8_weights(setting.model, kind) for kind in kinds)
    among = layout.shard_ranks, layout.tp, "shard"
    return kernels.network.seconds("all_reduce", LARGEST_BYTES * count, *among)


def data_wait(setting: CostInputs, kernels: Kernels, seconds: float, room: float) -> float:
    """Return how long a step waits for once-per-step messages of `seconds` seconds.

    They overlap with the backward of the last microbatch and the first forward, which take `room`
    seconds.
    """
    if not setting.system.overlaps_data:
        return seconds
    return max(seconds - kernels.overlap * min(seconds, room), 0.0)
