"""Measuring and pricing on GPUs, as far as that can be seen without one."""

import gc
import json
import math
import weakref

import pytest
import torch

from meshwright.bench import blocks, layouts, timing
from meshwright.bench.device import SIZES
from meshwright.cli import bench as cli
from meshwright.cli.main import main
from meshwright.cost.calibration import Calibration, over_shipped
from meshwright.cost.price import price
from meshwright.cost.work import layout_work
from meshwright.layout import Layout, Machine
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.prove.case import Case
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import ranks

MODEL = model_spec(dim=64, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=128, vocab_size=128)
CUDA = torch.device("cuda")  # which nothing here computes on
WORDS = [
    *("cluster.preset=h200", "model.dim=256", "model.n_layers=4", "train.precision=bf16"),
    *("train.batch=8", "train.seq_len=512", "train.compile=false"),
]

LARGE = [
    *(*WORDS, "model.dim=2048", "model.n_layers=8", "model.n_heads=16", "model.n_kv_heads=16"),
    *("model.ffn_dim=4096", "model.vocab_size=8192", "train.seq_len=2048"),
]


@pytest.fixture
def gpu(monkeypatch):
    """A machine of one GPU, whose ranks say what they are asked to."""
    asked = []

    def measure(request, count, environ, take, *, threads):
        asked.append(request)
        take({"case": 0, "seconds": [1.0], "peak_bytes": [2**30]})

    machine = Machine("cuda", 1, 16, "CUDA GPU", is_fixed=True)
    monkeypatch.setattr(cli, "detect", lambda *_: machine)
    monkeypatch.setattr(cli, "lacks_compiler", lambda *_: None)
    monkeypatch.setattr(cli, "measure_on_ranks", measure)
    return asked


@pytest.mark.parametrize("label", ["mb2", "zero2 mb2"])
def test_layouts_are_priced_for_the_gpu_that_they_run_on(gpu, label, capsys):
    command = ["bench", "layouts", *LARGE, "--layout", label, "--memory", "--json"]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert gpu[0]["device"] == "cuda"
    # Eight layers (four products of the heads, three of the feed-forward) and the vocabulary.
    weights = 8 * (4 * 2048**2 + 3 * 2048 * 4096) + 8192 * 2048
    # At least the products, 6 FLOP a weight and token at the H200's 989 TFLOP/s; at best by half.
    products = 6 * weights * 8 * 2048 / 989e12
    assert products < row["predicted_step_time_s"] < 3 * products
    # fp32 weights, gradients and both moments of AdamW; what two rows of 2048 keep in bf16.
    states = 16 * (weights + 8192 * 2048)
    kept = 2 * 2048 * (8 * 60 * 2048 + 12 * 8192)
    (peak,) = row["predicted_peak_bytes"]
    assert states < peak < states + kept
    assert main([*command, "cluster.preset=a40"]) == 0
    (other,) = json.loads(capsys.readouterr().out)["rows"]
    # An A40 has 150 TFLOP/s and 696 GB/s, an H200 has 989 and 4.8 TB/s.
    assert 3 < other["predicted_step_time_s"] / row["predicted_step_time_s"] < 8
    assert other["predicted_peak_bytes"] == [peak]


def test_a_gpu_that_is_not_known_is_not_priced_as_a_cpu(gpu, monkeypatch, capsys):
    monkeypatch.setattr("meshwright.runtime.pricing.planned.gpu_name", lambda: "NVIDIA GeForce 256")
    words = [word for word in WORDS if "preset" not in word]
    assert main(["bench", "layouts", *words, "--layout", "mb2"]) == 2
    assert "NVIDIA GeForce 256 is not in the catalogue" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("device", "words", "name", "kind"),
    [
        ("cuda", [], "NVIDIA H200", "h100-hbm3e"),
        ("cuda", ["cluster.preset=a40"], "NVIDIA H200", "h100-hbm3e"),
        ("cuda", ["cluster.preset=h200"], "NVIDIA Graphics Device", "h100-hbm3e"),
        ("cuda", [], "NVIDIA Graphics Device", "cuda"),
        ("cpu", ["cluster.preset=h200"], "x86_64", "cpu"),
    ],
)
def test_a_calibration_goes_where_plans_look_for_it(device, words, name, kind):
    machine = Machine(device, 1, 16, "any", is_fixed=True)
    assert cli._kind(load_config(None, words), machine, name) == kind


