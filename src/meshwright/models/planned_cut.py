"""The plan of attention by blocks: a call's division with its memory, and masked corners."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from meshwright.program.attention import BLOCK, Cut, ScoreBounds

LN_2: Final = math.log(2)


class PlannedCut(Cut):
    """A cut with its memory and the views of tensors that follow from it."""

    @classmethod
    def of_call(cls, query: Tensor, key: Tensor, window: int, cap: float) -> PlannedCut:
        """Return the cut of a call."""
        batch, kv_heads, length, dim = key.shape
        sees = ScoreBounds(window or None, cap or None)
        return cls(*Cut.of(batch, query.shape[1], kv_heads, length, dim, sees))

    @property
    def scale(self) -> float:
        """The factor of query-key products."""
        return 1 / math.sqrt(self.dim)

    @property
    def cap(self) -> float:
        """The cap of scores in powers of two, 0 for none."""
        return (self.sees.cap or 0.0) / LN_2

    @property
    def factor(self) -> float:
        """The factor that makes query-key products scores in powers of two, or shares of a cap."""
        return self.scale / self.sees.cap if self.sees.cap else self.scale / LN_2

    def parts(self, batch: int, kv_heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield slices of rows and of heads of keys."""
        for row in range(0, batch, self.rows):
            for head in range(0, kv_heads, self.heads):
                yield slice(row, row + self.rows), slice(head, head + self.heads)

    def blocks(self) -> Iterator[slice]:
        """Yield slices of tokens."""
        for start in range(0, self.length, BLOCK):
            yield slice(start, min(start + BLOCK, self.length))

    def of_tokens(self, tokens: slice) -> slice:
        """Return the rows that the queries of tokens are, all that share a head."""
        return slice(tokens.start * self.shared, tokens.stop * self.shared)

    def seen_by(self, queries: slice) -> slice:
        """Return the keys that any of a block of queries sees."""
        window = self.sees.window or self.length
        return slice(max(0, queries.start - window + 1), queries.stop)

    def seeing(self, keys: slice) -> slice:
        """Return the queries that see any of a block of keys."""
        window = self.sees.window or self.length
        return slice(keys.start, min(self.length, keys.stop + window - 1))

    def adding(self, part: Tensor, total: Tensor, keys: slice) -> Callable[[], None]:
        """Return a function that adds a block of keys' part to the sum over blocks, in their order.

        Queries that saw none of the blocks before have no sum yet.
        """
        rows = self.of_tokens(self.seeing(keys))
        last = self.seeing(slice(keys.start - BLOCK, keys.start)).stop if keys.start else 0
        split = max(last * self.shared, rows.start)
        old, new = total[:, rows.start : split], total[:, split : rows.stop]
        increment, first = part[:, : split - rows.start], part[:, split - rows.start :]

        def add() -> None:
            if increment.shape[1]:
                old.add_(increment)
            if first.shape[1]:
                new.copy_(first)

        return add

    def queries(self, dim: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for a part's queries `[heads, seq * shared, dim]`."""
        size = self.length * self.shared
        return torch.empty(self.rows * self.heads, size, dim or self.dim, dtype=dtype)

    def keys(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for a part's keys `[heads, seq, dim]`."""
        return torch.empty(self.rows * self.heads, self.length, self.dim, dtype=dtype)

    def room(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for a block's scores."""
        return torch.empty(self.scores, dtype=dtype)

    def by_key(self, x: Tensor) -> Tensor:
        """Return x `[batch, heads, seq, dim]` seen as `[batch, kv_heads, seq, shared, dim]`."""
        out: Tensor = x.unflatten(1, (-1, self.shared))  # type: ignore[no-untyped-call]
        return out.transpose(2, 3)

    def as_queries(self, x: Tensor) -> Tensor:
        """Return queries `[heads, tokens * shared, dim]` as a part of what `by_key` gives."""
        return x.view(self.rows, self.heads, -1, self.shared, x.shape[-1])

    def as_keys(self, x: Tensor) -> Tensor:
        """Return keys `[heads, tokens, dim]` as a part of `[batch, kv_heads, seq, dim]`."""
        return x.view(self.rows, self.heads, *x.shape[1:])


class Hidden(NamedTuple):
    """Masks to add to scores of keys that come after a query, or lie before its window."""

    later: Tensor
    past: Tensor
    shared: int
    window: int

    @classmethod
    def of(cls, cut: Cut) -> Hidden:
        """Return the masks of a cut: -inf in corners of `[BLOCK keys, BLOCK queries]`."""
        full = torch.full((BLOCK, BLOCK), -math.inf)
        later, past = (x.repeat_interleave(cut.shared, 1) for x in (full.tril(-1), full.triu()))
        return cls(later, past, cut.shared, cut.sees.window or cut.length)

    def corners(self, scores: Tensor, keys: slice, queries: slice) -> list[tuple[Tensor, Tensor]]:
        """Return the corners of scores `[heads, keys, queries]`, with the mask of each.

        The tokens that are among both are on the diagonal. Beyond the window are pairs of some
        first keys and as many last queries.
        """
        first, last = max(keys.start, queries.start), min(keys.stop, queries.stop)
        size, wide = last - first, (last - first) * self.shared
        column = (first - queries.start) * self.shared
        diagonal = scores[:, first - keys.start : last - keys.start, column : column + wide]
        corners = [(diagonal, self.later[:size, :wide])]
        beyond = queries.stop - keys.start - self.window
        if beyond > 0:
            columns = beyond * self.shared
            corners.append((scores[:, :beyond, -columns:], self.past[:beyond, :columns]))
        return corners


class FactorMemory(NamedTuple):
    """Memory for a factor in fp32 and in the dtype of products: the same if that is fp32."""

    wide: Tensor
    narrow: Tensor

    @classmethod
    def of(cls, make: Callable[..., Tensor], dtype: torch.dtype) -> FactorMemory:
        """Return new memory."""
        wide = make()
        return cls(wide, wide if dtype == wide.dtype else make(dtype=dtype))

    def fill(self, view: Callable[[Tensor], Tensor], source: Tensor) -> None:
        """Copy `source` into `view` of both memories."""
        view(self.narrow).copy_(source)
        if self.wide is not self.narrow:
            self.wide.copy_(self.narrow)

    def shaped(self, *shape: int) -> FactorMemory:
        """Return the start of both, flat memory, in a shape."""
        wide = shaped(self.wide, *shape)
        same = self.wide is self.narrow
        return FactorMemory(wide, wide if same else shaped(self.narrow, *shape))


def shaped(memory: Tensor, *shape: int) -> Tensor:
    """Return the start of flat memory in a shape."""
    return memory[: math.prod(shape)].view(shape)
