"""Which queries see which keys in ring attention, cut into the rectangles that are computed.

The ring's sequence is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r, in this
order. `execute.context` computes exactly these pieces of it, and `execute.documents` those of a
document, so that what a window saves can be counted without either.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from meshwright.program.attention import ScoreBounds

# A causal square whose window is shorter, or whose scores are all held at once, is cut into this
# many blocks of queries, but into none of fewer tokens: a call has its own cost.
BLOCKS: Final = 8
SHORTEST_BLOCK: Final = 64


class Piece(NamedTuple):
    """Some queries and keys, by their places among a rank's own, of which all pairs are computed.

    `causal`: as many keys as queries, of which query i sees none after key i. `masked`: not all of
    the rest is seen either, and takes a mask of positions; the first query's is `ahead` tokens
    after the first key's.
    """

    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False
    ahead: int = 0

    @property
    def rows(self) -> int:
        """How many queries it has."""
        return int(self.queries.stop - self.queries.start)

    @property
    def columns(self) -> int:
        """How many keys it has."""
        return int(self.keys.stop - self.keys.start)

    def pairs(self, plain: bool) -> float:
        """Return the pairs of query and key that cost time: a kernel skips half if it is causal."""
        return self.rows * self.columns / (2 if self.causal and not plain else 1)

    def moved(self, places: int) -> Piece:
        """Return it so many places on, of queries and keys."""
        queries, keys = (
            slice(x.start + places, x.stop + places) for x in (self.queries, self.keys)
        )
        return self._replace(queries=queries, keys=keys)


def causal_pieces(length: int, scores: ScoreBounds) -> tuple[Piece, ...]:
    """Return the pieces of causal attention inside `length` tokens: each query is in one of them.

    One piece, where every query sees all before it and a kernel does not hold the scores.
    """
    window = length if scores.window is None else scores.window
    if scores.cap is None and window >= length:
        return (Piece(slice(0, length), slice(0, length), causal=True),)
    size = max(SHORTEST_BLOCK, -(-length // BLOCKS))
    found = []
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(0, start - window + 1)
        rows, ahead = stop - start, start - first
        causal = ahead == 0
        masked = (rows > 1 and not causal) or ahead + rows > window
        found.append(Piece(slice(start, stop), slice(first, stop), causal, masked, ahead))
    return tuple(found)


def ring_pieces(
    length: int, cp: int, rank: int, owner: int, scores: ScoreBounds
) -> tuple[Piece, ...]:
    """Return what rank `rank` computes with rank `owner`'s keys, `length` of them, or nothing.

    Of its own keys, what comes first has each query once. Of two ranks the lower one's first chunk
    precedes, and its second chunk follows, both chunks of the other: so without a window half of
    the scores are needed whichever it is, in one piece.
    """
    chunk = length // 2
    farthest = (2 * cp - rank - owner) * chunk - 1  # from the last query to the first key
    if scores.cap is None and (scores.window is None or farthest < scores.window):
        queries = slice(chunk if owner > rank else 0, length)
        keys = slice(0, chunk if owner < rank else length)
        return (Piece(queries, keys, causal=owner == rank),)
    if owner == rank:
        own = causal_pieces(chunk, scores)
        found = [*own, *(piece.moved(chunk) for piece in own)]
    elif owner < rank:
        found = _of_chunks(chunk, rank - owner, 0, 0, scores)
    else:
        found = _of_chunks(chunk, owner - rank, 1, 1, scores)
    return (*found, *_of_chunks(chunk, 2 * cp - 1 - rank - owner, 1, 0, scores))


def _of_chunks(
    chunk: int, apart: int, query_chunk: int, key_chunk: int, scores: ScoreBounds
) -> list[Piece]:
    """Return what a chunk of queries sees of one of keys that begins `apart` chunks before it."""
    far = apart * chunk
    window = far + chunk if scores.window is None else scores.window
    rows = min(chunk, window - far + chunk - 1)  # of which the last sees the last key
    first = max(0, far - window + 1)  # which the first query sees
    if rows <= 0:
        return []
    start, ahead = query_chunk * chunk, far - first
    queries = slice(start, start + rows)
    keys = slice(key_chunk * chunk + first, (key_chunk + 1) * chunk)
    return [Piece(queries, keys, masked=ahead + rows > window, ahead=ahead)]


def ring_pairs(
    seq_len: int, cp: int, rank: int, scores: ScoreBounds
) -> tuple[tuple[Piece, ...], ...]:
    """Return what a rank computes in each step of the ring; in a step without pieces, nothing.

    In step s it has the keys of the s-th rank before it.
    """
    length = seq_len // cp
    return tuple(ring_pieces(length, cp, rank, (rank - step) % cp, scores) for step in range(cp))


class RingTotals(NamedTuple):
    """What a rank computes in all steps: pairs, those of plain operations, results of queries."""

    pairs: float
    plain_pairs: float
    rows: int


@lru_cache(maxsize=8192)
def ring_totals(seq_len: int, cp: int, rank: int, scores: ScoreBounds) -> RingTotals:
    """Return the sums over the pieces of `ring_pairs`; a search asks for the same ones often."""
    pieces = [piece for step in ring_pairs(seq_len, cp, rank, scores) for piece in step]
    return RingTotals(
        sum(piece.pairs(plain=False) for piece in pieces),
        sum(piece.pairs(plain=True) for piece in pieces),
        sum(piece.rows for piece in pieces),
    )
