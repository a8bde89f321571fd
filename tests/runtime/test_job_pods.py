"""Pods: a Kubernetes job's script begins, resumes, hands signals on and tells what is damaged."""

import subprocess
import time

import pytest
import yaml

from meshwright.checkpoint.commit import anew
from written_jobs import script_of


def attempt(folder, script, **environ):
    """Run a node's script where torchrun only says what it was asked for."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "torchrun").write_text('#!/bin/bash\necho "$$ $@"\n')
    (tools / "torchrun").chmod(0o755)
    path = {"PATH": f"{tools}:/usr/bin:/bin"}
    with subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**path, **environ},
        cwd=folder,
    ) as shell:
        pid, _, words = shell.stdout.read().strip().partition(" ")
        return int(pid) == shell.pid, words


@pytest.mark.case(45)
def test_a_pod_begins_resumes_and_hands_signals_on(written, tmp_path, outcome):
    started = time.monotonic()
    script = script_of(written("kubernetes", "--image", "i", "--volume", "v"))
    run = tmp_path / "runs" / "meshwright"
    is_same, words = attempt(tmp_path, script)
    assert is_same  # the shell has become torchrun: SIGTERM reaches it
    assert words.endswith("train /etc/meshwright/run.toml log.name=meshwright")
    (run / "checkpoints").mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    # Killed before it saved a step: nothing to resume, and nothing in the way.
    assert attempt(tmp_path, script, JOB_COMPLETION_INDEX="1")[1] == words
    assert run.exists()
    assert attempt(tmp_path, script, JOB_COMPLETION_INDEX="0")[1] == words
    assert not run.exists()
    (unsaved,) = run.parent.glob("meshwright-unsaved-*")
    outcome.add(None, f"{unsaved.name[:19]}... has the rest", time.monotonic() - started)
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    for index in "01":
        assert attempt(tmp_path, script, JOB_COMPLETION_INDEX=index)[1].endswith(
            "train /etc/meshwright/run.toml --resume runs/meshwright"
        )


@pytest.mark.case(52)
@pytest.mark.parametrize("options", [[], ["checkpoint.dir=my steps"]])
def test_a_pod_begins_anew_once_its_damaged_steps_are_out_of_its_way(
    options, written, tmp_path, outcome
):
    """By the command of the message that ends each of its attempts until then."""
    script = script_of(written("kubernetes", "--image", "i", "--volume", "v", *options))
    run = tmp_path / "runs" / "meshwright"
    root = tmp_path / "my steps" if options else run / "checkpoints"
    (root / "step-00000010").mkdir(parents=True)
    run.mkdir(parents=True, exist_ok=True)
    assert attempt(tmp_path, script, JOB_COMPLETION_INDEX="0")[1].endswith(
        "--resume runs/meshwright"
    )
    started = time.monotonic()
    said = anew(root)
    subprocess.run(["bash", "-c", said.rpartition(": ")[2]], check=True)
    _, words = attempt(tmp_path, script, JOB_COMPLETION_INDEX="0")
    assert words.endswith("log.name=meshwright")
    assert len(list(tmp_path.rglob("*-damaged/step-00000010"))) == 1  # nothing is lost
    outcome.add(
        None, said.partition(". ")[2].replace(str(tmp_path), "..."), time.monotonic() - started
    )


@pytest.mark.case(45)
def test_ranks_have_as_long_to_save_as_the_job_grants(written, outcome):
    """By itself torchrun kills them after 30 seconds."""
    started = time.monotonic()
    asked = "env TORCH_ELASTIC_SHUTDOWN_TIMEOUT="
    assert written("torchrun", "--hosts", "a", "b").count(f"{asked}180 torchrun --nnodes 2") == 2
    assert f"exec {asked}180 torchrun" in yaml.safe_load(written("skypilot", "--image", "i"))["run"]
    for kind in ("jobset", "pytorchjob"):
        options = ["--image", "i", "--volume", "v", "--kind", kind, "--grace", "10m"]
        text = written("kubernetes", *options)
        assert f"exec {asked}600 torchrun" in text
        assert text.count("terminationGracePeriodSeconds: 600") == text.count("containers:")
    outcome.add(None, "torchrun waits as long as the pod", time.monotonic() - started)


@pytest.mark.case(45)
def test_a_pod_finds_the_steps_that_it_saves_elsewhere(written, tmp_path, outcome):
    options = ["--image", "i", "--volume", "v", "checkpoint.dir=my steps"]
    script = script_of(written("kubernetes", *options))
    (tmp_path / "runs" / "meshwright").mkdir(parents=True)
    (tmp_path / "my steps" / "step-00000010").mkdir(parents=True)
    started = time.monotonic()
    _, words = attempt(tmp_path, script, JOB_COMPLETION_INDEX="0")
    assert words.endswith("--resume runs/meshwright")
    outcome.add(None, "the run is resumed", time.monotonic() - started)
