"""Files of rows and compressed files; what is skipped is counted and named."""

import gzip
import json
import re
import sys

import pytest

from meshwright.cli import main
from meshwright.data import formats
from meshwright.data.corpora import Files
from meshwright.data.dataset import open_data
from meshwright.errors import DataError
from meshwright.spec.training import DataSpec

TEXTS = ["one", 'two, with "quotes"\nand lines', "drei äöü", ""]
ROWS = [{"id": at, "text": text} for at, text in enumerate(TEXTS)]


def packed(path, content):
    """Write a file, compressed as its name says."""
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        pyarrow = pytest.importorskip("pyarrow")
        content = pyarrow.compress(content, codec="zstd", asbytes=True)
    path.write_bytes(content)
    return path


def lines(rows=ROWS):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows=ROWS, delimiter=","):
    quoted = [
        f'{row["id"]}{delimiter}"{row["text"].replace(chr(34), 2 * chr(34))}"' for row in rows
    ]
    return "\r\n".join([f"id{delimiter}text", *quoted, ""]).encode()


CONTENTS = {
    "jsonl": lines(),
    "ndjson": lines(),
    "json": json.dumps(ROWS).encode(),
    "csv": table(),
    "tsv": table(delimiter="\t"),
    "txt": "<|endoftext|>".join(TEXTS).encode(),
}


