"""What the first start on a machine measures of it; measurements are made up, but for one."""

import datetime
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.cost.calibration import as_toml, parse_calibration, read_calibration
from meshwright.errors import ConfigError, DataError, RankFailed, StoppedOnRequest
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of
from meshwright.prove.case import Case
from meshwright.report.record import read_run
from meshwright.runtime import session
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.machines.machine import detect
from meshwright.runtime.measure import measuring
from meshwright.runtime.measure.measuring import measured_first
from meshwright.runtime.pricing.measured import VARIABLE, calibration_in_use, keep, kept_at
from meshwright.spec.loading import load_config
from runs import TINY, clean_environ

CPU = ["cluster.device=cpu"]
ON_RANKS = measuring._on_ranks  # which no other test may call: tests/conftest.py
DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


class Start:
    """A start on a machine where nothing is kept; takes down what was measured and said."""

    def __init__(self, folder, had_core=1.0):
        self.environ = {"XDG_CACHE_HOME": str(folder)}
        self.had_core, self.asked, self.said = had_core, [], []

    def measure(self, case, ranks, threads, environ):
        self.asked.append((Case.from_json(case), ranks, threads))
        peak = 1e11 * len(self.asked)
        about = {"ranks": ranks, "torch": "2.13", "had_core": self.had_core, "seconds": 1.0}
        return {"constants": {"peak.fp32": peak}, **about}

    def __call__(self, *words):
        config = load_config(None, [*CPU, *words])
        return measured_first(config, self.environ, self.said.append, self.measure)

    def files(self):
        return sorted(Path(self.environ["XDG_CACHE_HOME"]).rglob("*.toml"))


@pytest.fixture
def start(tmp_path):
    return Start(tmp_path)


def peak_of(config):
    return cost_inputs_of(config).cluster.device.peaks["fp32"]


def test_the_first_start_measures_keeps_and_says_so(start):
    found = start()
    (path,) = start.files()
    machine = detect(load_config(None, CPU).cluster, start.environ)
    assert path == kept_at(machine, start.environ, "fp32")
    assert found.cluster.calibration == str(path)
    assert peak_of(found) == 1e11
    assert found.origins["cluster.calibration"].startswith("measured here, ")
    before, line = start.said
    assert before.startswith("note: measuring this CPU for predictions")
    assert line.startswith("note: this CPU was measured in ")
    assert str(path) in line
    assert "\n" not in line
    assert start() == found  # the next one reads it
    assert len(start.asked) == 1
    assert start.said == [before, line]


def test_it_is_measured_with_the_ranks_and_threads_of_training(start):
    start("layout.dp_replicate=1", "model.dim=64", "train.seq_len=32", "cluster.devices_per_node=1")
    machine = detect(load_config(None, CPU).cluster, start.environ)
    ((case, ranks, threads),) = start.asked
    assert ranks == machine.devices
    assert threads == machine.threads(ranks)
    assert (case.model.dim, case.train.seq_len) == (64, 32)
    (path,) = start.files()
    assert parse_calibration(path.read_text()).blocks  # whose blocks they are


@pytest.mark.parametrize(
    "words",
    [
        ["cluster.preset=h100-sxm"],
        ["cluster.calibration=shipped"],
        ["cluster.calibration=own.toml"],
        ["layout.tp=3"],  # illegal: refused by the command itself
    ],
)
def test_nothing_is_measured_where_it_would_not_count(start, words):
    config = load_config(None, [*CPU, *words])
    assert measured_first(config, start.environ, start.said.append, start.measure) == config
    assert not start.asked
    assert not start.said


def test_nothing_is_measured_on_a_gpu_or_where_the_environment_says_so(start, monkeypatch):
    start.environ[VARIABLE] = "shipped"
    assert start().cluster.calibration is None
    del start.environ[VARIABLE]
    gpu = detect(load_config(None, CPU).cluster, {})._replace(device="cuda")
    monkeypatch.setattr(measuring, "machine_of", lambda *_: gpu)
    assert start().cluster.calibration is None
    assert not start.asked


def test_shipped_is_a_name_for_the_constants_of_the_package(start):
    start()
    named = cost_inputs_of(load_config(None, [*CPU, "cluster.calibration=shipped"]))
    assert named == cost_inputs_of(load_config(None, CPU))
    assert named.cluster.device.peaks["fp32"] != 1e11


