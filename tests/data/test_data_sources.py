"""Sources of documents: what is a document, in which order, and what is refused."""

import json
import os
import pickle
import platform
from pathlib import Path

import pytest

from meshwright.data import corpora
from meshwright.data.corpora import Files, HuggingFace, Stdlib
from meshwright.errors import DataError

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared texts are missing")


def documents(source):
    return [text for part in source.parts() for text in source.documents(part)]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def test_stdlib_is_large_sorted_and_without_tests():
    source = Stdlib()
    parts = source.parts()
    assert sum(part.size for part in parts) > 5e6
    names = [Path(part.path).relative_to(source.root).as_posix() for part in parts]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert not any(name.startswith(("test/", "site-packages/", "encodings/")) for name in names)
    assert len(documents(source)) > 500
    assert platform.python_version() in source.fingerprint()["python"]
    assert source.fingerprint() == Stdlib().fingerprint()


def test_stdlib_skips_what_is_not_utf8_and_needs_something(tmp_path):
    write(tmp_path / "a.py", "x = 1")
    (tmp_path / "b.py").write_bytes(b"# \xff latin")
    write(tmp_path / "test" / "c.py", "y = 2")
    assert documents(Stdlib(tmp_path)) == ["x = 1"]
    with pytest.raises(DataError, match=r"no sources.*own text files"):
        Stdlib(tmp_path / "none").parts()


def test_a_text_file_is_one_document(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffone\n\ntwo\n")
    assert documents(Files((path,))) == ["one\n\ntwo\n"]


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("a\n<|endoftext|>\nb\n<|endoftext|>\n", None, ["a", "b"]),
        ("a\r\n\r\nb\n \n\n\nc", "\n\n", ["a", "b", "c"]),
        ("a%b%%c", "%", ["a", "b", "c"]),
    ],
)
def test_separators(tmp_path, text, separator, expected):
    path = write(tmp_path / "a.txt", text)
    assert documents(Files((path,), separator=separator)) == expected


@pytest.mark.parametrize("size", [7, 50, 333])
@pytest.mark.parametrize("kind", ["eot", "blank", "jsonl"])
def test_cutting_a_large_file_does_not_change_its_documents(tmp_path, monkeypatch, kind, size):
    texts = [f"story {n} naïve\n日本" * (n % 4 + 1) for n in range(40)]
    joined = {
        "eot": "\n<|endoftext|>\n".join(texts),
        "blank": "\n\n\n".join(texts),
        "jsonl": "\n".join(json.dumps({"text": text}) for text in texts),
    }[kind]
    path = write(tmp_path / ("a.jsonl" if kind == "jsonl" else "a.txt"), joined)
    source = Files((path,), separator="\n\n" if kind == "blank" else None)
    assert documents(source) == texts
    monkeypatch.setattr(corpora, "PART_BYTES", size)
    assert len(source.parts()) > 5
    assert documents(source) == texts
    assert sum(part.size for part in source.parts()) == len(joined.encode())


@needs_shared
def test_real_stories():
    path = SHARED / "text" / "tinystories_v1_head_cased_2MiB.txt"
    stories = documents(Files((path,)))
    assert len(stories) in (2316, 2317)  # the last is cut off
    assert stories[0].startswith("One day, a little girl named Lily")
    assert not any("<|endoftext|>" in story for story in stories)


@needs_shared
def test_real_jsonl():
    path = SHARED / "eval" / "lambada_openai.jsonl"
    assert len(documents(Files((path,), text_key="context"))) == 5153


def test_folder_is_read_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c.py", "c.jsonl", ".hidden/x.txt", "d.bin", ".e.txt"):
        write(tmp_path / name, '{"text": "row"}' if name.endswith("jsonl") else name)
    assert documents(Files((tmp_path,))) == ["a/b/c.py", "a/z.md", "b.txt", "row"]


