"""A run on a cluster corrects its prediction at its 20th step, and says what would be faster."""

import datetime
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright.layout import Layout, Machine
from meshwright.planner.plan import cost_inputs_of, explain
from meshwright.program.events import Events
from meshwright.report.record import read_run
from meshwright.report.run_words import verdict
from meshwright.runtime.pricing.correcting import AT, Correcting, correcting
from meshwright.runtime.pricing.correction import corrected_event, main
from meshwright.runtime.pricing.measured import VARIABLE, as_measured_here
from meshwright.spec.loading import load_config
from meshwright.training.run_folder import Job, RunTokenizer, choose_folder, create
from run_folders import step_event
from runs import clean_environ

PRESET = "cluster.preset=h100-sxm"
WORDS = ["model.preset=llama-3-8b", PRESET, "train.batch=64", "train.precision=bf16"]
GPUS = Machine("cuda", 8, 64, "h100", is_fixed=True)


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    return {**clean_environ(), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def run_of(tmp_path, label, slower, steps=AT):
    """Return the job of a made-up run, whose steps take so many times as long as predicted."""
    layout = Layout.parse(label)
    config = load_config(None, [*WORDS, f"log.dir={tmp_path}/runs"])
    folder = choose_folder(config, datetime.datetime(2026, 11, 24))
    tokenizer = RunTokenizer("bytes", None, None)
    job = Job(config, layout, GPUS, tmp_path, folder, tokenizer)
    create(job)
    found = explain(cost_inputs_of(config), layout)
    peak = {"0": round(found.memory.allocated)}
    with job.folder.events.open("a") as lines:
        for step in range(1, steps + 1):
            seconds = slower * found.time.total * (3 if step < 4 else 1)  # warms up
            event = step_event(step, 40, 8, step_time_s=seconds, peak_memory_bytes=peak)
            lines.write(json.dumps(event) + "\n")
    return job


def test_the_20th_step_corrects_what_is_predicted_of_the_cluster(tmp_path, environ, monkeypatch):
    job = run_of(tmp_path, "shard8 zero3 mb1 recompute-full", slower=1.5)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["correction", str(job.folder.path)])
    main()
    (event,) = [one for one in Events.read(job.folder.events) if one["event"] == "measured"]
    plain = explain(cost_inputs_of(job.config), job.layout).time.total
    assert event["step_time_s"] == pytest.approx(1.5 * plain)
    assert event["compute"] > 1.4
    assert event["memory"] == pytest.approx(1, abs=0.01)
    # What is planned for that cluster next is what was measured.
    after = cost_inputs_of(as_measured_here(load_config(None, WORDS), environ))
    assert explain(after, job.layout).time.total == pytest.approx(1.5 * plain, rel=2e-3)
    # All is computed anew in this layout: another is faster, and the report says so.
    assert event["faster"]["own_step_time_s"] == pytest.approx(1.5 * plain, rel=2e-3)
    assert event["faster"]["step_time_s"] < 0.95 * event["faster"]["own_step_time_s"]
    assert event["says"] in verdict(read_run(job.folder.path))
    assert f"With this, {event['faster']['layout']} is predicted to take" in event["says"]


def test_the_best_layout_is_told_that_nothing_is_faster(tmp_path, environ):
    first = run_of(tmp_path, "shard8 zero3 mb1 recompute-full", slower=1.0)
    best = corrected_event(first, environ)["faster"]["layout"]
    event = corrected_event(run_of(tmp_path / "second", best, slower=1.0), environ)
    assert event["faster"] is None
    assert "no other layout is predicted to be faster" in event["says"]


def test_steps_that_nothing_explains_correct_nothing(tmp_path, environ):
    job = run_of(tmp_path, "shard8 zero3 mb1", slower=900.0)
    event = corrected_event(job, environ)
    assert set(event) == {"event", "says"}
    assert "that is not an efficiency" in event["says"]
    assert not (tmp_path / "cache").exists()


def test_the_correction_begins_once_at_the_20th_step_and_is_waited_for():
    begun = []

    def begin():
        begun.append(subprocess.Popen([sys.executable, "-S", "-c", "pass"]))
        return begun[-1]

    sink = Correcting(begin)
    for step in range(1, AT + 30):
        sink.write({"event": "save", "step": step})
        sink.write({"event": "step", "step": step})
        assert len(begun) == (step >= AT)
    sink.close()
    assert begun[0].returncode == 0


def test_only_runs_on_gpus_of_a_named_cluster_correct_it(tmp_path, environ):
    job = run_of(tmp_path, "shard8 zero3 mb1", slower=1.0)
    assert len(correcting(job, environ)) == 1
    assert not correcting(replace(job, machine=GPUS._replace(device="cpu")), environ)
    local = job.config.cluster.model_copy(update={"preset": "local"})
    assert not correcting(
        replace(job, config=job.config.model_copy(update={"cluster": local})), environ
    )
    assert not correcting(job, {**environ, VARIABLE: "shipped"})
