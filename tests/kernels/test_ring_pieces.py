"""What the ring computes under windows and caps, against every pair of positions."""

import numpy as np
import pytest

from meshwright.program.attention import UNBOUNDED, ScoreBounds
from meshwright.program.ring import causal_pieces, ring_pairs, ring_pieces, whole_piece


def held(seq_len, cp, rank):
    """The positions of a rank, in its order."""
    chunk = seq_len // (2 * cp)
    first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
    return np.concatenate((np.arange(first, first + chunk), np.arange(second, second + chunk)))


def seen(queries, keys, window):
    """Which queries see which keys, by their positions."""
    back = queries[:, None] - keys
    return (back >= 0) & (True if window is None else back < window)


def check(pieces, queries, keys, window):
    """Each pair that is seen is computed once; a piece hides no other by its own words."""
    wanted, times = seen(queries, keys, window), np.zeros((len(queries), len(keys)), int)
    for piece in pieces:
        places = np.ix_(range(len(queries))[piece.queries], range(len(keys))[piece.keys])
        part = wanted[places]
        assert part.shape == (piece.rows, piece.columns)
        whole = np.ones(part.shape, bool)
        if piece.causal:
            assert piece.rows == piece.columns
            whole = np.tril(whole)
            assert not (part & ~whole).any()
        if piece.masked:
            assert (part != whole).any()
            own = np.arange(piece.ahead, piece.ahead + piece.rows)
            assert (seen(own, np.arange(piece.columns), window) == part).all()
        else:
            assert (part == whole).all()
        # Narrowed to what is seen: no query without a key, and no key without a query.
        assert part.any(0).all()
        assert part.any(1).all()
        times[places] += part
    assert (times == wanted).all()


CHUNK = 70  # cut into two blocks, of which the last is short


@pytest.mark.often(3)
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_visible_pair_is_computed_once(cp, cap):
    for chunk in (1, 3, CHUNK):
        seq_len = 2 * cp * chunk
        near = {w + d for w in range(0, seq_len + 1, chunk) for d in (-1, 0, 1)}
        for window in (None, *sorted(w for w in (near | {2, chunk // 2}) if w > 0)):
            scores = ScoreBounds(window, cap)
            for rank in range(cp):
                steps = ring_pairs(seq_len, cp, rank, scores)
                assert len(steps) == cp
                for step, pieces in enumerate(steps):
                    queries, keys = (held(seq_len, cp, r) for r in (rank, (rank - step) % cp))
                    check(pieces, queries, keys, window)
                    one = whole_piece(seq_len // cp, cp, rank, (rank - step) % cp, scores)
                    assert (one is None) == (not pieces)
                    for piece in pieces:  # all of them lie in it
                        for part, all_ in ((piece.queries, one.queries), (piece.keys, one.keys)):
                            assert all_.start <= part.start
                            assert part.stop <= all_.stop


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 1030])
def test_a_causal_sequence_is_cut_by_its_queries(length):
    for window in (1, 2, 64, 100, length - 1, length, length + 1):
        for cap in (None, 5.0):
            pieces = causal_pieces(length, ScoreBounds(window or None, cap))
            assert len(pieces) <= 8
            assert [p.queries.start for p in pieces[1:]] == [p.queries.stop for p in pieces[:-1]]
            check(pieces, np.arange(length), np.arange(length), window or None)


def test_the_comparison_catches_a_window_that_is_off_by_one():
    queries, keys = held(6 * CHUNK, 3, 1), held(6 * CHUNK, 3, 0)
    for window in (2, CHUNK // 2, CHUNK):
        for wrong in (window - 1, window + 1):
            with pytest.raises(AssertionError):
                check(ring_pieces(2 * CHUNK, 3, 1, 0, ScoreBounds(wrong)), queries, keys, window)


def test_without_a_window_each_step_is_half_a_square():
    for scores in (UNBOUNDED, ScoreBounds(8 * CHUNK)):
        for rank in range(4):
            steps = ring_pairs(8 * CHUNK, 4, rank, scores)
            assert [len(pieces) for pieces in steps] == [1] * 4
            assert [p.pairs(plain=False) for (p,) in steps] == [(2 * CHUNK) ** 2 / 2] * 4
            assert not any(p.masked for (p,) in steps)


def test_a_short_window_skips_steps():
    """With a window of a chunk a rank sees its own and the two that precede these."""
    steps = ring_pairs(16 * CHUNK, 8, 3, ScoreBounds(CHUNK))
    assert [bool(pieces) for pieces in steps] == [
        True,
        True,
        False,
        False,
        False,
        False,
        False,
        True,
    ]
    whole, cut = (
        sum(p.pairs(plain=False) for pieces in ring_pairs(65536, 8, 3, s) for p in pieces)
        for s in (UNBOUNDED, ScoreBounds(1024))
    )
    # Tokens see 1024 keys each, computed in blocks of 512 queries and all their keys.
    assert 8192 * 1024 < cut < 8192 * (1024 + 512 + 256)
    assert cut < whole / 10
