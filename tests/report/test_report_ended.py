"""Banners of runs that went wrong, and which of several runs was the fastest."""

import os
import shlex
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from meshwright.errors import Diverged
from meshwright.report.record import read_run
from meshwright.report.run_page import banner, comparison_page, run_page, winner
from meshwright.runtime.ranks.worker import is_out_of_memory
from meshwright.runtime.supervise import supervisor
from meshwright.runtime.supervise.attempts import failed_event
from meshwright.spec.loading import load_config
from meshwright.training.run_folder import RunFolder
from run_folders import step_event, write_run

START = {"event": "start", "steps": 100, "world": 1, "parameters": 10}


def ended(tmp_path, *events, count=30, loss=None):
    """Return the record of a run with so many steps, whose losses `loss(step)` may say."""
    steps = [
        step_event(step, 100, 1, **({} if loss is None else {"loss": loss(step)}))
        for step in range(1, count + 1)
    ]
    config = load_config(None, ["layout.dp_replicate=1", f"log.dir={tmp_path}"])
    return read_run(write_run(config, events=[START, *steps, *events], profile=False))


@pytest.mark.often(3)
@pytest.mark.parametrize(
    ("kind", "title", "todo"),
    [
        ("memory", "ran out of memory", "that fits"),
        ("killed", "was killed", "because memory ran out"),
        ("hang", "hung", "where each of them was"),
        ("diverged", "diverged", "lower optimizer.lr"),
        ("other", "failed", "Mend the cause"),
        (None, "failed", "Mend the cause"),
    ],
)
def test_a_run_that_failed_opens_with_cause_and_command(tmp_path, kind, title, todo):
    cause = "what the supervisor said"
    run = ended(tmp_path, {"event": "failed", "cause": cause, "kind": kind})
    found = banner(run)
    assert title in found.title
    assert found.cause == f"{cause}."
    assert todo in found.todo
    folder = str(run.path.resolve())
    assert f"meshwright train --resume {shlex.quote(folder)}" in found.commands
    page = run_page(run).html()
    main = page.partition("<main ")[2]
    assert main.count('role="alert"') == 1
    assert main.index('role="alert"') < main.index('class="facts"')


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (Diverged("the gradient of embed.weight is not finite"), "diverged"),
        (OSError("no such file"), "other"),
    ],
)
def test_the_supervisor_knows_the_kind_of_an_exception(tmp_path, error, kind):
    folder = RunFolder(tmp_path)
    said = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "",
        "time": 1.0,
        "expected": False,
        "exit_code": 3,
        "place": "step 3",
        "out_of_memory": is_out_of_memory(error),
    }
    with mock.patch.object(supervisor, "read_failure", return_value=said):
        assert supervisor.failure_of(folder, 0, 3).kind == kind


def test_the_supervisor_knows_a_rank_that_was_killed(tmp_path):
    there = [SimpleNamespace(place="step 3")]
    with mock.patch.object(supervisor, "witnesses", return_value=there):
        failure = supervisor.failure_of(RunFolder(tmp_path), 0, -9)
    assert failure.kind == "killed"
    assert failed_event(supervisor.RanksFailed("", failure, 0.0, 0.1))["kind"] == "killed"


def test_a_loss_that_leaves_is_a_divergence(tmp_path):
    end = {"event": "end", "step": 30, "stopped": False, "loss": 9.0}
    found = banner(ended(tmp_path, end, loss=lambda step: 3.0 if step < 15 else 6.0))
    assert found.title == "The run diverged"
    assert found.cause == "The loss was 3 at step 10, and is 6 at the end."
    lost = banner(ended(tmp_path, end, loss=lambda step: "nan" if step == 30 else 3.0))
    assert lost.cause == "The loss of step 30 is nan."
    assert banner(ended(tmp_path, end, loss=lambda step: 3.0 + 0.2 * (step % 3))) is None


def test_a_run_that_was_killed_is_told_from_one_that_goes_on(tmp_path):
    run = ended(tmp_path)
    written = os.stat(run.path / "events.jsonl").st_mtime
    assert banner(run, unix_time=written + 60) is None
    found = banner(run, unix_time=written + 600)
    assert found.title == "The run ended without a word"
    assert "nothing was written for 10m00s" in found.cause


def test_a_run_that_stopped_on_request_has_no_banner(tmp_path):
    end = {"event": "end", "step": 30, "stopped": True, "loss": 3.0}
    run = ended(tmp_path, end)
    assert banner(run) is None
    assert 'role="alert"' not in run_page(run).html()


def test_a_comparison_names_the_fastest_and_why(tmp_path):
    config = load_config(None, ["layout.dp_replicate=1", f"log.dir={tmp_path}"])
    faster = [START, *(step_event(n, 9, 1, tokens_per_s=300.0) for n in range(1, 9))]
    slower = [START, *(step_event(n, 9, 1, tokens_per_s=200.0) for n in range(1, 9))]
    runs = [
        read_run(write_run(config, events=slower, slower=2.0)),
        read_run(write_run(config, events=faster, slower=1.0)),
    ]
    said = winner(runs, ["one", "two"])
    assert said[0] == "two is the fastest: 300 tokens a second, 50% more than one."
    assert said[1].startswith("The largest difference of their recorded steps is comput")
    assert "is the fastest: 300 tokens a second, 50% more than" in comparison_page(runs).html()
    assert winner(runs[:1], ["one"]) == []
