"""Tokenizers that go to Hugging Face folders and come from them, with what lies beside them."""

import json
from pathlib import Path

import pytest

from hf_folders import export, hf_folder, write_run
from meshwright.cli import main
from meshwright.data import load_tokenizer, train_bpe
from meshwright.data.hf_tokenizer import hf_tokenizer
from meshwright.data.tokenizers import BYTES_EOS, byte_characters, byte_level_json
from runs import clean_environ


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_what_lies_beside_a_tokenizer_comes_through(tmp_path):
    hf = hf_folder(tmp_path)
    assert main(["checkpoint", "import-hf", str(hf), str(tmp_path / "ours")]) == 0
    assert load_tokenizer(str(tmp_path / "ours")).digest == load_tokenizer(str(hf)).digest
    assert export(tmp_path / "ours", tmp_path / "out") == 0
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes()
    read = {
        name: json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    }
    was = json.loads((hf / "generation_config.json").read_text())
    assert read["generation_config.json"] == was
    assert read["config.json"]["eos_token_id"] == was["eos_token_id"]
    assert read["config.json"]["bos_token_id"] == was["bos_token_id"]
    assert read["tokenizer_config.json"]["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_another_end_of_document_than_the_files_say(tmp_path):
    tokenizer = load_tokenizer(str(hf_folder(tmp_path)), "<|turn|>")
    generation = tmp_path / "hf" / "generation_config.json"
    generation.write_text('{"eos_token_id": 0}')
    found = hf_tokenizer(tokenizer, 64)
    assert found.eos_token_id == [tokenizer.eos_id, 0]
    assert json.loads(found.files["tokenizer_config.json"])["eos_token"] == "<|turn|>"


def test_the_byte_tokenizer_in_transformers(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert export(run, tmp_path / "out") == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "".join(map(chr, range(300))) + "  naïve\r\n\t日本語 🙂\u0301 <s>"
    assert theirs(text)["input_ids"] == list(text.encode())
    assert theirs.decode(list(text.encode())) == text
    assert theirs.eos_token_id == theirs.bos_token_id == BYTES_EOS
    assert len(theirs) == 257
    ours = load_tokenizer(str(tmp_path / "out"))
    assert ours.encode(text) == list(text.encode())
    assert (ours.eos_id, ours.vocab_size) == (256, 257)


def test_merges_are_found_in_ranks(tmp_path):
    """A vocabulary as tiktoken has it gives the file it was made from."""
    text = Path(json.__file__).read_text()
    trained = json.loads(train_bpe([text], 500, tmp_path).read_text())["model"]
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split()) for m in trained["merges"]]
    tokens = [*byte_characters(), *("".join(pair) for pair in merges)]
    ranks = {bytes(byte_of[c] for c in token): rank for rank, token in enumerate(tokens)}
    made = json.loads(byte_level_json(ranks, "<|endoftext|>", len(ranks)))
    assert [tuple(pair) for pair in made["model"]["merges"]] == merges
    assert len(merges) > 100
    with pytest.raises(ValueError, match="got id"):
        byte_level_json(ranks, "<|endoftext|>", 7)


def test_a_run_keeps_what_lies_beside_its_tokenizer(tmp_path, config):
    from meshwright.runtime.session import prepare_job
    from meshwright.training.run_folder import create, tokenizer_of

    own = config(f"data.tokenizer={hf_folder(tmp_path)}", "train.batch=2")
    job = prepare_job(own, clean_environ())
    create(job)
    stored = tokenizer_of(job.folder.path)
    files = hf_tokenizer(load_tokenizer(stored.name, stored.eos, stored.bos), 64).files
    assert set(files) >= {"chat_template.jinja", "generation_config.json"}
