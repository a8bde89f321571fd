"""Data that is not what it was: a bit flipped in a token store, tokens of a pair that were changed.

The numbers are those of docs/records/fault-cases.md.
"""

import shutil

import numpy as np
import pytest

from faulty import flip
from meshwright import files
from meshwright.data import open_data, open_store, prepare, view
from meshwright.data.corpora import Files
from meshwright.data.megatron_pair import open_megatron, write_megatron
from meshwright.errors import DataError
from meshwright.runtime.ranks.worker import differences
from meshwright.spec.training import DataSpec


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store whose blocks have 100 bytes."""
    for module in (files, view):
        monkeypatch.setattr(module, "BLOCK_BYTES", 100)
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(["abcdefgh" * 60, "ij"]))
    return prepare([Files((tmp_path / "a.txt",))], "bytes", tmp_path / "store").folder


@pytest.mark.case(35)
def test_a_bit_that_was_flipped_is_found_when_its_block_is_read(store, outcome):
    flip(store / "tokens-00000.bin", 250)
    data = open_data(DataSpec(source=str(store), validation=0.0), store)
    view = data.parts[0].train
    assert view.read(0, 100).tolist() == list(b"abcdefgh" * 12 + b"abcd")  # other blocks
    assert view.read(150, 158).tolist() == list(b"ghabcdef")
    pattern = r"tokens-00000\.bin is damaged within bytes 200-299: its checksum differs \("
    for _ in range(2):
        with outcome.refused(DataError, pattern):
            view.read(98, 103)


@pytest.mark.case(35)
def test_a_store_without_checksums_of_blocks_is_read_as_a_whole(store, outcome, monkeypatch):
    monkeypatch.setattr(view, "BLOCK_BYTES", 70)  # so that their number does not fit
    whole = open_store(store).shards[0]
    assert whole.read(0, 8).tolist() == list(b"abcdefgh")
    flip(store / "tokens-00000.bin", 250)
    pattern = r"tokens-00000\.bin is damaged within bytes 0-967: its checksum differs"
    with outcome.refused(DataError, pattern):
        open_store(store).shards[0].read(0, 8)


@pytest.mark.case(35)
@pytest.mark.parametrize("name", ["docs-00000.idx", "counts.bin"])
def test_what_is_read_whole_is_held_against_its_checksum(store, name, outcome):
    content = np.fromfile(store / name, "<i8")
    content[0] ^= 2  # another length of the first document, another count
    content.tofile(store / name)
    with outcome.refused(DataError, rf"{name} is damaged.*: its checksum differs"):
        open_data(DataSpec(source=str(store), validation=0.0), store)


@pytest.mark.case(35)
@pytest.mark.parametrize(
    ("suffix", "says"),
    [
        (".idx", r"pair\.idx is not what .*pair\.seal\.json says.*made anew by another program"),
        (".bin", r"pair\.bin is damaged within bytes 0-\d+: its checksum differs"),
    ],
)
def test_a_pair_that_was_exported_is_held_against_its_seal(store, tmp_path, outcome, suffix, says):
    """The bit that is flipped makes another document of the index, and another legal token."""
    prefix = tmp_path / "pair"
    write_megatron(prefix, open_store(store).shards, 300)
    whole = open_megatron(prefix).shard
    assert len(whole.read(0, len(whole.tokens))) == len(whole.tokens)
    moved = tmp_path / "elsewhere"
    for path in tmp_path.glob("pair*"):
        shutil.copyfile(path, moved.with_name(path.name.replace("pair", "elsewhere")))
    assert (open_megatron(moved).shard.ends == whole.ends).all()
    file = tmp_path / f"pair{suffix}"
    content = bytearray(file.read_bytes())
    content[-16 if suffix == ".idx" else 4] ^= 1
    file.write_bytes(content)
    with outcome.refused(DataError, says):
        shard = open_megatron(prefix).shard
        shard.read(0, len(shard.tokens))
    (tmp_path / "pair.seal.json").unlink()  # as of a pair that others have written
    shard = open_megatron(prefix).shard
    assert len(shard.read(0, len(shard.tokens))) == len(whole.tokens)


@pytest.mark.case(35)
def test_tokens_of_a_pair_that_were_changed_are_other_data(tmp_path, outcome):
    from test_data_megatron import write_pair

    prefix = write_pair(tmp_path / "pair")
    spec = DataSpec(source=str(prefix), validation=0.0)
    before = open_data(spec, tmp_path)
    flip(tmp_path / "pair.bin", 0)
    after = open_data(spec, tmp_path)
    assert before.identity["data"] != after.identity["data"]
    told = list(differences([before.files, after.files]))
    assert len(told) == 1
    assert told[0].startswith(f"{tmp_path / 'pair.bin'} is ")
    outcome.add(None, told[0], 0.0)


# --- no step is whole (case 36) --------------------------------------------------------------
