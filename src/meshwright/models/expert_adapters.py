"""Low-rank adapters (LoRA) of experts: each expert has its own matrices, in grouped matmuls.

arXiv:2106.09685, section 4.1. Projections with the same input may share A, for instance where a
checkpoint stores gate and up as one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from meshwright.models.grouped import products, weight_grads


class Adapter(NamedTuple):
    """The LoRA matrices of the projections `names`: one A, and a B for each of them.

    `a` `[experts, rank, in]`, `bs` `[experts, out, rank]`. In all methods, `rows` `[pairs, in]` are
    tokens sorted by expert, and `counts` int64 `[experts]` says how many each expert has.
    """

    names: tuple[str, ...]
    a: Tensor
    bs: tuple[Tensor, ...]
    scale: float

    def add(self, outputs: Mapping[str, Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Add `scale * rows A' B'` to the projections' outputs in place; return `rows A'`."""
        low = products(rows, self.a, counts)
        for name, b in zip(self.names, self.bs, strict=True):
            outputs[name].add_(products(low, b, counts), alpha=self.scale)
        return low

    def back(
        self, grads: Sequence[Tensor], low: Tensor, counts: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of `low = rows A'` and of each B, given those of the projections'
        outputs.
        """
        total, *further = (
            products(grad, b, counts, transposed=True)
            for grad, b in zip(grads, self.bs, strict=True)
        )
        for term in further:
            total += term
        to_bs = [weight_grads(grad, low, counts).mul_(self.scale) for grad in grads]
        return total.mul_(self.scale), to_bs


def named(
    adapters: Sequence[tuple[str, ...]], matrices: Sequence[Tensor | None], scale: float
) -> list[Adapter]:
    """Return an `Adapter` for each group of projection names.

    `matrices` has, group by group, A and then the B of each projection; None entries are skipped.
    """
    named_adapters, remaining = [], [matrix for matrix in matrices if matrix is not None]
    for names in adapters:
        a, *bs = remaining[: 1 + len(names)]
        named_adapters.append(Adapter(names, a, tuple(bs), scale))
        del remaining[: 1 + len(names)]
    return named_adapters


def added(
    adapters: Sequence[Adapter], outputs: Mapping[str, Tensor], rows: Tensor, counts: Tensor
) -> list[Tensor]:
    """Add the output of each adapter whose projections are in `outputs`; return their `rows A'`."""
    return [
        adapter.add(outputs, rows, counts) for adapter in adapters if adapter.names[0] in outputs
    ]


Through = list[tuple[Tensor, list[Tensor]]]
"""Of each adapter the gradients of its product with A, and of each B."""


def through(
    adapters: Sequence[tuple[Adapter, Tensor]],
    grads: Mapping[str, Tensor],
    to_rows: Tensor,
    counts: Tensor,
) -> Through:
    """Add the adapters' contribution to `to_rows`, the gradient of rows; return the other
    gradients.

    `adapters` are pairs of an adapter and its `rows A'` of the forward; `grads` are the gradients
    of the projections' outputs by name.
    """
    adapter_grads = []
    for adapter, low in adapters:
        to_low, to_bs = adapter.back([grads[name] for name in adapter.names], low, counts)
        to_rows += products(to_low, adapter.a, counts, transposed=True)
        adapter_grads.append((to_low, to_bs))
    return adapter_grads


def gradients(adapter_grads: Through, rows: Tensor, counts: Tensor) -> list[Tensor]:
    """Return the gradients of all A and B matrices, in the order in which `named` takes the
    matrices.

    `rows` are the inputs of the projections.
    """
    grads = []
    for to_low, to_bs in adapter_grads:
        grads += [weight_grads(to_low, rows, counts), *to_bs]
    return grads
