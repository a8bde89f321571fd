"""Whole matrices for optimizers such as Muon that need them, from shards, and shard positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.groups import Groups, Link
from meshwright.layout import Layout
from meshwright.parallel.data_parallel.gradients import GatheredParameter
from meshwright.program.shards import Sharding, data_rank


class ShardPlace(NamedTuple):
    """Where a rank's shard begins, per dim, in the parameter `name` of whole shape `shape`."""

    name: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]

    def after_rows(self, rows: int) -> ShardPlace:
        """Return the place of the part of the shard after its first `rows` rows."""
        return self._replace(starts=(self.starts[0] + rows, *self.starts[1:]))


class WholeMatrices:
    """Gathers whole matrices from the ranks' shards, and cuts this rank's shard out of whole ones.

    Every rank that has a shard of a matrix calls `whole` for it, in the same order. Without groups,
    each parameter is whole already. Messages are those of `program.update.matrix_gathers`.
    """

    def __init__(
        self,
        leaves: Sequence[nn.Parameter] = (),
        parameters: Sequence[GatheredParameter] = (),
        groups: Groups | None = None,
        device: torch.device | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Register `leaves`, the optimizer's tensors of `parameters`, in the same order.

        Gathers run on `device`, where the groups communicate.
        """
        self._layout = layout
        pairs = zip(leaves, parameters, strict=True)
        self._shardings: Mapping[int, Sharding] = {
            id(leaf): parameter.sharding for leaf, parameter in pairs
        }
        self._groups, self._device = groups, device

    def whole(self, leaf: Tensor, shard: Tensor) -> Tensor:
        """Gather the whole matrix of `shard`, a tensor that is sharded like the parameter of
        `leaf`.

        Experts are not gathered over ep: each expert is a whole matrix.
        """
        sharding = self._shardings.get(id(leaf))
        if sharding is None or self._groups is None:
            return shard
        matrix = shard.to(self._device)
        if sharding.cuts_rows_of_matrix:
            matrix = _gathered_rows(matrix, sharding, self._groups.shard)
        if sharding.tp_dim is not None:
            matrix = _gathered(matrix, sharding.tp_dim, self._groups.tp)
        return matrix

    def place(self, leaf: Tensor) -> ShardPlace:
        """Return where this rank's shard lies in its parameter."""
        sharding = self._shardings.get(id(leaf))
        if sharding is None or self._groups is None or self._layout is None:
            return ShardPlace("", tuple(leaf.shape), (0,) * leaf.dim())
        part, coordinates = sharding.part, self._groups.at
        region = sharding.region(coordinates["tp"], data_rank(self._layout, coordinates))
        return ShardPlace(part.name, part.shape, tuple(start for start, _ in region))

    def shard(self, leaf: Tensor, matrix: Tensor) -> Tensor:
        """Return this rank's shard of a matrix that `whole` returned for `leaf`."""
        sharding = self._shardings.get(id(leaf))
        if sharding is None or self._groups is None:
            return matrix
        if sharding.tp_dim is not None:
            matrix = matrix.chunk(sharding.tp, sharding.tp_dim)[self._groups.tp.rank]
        if sharding.cuts_rows_of_matrix:
            start = self._groups.shard.rank * sharding.rows_each
            matrix = matrix[start : start + sharding.rows_each]
        return matrix


def _gathered_rows(shard: Tensor, sharding: Sharding, link: Link) -> Tensor:
    """Gather a matrix whose rows are sharded evenly, except that the last ranks may have fewer."""
    rows_per_rank, rows = sharding.rows_each, sharding.tp_shape[0]
    if len(shard) < rows_per_rank:
        padded = shard.new_zeros(rows_per_rank, *shard.shape[1:])
        padded[: len(shard)] = shard
        shard = padded
    return _gathered(shard, 0, link)[:rows]


def _gathered(shard: Tensor, dim: int, link: Link) -> Tensor:
    """All-gather equally shaped tensors over a link, concatenated along `dim`."""
    gathered = shard.new_empty(link.size * len(shard), *shard.shape[1:])
    dist.all_gather_into_tensor(gathered, shard.contiguous(), group=link.required)
    if dim == 0:
        return gathered
    return torch.cat(gathered.chunk(link.size), dim)
