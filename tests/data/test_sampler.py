"""The sampler: an order that is a pure function of the step, whole, and the same for all ranks."""

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import IGNORE, Sampler
from meshwright.data import sampler as sampler_module
from meshwright.data.permutation import permute
from meshwright.data.view import Shard, split
from meshwright.errors import DataError

VOCAB = 1000


def shards_of(*documents_by_shard, dtype=np.uint16):
    """Shards of documents given by their lengths; the tokens count up through all of them."""
    shards, first = [], 0
    for number, lengths in enumerate(documents_by_shard):
        size = sum(lengths)
        tokens = (np.arange(first, first + size) % VOCAB).astype(dtype)
        path = Path("store") / f"tokens-{number:05d}.bin"
        shards.append(Shard(path, tokens, np.cumsum(lengths).astype(np.int64)))
        first += size
    return shards


def stream(*documents_by_shard):
    return split(shards_of(*documents_by_shard), 0.0, VOCAB)[0]


@given(st.integers(1, 5000), st.integers(0, 2**32), st.integers(0, 50))
def test_permutation_is_a_bijection(n, seed, epoch):
    order = permute(np.arange(n), n, f"{seed}/{epoch}")
    assert np.array_equal(np.sort(order), np.arange(n))


def test_permutation_differs_by_epoch_and_seed_and_looks_random():
    n = 10_000
    orders = [permute(np.arange(n), n, key) for key in ("0/0", "0/1", "1/0", "1/1")]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.002
        # Of a random order: no correlation with the place, nor between neighbours.
        assert abs(np.corrcoef(one, np.arange(n))[0, 1]) < 0.04
        assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.04


