"""A pickle in place of any file that is read (case 22) never runs, whatever the command says."""

import json
import os
import pickle
import shutil
import time

import pytest

from meshwright.cli import main
from meshwright.data import train_bpe
from meshwright.errors import EXIT_REFUSED
from meshwright.models import build_model, init_model
from meshwright.models.hf import save_hf
from meshwright.runtime.session import train
from meshwright.spec.resolve import model_spec
from runs import TINY, clean_environ
from test_data_megatron import write_pair

pytestmark = pytest.mark.case(22)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def try_all(tmp_path, capsys, outcome):
    """Return a function that puts a pickle in place of each file of a folder, and runs commands.

    Each of the `files` must be refused by one of them, unless none reads it.
    """
    fired = tmp_path / "fired"
    bomb = pickle.dumps(Bomb(str(fired)))

    def run(folder, files, commands, unread=()):
        assert files
        silent = set()
        for name in files:
            copy = folder.with_name("with-a-pickle")
            shutil.copytree(folder, copy, symlinks=True)
            (copy / name).write_bytes(bomb)
            said, began = [], time.monotonic()
            for words in commands:
                code = main([word.replace("IT", str(copy)) for word in words])
                shown = capsys.readouterr()
                lines = (shown.err or shown.out).strip().splitlines()
                bad_lines = [line for line in lines if line.startswith("BAD")]
                said.append((code, (bad_lines or lines or [""])[-1]))
            seconds = time.monotonic() - began
            assert not fired.exists(), name
            assert {code for code, _ in said} <= {0, 1, EXIT_REFUSED}, said
            bad = [(code, text) for code, text in said if code]
            if bad:
                outcome.add(*bad[0], seconds)
            else:
                silent.add(str(name))
            shutil.rmtree(copy)
            shutil.rmtree(f"{copy}-out", ignore_errors=True)
        assert silent == set(unread)

    pickle.loads(bomb)  # it does act
    fired.rmdir()
    return run


def files_of(folder):
    """Return the files below a folder, by their path in it."""
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


@pytest.mark.slow
def test_in_a_run_folder(config, tmp_path, try_all):
    asked = config("layout.dp_replicate=1", "train.steps=2", "checkpoint.every=1")
    folder = train(asked, clean_environ()).folder
    commands = [
        ["checkpoint", "verify", "IT"],
        ["doctor", "IT"],
        ["generate", "IT", "--prompt", "a", "--max-tokens", "2"],
        ["report", "IT"],
    ]
    every = files_of(folder)
    files = [path for path in every if path.parts[0] != "logs" or "recorder" in path.name]
    # A report says on its page which of its files it could not read.
    told = {"provenance.json", "ledger.json"}
    unread = {
        "lock",
        "checkpoints/latest",
        "checkpoints/lock",
        "logs/rank-0.recorder",
        "report/index.html",
        *told,
    }
    try_all(folder, files, commands, unread)


def test_in_a_hugging_face_folder(tmp_path, try_all):
    spec = model_spec(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=300)
    folder = tmp_path / "hf"
    save_hf(init_model(build_model(spec, device="cpu"), spec, seed=0), folder)
    train_bpe(["some words " * 20], 300, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    # What torch.load would read is not even looked at
    (folder / "pytorch_model.bin").write_bytes(b"")
    commands = [
        ["checkpoint", "import-hf", "IT", "IT-out"],
        ["generate", "IT", "--prompt", "a", "--max-tokens", "2"],
    ]
    try_all(folder, files_of(folder), commands, {"pytorch_model.bin"})


def test_in_a_megatron_pair(tmp_path, try_all):
    folder = tmp_path / "pair"
    folder.mkdir()
    write_pair(folder / "pair")
    words = [*TINY, f"log.dir={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}"]
    commands = [["train", "data.source=IT/pair", *words]]
    try_all(folder, files_of(folder), commands)
