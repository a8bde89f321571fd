"""The indexed store: what is in it, preparing it in any way gives the same bytes, opening it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import (
    dataset,
    load_tokenizer,
    open_data,
    open_store,
    prepare,
    refuse_changed,
    train_bpe,
    verify,
    writer,
)
from meshwright.data.corpora import Files
from meshwright.data.store import entropy_of
from meshwright.errors import DataError
from meshwright.spec.training import DataSpec

TEXTS = [f"document {n}: " + "naïve words, 日本 " * (n % 7 + 1) for n in range(60)]


@pytest.fixture
def corpus(tmp_path):
    """Eight files of documents, so that small shards hold some of them each."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for n in range(8):
        (folder / f"{n}.txt").write_text("\n<|endoftext|>\n".join(TEXTS[n::8]))
    return folder


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    return train_bpe(TEXTS, 350, tmp_path_factory.mktemp("bpe"))


def expected_documents():
    return [text.strip() for n in range(8) for text in TEXTS[n::8]]


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_store_holds_the_documents(corpus, tmp_path, bpe, kind):
    name = "bytes" if kind == "bytes" else str(bpe)
    store = prepare([Files((corpus,))], name, tmp_path / "out", shard_bytes=1500)
    tokenizer = store.tokenizer()
    assert tokenizer.digest == load_tokenizer(name).digest
    assert len(store.shards) > 3
    found, counts = [], np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for shard in store.shards:
        counts += np.bincount(shard.tokens, minlength=tokenizer.vocab_size)
        for ids in np.split(shard.tokens, shard.ends[:-1]):
            assert ids[-1] == tokenizer.eos_id
            found.append(tokenizer.decode(ids[:-1]))
    assert found == expected_documents()
    manifest = store.manifest
    assert (manifest.documents, manifest.tokens) == (60, int(counts.sum()))
    assert np.array_equal(store.counts(), counts)
    shares = counts[counts > 0] / counts.sum()
    assert manifest.entropy == pytest.approx(-(shares * np.log(shares)).sum())
    assert manifest.dtype == "uint16"
    assert verify(tmp_path / "out").problems == ()
    assert "shard-00000.json" not in content(tmp_path / "out")


def test_large_vocabularies_are_stored_in_32_bits(corpus, tmp_path, bpe):
    wide = json.loads(bpe.read_text())
    wide["model"]["vocab"]["日本語"] = 70_000
    file = tmp_path / "wide.json"
    file.write_text(json.dumps(wide))
    store = prepare([Files((corpus,))], str(file), tmp_path / "out")
    assert store.manifest.vocab_size == 70_001
    assert store.shards[0].tokens.dtype == np.uint32
    assert store.tokenizer().decode(store.shards[0].tokens[:-1]).startswith("document 0")


def test_entropy():
    assert entropy_of(np.array([5, 0, 5])) == pytest.approx(np.log(2))
    assert entropy_of(np.array([0, 9])) == 0


def test_same_bytes_for_any_number_of_workers(corpus, tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(writer, "POOL_BYTES", 0)
    seen = []
    here = []
    write = writer._write
    monkeypatch.setattr(writer, "_write", lambda *rest: (here.append(workers), write(*rest))[1])
    for workers in (1, 2):
        prepare(
            [Files((corpus,))],
            str(bpe),
            tmp_path / str(workers),
            workers=workers,
            shard_bytes=1500,
            progress=lambda done, total: seen.append((done, total)),
        )
    assert set(here) == {1}  # with two, none was written in this process
    assert content(tmp_path / "1") == content(tmp_path / "2")
    assert seen[-1][0] == seen[-1][1] == sum(p.stat().st_size for p in corpus.iterdir())


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [1, 4, 9])
def test_an_interrupted_run_continues_to_the_same_bytes(corpus, tmp_path, monkeypatch, at):
    source, options = [Files((corpus,))], {"shard_bytes": 700}
    prepare(source, "bytes", tmp_path / "whole", **options)
    calls = iter(range(10**6))

    def kill(done, total):
        if next(calls) == at:
            raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed):
        prepare(source, "bytes", out, progress=kill, **options)
    assert not (out / "manifest.json").exists()
    with pytest.raises(DataError, match="not an indexed store"):
        open_store(out)
    done = sorted(p.name for p in out.glob("shard-*.json"))
    # What a kill leaves, and an earlier shard that has gone bad since.
    (out / ".tokens-00007.bin.tmp-0123456789abcdef").write_bytes(b"half")
    bad = out / "tokens-00000.bin"
    if done:
        bad.write_bytes(bad.read_bytes()[:-2] + b"zz")
    written = []
    write = writer._write
    monkeypatch.setattr(
        writer,
        "_write",
        lambda task, *rest: (written.append(task.number), write(task, *rest))[1],
    )
    prepare(source, "bytes", out, **options)
    assert content(out) == content(tmp_path / "whole")
    kept = {int(name[6:11]) for name in done} - {0}
    assert not kept & set(written)
    assert 0 in written or not done


