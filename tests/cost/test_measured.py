"""What was measured of this machine is kept in the user's cache folder, and found there."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.bench import blocks, calibrate, device
from meshwright.cli import bench
from meshwright.cli.main import main
from meshwright.cost.calibration import (
    Calibration,
    as_toml,
    blocks_of,
    over_shipped,
    parse_calibration,
    read_calibration,
    shipped_calibration,
)
from meshwright.cost.inputs import work_of
from meshwright.errors import ConfigError
from meshwright.kernels.processor import fingerprint
from meshwright.layout import Layout
from meshwright.planner.lightest import with_train
from meshwright.planner.plan import as_json, cost_inputs_of, plan
from meshwright.runtime.machines.machine import detect
from meshwright.runtime.pricing import measured
from meshwright.runtime.pricing.measured import (
    VARIABLE,
    as_measured_here,
    keep,
    kept_at,
    user_cache,
)
from meshwright.spec.dump import portable
from meshwright.spec.loading import load_config

CPU = ["cluster.device=cpu"]
SHIPPED = ["cluster.calibration=shipped"]


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE)
    return {"XDG_CACHE_HOME": str(tmp_path)}


def keep_one(environ, constants, *, blocks="", precision=""):
    """Keep a calibration as `bench device` does, or a start for a precision; returns its file."""
    config = load_config(None, CPU)
    path = kept_at(detect(config.cluster, environ), environ, precision)
    return path if keep(as_toml({"cpu": constants}, "2026-01-01", "a test", blocks), path) else None


def test_the_cache_is_the_users():
    assert str(user_cache({"XDG_CACHE_HOME": "/x", "HOME": "/y"})) == "/x/meshwright"
    assert str(user_cache({"HOME": "/y"})) == "/y/.cache/meshwright"


def test_what_is_kept_is_found_where_nothing_else_is_named(environ, tmp_path):
    config = load_config(None, CPU)
    assert as_measured_here(config, environ) is config
    path = keep_one(environ, {"peak.fp32": 3e11})
    found = as_measured_here(config, environ)
    assert found.cluster.calibration == str(path)
    assert found.origins["cluster.calibration"] == "measured here, 2026-01-01: a test"
    assert cost_inputs_of(found).cluster.device.peaks["fp32"] == 3e11
    assert as_measured_here(config, {**environ, VARIABLE: "shipped"}) is config
    for words in (["cluster.preset=h100-sxm"], ["cluster.calibration=own.toml"], SHIPPED):
        other = load_config(None, words)
        assert as_measured_here(other, environ) is other
    path.write_text("no TOML")
    assert as_measured_here(config, environ) is config


def test_it_is_of_the_processor_its_cores_and_torch(environ, monkeypatch):
    machine = detect(load_config(None, CPU).cluster, environ)
    assert f"{machine.cores}-cores" in kept_at(machine, environ).name
    assert "torch-2" in kept_at(machine, environ).name
    monkeypatch.setattr(measured, "gpu_name", lambda: "NVIDIA H200")
    cuda = machine.__class__("cuda", 1, machine.cores, "CUDA GPU", is_fixed=True)
    assert kept_at(cuda, environ).name.startswith("NVIDIA-H200-torch")


def test_other_than_the_default_ranks_are_not_kept(environ, tmp_path):
    machine = detect(load_config(None, CPU).cluster, environ)
    other = load_config(None, [*CPU, "cluster.devices_per_node=4"])
    bench._keep("[cpu]", other, machine, environ)
    assert not kept_at(machine, environ).exists()
    bench._keep("[cpu]", load_config(None, CPU), machine, environ)
    assert kept_at(machine, environ).exists()


def test_a_processor_of_the_same_name_is_another(environ, monkeypatch, tmp_path):
    said = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model name": "AMD EPYC", "flags": "a"}
    found = []
    for change in ({}, {"cpu family": "26"}, {"flags": "a b"}, {"cpu MHz": "2596.12"}):
        file = tmp_path / "cpuinfo"
        file.write_text("".join(f"{k}\t: {v}\n" for k, v in {**said, **change}.items()))
        found.append(fingerprint(file))
    assert found[3] == found[0]  # the clock is none of it
    assert len(set(found)) == 3
    assert fingerprint(tmp_path / "none") == fingerprint(tmp_path / "nothing")
    machine = detect(load_config(None, CPU).cluster, environ)
    monkeypatch.setattr(measured, "fingerprint", lambda: found[0])
    assert found[0] in kept_at(machine, environ).name


def test_what_is_of_other_blocks_is_left_out(environ):
    config = load_config(None, CPU)
    own = blocks_of(config.model, config.train.seq_len)
    deeper = load_config(None, ["model.n_layers=3", "model.vocab_size=77"])
    assert blocks_of(deeper.model, deeper.train.seq_len) == own
    constants = {"compile.gain.fp32": 2.0, "peak.fp32": 3e11}
    found = read_calibration(keep_one(environ, constants, blocks=own))
    assert cost_inputs_of(config, found).measured("compile.gain.fp32") == 2
    other = load_config(None, [*CPU, "model.dim=128"])
    assert cost_inputs_of(other, found).measured("compile.gain.fp32") is None
    assert cost_inputs_of(other, found).measured("peak.fp32") == 3e11
    longer = with_train(cost_inputs_of(config, found), seq_len=2 * config.train.seq_len)
    assert longer.measured("compile.gain.fp32") is None
    found = read_calibration(keep_one(environ, constants))  # it does not say whose
    assert cost_inputs_of(other, found).measured("compile.gain.fp32") == 2


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ('date = "2026-01-01"\nsource = "fitted to X"', "calibration: fitted to X, 2026-01-01"),
        ('source = "fitted to X"', "calibration: fitted to X"),
        ("", "calibration: a file that states neither source nor date"),
    ],
)
def test_plan_says_where_a_named_calibration_is_from(tmp_path, capsys, about, told):
    file = tmp_path / "own.toml"
    file.write_text(f"[about]\n{about}\n")
    words = ["train.batch=1", "layout.dp_replicate=1", "cluster.devices_per_node=1"]
    assert main(["plan", *CPU, *words, "--calibration", str(file)]) == 0
    assert told in capsys.readouterr().out.splitlines()


def test_plan_and_config_show_say_where_it_is_from(environ, capsys):
    path = keep_one(environ, {"peak.fp32": 3e11})
    assert main(["plan", *CPU]) == 0
    assert "calibration: a test, 2026-01-01" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *CPU, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["calibration"] == {"date": "2026-01-01", "source": "a test"}
    assert main(["config", "show", *CPU, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["cluster"]["calibration"]
    assert shown == {"value": str(path), "origin": "measured here, 2026-01-01: a test"}


def test_what_was_found_here_is_not_written_into_a_run(environ):
    keep_one(environ, {"peak.fp32": 3e11})
    config = load_config(None, CPU)
    assert portable(as_measured_here(config, environ)).cluster.calibration is None
    named = load_config(None, [*CPU, "cluster.calibration=own.toml"])
    assert portable(named).cluster.calibration == "own.toml"


def test_what_was_found_here_is_not_written_into_a_plan(environ):
    keep_one(environ, {"peak.fp32": 3e11})
    made = plan(as_measured_here(load_config(None, CPU), environ))
    assert made.setting.cluster.device.peaks["fp32"] == 3e11
    assert as_json(made)["config"]["cluster"]["calibration"] is None


def test_a_cache_that_cannot_be_written_keeps_nothing(environ, tmp_path):
    (tmp_path / "meshwright").write_text("a file where the folder would be")
    assert keep_one(environ, {"peak.fp32": 1.0}) is None


def test_without_a_home_or_one_that_may_be_read_nothing_is_kept_or_found(environ, monkeypatch):
    config, nowhere = load_config(None, CPU), {"HOME": "~nobody-of-this-name"}
    with pytest.raises(RuntimeError, match="home"):
        keep_one(nowhere, {"peak.fp32": 1.0})
    bench._keep("[cpu]", config, detect(config.cluster, nowhere), nowhere)
    assert as_measured_here(config, nowhere) is config
    keep_one(environ, {"peak.fp32": 3e11})

    def refuses(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuses)
    assert as_measured_here(config, environ) is config


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[cpu]\nmoves = [1]", "cpu.moves = [1] must be a number"),
        ("[cpu]\nmoves = true", "cpu.moves = True must be a number"),
        ("moves = 1", "moves = 1 is in no table of a kind"),
        ("about = 3", "about = 3 is in no table"),
        ("[about]\ndate = 2026-01-01", "must have strings"),
        ("[about]\nhad_core = 'most'", "about.had_core = 'most' must be a number"),
        ("[cpu", "cannot be read"),
    ],
)
def test_what_is_no_calibration_is_told(environ, tmp_path, text, why):
    config = load_config(None, CPU)
    kept = keep_one(environ, {"peak.fp32": 1.0})
    kept.write_text(text)
    assert as_measured_here(config, environ) is config
    with pytest.raises(ConfigError, match=re.escape(why)):
        read_calibration(kept)


def test_a_block_is_priced_as_long_as_it_was_measured(monkeypatch):
    shape, peak, half = blocks.usual(torch.device("cpu")), 2e11, 16
    parts = blocks.BlockTimes(block=0.05, attention=0.004, overhead=0.001)
    monkeypatch.setattr(blocks, "seconds_of_parts", lambda *_: parts)
    monkeypatch.setattr(calibrate, "take_route", lambda matmul, _: matmul)
    monkeypatch.setattr(device, "copy_rate", lambda *_: 1e10)
    monkeypatch.setattr(device, "loss_rate", lambda *_: 4e9)
    monkeypatch.setattr(device, "optimizer_rate", lambda *_: 5e9)

    routes = []

    def products(where, precision, budget_s, shapes):
        routes.append(precision)
        # Each way of fp32 products that is not auto's: half, and a quarter, of its rate.
        rate = peak / 2 ** (len(routes) - 1) if precision == "fp32" else peak
        shares = [math.prod(side / (side + half) for side in one.sides) for one in shapes]
        of = zip(shapes, shares, strict=True)
        return [(one, one.flops / (rate * share)) for one, share in of]

    monkeypatch.setattr(device, "products", products)
    constants, _ = calibrate._compute(torch.device("cpu"), calibrate.Effort(0.1), None)
    found = parse_calibration(as_toml({"cpu": constants}, "", ""))
    every = replace(found, constants={**shipped_calibration().constants, **found.constants})
    words = {"dim": 512, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 1024}
    given = [*CPU, "train.seq_len=512", *(f"model.{key}={value}" for key, value in words.items())]
    setting = cost_inputs_of(load_config(None, given), every)
    layout, kernels = Layout.parse("dp1 mb1"), setting.kernels()
    assert setting.model.model_copy(update={"n_layers": 1, "vocab_size": 0}) == (
        shape.spec.model_copy(update={"vocab_size": 0})
    )
    work = work_of(setting, layout)
    seconds = kernels.layer(work, work.layers[0], 1, 1, "ring", "none").total
    assert seconds == pytest.approx(parts.block, rel=1e-3)
    assert kernels.optimizer_bandwidth == pytest.approx(5e9)
    assert constants["matmul.gain"] == pytest.approx(2)
    for count, matmul in ((2, "torch"), (4, "onednn")):
        other = cost_inputs_of(
            load_config(None, [*given, f"train.matmul={matmul}"]), every
        ).kernels()
        assert other.peak == pytest.approx(kernels.peak / count, rel=1e-4)
        assert other.half == kernels.half == half


def test_own_blocks_come_before_usual_ones_and_channels_only_where_there_are_any(environ, tmp_path):
    config = load_config(None, CPU)
    own = blocks_of(config.model, config.train.seq_len)
    constants = {"moves.fp32": 1.0, "blocks.moves.fp32": 2.0, "inner.rate": 1e9}
    path = keep_one(environ, constants, blocks=own)
    setting = cost_inputs_of(as_measured_here(config, environ))
    assert setting.kernels().moves == 2
    longer = load_config(None, [*CPU, "train.seq_len=64"])
    assert cost_inputs_of(as_measured_here(longer, environ)).kernels().moves == 1
    assert any(".channel." in name for name in shipped_calibration().constants)
    assert not any(".channel." in name for name in read_calibration(path).constants)


def test_what_was_measured_here_comes_before_what_is_shipped_of_our_system_on_that_device():
    shipped = over_shipped(Calibration({})).constants
    of_system = [name for name in shipped if name.startswith("meshwright.h100.")]
    assert "meshwright.h100.products.bf16" in of_system
    own = over_shipped(Calibration({"h100.products.bf16": 0.5, "h100.moves.bf16": 1.0}))
    assert own.find("products.bf16", "meshwright.h100", "meshwright", "h100") == 0.5
    assert own.find("moves.bf16", "meshwright.h100", "meshwright", "h100") == 1.0