def test_several_paths_keep_their_order(tmp_path):
    paths = tuple(write(tmp_path / name, name) for name in ("z.txt", "a.txt"))
    assert documents(Files(paths)) == ["z.txt", "a.txt"]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ('{"text": ', r"rows\.jsonl, line 3: "),
        ("[1]", "line 3: the row is a JSON list, not an object"),
        ('{"txt": "a"}', "line 3: no field 'text'; nearest legal: txt. Name the field with"),
        ('{"text": 5}', "line 3: field 'text' is a int, not text"),
        ('{"text": "\\ud800"}', "line 3: .*surrogate"),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_broken_row_is_named(tmp_path, monkeypatch, row, match, size):
    path = write(tmp_path / "rows.jsonl", f'{{"text": "a"}}\n\n{row}\n{{"text": "b"}}\n')
    monkeypatch.setattr(corpora, "PART_BYTES", size)
    with pytest.raises(DataError, match=match):
        documents(Files((path,)))


def test_text_that_is_not_utf8_names_the_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine <|endoftext|> caf\xe9 x")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 text: byte 22\. data\.on_error=skip"):
        documents(Files((path,)))


@pytest.mark.parametrize("content", ["", None])
def test_empty_and_missing_files_are_named(tmp_path, content):
    path = tmp_path / "a.txt"
    if content is not None:
        write(path, content)
    with pytest.raises(DataError, match=r"a\.txt"):
        Files((path,)).parts()


def test_folder_without_text_and_misspelt_names(tmp_path):
    write(tmp_path / "a.bin", "x")
    with pytest.raises(DataError, match=r"no text files \(looked for \.txt"):
        Files((tmp_path,)).parts()
    with pytest.raises(DataError, match="nearest legal: stdlib"):
        Files((Path("stdlb"),)).parts()


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path):
    path = write(tmp_path / "a.txt", "hello")
    source = Files((path,))
    parts = source.parts()
    write(path, "he")
    with pytest.raises(DataError, match="shorter"):
        list(source.documents(parts[0]))


def test_fingerprint_tells_a_changed_file(tmp_path):
    path = write(tmp_path / "a.txt", "hello")
    source = Files((tmp_path,))
    before = source.fingerprint()
    assert source.fingerprint() == before
    os.utime(path, ns=(1, 1))
    changed = source.fingerprint()
    write(tmp_path / "b.txt", "more")
    assert len({json.dumps(f) for f in (before, changed, source.fingerprint())}) == 3
    assert Files((tmp_path,), separator="x").fingerprint() != source.fingerprint()


def test_hugging_face_by_name():
    assert HuggingFace.parse("a/b", "text") == HuggingFace("a/b")
    assert HuggingFace.parse("a/b:en:test", "t") == HuggingFace("a/b", "en", "test", "t")
    assert HuggingFace.parse("a/b::test", "text") == HuggingFace("a/b", None, "test")
    for wrong in ("", "a:b:c:d"):
        with pytest.raises(DataError, match="hf:NAME"):
            HuggingFace.parse(wrong, "text")


def test_hugging_face_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'meshwright\[hf\]'"):
        HuggingFace("a/b").parts()


def test_hugging_face_rows(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", " ", "two", "three"], "n": [1, 2, 3, 4]})
    asked = []

    def load(**options):
        asked.append(options)
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(corpora, "HF_PART_ROWS", 3)
    source = HuggingFace("a/b", "en", "test")
    assert documents(source) == ["one", "two", "three"]
    assert asked == [{"path": "a/b", "name": "en", "split": "test", "streaming": False}]
    assert [(part.start, part.stop) for part in source.parts()] == [(0, 3), (3, 4)]
    assert "_rows" not in pickle.loads(pickle.dumps(source)).__dict__
    assert source.fingerprint()["rows"] == 4
    with pytest.raises(DataError, match="no field 'txt'; nearest legal: text"):
        HuggingFace("a/b", text_key="txt").parts()
    with pytest.raises(DataError, match="row 0: field 'n' is a int"):
        documents(HuggingFace("a/b", text_key="n"))
