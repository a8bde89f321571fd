"""What is wrong with a store, a pair or a folder is named, and nothing wrong is read silently."""

import hashlib
import json
import os
import pickle
import shutil
import time

import numpy as np
import pytest

from meshwright import files
from meshwright.data import open_data, open_store, prepare, train_bpe, verify
from meshwright.data.corpora import Files
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_REFUSED, DataError
from meshwright.spec.training import DataSpec

NAMES = [
    "manifest.json",
    "tokens-00000.bin",
    "tokens-00001.bin",
    "docs-00000.idx",
    "docs-00001.idx",
    "counts.bin",
    "tokenizer.json",
]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    texts = ["some words in a document " * 9, "others in another one " * 9]
    for n, text in enumerate(texts):
        (folder / f"{n}.txt").write_text("<|endoftext|>".join([text] * 5))
    bpe = train_bpe(texts, 300, folder / "bpe")
    sources = [Files((folder / "0.txt", folder / "1.txt"))]
    prepare(sources, str(bpe), folder / "store", shard_bytes=1200)
    return folder / "store"


@pytest.fixture
def store(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "store")


def rewrite_manifest(store, change):
    """Change a manifest as someone would who also knows how to compute its digest."""
    path = store / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["digest"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"digest": digest, **body}))


def test_the_intact_store_passes(store):
    assert sorted(NAMES) == sorted(p.name for p in store.iterdir() if p.name != ".lock")
    found = verify(store)
    assert found.problems == ()
    assert found.files == len(NAMES)
    open_store(store)


@pytest.mark.case(19)
@pytest.mark.parametrize("place", [0.0, 0.37, 0.999])
@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_found_and_its_file_named(store, name, place, outcome):
    path = store / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)
    started = time.monotonic()
    problems = verify(store).problems
    assert problems
    assert all(name in problem for problem in problems[:1])
    outcome.add(EXIT_CHECK_FAILED, problems[0], time.monotonic() - started)
    if name == "manifest.json":
        with outcome.refused(DataError, name):
            open_store(store)
    if name == "tokenizer.json":
        with outcome.refused(DataError, "tokenizer"):
            open_store(store).tokenizer()


def test_damage_is_narrowed_down_to_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    monkeypatch.setattr("meshwright.data.store.BLOCK_BYTES", 100)
    (tmp_path / "a.txt").write_text("x" * 400)
    prepare([Files((tmp_path / "a.txt",))], "bytes", tmp_path / "out")
    path = tmp_path / "out" / "tokens-00000.bin"
    content = bytearray(path.read_bytes())
    content[250] ^= 1
    path.write_bytes(content)
    (problem,) = verify(tmp_path / "out").problems
    assert problem.startswith("tokens-00000.bin is damaged within bytes 200-299:")


@pytest.mark.case(19)
@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("change", ["cut", "empty", "longer", "missing", "link"])
def test_a_wrong_size_is_refused_at_open_with_both_sizes(store, name, change, tmp_path, outcome):
    path = store / name
    content = path.read_bytes()
    path.unlink()
    if change == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
        match = f"{name} is a symbolic link"
    elif change == "missing":
        match = f"{name} is missing"
    else:
        new = {"cut": content[:-2], "empty": b"", "longer": content + b"\0\0"}[change]
        path.write_bytes(new)
        match = f"{name} has {len(new)} bytes, should be {len(content)}"
    with outcome.refused(DataError, match) as caught:
        open_store(store)
    assert caught.value.exit_code == EXIT_REFUSED
    assert any(name in problem for problem in verify(store).problems)


@pytest.mark.case(19)
@pytest.mark.parametrize("ends", [[5, 3], [0, 7], [-1, 7], [1, 1], [1, 2**40]])
def test_document_offsets_out_of_order_are_refused(store, ends, outcome):
    path = store / "docs-00001.idx"
    content = np.fromfile(path, "<i8")
    content[:2] = ends
    content.tofile(path)
    with outcome.refused(DataError, r"docs-00001\.idx: document \d ends at token"):
        open_store(store)
    problems = verify(store).problems
    assert any("damaged" in p for p in problems)
    assert any("ends at token" in p for p in problems)


def test_the_last_document_must_end_the_shard(store):
    path = store / "docs-00000.idx"
    content = np.fromfile(path, "<i8")
    content[-1] -= 1
    content.tofile(path)
    with pytest.raises(DataError, match=r"last document ends at token \d+ of \d+"):
        open_store(store)


