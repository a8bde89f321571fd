"""Tokenizers: known ids, round trips, ends of documents, refusals."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from meshwright.data import load_tokenizer, tokenizers, train_bpe
from meshwright.errors import DataError

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "tokenizers"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared tokenizers are missing")
# How tiktoken names its copies: the SHA-1 of the address.
TIKTOKEN_NAMES = {
    "6d1cbeee0f20b3d9449abfede4726ed8212e3aee": "vocab.bpe",
    "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": "encoder.json",
    "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4": "r50k_base.tiktoken",
}
TEXTS = ["def f(x):\n    return x + 1\n" * 20, "the quick brown fox, naïve 日本語 🙂\n" * 20]
unicode_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return load_tokenizer(str(train_bpe(TEXTS, 400, tmp_path_factory.mktemp("bpe"))))


@needs_shared
@pytest.mark.parametrize(
    ("path", "ids", "size", "eos"),
    [
        ("gpt2", [15496, 995], 50257, 50256),
        ("gpt-neox-20b/20B_tokenizer.json", [12092, 1533], 50277, 0),
        ("torchtitan-test-2k", None, 2020, 2003),
    ],
)
def test_known_tokenizers(path, ids, size, eos):
    tokenizer = load_tokenizer(str(SHARED / path))
    assert ids is None or tokenizer.encode("Hello world") == ids
    assert tokenizer.vocab_size == size
    assert tokenizer.eos_id == eos
    # The small one has no entry for a space and loses it, as it does in its own library.
    decoded = tokenizer.decode(tokenizer.encode("Hello world"))
    assert decoded == ("Hello world" if ids else "Helloworld")


@pytest.mark.slow
@needs_shared
def test_gpt2_through_tiktoken_equals_the_json(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken")
    for name, file in TIKTOKEN_NAMES.items():
        shutil.copy(SHARED / "gpt2" / file, tmp_path / name)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    gpt2, same = load_tokenizer("gpt2"), load_tokenizer(str(SHARED / "gpt2"))
    text = "Hello world <|endoftext|> naïve 日本語\n\n\tx = 1"
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode(text) == same.encode(text)
    assert gpt2.decode(gpt2.encode(text)) == text
    assert (gpt2.vocab_size, gpt2.eos_id) == (same.vocab_size, same.eos_id) == (50257, 50256)
    assert gpt2.digest == load_tokenizer("gpt2").digest != same.digest
    made, known = (json.loads(tokenizer.to_json())["model"] for tokenizer in (gpt2, same))
    assert [tuple(pair) for pair in made["merges"]] == [tuple(m.split()) for m in known["merges"]]


def test_gpt2_without_tiktoken_names_the_alternatives(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=r"meshwright\[tiktoken\].*tokenizer.json.*bytes"):
        load_tokenizer("gpt2")


@given(unicode_text)
@quick
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@given(unicode_text)
@quick
def test_bpe_round_trip(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.eos_id not in ids
    assert all(0 <= i < bpe.vocab_size for i in ids)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_pack_equals_encoding_one_by_one(kind, bpe, monkeypatch):
    tokenizer = bpe if kind == "bpe" else load_tokenizer("bytes")
    texts = [*TEXTS, "a", "日本語", "x\0y"]
    for _ in range(2):
        ids, lengths = tokenizer.pack(texts)
        expected = [i for text in texts for i in (*tokenizer.encode(text), tokenizer.eos_id)]
        assert ids.tolist() == expected
        assert lengths.tolist() == [len(tokenizer.encode(text)) + 1 for text in texts]
        monkeypatch.setattr(tokenizers, "PIECE_CHARS", 100)  # now in pieces


def test_long_texts_are_cut_at_line_ends_without_loss(bpe, monkeypatch):
    text = TEXTS[0] + "x" * 300 + "\n" + TEXTS[1]
    monkeypatch.setattr(tokenizers, "PIECE_CHARS", 64)
    assert bpe.decode(bpe.encode(text)) == text


def test_special_tokens_inside_a_text_are_ordinary_characters(bpe):
    assert bpe.eos_id not in bpe.encode("a <|endoftext|> b")


def test_training_is_reproducible_and_compresses(tmp_path, bpe):
    again = load_tokenizer(str(train_bpe(iter(TEXTS), 400, tmp_path / "own.json")))
    assert again.digest == bpe.digest
    assert bpe.vocab_size <= 400
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2


@pytest.mark.parametrize(("texts", "size", "match"), [([], 300, "no text"), (["a"], 256, "257")])
def test_training_refuses(tmp_path, texts, size, match):
    with pytest.raises(DataError, match=match):
        train_bpe(texts, size, tmp_path)


def without_eos(folder: Path, source: Path) -> Path:
    content = json.loads(source.read_text())
    content["added_tokens"][0]["content"] = "[STOP]"
    content["model"]["vocab"] = {
        ("[STOP]" if token == "<|endoftext|>" else token): i
        for token, i in content["model"]["vocab"].items()
    }
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(content))
    return file


def test_end_of_document_is_never_guessed(tmp_path, bpe):
    file = without_eos(tmp_path, bpe.file)
    with pytest.raises(DataError, match=r"which token ends a document.*data.eos.*\[STOP\]"):
        load_tokenizer(str(file))
    assert load_tokenizer(str(file), eos="[STOP]").eos_id == bpe.eos_id
    with pytest.raises(DataError, match=r"'\[STOPP\]' is not in the vocabulary.*\[STOP\]"):
        load_tokenizer(str(file), eos="[STOPP]")


def bert_like(folder: Path, bpe) -> Path:
    """A tokenizer of which no token ends a document by its name."""
    content = json.loads(bpe.to_json())
    content["added_tokens"] = []
    content["model"]["unk_token"] = "[UNK]"
    content["model"]["vocab"] |= {"[UNK]": 5000, "<": 5001, "[": 5002}
    del content["model"]["vocab"]["<|endoftext|>"]
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(content))
    return file


def with_special(file: Path, names: list[str]) -> Path:
    backend = Tokenizer.from_file(str(file))
    backend.add_special_tokens(names)
    backend.save(str(file))
    return file


@pytest.mark.parametrize(
    ("names", "likely"),
    [
        (["[PAD]", "<stop>", "[CLS]"], "<stop>"),
        (["[CLS]", "[SEP]", "<|eot_id|>", "[EOD]"], "[EOD], <|eot_id|> or [SEP]"),
        (["<think>", "<|vision_end|>", "<｜end▁of▁sentence｜>"], "<｜end▁of▁sentence｜>"),
        (["<turn_end>", "<eom>", "<|end|>", "</doc>"], "</doc>, <turn_end> or <eom>"),
    ],
)
def test_tokens_that_may_end_a_document_are_suggested_the_likeliest_first(
    tmp_path, bpe, names, likely
):
    file = with_special(bert_like(tmp_path, bpe), names)
    with pytest.raises(DataError, match=rf"perhaps {re.escape(likely)}$"):
        load_tokenizer(str(file))
    with pytest.raises(DataError, match=rf"nearest legal: {re.escape(likely)}$"):
        load_tokenizer(str(file), eos="@@@")


def test_of_likely_ends_the_one_spelled_alike_is_nearest(tmp_path, bpe):
    file = with_special(bert_like(tmp_path, bpe), ["[EOD]", "<|eot_id|>"])
    with pytest.raises(DataError, match=r"nearest legal: <\|eot_id\|> or \[EOD\]$"):
        load_tokenizer(str(file), eos="<|eot|>")
    with pytest.raises(DataError, match=r"nearest legal: <\|endoftext\|>$"):
        load_tokenizer(str(bpe.file), eos="<|endoftxt|>")


def test_without_a_token_that_may_end_a_document_it_is_told_how_to_add_one(tmp_path, bpe):
    """Ordinary tokens such as `<` and `[` are none, nor is the one of unknown words."""
    file = with_special(bert_like(tmp_path, bpe), ["[PAD]", "[CLS]"])
    for eos, told in ((None, "or add one"), ("<|endoftext|>", "Leave data.eos out, and add one")):
        with pytest.raises(DataError, match=f"{told}, as .* could be it: python -c ") as error:
            load_tokenizer(str(file), eos=eos)
        words = shlex.split(str(error.value).partition("could be it: ")[2])
        assert "nearest" not in str(error.value)
    subprocess.run([sys.executable, *words[1:]], check=True)  # the command does as it says
    assert load_tokenizer(str(file)).eos_token == "<|endoftext|>"


@pytest.mark.parametrize("eos", ["[STOP]", {"content": "[STOP]"}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_end_of_document_is_read_from_the_files_beside(tmp_path, bpe, name, eos):
    file = without_eos(tmp_path, bpe.file)
    (tmp_path / name).write_text(json.dumps({"eos_token": eos}))
    assert load_tokenizer(str(tmp_path)).eos_token == "[STOP]"
    (tmp_path / name).write_text("[1")
    with pytest.raises(DataError, match=name):
        load_tokenizer(str(file))


def test_digest_tells_tokenizers_apart(bpe, tmp_path):
    other = load_tokenizer(str(train_bpe(TEXTS, 300, tmp_path)))
    assert len({bpe.digest, other.digest, load_tokenizer("bytes").digest}) == 3


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04\x95", b'{"model": null}'])
def test_unusable_json_is_refused_with_its_path(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(str(file))


def test_missing_tokenizer_suggests():
    with pytest.raises(DataError, match="nearest legal: bytes"):
        load_tokenizer("byte")


def test_decode_takes_arrays():
    assert load_tokenizer("bytes").decode(np.array([104, 105, 256])) == "hi"


def test_lone_surrogates_are_refused():
    with pytest.raises(DataError, match="surrogate"):
        load_tokenizer("bytes").pack(["a\ud800"])
