"""A prepared store in an object store: read as one on a disk, through a cache of bounded size."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faulty import flip
from meshwright import files
from meshwright.data import IGNORE, open_data, prepare, remote, store, view
from meshwright.data.corpora import Files
from meshwright.data.remote import AHEAD, BlockCache, RowsAhead, open_remote
from meshwright.errors import ConfigError, DataError, MeshwrightError
from meshwright.spec.training import DataSpec
from meshwright.store import StoreError, StorePath, place

BLOCK = 100
TEXT = "<|endoftext|>".join("abcdefgh" * n for n in (60, 5, 40, 80))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a store whose blocks have 100 bytes, 50 tokens of two bytes."""
    for module in (files, view, remote, store):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    (tmp_path / "a.txt").write_text(TEXT)
    return prepare([Files((tmp_path / "a.txt",))], "bytes", tmp_path / "store").folder


@pytest.fixture
def requests(monkeypatch):
    """The names and ranges of objects that were read, in order."""
    seen, read = [], StorePath.read

    def recorded(path, start=0, stop=None):
        seen.append((path.name, start, stop))
        return read(path, start, stop)

    monkeypatch.setattr(StorePath, "read", recorded)
    return seen


def spec(folder, **more):
    return DataSpec(source=f"file://{folder}", validation=0.0, **more)


def rows_of(data, steps=6, **settings):
    sampler = data.sampler("train", 16, 2)
    return [sampler.rows(step, **settings) for step in range(steps)]


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.inputs, b.inputs)
        assert np.array_equal(a.targets, b.targets)
        assert (a.segments is None and b.segments is None) or (a.segments == b.segments).all()


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_rows_and_identity_are_those_of_the_folder(folder, tmp_path, packing):
    here = open_data(DataSpec(source=str(folder), validation=0.0, packing=packing), tmp_path)
    there = open_data(spec(folder, packing=packing), tmp_path / "cache")
    assert there.identity == here.identity
    assert there.unigram_entropy == here.unigram_entropy
    assert there.tokenizer.digest == here.tokenizer.digest
    assert there.is_remote
    assert not here.is_remote
    same(rows_of(there, 40), rows_of(here, 40))
    assert sorted(there.files) == sorted(f"file://{name}" for name in here.files)


def test_only_the_blocks_that_rows_need_are_read_and_once(folder, tmp_path, requests):
    data = open_data(spec(folder), tmp_path / "cache")
    assert not [name for name, *_ in requests if name.startswith("tokens")]
    read = data.parts[0].train.read
    assert read(10, 20).tolist() == list(b"cdefghabcd")
    assert read(30, 60).tolist() == list((b"abcdefgh" * 8)[30:60])
    del requests[:2]  # the manifest and the counts
    tokens = [entry for entry in requests if entry[0].startswith("tokens")]
    assert tokens == [("tokens-00000.bin", 0, BLOCK), ("tokens-00000.bin", BLOCK, 2 * BLOCK)]

    del requests[:]
    again = open_data(spec(folder), tmp_path / "cache")  # another process of the machine
    assert again.parts[0].train.read(0, 90).tolist() == list((b"abcdefgh" * 12)[:90])
    assert [name for name, *_ in requests] == ["manifest.json"]


def test_a_cache_that_was_damaged_is_read_again(folder, tmp_path, requests):
    first = open_data(spec(folder), tmp_path / "cache")
    wanted = first.parts[0].train.read(0, 90).tolist()
    for path in (tmp_path / "cache" / "blocks").iterdir():
        flip(path, 3)
    (small,) = (tmp_path / "cache" / "remote").glob("*/docs-00000.idx")
    flip(small, 0)
    del requests[:]
    again = open_data(spec(folder), tmp_path / "cache")
    assert again.parts[0].train.read(0, 90).tolist() == wanted
    assert [name for name, *_ in requests].count("tokens-00000.bin") == 2
    assert "docs-00000.idx" in [name for name, *_ in requests]