def test_a_finished_store_is_not_written_again(corpus, tmp_path):
    out = tmp_path / "out"
    prepare([Files((corpus,))], "bytes", out)
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    prepare([Files((corpus,))], "bytes", out)
    assert before == {p.name: p.stat().st_mtime_ns for p in out.iterdir()}


def test_a_folder_of_another_corpus_or_tokenizer_is_refused(corpus, tmp_path, bpe):
    out = tmp_path / "out"
    prepare([Files((corpus,))], "bytes", out)
    with pytest.raises(DataError, match="a corpus of another tokenizer"):
        prepare([Files((corpus,))], str(bpe), out)
    with pytest.raises(DataError, match="already holds another corpus"):
        prepare([Files((corpus / "1.txt",))], "bytes", out)


def test_shards_of_other_work_are_not_taken(corpus, tmp_path, bpe):
    out = tmp_path / "out"

    def kill(done, total):
        if done > total / 2:
            raise Killed

    with pytest.raises(Killed):
        prepare([Files((corpus,))], str(bpe), out, progress=kill, shard_bytes=700)
    prepare([Files((corpus,))], "bytes", out, shard_bytes=700)
    prepare([Files((corpus,))], "bytes", tmp_path / "fresh", shard_bytes=700)
    assert content(out) == content(tmp_path / "fresh")


def test_blank_documents_leave_no_shard(tmp_path):
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": " "}\n' * 5)
    other = tmp_path / "b.txt"
    other.write_text("hello")
    store = prepare([Files((rows, other))], "bytes", tmp_path / "out", shard_bytes=10)
    assert store.manifest.documents == 1
    assert verify(tmp_path / "out").problems == ()
    with pytest.raises(DataError, match=r"the corpus is empty.*a\.jsonl"):
        prepare([Files((rows,))], "bytes", tmp_path / "none")


def test_open_data_prepares_once_and_follows_changes(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "SAY_EVERY_S", 0.0)
    cache, lines = tmp_path / "cache", []
    spec = DataSpec(source=str(corpus), validation=0.1)
    first = open_data(spec, cache, progress=lines.append)
    assert lines[0].startswith(f"{corpus}: note: 0.txt and 7 other files split into documents")
    assert lines[1].startswith(f"preparing {corpus}: ")
    assert "100%" in lines[-1]
    again = open_data(spec, cache, progress=lambda line: pytest.fail(line))
    assert first.folders == again.folders
    assert first.identity == again.identity
    assert (first.documents("train"), first.documents("validation")) == (54, 6)
    assert first.tokens("train") + first.tokens("validation") == 60 + sum(
        len(text.encode()) for text in expected_documents()
    )
    assert first.unigram_entropy == pytest.approx(open_store(first.folders[0]).manifest.entropy)
    (corpus / "new.txt").write_text("new")
    changed = open_data(spec, cache)
    assert changed.folders != first.folders
    with pytest.raises(DataError, match=r"other data: data was \w+, is \w+"):
        refuse_changed(first.identity, changed.identity)
    refuse_changed(first.identity, again.identity)


