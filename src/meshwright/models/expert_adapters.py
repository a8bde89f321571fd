"""Low-rank adapters of experts, LoRA: matrices of its own for each expert, by grouped products.

arXiv:2106.09685, section 4.1. Projections of one input may share A, as where a file has them as one
matrix with the outputs of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from meshwright.models.grouped import products, weight_grads


class Adapter(NamedTuple):
    """A `[experts, rank, in]`, and B `[experts, out, rank]` of each projection that takes `x A'`.

    Rows are sorted by expert, `counts` int64 `[experts]` of them each.
    """

    names: tuple[str, ...]
    a: Tensor
    bs: tuple[Tensor, ...]
    scale: float

    def add(self, outputs: Mapping[str, Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Add `scale * rows A' B'` to the outputs of projections; returns `rows A'`."""
        low = products(rows, self.a, counts)
        for name, b in zip(self.names, self.bs, strict=True):
            outputs[name].add_(products(low, b, counts), alpha=self.scale)
        return low

    def back(
        self, grads: Sequence[Tensor], low: Tensor, counts: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of `rows A'` and of each B, from those of projections' outputs."""
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
    """Return the adapters of projections from their matrices in order: A, and the B of each."""
    named_adapters, remaining = [], [matrix for matrix in matrices if matrix is not None]
    for names in adapters:
        a, *bs = remaining[: 1 + len(names)]
        named_adapters.append(Adapter(names, a, tuple(bs), scale))
        del remaining[: 1 + len(names)]
    return named_adapters


def added(
    adapters: Sequence[Adapter], outputs: Mapping[str, Tensor], rows: Tensor, counts: Tensor
) -> list[Tensor]:
    """Add the adapters' outputs to those of projections in `outputs`; returns each `rows A'`."""
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
    """Add the adapters' part to the gradient of rows, from those of projections' outputs.

    Beside each adapter there is the product with A that the forward has made.
    """
    adapter_grads = []
    for adapter, low in adapters:
        to_low, to_bs = adapter.back([grads[name] for name in adapter.names], low, counts)
        to_rows += products(to_low, adapter.a, counts, transposed=True)
        adapter_grads.append((to_low, to_bs))
    return adapter_grads


def gradients(adapter_grads: Through, rows: Tensor, counts: Tensor) -> list[Tensor]:
    """Return the gradients of all matrices, in the order in which `named` takes them.

    That of an A is made by the rows that it has multiplied.
    """
    grads = []
    for to_low, to_bs in adapter_grads:
        grads += [weight_grads(to_low, rows, counts), *to_bs]
    return grads
