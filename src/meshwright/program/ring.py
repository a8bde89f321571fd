"""The rectangles of queries and keys that each rank computes in ring attention.

The sequence is cut into 2 cp chunks. Rank r holds chunk r, then chunk 2 cp - 1 - r.
`parallel.context_parallel.context` computes the pieces that this module lists for a sequence,
`kernels.varlen` those for a document. The module also counts the work that a window saves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from meshwright.program.attention import UNBOUNDED, ScoreBounds

# Causal attention is cut into this many blocks of queries where a window leaves out some keys, or
# where a cap makes the kernel hold all scores at once. No block has fewer queries than
# SHORTEST_BLOCK, as every call has a fixed cost; the last one may.
BLOCKS: Final = 8
SHORTEST_BLOCK: Final = 64


class Piece(NamedTuple):
    """A rectangle of queries and keys that one call computes.

    `queries` and `keys` are slices of the tokens that a rank holds. With `causal`, there are as
    many keys as queries, and query i sees keys 0 to i. With `masked`, other pairs are hidden, too,
    so the call takes a mask made from positions. `ahead` is the position of the first query minus
    the position of the first key, in tokens.
    """

    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False
    ahead: int = 0

    @property
    def rows(self) -> int:
        """The number of queries."""
        return int(self.queries.stop - self.queries.start)

    @property
    def columns(self) -> int:
        """The number of keys."""
        return int(self.keys.stop - self.keys.start)

    def pairs(self, plain: bool) -> float:
        """Return the number of (query, key) pairs that are computed.

        A kernel skips half of a causal piece; `plain` torch operations compute all of it.
        """
        return self.rows * self.columns / (2 if self.causal and not plain else 1)

    def moved(self, places: int) -> Piece:
        """Return the piece with queries and keys shifted by `places` tokens."""
        queries, keys = (
            slice(x.start + places, x.stop + places) for x in (self.queries, self.keys)
        )
        return self._replace(queries=queries, keys=keys)


def causal_pieces(length: int, scores: ScoreBounds) -> tuple[Piece, ...]:
    """Return the causal pieces of `length` tokens; each query is in one of them.

    There is a single piece if no window hides a key and no cap makes the kernel store the scores.
    """
    window = length if scores.window is None else scores.window
    if scores.cap is None and window >= length:
        return (Piece(slice(0, length), slice(0, length), causal=True),)
    size = max(SHORTEST_BLOCK, -(-length // BLOCKS))
    pieces = []
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(0, start - window + 1)
        rows, ahead = stop - start, start - first
        causal = ahead == 0
        masked = (rows > 1 and not causal) or ahead + rows > window
        pieces.append(Piece(slice(start, stop), slice(first, stop), causal, masked, ahead))
    return tuple(pieces)


def ring_pieces(
    length: int, cp: int, rank: int, owner: int, scores: ScoreBounds
) -> tuple[Piece, ...]:
    """Return the pieces that `rank` computes with the keys of `owner`; empty if it sees none of
    them.

    Each rank holds `length` tokens. If `owner` is `rank`, the first pieces have each query once. Of
    two different ranks, the first chunk of the lower one precedes both chunks of the other, and its
    second chunk follows both. So without a window, a rank computes half of the scores with the keys
    of any other rank, in one piece.
    """
    chunk = length // 2
    farthest = (2 * cp - rank - owner) * chunk - 1  # from the last query to the first key
    if scores.cap is None and (scores.window is None or farthest < scores.window):
        queries = slice(chunk if owner > rank else 0, length)
        keys = slice(0, chunk if owner < rank else length)
        return (Piece(queries, keys, causal=owner == rank),)
    if owner == rank:
        first_chunk = causal_pieces(chunk, scores)
        pieces = [*first_chunk, *(piece.moved(chunk) for piece in first_chunk)]
    elif owner < rank:
        pieces = _of_chunks(chunk, rank - owner, 0, 0, scores)
    else:
        pieces = _of_chunks(chunk, owner - rank, 1, 1, scores)
    return (*pieces, *_of_chunks(chunk, 2 * cp - 1 - rank - owner, 1, 0, scores))


def whole_piece(length: int, cp: int, rank: int, owner: int, scores: ScoreBounds) -> Piece | None:
    """Return one piece that covers all keys of `owner` that `rank` sees; None if it sees none.

    GPU kernels for documents, windows and caps take it, and skip hidden pairs themselves.
    """
    if not ring_pieces(length, cp, rank, owner, scores):
        return None
    (piece,) = ring_pieces(length, cp, rank, owner, UNBOUNDED)
    return piece


def _of_chunks(
    chunk: int, apart: int, query_chunk: int, key_chunk: int, scores: ScoreBounds
) -> list[Piece]:
    """Return a list with the piece of a query chunk and the key chunk `apart` chunks before; empty
    if none is visible.

    `query_chunk` and `key_chunk` say which of a rank's two chunks (0 or 1) each is.
    """
    far = apart * chunk
    window = far + chunk if scores.window is None else scores.window
    rows = min(chunk, window - far + chunk - 1)  # the last of these queries sees the last key
    first = max(0, far - window + 1)  # the first key that the first query sees
    if rows <= 0:
        return []
    start, ahead = query_chunk * chunk, far - first
    queries = slice(start, start + rows)
    keys = slice(key_chunk * chunk + first, (key_chunk + 1) * chunk)
    return [Piece(queries, keys, masked=ahead + rows > window, ahead=ahead)]


def ring_pairs(
    seq_len: int, cp: int, rank: int, scores: ScoreBounds
) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces that a rank computes in each step of the ring; a step may have none.

    In step s the rank has the keys of the rank s places before it.
    """
    length = seq_len // cp
    return tuple(ring_pieces(length, cp, rank, (rank - step) % cp, scores) for step in range(cp))


class RingTotals(NamedTuple):
    """What a rank computes in all steps of the ring.

    `pairs` are the pairs of query and key that a kernel computes, `plain_pairs` those that plain
    operations compute. `rows` counts the queries of all pieces, `whole_rows` those of the steps'
    `whole_piece`.
    """

    pairs: float
    plain_pairs: float
    rows: int
    whole_rows: int


@lru_cache(maxsize=8192)
def ring_totals(seq_len: int, cp: int, rank: int, scores: ScoreBounds) -> RingTotals:
    """Return the sums over the pieces of `ring_pairs`; cached, because a search repeats them."""
    pieces = [piece for step in ring_pairs(seq_len, cp, rank, scores) for piece in step]
    wholes = [whole_piece(seq_len // cp, cp, rank, owner, scores) for owner in range(cp)]
    return RingTotals(
        sum(piece.pairs(plain=False) for piece in pieces),
        sum(piece.pairs(plain=True) for piece in pieces),
        sum(piece.rows for piece in pieces),
        sum(piece.rows for piece in wholes if piece is not None),
    )
