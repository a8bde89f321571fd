"""Low-rank adapters of experts, LoRA: matrices of its own for each expert, by grouped products.

arXiv:2106.09685, section 4.1. Projections of one input may share A, as where a file has them as one
matrix with the outputs of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class Backward:
    """The gradients of adapters' matrices: first those of B, then of A, by the rows it multiplied.

    `lows` are the products with A that the forward has made, in the order of adapters.
    """

    def __init__(self, adapters: Sequence[Adapter], lows: Sequence[Tensor], counts: Tensor) -> None:
        self._adapters, self._lows, self._counts = adapters, lows, counts
        self._waiting: list[tuple[int, Tensor]] = []
        self._to_a: dict[int, Tensor] = {}
        self._to_bs: dict[int, list[Tensor]] = {}

    def through(self, grads: Mapping[str, Tensor], to_rows: Tensor) -> bool:
        """Add what adapters give to the gradient of their rows; returns whether there are any.

        `grads` are those of projections' results by name.
        """
        for at, one in enumerate(self._adapters):
            if one.names[0] not in grads:
                continue
            own = [grads[name] for name in one.names]
            to_low, self._to_bs[at] = one.back(own, self._lows[at], self._counts)
            to_rows += products(to_low, one.a, self._counts, transposed=True)
            self._waiting.append((at, to_low))
        return bool(self._waiting)

    def made_of(self, rows: Tensor) -> None:
        """Make the gradients of A by the rows that it has multiplied."""
        for at, to_low in self._waiting:
            self._to_a[at] = weight_grads(to_low, rows, self._counts)
        self._waiting.clear()

    @property
    def gradients(self) -> Iterator[Tensor]:
        """Those of all matrices, in the order in which `named` takes them."""
        for at in range(len(self._adapters)):
            yield from (self._to_a[at], *self._to_bs[at])