def documents(source, skip=None):
    return [text for part in source.parts() for text in source.documents(part, skip)]


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_every_kind_of_file_gives_its_documents(tmp_path, kind, packing):
    path = packed(tmp_path / f"rows.{kind}{packing}", CONTENTS[kind])
    assert documents(Files((path,))) == TEXTS[:3]
    assert documents(Files((tmp_path,))) == TEXTS[:3]
    assert Files((tmp_path,)).left_out() == []


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    many = [f"text {at}" for at in range(3000)]
    parquet.write_table(pa.table({"id": list(range(3000)), "text": many}), tmp_path / "a.parquet")
    assert documents(Files((tmp_path,))) == many
    with pytest.raises(DataError, match=r"a\.parquet: no field 'txt'; nearest legal: text"):
        documents(Files((tmp_path,), text_key="txt"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    found = []
    assert documents(Files((tmp_path,)), found.append) == many
    assert [text.partition(":")[0] for text in found] == [str(tmp_path / "b.parquet")]


def test_parquet_whose_text_is_no_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = pa.array([b"one", b"t\xffo"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, after row 0: 'utf-8' codec can't decode"):
        documents(Files((tmp_path / "a.parquet",)))


def test_one_object_is_one_row(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "alone"}')
    assert documents(Files((tmp_path,))) == ["alone"]


def test_a_long_field_of_a_table_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "x" * 300_000 + "\n")
    assert [len(text) for text in documents(Files((tmp_path,)))] == [300_000]


BAD = {
    "a.html": (b"caf\xe9", "a.html: not UTF-8 text: byte 3"),
    "b.jsonl": (lines([*ROWS[:1], {"body": "x"}]), "b.jsonl, line 2: no field 'text'"),
    "c.json": (b"{", "c.json: not JSON"),
    "d.csv": (b"id\n1\n", "d.csv, row 1: no field 'text'"),
    "e.jsonl.gz": (b"no gzip", "e.jsonl.gz: damaged, or not compressed"),
    "f.txt.gz": (gzip.compress(b"x" * 999)[:-9], "f.txt.gz: damaged, or not compressed"),
    "g.json": (json.dumps([{"text": "good"}, 5]).encode(), "g.json, row 2: the row is a JSON int"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_text_stops_or_is_skipped(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("after it")
    source = Files((tmp_path,))
    with pytest.raises(DataError) as caught:
        documents(source)
    assert message in str(caught.value)
    assert str(caught.value).endswith("data.on_error=skip passes over such files and rows")
    found = []
    assert documents(source, found.append)[-1] == "after it"
    (told,) = found
    assert message in told


def test_a_preparation_counts_and_names_what_it_skips(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, (content, _) in BAD.items():
        (corpus / name).write_bytes(content)
    (corpus / "good.txt").write_text("good text")
    (corpus / "paper.pdf").write_bytes(b"%PDF")
    (corpus / "Makefile").write_text("all:")
    (corpus / "rows.parquet.gz").write_bytes(b"PAR1")  # Parquet compresses by itself
    said = []
    spec = DataSpec(source=str(corpus), on_error="skip", validation=0.0)
    data = open_data(spec, tmp_path / "cache", progress=said.append)
    assert data.documents("train") == 3  # of b.jsonl, of g.json, and the good one
    left, skipped = said
    assert left == (
        f"{corpus}: left out 3 files that are not text (no suffix 1, .pdf 1, .gz 1): "
        "Makefile, paper.pdf, rows.parquet.gz"
    )
    assert skipped.startswith(f"{corpus}: skipped {len(BAD)}, listed in ")
    names = (data.folders[0] / "skipped.txt").read_text().splitlines()
    assert len(names) == len(BAD)
    for line, (_, message) in zip(names, BAD.values(), strict=True):
        assert message in line
    # Another store than one in which nothing was skipped, and this one again.
    with pytest.raises(DataError, match="on_error=skip"):
        open_data(spec.model_copy(update={"on_error": "stop"}), tmp_path / "cache")
    assert open_data(spec, tmp_path / "cache").identity == data.identity


def test_the_command_skips_and_says_so(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines([*ROWS, {"body": "x"}]))
    (tmp_path / "a.bin").write_bytes(b"x")
    words = ["data", "prepare", str(tmp_path / "out"), "--source", str(tmp_path / "a.jsonl")]
    assert main(words) == 2
    assert "line 5: no field 'text'" in capsys.readouterr().err
    assert main([*words, "--on-error", "skip"]) == 0
    assert "skipped 1, listed in" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [("prompt", "response"), ("instruction", "output")])
def test_halves_of_a_dialogue_are_not_advised(tmp_path, keys):
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(keys, "x")))
    with pytest.raises(DataError, match="are halves of a dialogue") as caught:
        documents(Files((tmp_path,)))
    assert "data.text_key" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("a.parquet", "meshwright\\[hf\\]"), ("a.jsonl.zst", "meshwright\\[zstd\\]")],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, name, hint):
    (tmp_path / name).write_bytes(b"x")
    for library in ("pyarrow", "pyarrow.parquet", "zstandard"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=hint):
        documents(Files((tmp_path,)), skip=[].append)


def test_suffixes_are_told_from_compression(tmp_path):
    assert formats.kind_of(tmp_path / "A.JSONL.GZ") == (".jsonl", ".gz")
    assert formats.kind_of(tmp_path / "a.csv") == (".csv", None)


TORN = {
    "a quote that never closes": ("a.csv", 'id,text\n1,"He said no\n2,and left\n3,three\n',
                                  "after row 0, from line 2: quotes do not pair up"),
    "one that closes lines below": ("a.csv", 'id,text\n1,one\n2,"two\n3,three\n4,"four"\n',
                                    "after row 1, from line 3: quotes do not pair up"),
    "of a tab-separated table": ("a.tsv", 'id\ttext\n1\tone\n2\t"two\n3\tthree\n', "from line 3"),
    "text after a closing quote": ("a.csv", 'id,text\n1,"one" two\n', "after row 0, from line 2"),
    "a field too many": ("a.csv", "id,text\n1,one\n2,two, and three\n",
                         "row 2: line 3 has 3 fields, but the header has 2"),
    "a field too few": ("a.csv", "text,id\none,1\ntwo\n", "row 2: line 3 has 1 fields"),
    "a column twice": ("a.csv", "text,id,text\na,1,b\n", "two columns are called"),
    "UTF-16": ("a.csv", "id,text\n1,one\n".encode("utf-16"), "can't decode byte"),
    "UTF-16 without its mark": ("a.csv", "text\nan other\n".encode("utf-16-le"), "row 1: it has"),
    "NUL characters": ("a.csv", "id,text\n1,a\0b\n", "row 1: it has NUL characters"),
    "NUL characters of a text": ("a.txt", "one\n".encode("utf-16-le"), "it has NUL characters"),
    "Latin-1": ("a.csv", "id,text\n1,na\xefve\n".encode("latin-1"), "after row 0: 'utf-8' codec"),
    "two objects on a line": ("a.jsonl", '{"text": "a"}{"text": "b"}\n', "line 1: Extra data"),
    "a comma after an object": ("a.jsonl", '{"text": "a"},\n', "line 1: Extra data"),
    "a line cut off": ("a.jsonl", '{"text": "a"}\n{"text": "b', "line 2: Unterminated string"),
    "a key twice": ("a.jsonl", '{"text": "a", "text": "b"}\n', "line 1: the key 'text' twice"),
    "a key twice in a list": ("a.json", '[{"text": "a", "text": "b"}]', "the key 'text' twice"),
    "lines that end as on a Macintosh": ("a.jsonl", '{"text": "a"}\r{"text": "b"}\r', "Extra data"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TORN)
def test_a_torn_table_is_refused_with_its_row_or_line(kind, tmp_path):
    name, content, why = TORN[kind]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=re.escape(why)):
        documents(Files((path,)))


WHOLE = {
    "a mark of UTF-8": ("a.csv", "\ufefftext,id\na,1\n", ["a"]),
    "a mark in jsonl": ("a.jsonl", '\ufeff{"text": "a"}\n\ufeff{"text": "b"}\n', ["a", "b"]),
    "quoted line ends and quotes": (
        "a.csv",
        'text,id\n"a\n""b"", c",1\n\nd,2\n',
        ['a\n"b", c', "d"],
    ),
    "a quote inside a field": ("a.tsv", 'text\tid\n5" disk\t1\n', ['5" disk']),
    "lines that end as on Windows": ("a.csv", "text,id\r\na,1\r\nb,2\r\n", ["a", "b"]),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_an_odd_table_is_read(kind, tmp_path):
    name, content, texts = WHOLE[kind]
    (tmp_path / name).write_bytes(content.encode())
    assert documents(Files((tmp_path / name,))) == texts