def test_each_precision_is_measured_where_no_bench_has(start):
    start()
    start("train.precision=bf16")
    assert [case.train.precision for case, _, _ in start.asked] == ["fp32", "bf16"]
    assert len(start.files()) == 2
    machine = detect(load_config(None, CPU).cluster, start.environ)
    at_length = as_toml({"cpu": {"peak.fp32": 7e11}}, "2026-01-01", "meshwright bench device")
    assert keep(at_length, kept_at(machine, start.environ))
    assert peak_of(start()) == 7e11  # what was measured at length comes first
    start("train.precision=fp16")
    assert len(start.asked) == 2


def test_a_machine_that_is_busy_is_measured_again_once_it_is_quiet(tmp_path, monkeypatch):
    start, known = Start(tmp_path, had_core=0.45), measuring.machine_of

    def with_load(share):
        def machine_of(config, environ):
            machine = known(config, environ)
            return machine._replace(load=share * machine.cores)

        monkeypatch.setattr(measuring, "machine_of", machine_of)

    with_load(2.0)
    assert peak_of(start()) == 1e11
    assert "Other processes used 55% of its cores" in start.said[1]
    assert peak_of(start()) == 1e11  # not once more for the same
    assert len(start.asked) == 1
    with_load(0.0)
    start.had_core = 0.97
    assert peak_of(start()) == 2e11
    assert "Other processes" not in start.said[3]
    start()
    assert len(start.asked) == 2


def test_a_folder_that_cannot_be_written_is_told_and_nothing_is_measured(start, tmp_path):
    (tmp_path / "meshwright").write_text("a file where the folder would be")
    assert start().cluster.calibration is None
    assert not start.asked
    (line,) = start.said
    assert "there is no folder to keep it in" in line
    assert "cluster.calibration=shipped" in line


def test_a_measurement_that_fails_is_told_and_the_run_goes_on(start):
    def fail(*_):
        raise RankFailed("rank 1 was killed")

    config = load_config(None, CPU)
    assert measured_first(config, start.environ, start.said.append, fail) == config
    assert start.said[1].endswith("rank 1 was killed")
    assert not start.files()

    def stop(*_):
        raise StoppedOnRequest("stopped on request")

    with pytest.raises(StoppedOnRequest):
        measured_first(config, start.environ, start.said.append, stop)


