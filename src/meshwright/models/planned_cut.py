"""The plan of blockwise attention: how a call is divided, its memory, and the masks of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from meshwright.program.attention import BLOCK, Cut, ScoreBounds

LN_2: Final = math.log(2)


class PlannedCut(Cut):
    """A `Cut` (how blockwise attention divides a call) with its buffers and views of tensors.

    `parts` divides the batch and the key heads; one part after the other is computed, in blocks of
    tokens. `shared` query heads share a key head.
    """

    @classmethod
    def of_call(cls, query: Tensor, key: Tensor, window: int, cap: float) -> PlannedCut:
        """Return the plan of an attention call with these shapes; `window` and `cap` are 0 for
        none.
        """
        batch, kv_heads, length, dim = key.shape
        sees = ScoreBounds(window or None, cap or None)
        return cls(*Cut.of(batch, query.shape[1], kv_heads, length, dim, sees))

    @property
    def scale(self) -> float:
        """The factor of query-key products, `1 / sqrt(head_dim)`."""
        return 1 / math.sqrt(self.dim)

    @property
    def cap(self) -> float:
        """The cap of base-2 scores, 0 for none."""
        return (self.sees.cap or 0.0) / LN_2

    @property
    def factor(self) -> float:
        """The factor that turns query-key products into base-2 scores, or with a cap into tanh's
        input.
        """
        return self.scale / self.sees.cap if self.sees.cap else self.scale / LN_2

    def parts(self, batch: int, kv_heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield the parts of a call: (slice of sequences, slice of key heads)."""
        for row in range(0, batch, self.rows):
            for head in range(0, kv_heads, self.heads):
                yield slice(row, row + self.rows), slice(head, head + self.heads)

    def blocks(self) -> Iterator[slice]:
        """Yield the slice of tokens of each block."""
        for start in range(0, self.length, BLOCK):
            yield slice(start, min(start + BLOCK, self.length))

    def of_tokens(self, tokens: slice) -> slice:
        """Return the matrix rows of the tokens' queries, where heads that share a key head are
        adjacent.
        """
        return slice(tokens.start * self.shared, tokens.stop * self.shared)

    def seen_by(self, queries: slice) -> slice:
        """Return the slice of keys that any query of a block attends to."""
        window = self.sees.window or self.length
        return slice(max(0, queries.start - window + 1), queries.stop)

    def seeing(self, keys: slice) -> slice:
        """Return the slice of queries that attend to any key of a block."""
        window = self.sees.window or self.length
        return slice(keys.start, min(self.length, keys.stop + window - 1))

    def adding(self, part: Tensor, total: Tensor, keys: slice) -> Callable[[], None]:
        """Return a function that adds a key block's query gradients, `part`, to their sum `total`.

        Blocks of keys come in order; queries that no earlier block reached are copied, since their
        part of `total` is uninitialised.
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
        """Return an uninitialised buffer for a part's queries `[heads, seq * shared, dim]`."""
        size = self.length * self.shared
        return torch.empty(self.rows * self.heads, size, dim or self.dim, dtype=dtype)

    def keys(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised buffer for a part's keys `[heads, seq, dim]`."""
        return torch.empty(self.rows * self.heads, self.length, self.dim, dtype=dtype)

    def room(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised flat buffer for the scores of a block."""
        return torch.empty(self.scores, dtype=dtype)

    def by_key(self, x: Tensor) -> Tensor:
        """Return `x` `[batch, heads, seq, dim]` viewed as `[batch, kv_heads, seq, shared, dim]`."""
        out: Tensor = x.unflatten(1, (-1, self.shared))  # type: ignore[no-untyped-call]
        return out.transpose(2, 3)

    def as_queries(self, x: Tensor) -> Tensor:
        """View queries `[heads, tokens * shared, dim]` in the shape that `by_key` gives."""
        return x.view(self.rows, self.heads, -1, self.shared, x.shape[-1])

    def as_keys(self, x: Tensor) -> Tensor:
        """View keys `[heads, tokens, dim]` as `[batch, kv_heads, tokens, dim]` of the part."""
        return x.view(self.rows, self.heads, *x.shape[1:])


class Hidden(NamedTuple):
    """Masks to add to scores of keys after a query (`later`) or before its window (`past`)."""

    later: Tensor
    past: Tensor
    shared: int
    window: int

    @classmethod
    def of(cls, cut: Cut) -> Hidden:
        """Return the masks of a plan, `[BLOCK keys, BLOCK * shared queries]` with -inf in one
        triangle.
        """
        full = torch.full((BLOCK, BLOCK), -math.inf)
        later, past = (x.repeat_interleave(cut.shared, 1) for x in (full.tril(-1), full.triu()))
        return cls(later, past, cut.shared, cut.sees.window or cut.length)

    def corners(self, scores: Tensor, keys: slice, queries: slice) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a view into scores `[heads, keys, queries]` and the mask to add to that
        view.

        Tokens that are both keys and queries are on the diagonal. The pairs beyond the window are
        in the corner of the first keys and the last queries.
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
    """Buffers of a matmul's factor in fp32 and in the matmul's dtype, one if both are fp32."""

    wide: Tensor
    narrow: Tensor

    @classmethod
    def of(cls, make: Callable[..., Tensor], dtype: torch.dtype) -> FactorMemory:
        """Allocate `wide` and `narrow`, which has `dtype`.

        `make()` returns a flat fp32 buffer, large enough for the factor; `make(dtype=dtype)` one of
        the same size in that dtype.
        """
        wide = make()
        return cls(wide, wide if dtype == wide.dtype else make(dtype=dtype))

    def fill(self, view: Callable[[Tensor], Tensor], source: Tensor) -> None:
        """Copy `source` into both buffers; `view` returns the view to write to."""
        view(self.narrow).copy_(source)
        if self.wide is not self.narrow:
            self.wide.copy_(self.narrow)

    def shaped(self, *shape: int) -> FactorMemory:
        """Return views of the start of both flat buffers in `shape`."""
        wide = shaped(self.wide, *shape)
        same = self.wide is self.narrow
        return FactorMemory(wide, wide if same else shaped(self.narrow, *shape))


def shaped(memory: Tensor, *shape: int) -> Tensor:
    """Return a view of the start of a flat buffer in `shape`."""
    return memory[: math.prod(shape)].view(shape)