def test_a_damaged_object_is_named_with_its_bytes(folder, tmp_path, requests):
    flip(folder / "tokens-00000.bin", 250)
    data = open_data(spec(folder), tmp_path / "cache")
    view = data.parts[0].train
    assert view.read(0, 100).tolist() == list(b"abcdefgh" * 12 + b"abcd")
    with pytest.raises(DataError, match=r"tokens-00000\.bin is damaged within bytes 200-299:"):
        view.read(98, 103)
    assert requests.count(("tokens-00000.bin", 200, 300)) == 2  # it may be damaged on the way


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("where", ["folder", "url"])
def test_rows_of_damaged_data_are_left_out_or_the_run_stops(folder, tmp_path, where, packing):
    def opened(**more):
        source = str(folder) if where == "folder" else f"file://{folder}"
        settings = {"source": source, "validation": 0.0, "packing": packing, **more}
        return open_data(DataSpec(**settings), tmp_path / "cache")

    whole = rows_of(opened(), 40)
    flip(folder / "tokens-00000.bin", 250)
    for path in (tmp_path / "cache" / "blocks").glob("*"):
        path.unlink()
    with pytest.raises(DataError, match=r"tokens-00000\.bin is damaged within bytes 200-299"):
        rows_of(opened(), 40)

    count = 0
    for rows, intact in zip(rows_of(opened(on_error="skip"), 40), whole, strict=True):
        gone = (rows.targets == IGNORE).all(axis=1)
        assert len(rows.left_out) == gone.sum()
        assert all("damaged within bytes 200-299" in line for line in rows.left_out)
        assert np.array_equal(rows.inputs[~gone], intact.inputs[~gone])
        assert np.array_equal(rows.targets[~gone], intact.targets[~gone])
        assert not rows.inputs[gone].any()
        count += int(gone.sum())
    # A block of 50 tokens lies in 4 or 5 windows of 17 that begin every 16, of 93 in each epoch.
    samples = opened().sampler("train", 16, 2).samples
    assert 4 * (80 // samples) <= count <= 5 * (80 // samples + 1)


def test_each_row_is_left_out_alike_whoever_reads_it(folder, tmp_path):
    flip(folder / "tokens-00000.bin", 250)
    data = open_data(spec(folder, on_error="skip"), tmp_path / "cache")
    sampler = data.sampler("train", 16, 4)
    for step in range(12):
        whole = sampler.rows(step)
        parts = [sampler.rows(step, range(row, row + 1)) for row in range(4)]
        assert np.array_equal(np.concatenate([p.targets for p in parts]), whole.targets)
        assert sum(len(p.left_out) for p in parts) == len(whole.left_out)


def test_a_blend_says_what_was_left_out(folder, tmp_path):
    (tmp_path / "b.txt").write_text("0123456789" * 90)
    other = prepare([Files((tmp_path / "b.txt",))], "bytes", tmp_path / "other").folder
    flip(folder / "tokens-00000.bin", 250)
    sources = (f"file://{folder}", str(other))
    blend = DataSpec(source=sources, weights=(1.0, 1.0), validation=0.0, on_error="skip")
    sampler = open_data(blend, tmp_path / "cache").sampler("train", 16, 4)
    rows = [sampler.rows(step) for step in range(40)]
    gone = sum(int((each.targets == IGNORE).all(axis=1).sum()) for each in rows)
    assert gone == sum(len(each.left_out) for each in rows) > 0


def test_a_store_that_is_down_ends_the_rank_to_be_started_again(folder, tmp_path, monkeypatch):
    data = open_data(spec(folder, on_error="skip"), tmp_path / "cache")

    def down(path, start=0, stop=None):
        raise StoreError("it does not answer")

    monkeypatch.setattr(StorePath, "read", down)
    with pytest.raises(MeshwrightError, match="it does not answer") as caught:
        data.sampler("train", 16, 2).rows(0)
    assert not isinstance(caught.value, DataError)  # which is refused for good, or left out
    with pytest.raises(DataError, match="cannot be read: it does not answer"):
        open_data(spec(folder), tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "tokens-00000.bin").unlink(), "tokens-00000.bin is missing"),
        (lambda f: (f / "tokens-00000.bin").write_bytes(b"ab"), "has 2 bytes, should be"),
        (lambda f: (f / "counts.bin").unlink(), "counts.bin"),
        (lambda f: flip(f / "docs-00000.idx", 1), "docs-00000.idx is damaged"),
        (lambda f: flip(f / "manifest.json", 90), "manifest.json"),
        (lambda f: (f / "manifest.json").unlink(), "is not an indexed store"),
    ],
)
def test_what_is_missing_or_damaged_is_named_at_the_start(folder, tmp_path, change, says):
    change(folder)
    with pytest.raises(DataError, match=says):
        open_data(spec(folder), tmp_path / "cache")


def test_urls_with_credentials_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="credentials"):
        open_data(DataSpec(source="s3://key:secret@bucket/store"), tmp_path)


@given(st.lists(st.integers(0, 39), max_size=120), st.integers(4, 40))
def test_a_cache_stays_within_its_limit_and_returns_what_was_stored(tmp_path_factory, names, room):
    """Two caches of one folder, as two processes have them; without what is in memory."""
    cache = tmp_path_factory.mktemp("cache")
    limit = room * 100
    pair = [BlockCache(cache, limit), BlockCache(cache, limit)]
    for turn, name in enumerate(names):
        content = bytes([name]) * (50 + name)
        one = pair[turn % 2]
        one._recent.clear()
        got = one.block(f"b{name}", lambda content=content: content, lambda read: True)
        assert got == content
        assert sum(path.stat().st_size for path in cache.iterdir()) <= limit


def test_what_was_used_last_stays_in_the_cache(tmp_path):
    cache = BlockCache(tmp_path, 1600)
    for name in range(30):
        cache._recent.clear()
        cache.block(f"b{name}", lambda: bytes(100), lambda read: True)
        os.utime(tmp_path / f"b{name}", (name, name))
        cache.block("b0", lambda: bytes(100), lambda read: True)
        cache._recent.clear()
        cache.block("b0", lambda: bytes(100), lambda read: True)
    assert (tmp_path / "b0").exists()
    assert not (tmp_path / "b5").exists()


def test_a_cache_that_cannot_be_written_is_done_without(folder, tmp_path):
    blocks = tmp_path / "cache" / "blocks"
    data = open_data(spec(folder), tmp_path / "cache")
    for path in blocks.iterdir():
        path.unlink()
    blocks.rmdir()
    assert data.parts[0].train.read(0, 8).tolist() == list(b"abcdefgh")


def test_rows_are_read_ahead_in_their_order_and_not_beyond_the_end():
    read = []

    def rows(step, chosen):
        read.append(step)
        return step, chosen

    ahead = RowsAhead(rows, stop=12)
    assert [ahead(step, range(2)) for step in range(12)] == [(step, range(2)) for step in range(12)]
    assert sorted(read) == list(range(12))
    far = RowsAhead(rows, stop=100)
    del read[:]
    assert far(50, range(2)) == (50, range(2))
    far._pool.shutdown()
    assert sorted(read) == list(range(50, 50 + AHEAD))


def test_a_store_of_before_is_refused_for_its_checksums(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", 70)  # so that their number does not fit
    with pytest.raises(DataError, match="no checksums of blocks"):
        open_remote(place(f"file://{folder}"), tmp_path / "cache", 1000)
