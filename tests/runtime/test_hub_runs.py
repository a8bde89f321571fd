"""Runs of models by their ids of the Hub, from a server on this machine."""

import json
import subprocess
import sys

import pytest

from hf_folders import model_of
from hub_server import HubServer
from meshwright.data import train_bpe
from meshwright.models.hf import save_hf

NAME = "lab/tiny"
SMALL = ("train.batch=4", "train.seq_len=32", "data.source=corpus.txt", "data.cache=store")


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "local"
    save_hf(model_of(), folder)
    text = "the quick brown fox jumps over the lazy dog\n" * 400
    train_bpe([text], 300, folder)
    (tmp_path / "corpus.txt").write_text(text)
    server = HubServer()
    server.private.add(NAME)
    server.commit_folder(NAME, folder)
    yield server
    server.shutdown()
    server.server_close()


def command(hub, folder, *words, **environ):
    """Run a command with its cache in a folder, and return what it printed."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), "HF_TOKEN": hub.token}
    settings |= {"PATH": "/usr/bin:/bin", "HOME": str(folder), **environ}
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        cwd=folder,
        env={**settings, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(run):
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.slow
def test_a_run_from_an_id_is_that_from_its_folder_and_resumes_from_its_commit(hub, tmp_path):
    words = ("train", "train.steps=2", "cluster.devices_per_node=2", "checkpoint.every=1", *SMALL)
    said = command(hub, tmp_path, *words, f"model.init_from={NAME}", "log.dir=by_id")
    (commit,) = hub.commits[NAME]
    assert f"downloading {NAME} at {commit[:7]}: " in said
    assert len(hub.fetched("model.safetensors")) == 1  # of a supervisor and two ranks
    command(hub, tmp_path, *words, "model.init_from=local", "log.dir=by_folder")
    by_id, by_folder = ((tmp_path / name / "latest").resolve() for name in ("by_id", "by_folder"))
    assert losses(by_id) == losses(by_folder)
    config = (by_id / "config.toml").read_text()
    assert config.count(f'"{NAME}@{commit}"') == 2  # the model and its tokenizer
    assert hub.token not in "".join(
        path.read_text(errors="replace") for path in by_id.rglob("*") if path.is_file()
    )

    hub.commit(NAME, {"config.json": "{}"})
    resumed = ("train", "--resume", str(by_id), "train.steps=3")
    command(hub, tmp_path, *resumed, HF_HUB_OFFLINE="1", HF_TOKEN="")
    assert len(losses(by_id)) == 3
    assert f"{NAME}@{commit}" in (by_id / "config.toml").read_text()
    text = command(
        hub,
        tmp_path,
        "generate",
        f"{NAME}@{commit}",
        "--prompt",
        "the",
        "--max-tokens",
        "8",
        HF_TOKEN="",
    )
    assert text.startswith("the")
