"""Megatron's pair: a real one, one written byte by byte, and broken ones."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.data import open_data, open_store, train_bpe
from meshwright.data.megatron_pair import megatron_prefix, open_megatron, write_megatron
from meshwright.data.view import Shard
from meshwright.errors import DataError
from meshwright.spec.training import DataSpec

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "megatron"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared pair is missing")
DOCUMENTS = [[[5, 6, 256]], [[7], [8, 9, 256]], [], [[1, 2, 3, 4, 256]]]


def write_pair(prefix, documents=DOCUMENTS, dtype="<i4", code=4, **changed):
    """Write a pair of documents made of sequences; `changed` replaces fields of the index."""
    sequences = [ids for document in documents for ids in document]
    sizes = [len(ids) for ids in sequences]
    width = np.dtype(dtype).itemsize
    index = [0]
    for document in documents:
        index.append(index[-1] + len(document))
    fields = {
        "magic": b"MMIDIDX\x00\x00",
        "version": 1,
        "code": code,
        "sequences": len(sizes),
        "entries": len(index),
        "sizes": sizes,
        "pointers": [width * sum(sizes[:n]) for n in range(len(sizes))],
        "index": index,
        "tail": b"",
    } | changed
    head = ("magic", "version", "code", "sequences", "entries")
    content = struct.pack("<9sQBQQ", *(fields[name] for name in head))
    content += np.array(fields["sizes"], "<i4").tobytes()
    content += np.array(fields["pointers"], "<i8").tobytes()
    content += np.array(fields["index"], "<i8").tobytes() + fields["tail"]
    prefix.with_name(prefix.name + ".idx").write_bytes(content)
    flat = np.array([i for ids in sequences for i in ids], dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(flat.tobytes())
    return prefix


@needs_shared
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_real_pair(suffix):
    prefix = megatron_prefix(SHARED / f"fim_text_document{suffix}")
    shard = open_megatron(prefix).shard
    assert (len(shard.ends), len(shard.tokens)) == (1000, 7600)
    assert shard.tokens[:8].tolist() == [128000, 1820, 4062, 14198, 39935, 35308, 927, 128001]
    assert (shard.tokens[shard.ends - 1] == 128001).all()


@needs_shared
def test_a_real_pair_of_a_larger_vocabulary_is_noticed_at_open(tmp_path):
    source = str(SHARED / "fim_text_document")
    with pytest.raises(DataError, match=r"id 128000 at token 0 of fim_text_document\.bin.*token"):
        open_data(DataSpec(source=source), tmp_path)


@pytest.mark.parametrize(("dtype", "code"), [("<i4", 4), ("<u2", 8), ("<i8", 5), ("<i2", 3)])
def test_a_pair_written_byte_by_byte(tmp_path, dtype, code):
    prefix = write_pair(tmp_path / "my.pair", dtype=dtype, code=code)
    shard = open_megatron(prefix).shard
    assert shard.tokens.tolist() == [5, 6, 256, 7, 8, 9, 256, 1, 2, 3, 4, 256]
    assert shard.ends.tolist() == [3, 7, 12]  # the document without tokens has vanished
    spec = DataSpec(source=str(prefix), validation=0.4, packing="documents")
    data = open_data(spec, tmp_path / "cache")
    assert (data.documents("train"), data.documents("validation")) == (2, 1)
    assert data.unigram_entropy is None
    assert not (tmp_path / "cache").exists()
    rows = data.sampler("train", 3, 1).rows(0)
    assert rows.inputs.shape == (1, 3)


def test_the_name_of_a_pair(tmp_path):
    prefix = write_pair(tmp_path / "my.pair")
    for name in ("my.pair", "my.pair.bin", "my.pair.idx"):
        assert megatron_prefix(tmp_path / name) == prefix
    assert megatron_prefix(tmp_path / "other.bin") is None


def test_other_tokenizers_go_with_a_pair(tmp_path):
    bpe = train_bpe(["some words"], 300, tmp_path)
    prefix = write_pair(tmp_path / "pair", [[[299 % 257, 3]]])
    data = open_data(DataSpec(source=str(prefix), tokenizer=str(bpe), validation=0), tmp_path)
    assert data.parts[0].train.read(0, 2).tolist() == [42, 3]


@pytest.mark.case(19)
@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"magic": b"MMIDIDY\x00\x00"}, "not a Megatron index"),
        ({"version": 2}, "version 2; only 1"),
        ({"code": 7}, "token type 7"),
        ({"code": 99}, "token type 99"),
        ({"tail": b"\0" * 4}, r"has \d+ bytes, its header says \d+"),
        ({"sequences": 2**60}, r"has \d+ bytes, its header says \d+"),
        ({"entries": 3}, r"has \d+ bytes, its header says \d+"),
        ({"sizes": [3, 1, 3, 6]}, r"pair\.bin has 48 bytes, its index says 52"),
        ({"sizes": [3, -1, 5, 5]}, "sequence 1 has -1 tokens"),
        ({"pointers": [0, 12, 16, 99]}, "sequence 3 starts at byte 99, .* end at byte 28"),
        ({"pointers": [0, 12, 12, 28]}, "sequence 2 starts at byte 12"),
        ({"pointers": [-4, 12, 16, 28]}, "sequence 0 starts at byte -4"),
        ({"index": [0, 1, 3, 2, 4]}, "must rise from 0 to 4"),
        ({"index": [0, 1, 3, 3, 9]}, "must rise from 0 to 4"),
        ({"index": [1, 1, 3, 3, 4]}, "must rise from 0 to 4"),
        ({"index": [-1, 1, 3, 3, 4]}, "must rise from 0 to 4"),
    ],
)
def test_broken_indexes_are_refused(tmp_path, changed, match, outcome):
    prefix = write_pair(tmp_path / "pair", **changed)
    with outcome.refused(DataError, match):
        open_megatron(prefix)


def test_short_missing_and_empty_files(tmp_path):
    prefix = write_pair(tmp_path / "pair")
    tokens, index = tmp_path / "pair.bin", tmp_path / "pair.idx"
    shutil.copy(tokens, tmp_path / "kept")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"pair\.bin has 47 bytes, its index says 48"):
        open_megatron(prefix)
    tokens.unlink()
    with pytest.raises(DataError, match=r"cannot read .*pair\.bin"):
        open_data(DataSpec(source=str(prefix)), tmp_path)
    shutil.copy(tmp_path / "kept", tokens)
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(DataError, match="not a Megatron index"):
        open_megatron(prefix)
    write_pair(tmp_path / "none", [])
    with pytest.raises(DataError, match="empty"):
        open_megatron(tmp_path / "none")


@pytest.mark.case(18)
@pytest.mark.parametrize("bad", [-1, 257, 10**6])
def test_impossible_ids_are_named(tmp_path, bad, outcome):
    prefix = write_pair(tmp_path / "pair", [[[1, 2, 256]], [[3, bad, 256]]])
    with outcome.refused(DataError, rf"id {bad} at token 4 of pair\.bin, vocabulary is 257"):
        open_data(DataSpec(source=str(prefix)), tmp_path)


@pytest.mark.parametrize(("vocab", "dtype"), [(300, "<u2"), (70_000, "<i4")])
def test_what_is_written_is_read_back(tmp_path, vocab, dtype):
    parts = [[[1, 2, 299], [3]], [[4, 5, 6, 7]]]
    shards = []
    for documents in parts:
        tokens = np.array([token for document in documents for token in document])
        ends = np.cumsum([len(document) for document in documents])
        shards.append(Shard(tmp_path, tokens, ends))
    assert write_megatron(tmp_path / "pair", shards, vocab) == 8
    shard = open_megatron(tmp_path / "pair").shard
    assert shard.tokens.dtype == np.dtype(dtype)
    assert shard.tokens.tolist() == [1, 2, 299, 3, 4, 5, 6, 7]
    assert shard.ends.tolist() == [3, 4, 8]
    with pytest.raises(DataError, match=r"pair\.idx is there already"):
        write_megatron(tmp_path / "pair", shards, vocab)


@needs_shared
def test_what_is_written_has_the_bytes_of_megatron(tmp_path):
    """A real pair, read and written again; its documents are single sequences."""
    prefix = megatron_prefix(next(SHARED.glob("*.idx")))
    pair = open_megatron(prefix)
    code = struct.unpack_from("<9sQBQQ", prefix.with_suffix(".idx").read_bytes())[2]
    write_megatron(tmp_path / "again", [pair.shard], 2**16 if code == 8 else 2**17)
    for suffix in (".bin", ".idx"):
        again = (tmp_path / "again").with_suffix(suffix)
        assert again.read_bytes() == prefix.with_name(prefix.name + suffix).read_bytes()


def test_a_store_is_exported(tmp_path, corpus, capsys):
    store, prefix = tmp_path / "store", tmp_path / "pair"
    assert main(["data", "prepare", str(store), "--source", str(corpus)]) == 0
    assert main(["data", "export-megatron", str(store), str(prefix)]) == 0
    assert "tokens" in capsys.readouterr().out
    shards = open_store(store).shards
    exported = open_megatron(prefix).shard
    assert exported.tokens.tolist() == [int(t) for shard in shards for t in shard.tokens]
    assert len(exported.ends) == sum(len(shard.ends) for shard in shards)
