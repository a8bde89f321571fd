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

    def add(self, made: Mapping[str, Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Add `scale * rows A' B'` to what projections have made of rows; returns `rows A'`."""
        low = products(rows, self.a, counts)
        for name, b in zip(self.names, self.bs, strict=True):
            made[name].add_(products(low, b, counts), alpha=self.scale)
        return low

    def back(
        self, grads: Sequence[Tensor], low: Tensor, counts: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of `rows A'` and of each B, of those of projections' results."""
        first, *others = (
            products(grad, b, counts, transposed=True)
            for grad, b in zip(grads, self.bs, strict=True)
        )
        for other in others:
            first += other
        to_bs = [weight_grads(grad, low, counts).mul_(self.scale) for grad in grads]
        return first.mul_(self.scale), to_bs


def named(
    adapters: Sequence[tuple[str, ...]], matrices: Sequence[Tensor | None], scale: float
) -> list[Adapter]:
    """Return the adapters of projections, of their matrices in order: A, and the B of each."""
    found, rest = [], [one for one in matrices if one is not None]
    for names in adapters:
        a, *bs = rest[: 1 + len(names)]
        found.append(Adapter(names, a, tuple(bs), scale))
        del rest[: 1 + len(names)]
    return found


def added(
    adapters: Sequence[Adapter], made: Mapping[str, Tensor], rows: Tensor, counts: Tensor
) -> list[Tensor]:
    """Add what the adapters of some projections make of rows; returns their products with A."""
    return [one.add(made, rows, counts) for one in adapters if one.names[0] in made]


Through = list[tuple[Tensor, list[Tensor]]]
"""Of each adapter the gradients of its product with A, and of each B."""


def through(
    adapters: Sequence[tuple[Adapter, Tensor]],
    grads: Mapping[str, Tensor],
    to_rows: Tensor,
    counts: Tensor,
) -> Through:
    """Add to the gradient of rows what adapters give to it, of those of projections' results.

    Beside each adapter there is the product with A that the forward has made.
    """
    found = []
    for one, low in adapters:
        to_low, to_bs = one.back([grads[name] for name in one.names], low, counts)
        to_rows += products(to_low, one.a, counts, transposed=True)
        found.append((to_low, to_bs))
    return found


def gradients(found: Through, rows: Tensor, counts: Tensor) -> list[Tensor]:
    """Return those of all matrices, in the order in which `named` takes them.

    That of an A is made by the rows that it has multiplied.
    """
    every = []
    for to_low, to_bs in found:
        every += [weight_grads(to_low, rows, counts), *to_bs]
    return every
