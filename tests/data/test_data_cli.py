"""`meshwright data`: what it prints, as a table and as JSON, and how it ends."""

import argparse
import json
import pathlib

import pytest

from meshwright.cli import main
from meshwright.cli.data import configure

TEXT = "\n<|endoftext|>\n".join(f"once upon a time number {n}" for n in range(100))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return str(path)


def run(capsys, *words, code=0):
    assert main(["data", *words]) == code
    return capsys.readouterr()


def test_from_text_to_a_verified_store(corpus, tmp_path, capsys):
    bpe, store = str(tmp_path / "bpe"), str(tmp_path / "store")
    words = ("train-tokenizer", bpe, "--source", corpus, "--vocab-size", "300", "--json")
    trained = json.loads(run(capsys, *words).out)
    assert trained["vocab_size"] <= 300
    words = ("prepare", store, "--source", corpus, "--tokenizer", trained["file"], "--json")
    prepared = json.loads(run(capsys, *words, "--validation", "0.1", "--workers", "1").out)
    assert prepared["documents"] == 100
    assert prepared["validation"]["documents"] == 10
    assert prepared["tokenizer"]["digest"] == trained["digest"]
    inspected = json.loads(run(capsys, "inspect", store, "--json").out)
    assert inspected["sample"]["text"].startswith("once upon a time number 0")
    assert inspected["digest"] == prepared["digest"]
    assert json.loads(run(capsys, "verify", store, "--json").out)["passed"] is True


def test_tables(corpus, tmp_path, capsys):
    store = str(tmp_path / "store")
    shown = run(capsys, "prepare", store, "--source", corpus)
    assert "257 (bytes, document ends with 256)" in shown.out
    assert "0.02 held out" in shown.out
    # No animation where there is no terminal
    assert shown.err == (
        "note: corpus.txt split into documents at <|endoftext|>; data.separator='' makes a file "
        "one document\n"
    )
    shown = run(capsys, "inspect", store)
    assert "nats per token" in shown.out
    assert "'once upon a time" in shown.out
    assert "is intact: 4 files" in run(capsys, "verify", store).out


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_verify_fails_with_the_name_of_the_bad_file(corpus, tmp_path, capsys, flags):
    store = tmp_path / "store"
    run(capsys, "prepare", str(store), "--source", corpus)
    path = store / "tokens-00000.bin"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    out = run(capsys, "verify", str(store), *flags, code=1).out
    assert "tokens-00000.bin is damaged within bytes 0-" in out
    assert not flags or json.loads(out)["passed"] is False


def test_a_file_that_is_split_by_default_is_named(tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "one.txt").write_text("a text that says <|endoftext|> in its middle")
    (texts / "two.txt").write_text("another <|endoftext|> here")
    (texts / "plain.txt").write_text("one document")
    prepared = run(capsys, "prepare", str(tmp_path / "a"), "--source", str(texts), "--json")
    assert json.loads(prepared.out)["documents"] == 5
    assert "note: one.txt and 1 other file split into documents at <|endoftext|>" in prepared.err
    words = ("--source", str(texts), "--separator", "", "--json")
    whole = run(capsys, "prepare", str(tmp_path / "b"), *words)
    assert json.loads(whole.out)["documents"] == 3
    assert "split into documents" not in whole.err


def test_separator_and_text_key(tmp_path, capsys):
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("a\n\nb\n\nc")
    rows.write_text('{"body": "a"}\n{"body": "b"}\n')
    words = ("prepare", str(tmp_path / "s"), "--source", str(text), str(rows), "--json")
    words += ("--text-key", "body", "--separator", r"\n\n")
    assert json.loads(run(capsys, *words).out)["documents"] == 5


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["prepare", "{}/out", "--source", "{}/none.txt"], "no such file or folder"),
        (["prepare", "{}/out", "--source", "stdlib", "--tokenizer", "gpt"], "gpt2"),
        (["prepare", "{}/out", "--source", "stdlib", "--validation", "1"], "[0, 1)"),
        (["inspect", "{}/none"], "not an indexed store"),
        (["train-tokenizer", "{}/o", "--source", "stdlib", "--vocab-size", "9"], "at least 257"),
    ],
)
def test_refusals_end_with_2_and_say_why(tmp_path, capsys, words, match):
    found = run(capsys, *(word.format(tmp_path) for word in words), code=2)
    assert match in found.err
    assert found.out == ""


@pytest.mark.parametrize("action", ["prepare", "inspect", "verify", "train-tokenizer"])
def test_help_shows_an_example(action, capsys):
    parser = argparse.ArgumentParser()
    configure(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([action, "--help"])
    out = capsys.readouterr().out
    assert f"  meshwright data {action}" in out
    assert "--json" in out


def test_a_conversation_is_shown_with_what_is_trained(tmp_path, capsys, monkeypatch):
    chat = pathlib.Path(__file__).parents[2] / "examples" / "chat"
    source = ["--source", str(chat / "conversations.jsonl"), "--tokenizer", str(chat / "tokenizer")]
    store = str(tmp_path / "store")
    assert main(["data", "prepare", store, *source, "--format", "chat"]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", store, "--document", "3"]) == 0
    assert "assistant\n[[It is red, my friend!<|im_end|>]]\n" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["data", "inspect", store, "--document", "3"]) == 0
    assert "\x1b[1;32mIt is red, my friend!<|im_end|>\x1b[0m" in capsys.readouterr().out
    assert main(["data", "inspect", store, "--document", "401"]) == 2
    assert "nearest legal: 400" in capsys.readouterr().err
    assert main(["data", "inspect", store, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["trained"] for part in found["sample"][:3]] == [False, True, False]
    assert 0 < found["supervised_tokens"] < found["tokens"]
