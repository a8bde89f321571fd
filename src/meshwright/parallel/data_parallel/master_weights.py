"""Compute copies of weights for matmuls, and the rows of master weights that this rank trains.

Mixed precision, arXiv:1710.03740, section 3.1: products use a copy in half precision, updates
change the fp32 weights; without masters, both are the same bf16 weights. ZeRO-1,
arXiv:1910.02054, section 5.1: a rank has only the rows of these that it updates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from meshwright.parallel.data_parallel.gradients import local_shard
from meshwright.torch_private import StridedShard


class Weight:
    """A parameter of a module: `used` by its matmuls, `master` trained by the optimizer.

    `used` has the dtype of products and is sharded by tp only; `master` has this rank's rows in the
    dtype of the parameter. They share memory if rows and dtype allow it. A gradient arrives in
    `used.grad`; `hand_on` or `add` moves it to `master.grad`. `rows` are those of each rank.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        mesh: DeviceMesh,
        rank: int,
        *,
        reshards: bool = False,
        cut: bool = True,
    ) -> None:
        """Take over a parameter; a frozen one has the dtype of products, `dtype`.

        The gradient of the master is in `gradient_dtype`.
        `mesh` has the axes `shard`, which cuts rows, and `tp`; `rank` is this one's along `shard`.
        One that `reshards` has memory for what is gathered only between `allocate_storage` and
        `reshard`.
        One that is not `cut` is whole on each rank.
        """
        self._mesh, self._shards = mesh, mesh["shard"]
        self.is_cut, self.is_trained = cut and self._shards.size() > 1, parameter.requires_grad
        self._ranks, self._rank = (self._shards.size(), rank) if self.is_cut else (1, 0)
        local = local_shard(parameter.detach())
        rank_rows = -(-len(local) // self._ranks)
        self.rows = tuple(
            slice(min(owner * rank_rows, len(local)), min((owner + 1) * rank_rows, len(local)))
            for owner in range(self._ranks)
        )
        self._rows = self.rows[self._rank]
        self._memory, self.used = local, parameter
        if reshards or dtype != local.dtype:
            self._memory = torch.empty_like(local, dtype=dtype)
            self.used = nn.Parameter(_like(parameter, self._memory), self.is_trained)
        self.reshards, self.is_copy = reshards, reshards or dtype != local.dtype
        self.master, self._gradient_dtype = parameter, gradient_dtype
        if self._ranks > 1:
            rows = local_shard(self.used.detach())[self._rows]
            rows = torch.empty_like(rows, dtype=local.dtype) if self.is_copy else rows
            self.master = nn.Parameter(self._cut(rows), self.is_trained)
        if self.is_trained:  # sums may be wider than weights
            self.used.grad_dtype = self.master.grad_dtype = None
        # Unknown to autograd, for which a weight that is gathered again is the one it has saved.
        self._memory = self._memory.data
        self._size = self._memory.untyped_storage().nbytes()
        if reshards:
            self.reshard()
        self._sum: Tensor | None = None

    def _cut(self, rows: Tensor) -> DTensor:
        """Return this rank's rows as a DTensor shard of the whole parameter."""
        like, mesh = self.used, self._shards
        placements: list[Placement] = [Shard(0)]
        if isinstance(like, DTensor):
            mesh, (cut,) = self._mesh, like.placements
            if cut == Shard(0):  # rows of what tp has cut
                placements = [StridedShard(0, split_factor=mesh["tp"].size())]
            placements.append(cut)
        return DTensor.from_local(
            rows, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    @property
    def memory(self) -> Tensor:
        """The memory of the weight that matmuls use, sharded by tp only."""
        return self._memory

    def rows_used(self, rank: int) -> Tensor:
        """Return the rows of `rank` in the weight that matmuls use."""
        return self._memory[self.rows[rank]]

    def allocate_storage(self) -> None:
        """Allocate the memory that a gather fills."""
        storage = self._memory.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self._size)

    def reshard(self) -> None:
        """Free the gathered memory."""
        self._memory.untyped_storage().resize_(0)

    def round(self) -> None:
        """Copy this rank's master rows into `used`, rounded to its dtype."""
        if self.is_copy:
            self.rows_used(self._rank).copy_(local_shard(self.master.detach()))

    def widen(self, dtype: torch.dtype) -> None:
        """Move a microbatch's gradient from `used.grad` into a sum in `dtype`, if that differs."""
        if self.used.grad is None or self.used.dtype == dtype:
            return
        gradient = local_shard(self.used.grad)
        self._sum = gradient.to(dtype) if self._sum is None else self._sum.add_(gradient)
        self.used.grad = None

    @property
    def is_summing(self) -> bool:
        """Whether gradients are accumulated in a dtype other than the weight's."""
        return self._sum is not None

    @property
    def gradient(self) -> Tensor | None:
        """The gradient accumulated so far, sharded by tp only, or None."""
        if self._sum is not None or self.used.grad is None:
            return self._sum
        return local_shard(self.used.grad)

    def rows_of_gradient(self, rank: int) -> Tensor:
        """Return the rows of `rank` in the gradient, which must exist."""
        assert self.gradient is not None
        return self.gradient[self.rows[rank]]

    def clear(self) -> None:
        """Free the gradient of all rows."""
        self.used.grad = self._sum = None

    def add(self, rows: Tensor) -> None:
        """Add `rows` to the gradient of the master, where the master has only this rank's rows."""
        gradient = self.shard_gradient
        if gradient is None:
            self.master.grad = self._cut(rows.to(self._gradient_dtype, copy=True))
        else:
            gradient.add_(rows)

    @property
    def shard_gradient(self) -> Tensor | None:
        """The master's gradient, as a plain tensor of this rank's rows, or None."""
        return None if self.master.grad is None else local_shard(self.master.grad)

    def hand_on(self) -> None:
        """Move the gradient from `used` to the master, where the master has all rows."""
        gradient = self.gradient
        if gradient is None or (self.used is self.master and not self.is_summing):
            return
        self.clear()
        self.master.grad = _like(self.used, gradient.to(self._gradient_dtype))


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return `local` as a DTensor sharded like `parameter`, or as it is without tp."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


def take_over(model: nn.Module, make: Callable[[str, nn.Parameter], Weight]) -> dict[str, Weight]:
    """Replace a model's parameters by the compute weights `Weight.used`; return weights by name.

    `make` is called with each parameter's name and the parameter. A parameter that several modules
    share stays shared.
    """
    weights: dict[nn.Parameter, Weight] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in weights:
                weights[parameter] = make(f"{path}.{name}", parameter)
            setattr(module, name, weights[parameter].used)
    by_used = {weight.used: weight for weight in weights.values()}
    return {name: by_used[used] for name, used in model.named_parameters()}
