"""Trackers of experiments: one record of a run, however often it is restarted or resumed.

With the packages themselves in the group `trackers` of `python -m ci.extras`.
"""

import json
import sqlite3
import sys
import tomllib
import types
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.session import train
from meshwright.spec.training import LogSpec
from meshwright.training.events import open_sinks
from meshwright.training.run_folder import read_job
from meshwright.training.sinks import TRACKERS
from meshwright.training.sinks.base import TrackedRun
from runs import clean_environ

ROOT = Path(__file__).parents[2]
NAMES = [name for name in TRACKERS if name != "tensorboard"]


def step_of(number):
    return {"event": "step", "step": number, "loss": 1.0 / number, "path": "no number"}


def record(folder, name, steps, setting="project"):
    """Write steps to a tracker as one attempt of a run does."""
    run = TrackedRun(folder, "0123456789abcdef", {"train": {"steps": 3, "clip_norm": None}})
    for sink in open_sinks(LogSpec(**{name: setting}), run):
        for number in steps:
            sink.write(step_of(number))
        sink.close()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_continues_its_record(name, monkeypatch, tmp_path):
    """A stand-in with the two packages' interface records what identifies a run."""
    opened, logged = [], []
    stand_in = types.ModuleType(name)
    stand_in.log = lambda numbers, step: logged.append((step, numbers))
    stand_in.finish = lambda: None
    stand_in.init = lambda **words: opened.append(words) or stand_in
    monkeypatch.setitem(sys.modules, name, stand_in)
    for steps in ([1, 2], [3]):
        record(tmp_path, name, steps)
    assert opened[0] == opened[1]
    assert opened[0]["resume"] == "allow"
    assert opened[0]["project"] == "project"
    assert opened[0]["config"]["train"]["steps"] == 3
    assert (
        opened[0]
        .get("id", opened[0]["name"])
        .startswith("0123456789abcdef" if name == "wandb" else f"{tmp_path.name}-012345")
    )
    assert [(step, numbers["train/loss"]) for step, numbers in logged] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
    ]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_tensorboard_hides_the_steps_that_are_trained_again(tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, "tensorboard", [1, 2, 3, 4], setting=True)
    record(tmp_path, "tensorboard", [3, 4, 5], setting=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_every_tracker_is_a_key_an_extra_and_a_line_of_the_docs():
    """A new one is a file, a line of the registry, a key and an extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    keys = (ROOT / "docs" / "config.md").read_text()
    install = (ROOT / "docs" / "install.md").read_text()
    for name in TRACKERS:
        assert name in LogSpec.model_fields
        assert name in extras["optional-dependencies"]
        assert f"`log.{name}`" in keys
        assert f"`{name}`" in install


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_refused_with_its_extra(name, monkeypatch, tmp_path):
    for package in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'meshwright\[{name}\]'"):
        record(tmp_path, name, [1], setting=name == "tensorboard" or "project")


def test_wandb_itself_has_one_run(config):
    """Offline: each attempt leaves a folder, and all have the run's id."""
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    keys = ("log.wandb=project", "checkpoint.every=2", "train.log_every=1")
    environ = {**clean_environ(), "WANDB_MODE": "offline"}
    run = train(config(*keys, "train.steps=2"), environ)
    longer = config(*keys, "train.steps=4")
    train(longer, environ, resume=Resume(run.folder))
    folders = sorted((run.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert {folder.name.rpartition("-")[2] for folder in folders} == {read_job(run.folder).run}


def test_trackio_itself_has_one_run(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read as it is imported
    pytest.importorskip("trackio", reason="the trackio extra is not installed")
    (tmp_path / "run-1").mkdir()
    for steps in ([1, 2], [3]):
        record(tmp_path / "run-1", "trackio", steps)
    rows = sqlite3.connect(tmp_path / "store" / "project.db").execute(
        "select run_name, step from metrics order by step"
    )
    assert rows.fetchall() == [("run-1-012345", step) for step in (1, 2, 3)]


def test_mlflow_itself_has_one_run(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    for steps in ([1, 2], [3]):
        record(tmp_path, "mlflow", steps)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("project").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.data.params == {"train.steps": "3"}
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


def test_callbacks_get_each_event_and_a_failing_one_ends_no_run(config, capsys):
    seen = []

    def fails(event):
        raise ValueError("no more of these")

    keys = ("train.steps=3", "train.log_every=1", "layout.dp_replicate=2")
    run = train(config(*keys), clean_environ(), callbacks=[fails, seen.append])
    assert run.exit_code == 0
    recorded = [json.loads(line) for line in run.folder.joinpath("events.jsonl").open()]
    assert [event for event in seen if event in recorded] == recorded
    said = capsys.readouterr().err
    assert said.count("no more of these") == 1
    assert "fails is not called again, the run continues: ValueError" in said
