"""Data parallelism by replicas, where gradients need no other dtype: sums over them, in place.

Each block's gradients are summed as soon as the last of them is there, beside the backward of the
blocks before it (arXiv:2006.15704, section 3.2.3). Neither weights nor gradients are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.execute.ledger import Ledger, Pending


class Replicas:
    """Sums the gradients of a module over replicas, block by block and then the rest.

    `due` says that the backward to come is the last one before the update; those before it only
    accumulate.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        group: dist.ProcessGroup,
        ledger: Ledger,
    ) -> None:
        self.due = False
        self._group, self._ledger = group, ledger
        in_blocks = [list(block.parameters()) for block in blocks]
        known = {id(parameter) for unit in in_blocks for parameter in unit}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
        self._units = [unit for unit in (*in_blocks, rest) if unit]
        self._left = [len(unit) for unit in self._units]
        self._works: list[tuple[Pending, list[Tensor]]] = []
        for index, unit in enumerate(self._units):
            for parameter in unit:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, index))  # type: ignore[no-untyped-call]

    def _ready(self, index: int, parameter: Tensor) -> None:
        """Take note that a gradient has come, and sum those of its unit when it is the last."""
        if not self.due:
            return
        self._left[index] -= 1
        if self._left[index] == 0:
            self._sum(index)

    def _sum(self, index: int) -> None:
        gradients = [p.grad for p in self._units[index] if p.grad is not None]
        plain = [g._local_tensor if isinstance(g, DTensor) else g for g in gradients]
        self._left[index] = 0
        if plain:
            work = self._group.allreduce_coalesced(plain)
            self._works.append((Pending(self._ledger, work), plain))

    def finish(self) -> None:
        """Sum what no hook has told of, such as gradients computed outside of autograd, and wait.

        Every replica calls it once for each update, after its last backward.
        """
        for index, left in enumerate(self._left):
            if left:
                self._sum(index)
        for work, _ in self._works:
            work.wait()
        self._works = []
        self._left = [len(unit) for unit in self._units]
        self.due = False
