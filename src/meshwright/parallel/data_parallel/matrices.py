"""What an update may ask beside its shards: whole matrices, and where in them a shard lies."""

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
    """Where a rank's shard begins, by dim, in a parameter of a name and a whole shape."""

    name: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]

    def after_rows(self, rows: int) -> ShardPlace:
        """Return the place of what follows so many rows of the shard."""
        return self._replace(starts=(self.starts[0] + rows, *self.starts[1:]))


class WholeMatrices:
    """Gathers matrices of which this rank has shards, and cuts its shards out of whole ones.

    Every rank that has a shard of a matrix calls `whole` for it, in one order, and gets all of it.
    Without groups, each parameter is whole already. Messages are those of
    `program.update.matrix_gathers`.
    """

    def __init__(
        self,
        leaves: Sequence[nn.Parameter] = (),
        parameters: Sequence[GatheredParameter] = (),
        groups: Groups | None = None,
        device: torch.device | None = None,
        layout: Layout | None = None,
    ) -> None:
        """`leaves` are the optimizer's tensors of the `parameters`, in a layout.

        Gathering is done on `device`, where groups communicate.
        """
        self._layout = layout
        pairs = zip(leaves, parameters, strict=True)
        self._shardings: Mapping[int, Sharding] = {
            id(leaf): parameter.sharding for leaf, parameter in pairs
        }
        self._groups, self._device = groups, device

    def whole(self, leaf: Tensor, shard: Tensor) -> Tensor:
        """Return the matrix that a tensor is this rank's shard of, as `leaf` is of its parameter.

        A parameter of experts stays with this rank's experts: each of them is a whole matrix.
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
        """Return where this rank's shard lies in its parameter, the same for any layout."""
        sharding = self._shardings.get(id(leaf))
        if sharding is None or self._groups is None or self._layout is None:
            return ShardPlace("", tuple(leaf.shape), (0,) * leaf.dim())
        part, coordinates = sharding.part, self._groups.at
        region = sharding.region(coordinates["tp"], data_rank(self._layout, coordinates))
        return ShardPlace(part.name, part.shape, tuple(start for start, _ in region))

    def shard(self, leaf: Tensor, matrix: Tensor) -> Tensor:
        """Return this rank's shard of what `whole` has returned for a leaf."""
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
    """Return a matrix of which each rank has as many rows, but for the last ones."""
    rows_per_rank, rows = sharding.rows_each, sharding.tp_shape[0]
    if len(shard) < rows_per_rank:
        padded = shard.new_zeros(rows_per_rank, *shard.shape[1:])
        padded[: len(shard)] = shard
        shard = padded
    return _gathered(shard, 0, link)[:rows]


def _gathered(shard: Tensor, dim: int, link: Link) -> Tensor:
    """Return tensors of equal shape from all ranks of a link, joined along a dim."""
    gathered = shard.new_empty(link.size * len(shard), *shard.shape[1:])
    dist.all_gather_into_tensor(gathered, shard.contiguous(), group=link.required)
    if dim == 0:
        return gathered
    return torch.cat(gathered.chunk(link.size), dim)