def test_plan_and_train_ask_for_it_and_print_it_beside_their_output(
    start, config, monkeypatch, capsys
):
    for name, value in start.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(measuring, "_on_ranks", start.measure)
    assert main(["plan", *CPU, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["calibration"]["source"].startswith("a start's measurement in ")
    assert "\nnote: this CPU was measured in " in said.err
    for file in start.files():
        file.unlink()
    job = session.prepare_job(config(), os.environ)
    assert job.config.cluster.calibration == str(start.files()[0])
    assert len(start.asked) == 2
    # Who asks for nothing measures nothing, and a file that is named is taken.
    for file in start.files():
        file.unlink()
    assert main(["config", "show", *CPU]) == 0
    assert main(["doctor"]) == 0
    own = start.environ["XDG_CACHE_HOME"] + "/own.toml"
    Path(own).write_text(as_toml({"cpu": {"peak.fp32": 7e11}}, "", ""))
    assert main(["plan", *CPU, "--calibration", own]) == 0
    assert len(start.asked) == 2


def test_doctor_names_the_calibration_and_its_age(start):
    config, today = load_config(None, CPU), datetime.date(2026, 1, 3)

    def told(words=(), environ=start.environ):
        return calibration_in_use(load_config(None, [*CPU, *words]), environ, today)

    assert told().text == "the shipped constants; the first `train` or `plan` measures this CPU"
    assert told(["cluster.calibration=own.toml"]).text == "own.toml"
    shipped = {**start.environ, VARIABLE: "shipped"}
    for one in (told(["cluster.calibration=shipped"]), told(environ=shipped)):
        assert one.text == "the shipped constants"
    path = kept_at(detect(config.cluster, start.environ), start.environ, "fp32")
    constants = {"cpu": {"peak.fp32": 1e11}}
    for date, age in (("2026-01-03", ", today"), ("2026-01-01", ", 2 days ago"), ("", "")):
        assert keep(as_toml(constants, date, "a test"), path)
        assert (told().text, told().state) == (f"a test{age}: {path}", "ok")
    assert keep(as_toml(constants, "2026-01-02", "a test", had_core=0.25), path)
    assert told().state == "note"
    expected = f"a test, yesterday: {path}; other processes had 75% of the cores meanwhile"
    assert told().text == expected


@pytest.mark.slow
def test_a_start_measures_both_ways_of_products_and_what_its_blocks_do(tmp_path):
    """The measurement itself, once; its figures are this machine's, and only looked at roughly."""
    environ = {**clean_environ(), "XDG_CACHE_HOME": str(tmp_path)}
    del environ[VARIABLE]
    config, said = load_config(None, TINY), []
    found = measured_first(config, environ, said.append, measure=ON_RANKS)
    own = parse_calibration(Path(found.cluster.calibration).read_text()).constants
    for name in ("bandwidth", "peak.fp32", "products.fp32", "matmul.gain", "optimizer"):
        assert own[f"cpu.{name}"] > 0
    for name in ("attention.flash2.fp32", "overhead.layer.fp32", "moves.fp32"):
        assert f"cpu.blocks.{name}" in own
    assert own["cpu.overhead.layer.fp32"] == own["cpu.blocks.overhead.layer.fp32"] > 0
    assert "cpu.moves.fp32" not in own  # of other models' blocks the shipped ones say more
    assert not any("bf16" in name for name in own)
    # Messages where the machine was quiet, all others as shipped.
    is_quiet = read_calibration(Path(found.cluster.calibration)).is_quiet
    assert ("cpu.inner.rate" in own) == is_quiet
    assert "cpu.times.send" not in own
    assert cost_inputs_of(found).kernels().network.times["send"] == 0.348
    assert re.match(r"note: this CPU was measured in .*: /", said[1])


@pytest.mark.perf
@pytest.mark.parametrize("matmul", ["torch", "onednn"])
def test_the_demo_is_predicted_on_a_machine_that_was_never_measured(matmul, tmp_path):
    """By three first starts: the step within 10% in the median, the memory within 3% in each.

    A virtual machine's neighbours take up to a quarter of its speed from one second to the next,
    so what is predicted is the fastest of the logged tens of steps.
    """
    errors = []
    for number in range(3):
        run = first_start(matmul, tmp_path / str(number))
        fastest = min(event["step_time_s"] for event in run.steps[1:])
        errors.append(run.planned.step_time_s / fastest - 1)
        measured = run.measured.worst.peak.total
        assert run.planned.worst.peak.total == pytest.approx(measured, rel=0.03)
        assert run.layout == Layout.parse(run.planned.label)
    assert abs(statistics.median(errors)) < 0.10, errors


def first_start(matmul, folder):
    """Train the demo for 100 steps with an empty cache, and return the run."""
    environ = {**clean_environ(), "XDG_CACHE_HOME": str(folder / "cache")}
    environ.pop(VARIABLE, None)
    words = [f"train.matmul={matmul}", "train.steps=100", "train.eval_every=0"]
    words += [f"log.dir={folder}", "log.name=run"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", str(DEMO), *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "this CPU was measured in" in done.stderr
    assert "Other processes" not in done.stderr, "this test needs a machine that does nothing else"
    return read_run(folder / "run")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["log.wandb=p"], "wandb is not installed"),
        (["data.source=nowhere.txt"], "nowhere.txt"),
        (["model.vocab_size=100"], "model.vocab_size = 100 is smaller than the vocabulary of 257"),
        (["train.compile=true"], "train.compile"),
        (["log.name=taken"], "already holds a run"),
        (["checkpoint.dir=/proc/nowhere"], "cannot be written"),
        (["model.dim=65536", "model.n_layers=64"], "has no room for the run's steps"),
    ],
)
def test_what_takes_no_time_is_refused_before_the_machine_is_measured(
    config, overrides, told, tmp_path, monkeypatch
):
    def measured(config, environ):
        raise AssertionError("measured first")

    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else known(name)
    )
    monkeypatch.setattr(session, "lacks_compiler", lambda device, environ: "a C++ compiler")
    monkeypatch.setattr(session, "measured_first", measured)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "plan.json").touch()
    with pytest.raises((ConfigError, DataError), match=told):
        session.prepare_job(config(*overrides), clean_environ())


def test_a_run_that_is_none_is_refused_before_the_machine_is_measured(tmp_path, monkeypatch):
    def measured(config, environ):
        raise AssertionError("measured first")

    monkeypatch.setattr(session, "measured_first", measured)
    with pytest.raises(ConfigError, match="not a run folder"):
        session.prepare_job(load_config(), clean_environ(), resume=Resume(tmp_path / "none"))
