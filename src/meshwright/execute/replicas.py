"""Data parallelism on whole weights, ZeRO-1 and mixed precision among it: sums where gradients are.

Each block's gradients are summed as soon as the last of them is there, beside the backward of the
blocks before it (arXiv:2006.15704, section 3.2.3), in their own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.execute.ledger import Ledger, Pending
from meshwright.execute.masters import Weight, take_over


class Replicas:
    """Sums the gradients of a module over replicas, block by block and then the rest.

    `due` says that the backward to come is the last one before the update; those before it only
    accumulate. `stale` says that weights may have changed since products' copies were made. `group`
    are the ranks that sum, None where there are no others.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        group: dist.ProcessGroup | None,
        mesh: DeviceMesh,
        rank: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        ledger: Ledger,
    ) -> None:
        """Take over the parameters of a model, in fp32.

        `mesh` has the ranks that share rows (`shard`) and those that cut the model (`tp`), and
        `rank` is this one's place among the former. `dtypes` are those of products and of sums.
        """
        self.due, self.stale = False, True
        self.group, self._ledger = group, ledger
        self._shards = mesh.get_group("shard")
        used, self._summed = dtypes
        self.weights = take_over(model, used, mesh, rank)
        known = {weight.used: weight for weight in self.weights.values()}
        units = [[known.pop(parameter) for parameter in block.parameters()] for block in blocks]
        self._units = [unit for unit in (*units, list(known.values())) if unit]
        self._left = [len(unit) for unit in self._units]
        self._works: list[tuple[Pending, list[Tensor]]] = []
        for index, unit in enumerate(self._units):
            for weight in unit:
                hook = partial(self._ready, index, weight)
                weight.used.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(lambda module, args: self._refresh())

    @torch.no_grad()
    def _refresh(self) -> None:
        """Bring what products use up to date, where weights may have changed."""
        if not self.stale:
            return
        works = []
        for unit in self._units:
            for weight in unit:
                weight.round()
            if unit[0].is_gathered:
                whole, mine = map(list, zip(*(weight.parts for weight in unit), strict=True))
                work = self._shards.allgather_into_tensor_coalesced(whole, mine)
                works.append(Pending(self._ledger, work))
        for pending in works:
            pending.wait()
        self.stale = False

    def _ready(self, index: int, weight: Weight, parameter: Tensor) -> None:
        """Take note that a gradient has come, and sum those of its unit when it is the last."""
        weight.widen(self._summed)
        if not self.due:
            return
        self._left[index] -= 1
        if self._left[index] == 0:
            self._sum(index)

    def take(self) -> None:
        """Take in gradients that were computed outside of autograd."""
        for weight in self.weights.values():
            weight.widen(self._summed)

    def _sum(self, index: int) -> None:
        found = (weight.gradient for weight in self._units[index])
        gradients = [gradient for gradient in found if gradient is not None]
        self._left[index] = 0
        if gradients and self.group is not None:
            work = self.group.allreduce_coalesced(gradients)
            self._works.append((Pending(self._ledger, work), gradients))

    def finish(self) -> None:
        """Sum what no hook has told of, wait, and leave the gradients with the masters.

        Every replica calls it once for each update, after its last backward.
        """
        for index, left in enumerate(self._left):
            if left:
                self._sum(index)
        for work, _ in self._works:
            work.wait()
        self._works = []
        self._left = [len(unit) for unit in self._units]
        for weight in self.weights.values():
            weight.hand_on()
        self.due, self.stale = False, True