def test_permutation_of_many_things():
    n = 10**12 + 39
    out = permute(np.arange(0, n, n // 1000), n, "key")
    assert len(np.unique(out)) == len(out)
    assert out.min() >= 0
    assert n * 0.9 < out.max() < n


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_read_the_global_batch(ranks, packing):
    sampler = Sampler(stream([50] * 9, [30] * 5), seq_len=16, batch=8, seed=3, packing=packing)
    share = 8 // ranks
    for step in range(12):  # across epochs
        whole = sampler.rows(step)
        parts = [sampler.rows(step, range(r * share, (r + 1) * share)) for r in range(ranks)]
        for name in ("inputs", "targets", "segments"):
            if getattr(whole, name) is None:
                assert packing == "stream"
                continue
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert np.array_equal(joined, getattr(whole, name))


def test_a_single_row_keeps_its_inputs_where_targets_are_ignored():
    sampler = Sampler(stream([5] * 40), seq_len=16, batch=4, packing="documents")
    whole = sampler.rows(0)
    assert (whole.targets == IGNORE).any()
    for row in range(4):
        assert np.array_equal(sampler.rows(0, range(row, row + 1)).inputs[0], whole.inputs[row])


def test_every_epoch_reads_every_sample_once():
    sampler = Sampler(stream([1001]), seq_len=10, batch=7, seed=1)
    assert sampler.samples == 100
    seen = np.concatenate([sampler.windows(step) for step in range(100)])  # seven epochs
    epochs = seen.reshape(7, 100)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(100))
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_batch_larger_than_the_epoch_goes_on_into_the_next():
    sampler = Sampler(stream([31]), seq_len=10, batch=8)
    seen = np.concatenate([sampler.windows(step) for step in range(3)]).reshape(8, 3)
    assert all(sorted(epoch) == [0, 1, 2] for epoch in seen.tolist())


def test_samples_are_windows_of_the_stream():
    view = stream([700], [400], [33])
    sampler = Sampler(view, seq_len=64, batch=4)
    for step in range(4):
        rows = sampler.rows(step)
        for window, inputs, targets in zip(
            sampler.windows(step), rows.inputs, rows.targets, strict=True
        ):
            expected = np.arange(window * 64, window * 64 + 65) % VOCAB
            assert np.array_equal(inputs, expected[:-1])
            assert np.array_equal(targets, expected[1:])
        assert rows.segments is None
        assert rows.inputs.dtype == rows.targets.dtype == np.int64
        assert rows.inputs.flags.c_contiguous
        assert rows.targets.flags.c_contiguous


@given(st.lists(st.integers(1, 40), min_size=2, max_size=30), st.integers(2, 20), st.integers(0, 9))
def test_documents_against_a_plain_loop(lengths, seq_len, step):
    lengths = [*lengths, seq_len + 2]
    view = stream(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    sampler = Sampler(view, seq_len=seq_len, batch=3, packing="documents")
    rows = sampler.rows(step)
    for row, window in enumerate(sampler.windows(step)):
        start = window * seq_len
        for column in range(seq_len):
            here, after = document[start + column], document[start + column + 1]
            assert rows.segments[row, column] == here - document[start]
            following = (start + column + 1) % VOCAB
            assert rows.targets[row, column] == (following if here == after else IGNORE)


def test_a_far_step_costs_the_same_and_equals_its_place(monkeypatch):
    sampler = Sampler(stream([100_001]), seq_len=10, batch=16, seed=5)
    far = 10**15
    epoch = far * 16 // sampler.samples
    first = far * 16 % sampler.samples
    places = np.arange(first, min(first + 16, sampler.samples))
    expected = permute(places, sampler.samples, f"5/{epoch}")
    assert np.array_equal(sampler.windows(far)[: len(places)], expected)
    assert sampler.position(far).epoch == epoch
    asked = []
    monkeypatch.setattr(sampler_module, "permute", lambda x, *a: asked.append(x) or permute(x, *a))
    for step in (far, 0):
        asked.clear()
        sampler.rows(step)
        assert sum(map(len, asked)) == 16  # places of this batch alone, however far it is


@pytest.mark.perf
def test_rows_are_read_quickly():
    view = stream([400] * 3000)
    sampler = Sampler(view, seq_len=512, batch=16, packing="documents")
    times = []
    for step in range(50):
        started = time.perf_counter()
        sampler.rows(step)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3


def test_position():
    sampler = Sampler(stream([1001]), seq_len=10, batch=8)
    position = sampler.position(13)
    assert (position.epoch, position.sample, position.samples) == (1, 4, 100)
    assert position.tokens == 1040


@pytest.mark.parametrize("rows", [range(-1, 2), range(2, 5)])
def test_rows_outside_the_batch_are_refused(rows):
    with pytest.raises(IndexError):
        Sampler(stream([100]), seq_len=8, batch=4).rows(0, rows)


def test_rows_by_slice_and_none():
    sampler = Sampler(stream([100]), seq_len=8, batch=4)
    assert np.array_equal(sampler.rows(2, slice(1, 3)).inputs, sampler.rows(2).inputs[1:3])
    assert sampler.rows(2, range(0)).inputs.shape == (0, 8)
    with pytest.raises(IndexError, match="negative"):
        sampler.rows(-1)


def test_of_one_document_the_last_tokens_are_held_out_as_the_docs_say():
    train, held = split(shards_of([100]), 0.02, VOCAB)
    assert (len(train), len(held)) == (98, 2)
    docs = Path(__file__).parents[2] / "docs"
    for page, share in (
        ("config.md", "the last share of the tokens"),
        ("guides/data.md", "the last share of its tokens"),
    ):
        assert share in (docs / page).read_text()


def test_too_short_a_split_names_both_numbers():
    with pytest.raises(DataError, match="validation split has 16 tokens, one sample needs 17"):
        Sampler(stream([16]), seq_len=16, batch=1, name="validation split")
    assert Sampler(stream([17]), seq_len=16, batch=1).samples == 1


@pytest.mark.parametrize(
    ("bad", "dtype", "limit", "match"),
    [
        (70000, np.uint32, None, r"id 70000 at token 25 of tokens-00001\.bin, vocabulary is 1000"),
        (-7, np.int32, None, r"id -7 at token 25 of tokens-00001\.bin"),
        (999, np.uint16, 900, r"id 999 at token 25 of tokens-00001\.bin, vocabulary is 900"),
    ],
)
def test_an_impossible_id_is_named(bad, dtype, limit, match):
    shards = shards_of([40], [60], dtype=dtype)
    tokens = shards[1].tokens.copy()
    tokens[25] = bad
    shards[1] = Shard(shards[1].path, tokens, shards[1].ends)
    view = split(shards, 0.0, VOCAB)[0]
    sampler = Sampler(view, seq_len=33, batch=3, vocab_size=limit)
    with pytest.raises(DataError, match=match):
        sampler.rows(0)


def test_rows_without_a_target_are_named():
    sampler = Sampler(stream([1] * 100), seq_len=8, batch=2, packing="documents")
    with pytest.raises(DataError, match=r"token \d+ of tokens-00000.bin.*nothing to learn"):
        sampler.rows(0)


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=20), min_size=1, max_size=4),
    st.sampled_from([0.01, 0.1, 0.3, 0.7]),
)
def test_split_is_disjoint_and_complete(lengths, share):
    total = sum(map(sum, lengths))
    documents = sum(map(len, lengths))
    if total < 4:
        return
    shards = shards_of(*lengths)
    train, held = split(shards, share, VOCAB)
    assert len(train) + len(held) == total
    assert len(train) > 0
    assert len(held) > 0
    parts = [view.read(0, len(view)) for view in (train, held)]
    places = np.concatenate([[view.locate(i) for i in range(len(view))] for view in (train, held)])
    assert len({tuple(place) for place in places.tolist()}) == total
    assert sorted(np.concatenate(parts).tolist()) == sorted(i % VOCAB for i in range(total))
    whole = int(documents * share)
    if whole:
        assert held.documents == whole
        assert train.documents == documents - whole
    else:
        assert len(held) == max(1, round(total * share))


def test_split_is_stable_and_spread():
    shards = shards_of([10] * 600, [10] * 400)
    _, held = split(shards, 0.05, VOCAB)
    _, again = split(shards, 0.05, VOCAB)
    places = [held.locate(i) for i in range(0, len(held), 10)]
    assert places == [again.locate(i) for i in range(0, len(again), 10)]
    first = [token // 10 + 600 * path.name.endswith("1.bin") for path, token in places]
    assert len(first) == 50
    assert all(any(a <= d < a + 250 for d in first) for a in range(0, 1000, 250))


def test_no_validation_and_impossible_shares():
    train, held = split(shards_of([5, 5]), 0.0, VOCAB)
    assert (len(train), len(held)) == (10, 0)
    assert held.documents == 0
    with pytest.raises(DataError, match=r"validation = 1\.0"):
        split(shards_of([5]), 1.0, VOCAB)
    with pytest.raises(DataError, match="1 tokens cannot be split"):
        split(shards_of([1]), 0.1, VOCAB)
    with pytest.raises(DataError, match="validation split has 0 tokens"):
        Sampler(held, seq_len=2, batch=1, name="validation split")