def test_several_sources_follow_each_other(corpus, tmp_path):
    names = tuple(str(corpus / name) for name in ("3.txt", "0.txt"))
    data = open_data(DataSpec(source=names, validation=0.0), tmp_path)
    alone = [open_data(DataSpec(source=name, validation=0.0), tmp_path) for name in names]
    ids = [one.parts[0].train.read(0, len(one.parts[0].train)) for one in alone]
    assert np.array_equal(
        data.parts[0].train.read(0, len(data.parts[0].train)), np.concatenate(ids)
    )
    counts = np.bincount(np.concatenate(ids))
    assert data.unigram_entropy == pytest.approx(entropy_of(counts))
    assert len(data.folders) == 2


def test_a_prepared_store_brings_its_tokenizer(corpus, tmp_path, bpe):
    folder = tmp_path / "store"
    prepare([Files((corpus,))], str(bpe), folder)
    data = open_data(DataSpec(source=str(folder)), tmp_path / "cache")
    assert data.tokenizer.digest == load_tokenizer(str(bpe)).digest
    assert not (tmp_path / "cache").exists()
    open_data(DataSpec(source=str(folder), tokenizer=str(bpe)), tmp_path / "cache")
    other = train_bpe(TEXTS, 300, tmp_path / "other")
    with pytest.raises(DataError, match=r"leave data\.tokenizer out"):
        open_data(DataSpec(source=str(folder), tokenizer=str(other)), tmp_path / "cache")
    with pytest.raises(DataError, match="different tokenizers cannot be mixed"):
        open_data(DataSpec(source=(str(folder), str(corpus))), tmp_path / "cache")
    with pytest.raises(DataError, match=r"model\.vocab_size = 64 is smaller than the vocab"):
        open_data(DataSpec(source=str(folder)), tmp_path / "cache", vocab_size=64)


def test_the_split_samples(corpus, tmp_path):
    spec = DataSpec(source=str(corpus), packing="documents", seed=4, validation=0.2)
    data = open_data(spec, tmp_path)
    rows = data.sampler("train", 32, 4).rows(0)
    assert rows.inputs.shape == rows.segments.shape == (4, 32)
    assert data.sampler("validation", 32, 4).seed == 4
    with pytest.raises(DataError, match="validation split has"):
        data.sampler("validation", 10**6, 4)


@pytest.mark.slow
def test_two_processes_prepare_one_store(corpus, tmp_path):
    code = (
        "import sys; from pathlib import Path; from meshwright.data import open_data\n"
        "from meshwright.spec.training import DataSpec\n"
        "data = open_data(DataSpec(source=sys.argv[1]), Path(sys.argv[2]))\n"
        "print(data.identity['data'])"
    )
    command = [sys.executable, "-c", code, str(corpus), str(tmp_path / "cache")]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(2)
    ]
    answers = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(answers) == 1
    stores = list((tmp_path / "cache" / "stores").iterdir())
    assert len(stores) == 1
    assert verify(stores[0]).problems == ()


def test_stdlib_end_to_end(tmp_path):
    data = open_data(DataSpec(), tmp_path)
    assert data.tokens("train") > 4_000_000
    assert 2.5 < data.unigram_entropy < 4
    share = data.tokens("validation") / (data.tokens("train") + data.tokens("validation"))
    assert 0.002 < share < 0.1
    text = data.tokenizer.decode(data.parts[0].train.read(0, 200))
    source = Path(os.__file__).with_name("__future__.py").read_text()
    assert text[:150] in source or data.parts[0].train.locate(0)[1] > 0


def test_tokens_file_is_plain_little_endian(tmp_path):
    (tmp_path / "a.txt").write_text("hi")
    store = prepare([Files((tmp_path / "a.txt",))], "bytes", tmp_path / "out")
    raw = (tmp_path / "out" / "tokens-00000.bin").read_bytes()
    assert raw == bytes([104, 0, 105, 0, 0, 1])
    assert (tmp_path / "out" / "docs-00000.idx").read_bytes() == (3).to_bytes(8, "little")
    record = store.manifest.shards[0].tokens_file
    assert record.sha256 == hashlib.sha256(raw).hexdigest()