def test_a_gpu_draws_weights_that_are_like_the_seeded_ones():
    source = layouts.drawn(MODEL, torch.device("cpu"))
    embed = source("embed.weight", (128, 64), ((32, 128), (0, 64)))
    assert embed.shape == (96, 64)
    assert embed.std().item() == pytest.approx(MODEL.init_std, rel=0.1)
    out = source("layers.0.attn.o.weight", (64, 64), ((0, 64), (0, 64)))
    assert out.std().item() == pytest.approx(MODEL.init_std / math.sqrt(4), rel=0.1)
    assert torch.equal(source("norm.weight", (64,), ((0, 8),)), torch.ones(8))
    assert torch.equal(source("layers.0.attn.q.bias", (64,), ((0, 8),)), torch.zeros(8))


@ranks(1)
def test_nothing_of_a_model_stays_when_the_next_is_built(world):
    train = TrainSpec(batch=2, seq_len=16, precision="bf16")
    step = layouts.Stepper(world, Case(MODEL, train, Layout(microbatch=1)))
    step()
    weights = [weakref.ref(one.parameter) for one in step._parallel.held]
    gc.disable()
    try:
        del step
        layouts.release()
    finally:
        gc.enable()
    assert [one() for one in weights] == [None] * len(weights)


def test_calls_come_in_bursts_before_a_gpu_is_waited_for(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    found = timing.seconds_in_turns([lambda: done.append("call")], 0.0, CUDA)
    assert 0 < found[0] < 1
    assert done[:4] == ["call", "wait"] * 2  # the first two are not counted
    burst = ["call"] * timing._MOST + ["wait"]
    assert done[4:] == burst * 3
    done.clear()
    timing.seconds_between(lambda: done.append("compute"), lambda: done.append("call"), 1, CUDA)
    assert done == ["compute", "call", "compute", "wait", "call", "wait"]
    done.clear()
    timing.seconds_together(lambda: done.append("call"), 1, CUDA)
    assert done == ["call", "wait", "call", "wait"]


def test_what_a_gpu_is_given_to_do_takes_longer_than_giving_it():
    least, *others = SIZES["cuda"].shapes
    assert 3 * least.flops / 989e12 < 1e-6  # tells how long giving it takes: see `by_device`
    for shape in others:
        assert 3 * shape.flops / 989e12 > 50e-6
    assert SIZES["cuda"].copied > 2**28
    usual = blocks.usual(CUDA)
    assert blocks.weights_of(usual.spec) * 2 > 60e6  # beyond its cache


def h200(constants):
    config = load_config(None, WORDS)
    known = over_shipped(Calibration(constants))
    return on_cluster(cost_inputs_of(config, known), Layout(microbatch=2))


def test_before_a_gpu_the_host_runs_ahead():
    layout = Layout(microbatch=2)
    plain = price(h200({}), layout).time.total
    assert price(h200({"h100.overhead.layer.bf16": 1e-6}), layout).time.total == plain
    slow = h200({"h100.overhead.layer.bf16": 0.03}).kernels()
    work = layout_work(MODEL, 64, "bf16", 1, False, 1, "ring", 1, "none")
    layer = slow.layer(work, work.layers[0], 1, 1, "ring", "none")
    assert layer.forward == pytest.approx(0.01)
    assert layer.backward == pytest.approx(0.02)


def test_a_block_is_predicted_to_take_what_it_took():
    shape, rates, bandwidth = blocks.usual(CUDA), (7e14, 64.0), 4e12
    parts = blocks.BlockTimes(block=0.02, attention=0.004, overhead=0.001)
    attention = blocks.attention_flops(shape) / parts.attention / rates[0]
    moves = blocks.seconds_per_byte("bf16", shape, rates, parts, runs_ahead=True)
    found = {
        "bandwidth": bandwidth,
        "memory": 1.0,
        "peak.bf16": rates[0],
        "products.bf16": 1.0,
        "products.half.bf16": rates[1],
        "attention.flash2.bf16": attention,
        "moves.bf16": moves * bandwidth,
        "overhead.layer.bf16": parts.overhead,
    }
    kernels = h200({f"h100-hbm3e.{name}": value for name, value in found.items()}).kernels()
    work = layout_work(shape.spec, shape.length, "bf16", 1, False, 1, "ring", shape.rows, "none")
    assert kernels.layer(work, work.layers[0], 1, 1, "ring", "none").total == pytest.approx(
        parts.block
    )
