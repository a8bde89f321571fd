"""`train.compile`: what "auto" comes to, who records it, and what a missing compiler changes."""

import gc
import json
import shutil
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from meshwright.bench import blocks as measured_compiling
from meshwright.bench.blocks import bytes_moved, compiling, own, stack
from meshwright.cli import bench
from meshwright.cli.main import main
from meshwright.cost.calibration import as_toml
from meshwright.cost.price import price
from meshwright.errors import EXIT_REFUSED, ConfigError
from meshwright.layout import Layout, Machine
from meshwright.planner.choices import choose, with_compile
from meshwright.planner.plan import cost_inputs_of, plan
from meshwright.planner.saved import load_planned
from meshwright.prove.case import Case
from meshwright.runtime.machines.machine import check_compiler, lacks_compiler
from meshwright.runtime.pricing.planned import settled
from meshwright.spec.dump import to_toml
from meshwright.spec.loading import load_config
from meshwright.training.run_folder import RunFolder, compiled_as

LAYOUT = Layout(dp_replicate=2, microbatch=2)
MACHINE = Machine("cpu", 2, 2, "CPU", False)
GAIN, SECONDS = 1.25, 10.0


@pytest.fixture
def measured(tmp_path):
    """A calibration in which compiled fp32 blocks are a quarter faster, and bf16 was not tried."""
    path = tmp_path / "here.toml"
    found = {"compile.gain.fp32": GAIN, "compile.seconds.fp32": SECONDS}
    path.write_text(as_toml({"cpu": found}, "2026-11-22", "a test"))
    return f"cluster.calibration={path}"


def chosen(*words, lacks=None):
    return choose(cost_inputs_of(load_config(None, ["cluster.device=cpu", *words])), LAYOUT, lacks)


def test_auto_compiles_where_the_run_repays_it(measured):
    setting = cost_inputs_of(load_config(None, [measured]))
    plain = price(setting, LAYOUT).time
    compiled = price(with_compile(setting, compiles=True), LAYOUT).time
    assert compiled.causes["compute"] < plain.causes["compute"]
    assert {**plain.causes, "compute": 0} == {**compiled.causes, "compute": 0}
    repaid = int(SECONDS / (plain.total - compiled.total))
    assert chosen(measured, f"train.steps={repaid + 1}").compiled
    short = chosen(measured, f"train.steps={repaid}")
    assert not short.compiled
    assert "1.25 x" in short.reason
    assert "compiling takes 10.0s" in short.reason


@pytest.mark.parametrize(
    ("words", "lacks", "why"),
    [
        ([], None, "bench device"),
        (["MEASURED", "train.precision=bf16"], None, "bench device"),
        (["MEASURED"], "there is no C++ compiler", "there is no C++ compiler"),
        (["MEASURED", "train.engine=deepspeed"], None, "does not compile blocks"),
        (["MEASURED", "train.compile=false"], None, "as asked for"),
    ],
)
def test_auto_is_off_and_says_why(measured, words, lacks, why):
    words = [measured if word == "MEASURED" else word for word in words]
    found = chosen("train.steps=1000000", *words, lacks=lacks)
    assert not found.compiled
    assert why in found.reason


