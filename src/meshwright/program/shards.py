"""How each parameter is sharded over the mesh, and which gradients are partial sums.

The table is by logical axis, so that a new parameter needs no new rule: `heads`, `kv_heads`, `ffn`
and `vocab` are sharded over tp (arXiv:1909.08053, section 3), `dim` never is. Data parallelism
shards the remaining tensor along dim 0, like FSDP2: `ceil(rows / ranks)` rows each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from meshwright.layout import Layout
from meshwright.spec.lora import nf4_bytes
from meshwright.spec.parts import Part

# (start, stop) along each dim of a whole tensor
Region = tuple[tuple[int, int], ...]

TENSOR_AXES: Final = frozenset({"heads", "kv_heads", "ffn", "vocab"})
# What the unit of a layer's experts is called, after the layer.
EXPERTS: Final = ".mlp.experts"
EMBED: Final = "embed"
HEAD: Final = "head"
# Whole on each rank of tp, which uses it for a part of what it is for: some of the heads, a part
# of each expert's width, or of an adapter's inputs or outputs; or only one of the ranks uses it, as
# it is added once.
_USED_IN_PART: Final = frozenset({"head_dim", "routes", "rank", "latent", "addend"})


@dataclass(frozen=True)
class Slice:
    """A part of a tensor: indices `start` to `stop` along `dim`."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sharding:
    """How one parameter is sharded over the mesh.

    `tp_dim` is the dim sharded over tp, None if whole. `shard_ranks` ranks share dim 0 of the tp
    shard. Before any other sharding, each of `ep` ranks has its own experts; `folds` of them are tp
    ranks, the others are data ranks. `is_partial`: the gradient on each tp rank is a partial sum,
    because the parameter is whole on all of them, but each rank sees different tokens (norms under
    sequence parallelism), different heads (head norms, projections to latent vectors) or a
    different part of experts (routers), or only the first rank adds it.
    """

    part: Part
    tp: int
    tp_dim: int | None
    shard_ranks: int
    is_partial: bool
    ep: int = 1
    folds: int = 1

    def slices(self, tp_rank: int, data_rank: int) -> tuple[Slice, ...]:
        """Return the successive slices that lead from the whole tensor to a rank's shard.

        `data_rank` is the result of the function `data_rank`.
        """
        cuts, rows = [], self.part.shape[0]
        shard_rank, ep_rank = divmod(data_rank, self.expert_data)
        if self.ep > 1:
            ep_rank = ep_rank * self.folds + (tp_rank if self.folds > 1 else 0)
            rows //= self.ep
            cuts.append(Slice(0, ep_rank * rows, (ep_rank + 1) * rows))
        if self.tp_dim is not None:
            size = self.part.shape[self.tp_dim] // self.tp
            cuts.append(Slice(self.tp_dim, tp_rank * size, (tp_rank + 1) * size))
            rows = size if self.tp_dim == 0 else rows
        if self.shard_ranks > 1:
            size = self.rows_each
            start = min(shard_rank * size, rows)
            cuts.append(Slice(0, start, min(start + size, rows)))
        return tuple(cuts)

    def region(self, tp_rank: int, data_rank: int) -> Region:
        """Return the position of a rank's shard in the whole tensor."""
        bounds = [(0, size) for size in self.part.shape]
        for cut in self.slices(tp_rank, data_rank):
            start = bounds[cut.dim][0]
            bounds[cut.dim] = (start + cut.start, start + cut.stop)
        return tuple(bounds)

    def real_region(self, tp_rank: int, data_rank: int) -> Region:
        """Return the position of a rank's shard in the whole tensor without vocabulary padding."""
        (start, stop), *other_dims = self.region(tp_rank, data_rank)
        rows = self.part.real_shape[0]
        return ((min(start, rows), min(stop, rows)), *other_dims)

    def shape(self, tp_rank: int, data_rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""
        return tuple(stop - start for start, stop in self.region(tp_rank, data_rank))

    @property
    def expert_data(self) -> int:
        """The number of data ranks among those that divide the experts."""
        return self.ep // self.folds

    @property
    def rows_each(self) -> int:
        """Rows of a shard, the same for all sharding ranks; the last ones may have fewer."""
        return -(-self.tp_shape[0] // self.shard_ranks)

    @property
    def cuts_rows_of_matrix(self) -> bool:
        """Whether sharding ranks have rows of a matrix; of experts, they have whole matrices."""
        return self.shard_ranks > 1 and not self.part.is_of_experts

    @property
    def row_elements(self) -> int:
        """Elements of one row of the tp shard."""
        return math.prod(self.tp_shape[1:])

    @property
    def padded_elements(self) -> int:
        """Elements of the tp shard, with rows padded to a multiple of the sharding ranks."""
        return self.rows_each * self.shard_ranks * self.row_elements

    @cached_property
    def tp_shape(self) -> tuple[int, ...]:
        """Shape of a rank's tp shard, gathered over data ranks, with only its own experts."""
        shape = list(self.part.shape)
        shape[0] //= self.ep
        if self.tp_dim is not None:
            shape[self.tp_dim] //= self.tp
        return tuple(shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in which a rank stores the tp shard if ZeRO does not shard it: bytes in NF4."""
        *outer, inner = self.tp_shape
        return (*outer, nf4_bytes(inner)) if self.part.is_nf4 else self.tp_shape

    def stored_bytes(self, element: int) -> int:
        """Return the bytes of `stored_shape`, with `element` bytes per element outside of NF4."""
        return math.prod(self.stored_shape) * (1 if self.part.is_nf4 else element)

    @property
    def distinct(self) -> int:
        """The number of different shards; the ranks of a stage divided by it are the copies of
        each."""
        return self.ep * self.shard_ranks * (self.tp if self.tp_dim is not None else 1)


def shard(part: Part, layout: Layout) -> Sharding:
    """Return how a parameter is sharded over the mesh of a layout."""
    tp_dim = None
    is_of_ep = layout.ep > 1 and part.is_of_experts
    is_folded = is_of_ep and layout.folds > 1
    if layout.tp > 1 and not is_folded:
        cut = [dim for dim, axis in enumerate(part.axes) if axis in TENSOR_AXES]
        tp_dim = cut[0] if cut else None
    is_whole = layout.tp > 1 and tp_dim is None and not is_folded
    is_partial = is_whole and (layout.sp or not _USED_IN_PART.isdisjoint(part.axes))
    is_partial = is_partial and part.trained
    is_cut = part.trained or cuts_frozen(layout)
    if is_of_ep:
        ranks = layout.expert_shard_ranks if is_cut else 1
        return Sharding(part, layout.tp, tp_dim, ranks, is_partial, layout.ep, layout.folds)
    return Sharding(part, layout.tp, tp_dim, layout.shard_ranks if is_cut else 1, is_partial)


def cuts_frozen(layout: Layout) -> bool:
    """Whether ZeRO shards frozen weights.

    Its stages 1 and 2 shard gradients and optimizer states, which frozen weights don't have.
    """
    return layout.zero == 3 or layout.offload == "params"


def unit_of(name: str, *, ep: int = 1, apart: Sequence[str] = (EMBED,)) -> str:
    """Return the name of the unit (weights gathered and reduced together) of a parameter.

    Units are a block, and the rest of the stage. Experts that are divided over ranks are a separate
    unit, because their peers differ. So are the ends in `apart`: the embedding's gradient comes
    last, those of the rest come first, and its backward doesn't need its weights.
    """
    room, _, suffix = name.partition(".")
    if room == "layers":
        block, _, inner = suffix.partition(".")
        return f"layers.{block}{EXPERTS if ep > 1 and inner.startswith(EXPERTS[1:]) else ''}"
    return room if room in apart else "rest"


def data_rank(layout: Layout, coordinates: Mapping[str, int]) -> int:
    """Return the index of the rank at some coordinates among the layout's `alike_ranks`."""
    return (
        coordinates["dp_shard" if layout.zero else "dp_replicate"] * layout.cp + coordinates["cp"]
    )


def whole(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor."""
    return tuple((0, size) for size in shape)
