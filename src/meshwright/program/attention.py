"""How causal attention on a CPU is divided into blocks, and their memory: `models.blockwise`
computes them."""

from __future__ import annotations

from typing import Final, NamedTuple

from meshwright.layout.rules import divisors
from meshwright.spec.model import LayerSpec, ModelSpec

# Tokens of a row from which, in fp32, and up to which blocks were measured to be faster than
# PyTorch's kernel: `python -m benchmarks.attention`.
SHORTEST: Final = 192
LONGEST: Final = 2048
# Tokens in a block, and the bytes that its scores may have: a core's second-level cache.
BLOCK: Final = 64
SCORES: Final = 1 << 20
# Queries of a part, at most, where a window keeps scores small: they are held in fp32 too.
QUERIES: Final = 1 << 15
_WIDE: Final = 4


class ScoreBounds(NamedTuple):
    """Which attention scores a query has, and their soft cap.

    A query sees its own position and the `window - 1` before it, or with None all before it. A
    score x becomes `cap * tanh(x / cap)`. With `sinks`, the softmax has one more score, the sink of
    its head.
    """

    window: int | None = None
    cap: float | None = None
    sinks: bool = False

    @classmethod
    def of(cls, model: ModelSpec, kind: LayerSpec) -> ScoreBounds:
        """Return the bounds of the scores in a kind of layer."""
        return cls(kind.window, model.attention_softcap, model.attention_sinks)

    def within(self, keys: int) -> ScoreBounds:
        """Return the bounds without the window if it is at least `keys` tokens, the length of a
        sequence."""
        is_bounded = self.window is not None and self.window < keys
        return self if is_bounded else self._replace(window=None)


UNBOUNDED: Final = ScoreBounds()


def causal_scores(length: int, window: int | None) -> float:
    """Return the number of scores of a head in a causal sequence; those on the diagonal count
    half."""
    seen = length if window is None else min(window, length)
    return seen * (length - seen / 2)


class Cut(NamedTuple):
    """How a call of attention is divided: into parts of `rows` sequences with `heads` key heads,
    then into blocks.

    All parts have the same shape. `shared` query heads share a key head; `length` is in tokens,
    `dim` is that of a head. `sees` has the bounds of scores.
    """

    rows: int
    heads: int
    shared: int
    length: int
    dim: int
    sees: ScoreBounds = UNBOUNDED

    @classmethod
    def of(
        cls,
        batch: int,
        heads: int,
        kv_heads: int,
        length: int,
        dim: int,
        sees: ScoreBounds = UNBOUNDED,
    ) -> Cut:
        """Return the division in which the scores of a block fit the cache and queries are rarely
        copied."""
        shared = heads // kv_heads
        single = cls(1, 1, shared, length, dim, sees)
        limit = SCORES // (_WIDE * single.scores)
        if sees.within(length).window is not None:
            limit = min(limit, QUERIES // (shared * length))
        limit = max(1, limit)
        parts = max(size for size in divisors(kv_heads) if size <= limit)
        fits = [size for size in divisors(batch) if size <= limit // parts]
        rows = max(fits) if parts == kv_heads else 1
        return single._replace(rows=rows, heads=parts)

    @property
    def span(self) -> int:
        """The most keys that a query block sees, and the most queries that see a key block."""
        window = self.sees.within(self.length).window
        return self.length if window is None else min(self.length, window + BLOCK - 1)

    @property
    def scores(self) -> int:
        """The number of scores in a block, over all heads of a part."""
        return self.rows * self.heads * self.shared * min(BLOCK, self.length) * self.span

    def backward_bytes(self, element: int) -> int:
        """Return the workspace of a part's backward in bytes; `element` is bytes per element."""
        # In fp32, and as products take it.
        element_bytes = _WIDE + (element if element != _WIDE else 0)
        heads = self.rows * self.heads
        keys = heads * self.length
        queries = keys * self.shared
        # Queries and their gradient in both, the sum of gradients, and what a block adds to it.
        byte_count = queries * self.dim * (2 * element_bytes + _WIDE)
        byte_count += heads * self.span * self.shared * self.dim * element
        # Keys and values in both, gradients of a block's keys; two scores; log-sum-exp and rest.
        block = heads * min(BLOCK, self.length)
        byte_count += keys * self.dim * 2 * element_bytes + block * self.dim * element
        byte_count += 2 * self.scores * element_bytes + 2 * queries * _WIDE
        # The cap's slopes.
        return byte_count + (0 if self.sees.cap is None else self.scores * _WIDE)


def by_blocks(
    heads: int, kv_heads: int, length: int, precision: str, sees: ScoreBounds = UNBOUNDED
) -> bool:
    """Whether attention on a CPU runs in blocks: in fp32 and bf16, unless sequences are long, or
    short in fp32.

    With a window, a cap or a sink, sequences of all lengths use blocks: for a window, PyTorch's
    kernel needs a mask, with which it computes and stores a whole square, and it supports neither
    caps nor sinks.
    """
    shortest = {"fp32": SHORTEST, "bf16": 1}.get(precision)
    if shortest is None or sees.within(length) != UNBOUNDED:
        return shortest is not None
    is_small = _WIDE * heads // kv_heads * BLOCK * length <= SCORES
    return is_small and shortest <= length <= LONGEST