def test_what_slows_down_is_left_out(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(as_toml({"cpu": {"compile.gain.fp32": 0.9}}, "", ""))
    found = chosen(f"cluster.calibration={path}")
    assert not found.compiled
    assert "save nothing" in found.reason


def test_the_plan_takes_the_choice_and_a_saved_one_brings_it_along(measured, tmp_path, capsys):
    words = ["cluster.device=cpu", measured, "train.steps=1000000"]
    made = plan(load_config(None, words))
    assert made.config.train.compile is True
    off = plan(load_config(None, [*words, "train.compile=false"]))
    assert made.best.time.total < off.best.time.total

    saved = tmp_path / "plan.json"
    assert main(["plan", *words, "--save", str(saved)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    if lacks_compiler("cpu", {"PATH": "/usr/bin:/bin"}) is None:
        assert "blocks: compiled (train.compile = auto): blocks were measured at 1.25 x" in said
        assert json.loads(saved.read_text())["compile"]["compiled"] is True
        assert load_planned(saved).train.compile is True
        own = tmp_path / "own.toml"
        own.write_text("")
        assert load_planned(saved, own, words).train.compile is True
        assert load_planned(saved, own, [*words, "train.compile=false"]).train.compile is False


def test_a_run_records_the_choice_and_keeps_it(measured, tmp_path):
    words = [measured, "train.steps=1000000"]
    config = load_config(None, words)
    begun = settled(config, MACHINE)
    assert begun.train.compile is True
    assert begun.origins["train.compile"].startswith("auto: blocks were measured at 1.25")
    assert settled(load_config(None, ["layout.auto=true", *words]), MACHINE).train.compile is True

    folder = RunFolder(tmp_path)
    for first, before in ((begun, True), (settled(config, MACHINE, "nothing"), False)):
        folder.config.write_text(to_toml(first))
        again = settled(compiled_as(config, folder), MACHINE)
        assert again.train.compile is before
        asked = load_config(None, [*words, f"train.compile={str(not before).lower()}"])
        assert compiled_as(asked, folder).train.compile is not before
    folder.config.write_text(to_toml(load_config(None, [])))  # nothing was measured when it began
    assert compiled_as(config, folder).train.compile is False


def test_what_a_compiler_lacks_is_told(tmp_path):
    lacks = lacks_compiler("cpu", {"PATH": str(tmp_path)})
    assert "g++ is not on the PATH" in lacks or "clang++" in lacks
    assert "mycc is not" in lacks_compiler("cpu", {"PATH": str(tmp_path), "CXX": "mycc"})
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert lacks_compiler("cuda", {}) == "triton is not installed"
    with mock.patch("importlib.util.find_spec", return_value=object()):
        found = lacks_compiler("cuda", {"PATH": str(tmp_path)})
        assert "no C compiler: gcc and clang are not on the PATH" in found
    train = load_config(None, ["train.compile=true"]).train
    check_compiler(train, None)
    check_compiler(train.model_copy(update={"compile": "auto"}), lacks)
    with pytest.raises(ConfigError, match=r"train.compile = true, but there is no C\+\+ compiler"):
        check_compiler(train, lacks)


@pytest.mark.parametrize(
    "command",
    [["train"], ["prove"], ["bench", "layouts", "--layout", "dp2 mb2"]],
    ids=lambda words: words[0],
)
def test_no_process_starts_without_a_compiler(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    words = ["cluster.device=cpu", "train.compile=true", f"log.dir={tmp_path / 'runs'}"]
    assert main([*command[:2], *words, *command[2:]]) == EXIT_REFUSED
    said = capsys.readouterr().err
    assert "there is no C++ compiler" in said
    assert "train.compile = false" in said
    assert not (tmp_path / "runs").exists()


def test_bench_device_compiles_what_the_config_trains(monkeypatch, capsys):
    machine, words = MACHINE, ["train.precision=bf16", "layout.microbatch=2", "train.batch=8"]
    monkeypatch.setattr(bench, "lacks_compiler", lambda device, environ: None)
    assert bench._compiles(load_config(None, words), machine)
    off = load_config(None, [*words, "train.compile=false"])
    assert not bench._compiles(off, machine)
    monkeypatch.setattr(bench, "lacks_compiler", lambda device, environ: "nothing is here")
    assert not bench._compiles(load_config(None, words), machine)
    assert "not measured: nothing is here" in capsys.readouterr().err


def test_blocks_that_take_too_long_are_not_compiled_to_be_measured():
    config = load_config(None, ["model.preset=llama-3-70b"])
    case = Case(config.model, config.train, LAYOUT)
    assert compiling(torch.device("cpu"), case, 1.0, 3e9) == {}


def small_case():
    config = load_config(None, ["model.dim=64", "model.n_heads=4", "train.seq_len=64"])
    train = config.train.model_copy(update={"precision": "bf16"})
    return Case(config.model, train, LAYOUT)


def test_what_is_measured_of_compiling_is_told_of_it(monkeypatch):
    """By a clock of the test's own, and with blocks that only say that they are compiled."""
    passes = []

    def marks(block):
        block.is_compiled = True

    def seconds(stack, x):
        is_compiled = all(hasattr(block, "is_compiled") for block in stack)
        passes.append(is_compiled)
        # Compiling takes 100 s; one pass in five is disturbed.
        first = 100.0 if is_compiled and passes.count(True) == 1 else 0.0
        return first + (2.0 if is_compiled else 3.0) * (10 if len(passes) % 10 == 7 else 1)

    def kept(stack, x):
        return 60 if hasattr(stack[0], "is_compiled") else 80

    monkeypatch.setattr(measured_compiling, "compiler", lambda route: marks)
    monkeypatch.setattr(measured_compiling, "_seconds", seconds)
    monkeypatch.setattr(measured_compiling, "_kept", kept)
    found = compiling(torch.device("cpu"), small_case(), 0.01, 3e9)
    moved = bytes_moved("bf16", own(torch.device("cpu"), small_case()))
    depth = 4  # blocks are timed together
    assert found == {
        "compile.gain.bf16": 1.5,
        "saves.bf16": pytest.approx(1.0 / depth * 3e9 / moved),
        "compile.memory.bf16": 0.75,
        "compile.seconds.bf16": 100.0,
    }
    assert passes[:4] == [True, False, False, True]
    assert passes[4:] == [False, True] * 5  # in turns


def test_what_a_forward_keeps_is_counted():
    """Of two linear layers with a GELU between: what goes into the GELU, and what comes out."""
    stack = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(5, 8, requires_grad=True)
    assert measured_compiling._kept(stack, x) == 2 * 5 * 16 * 4


def test_measuring_what_a_block_keeps_leaves_nothing():
    """On an H200 4.4 GiB of blocks and activations were left, and no collector found them."""
    config = load_config(None, ["model.dim=32", "model.n_heads=2", "model.n_layers=2"])
    blocks = stack(torch.device("cpu"), "bf16", config.model, 16, 2)
    left = [weakref.ref(weight) for weight in blocks.parameters()]
    measured_compiling._kept(blocks, torch.randn(2, 16, 32, dtype=torch.bfloat16))
    del blocks
    gc.collect()
    assert left
    assert not any(weight() is not None for weight in left)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
def test_blocks_are_compiled_to_be_measured():
    found = compiling(torch.device("cpu"), small_case(), 0.01, 3e9)
    of_blocks = [f"compile.{what}.bf16" for what in ("memory", "seconds")]
    assert list(found) == ["compile.gain.bf16", "saves.bf16", *of_blocks]
    assert 0.1 < found["compile.memory.bf16"] <= 1  # a Xeon with AMX keeps all of it
    assert found["compile.gain.bf16"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