@pytest.mark.case(18)
def test_an_impossible_id_is_named_by_verify_and_by_the_sampler(store, outcome):
    path = store / "tokens-00001.bin"
    content = np.fromfile(path, "<u2")
    content[3] = 60_000
    content.tofile(path)
    vocab = open_store(store).manifest.vocab_size
    named = f"id 60000 at token 3 of tokens-00001.bin, vocabulary is {vocab}"
    assert any(named in problem for problem in verify(store).problems)
    sampler = open_data(DataSpec(source=str(store), validation=0.0), store).sampler("train", 4, 1)
    steps = np.concatenate([sampler.windows(step) for step in range(sampler.samples)])
    first = open_store(store).shards[0].tokens
    bad = int(np.argmax(steps == (len(first) + 3) // 4))
    with outcome.refused(DataError, r"tokens-00001\.bin is damaged within bytes 0-\d+"):
        sampler.rows(bad)
    # Where it was written so

    def fit(body):
        found = files.hash_file(path)
        record = body["shards"][1]["tokens_file"]
        record.update(sha256=found.sha256, blocks=list(found.blocks))

    rewrite_manifest(store, fit)
    sampler = open_data(DataSpec(source=str(store), validation=0.0), store).sampler("train", 4, 1)
    with outcome.refused(DataError, named):
        sampler.rows(bad)


@pytest.mark.case(28)
@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", "", ".hidden", "a\\b", "x\0", "\n", "x" * 999]
)
@pytest.mark.parametrize("where", ["tokens", "counts", "tokenizer"])
def test_names_are_never_paths(store, name, where, outcome):
    def change(body):
        record = {
            "tokens": body["shards"][0]["tokens_file"],
            "counts": body["counts"],
            "tokenizer": body["tokenizer"]["file"],
        }[where]
        record["file"] = name

    rewrite_manifest(store, change)
    with outcome.refused(DataError, "not a plain file name"):
        open_store(store)
    assert "not a plain file name" in verify(store).problems[0]


def test_numbers_of_a_manifest_must_agree(store):
    def raised(body):
        body["shards"][0]["max_id"] = body["vocab_size"]

    def more(body):
        body["shards"][0]["tokens"] += 1

    def renamed(body):
        body["vocab_size"] -= 1

    def older(body):
        body["format"] = 0

    def unknown(body):
        body["extra"] = 1

    def emptied(body):
        body["shards"] = []

    expected = {
        raised: r"tokens-00000\.bin has id \d+, vocabulary is",
        more: r"tokens-00000\.bin has \d+ bytes for \d+ tokens",
        renamed: "vocab_size",
        older: "format",
        unknown: "extra",
        emptied: "tokens",
    }
    original = (store / "manifest.json").read_bytes()
    for change, match in expected.items():
        (store / "manifest.json").write_bytes(original)
        rewrite_manifest(store, change)
        with pytest.raises(DataError, match=match):
            open_store(store)
        assert verify(store).problems


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_manifest_that_is_none(store, content):
    (store / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_store(store)


class Marker:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.case(22)
@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_never_runs(store, name, tmp_path, outcome):
    marker = tmp_path / "ran"
    (store / name).write_bytes(pickle.dumps(Marker(str(marker))))
    assert verify(store).problems
    with outcome.refused(DataError):
        open_store(store)
    assert not marker.exists()


@pytest.mark.case(28)
def test_an_unwritable_folder_is_refused_before_any_work(tmp_path, outcome):
    text = tmp_path / "a.txt"
    text.write_text("hello")
    with outcome.refused(DataError, r"cannot write to the folder .*a\.txt.sub"):
        prepare([Files((text,))], "bytes", text / "sub")
    with outcome.refused(DataError, "cannot write"):
        open_data(DataSpec(source=str(text)), text / "cache")


@pytest.mark.case(7)
def test_a_full_disk_says_the_path_and_the_bytes(tmp_path, monkeypatch, outcome):
    text = tmp_path / "a.txt"
    text.write_text("hello")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with outcome.refused(DataError, r"tokens-00000\.bin \(after 12 bytes\): No space left"):
        prepare([Files((text,))], "bytes", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == [".lock"]


@pytest.mark.case(28)
def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path, outcome):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "victim")
    (tmp_path / "a.txt").write_text("hello")
    with outcome.refused(DataError, "cannot lock"):
        prepare([Files((tmp_path / "a.txt",))], "bytes", tmp_path / "out")
    assert not (tmp_path / "victim").exists()


@pytest.mark.case(29)
def test_a_changed_tokenizer_is_refused(store, outcome):
    content = json.loads((store / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    text = json.dumps(content).ljust((store / "tokenizer.json").stat().st_size)
    (store / "tokenizer.json").write_text(text)
    with outcome.refused(DataError, r"tokenizer"):
        open_data(DataSpec(source=str(store)), store)
