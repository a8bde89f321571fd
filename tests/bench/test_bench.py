"""Measurements: what is fitted to curves, the calibration that is written, layouts side by side."""

import json
import time
import uuid
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.bench import blocks, layouts, links
from meshwright.bench.device import by_device, saturation
from meshwright.cli.main import main
from meshwright.comm import shared
from meshwright.comm.groups import open_groups
from meshwright.comm.world import World, exchange
from meshwright.cost.calibration import as_toml, parse_calibration, read_calibration
from meshwright.cost.work import Product
from meshwright.layout import Layout
from meshwright.parallel.tensor_parallel.tp_regions import all_reduce
from meshwright.planner.plan import cost_inputs_of, plan
from meshwright.spec.loading import load_config
from ranks import on_ranks

LATE_S = 0.1
# Long beside what a busy machine makes other operations wait.
COMPUTED_S = 1.0
SMALL = [
    *("model.dim=64", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2"),
    *("model.ffn_dim=128", "model.vocab_size=128", "train.batch=8", "train.seq_len=32"),
]


def test_products_that_a_host_takes_longer_for_say_nothing_of_a_gpu():
    """Microseconds of an H100, whose host took 60 for a product."""
    small, large = (2048, 2048, 2048), (4096, 4096, 4096)
    found = [(Product(*small), 85e-6), (Product(*large), 193e-6), (Product(4096, 2048, 512), 61e-6)]
    assert [shape.sides for shape, _ in by_device(found)] == [large]
    assert by_device(found[2:]) == found[2:]


def test_saturation_finds_the_rate_and_the_half_that_made_the_curve():
    shapes = [Product(d, e, f) for d in (64, 512) for e in (64, 1024) for f in (128, 2048)]
    made = []
    for shape in shapes:
        share = 1.0
        for side in shape.sides:
            share *= side / (side + 64)
        made.append((shape, shape.flops / (2e11 * share)))
    peak, half = saturation(made)
    assert peak == pytest.approx(2e11)
    assert half == 64


def test_a_rate_that_does_not_depend_on_the_size_is_written_and_read():
    """As of bf16 matmuls that a processor emulates."""
    shapes = [Product(d, e, 64) for d in (64, 512) for e in (64, 1024)]
    peak, half = saturation([(shape, shape.flops / 2e9) for shape in shapes])
    assert (peak, half) == (pytest.approx(2e9), 0)
    text = as_toml({"cpu": {"products.half.bf16": half, "products.bf16": 1.0}}, "", "")
    assert parse_calibration(text).find("products.half.bf16", "cpu") == 0
    with pytest.raises(ValueError, match=r"cpu\.products\.bf16 = 0\.0 must be finite and above 0"):
        parse_calibration(as_toml({"cpu": {"products.bf16": 0.0}}, "", ""))


def test_a_calibration_is_read_as_it_was_written():
    constants = {"cpu": {"moves": 1.5, "moves.fp32": 0.25, "inner.latency.send": 1e-5}}
    found = parse_calibration(as_toml(constants, "2026-01-01", 'a "machine"'))
    assert (found.date, found.source) == ("2026-01-01", 'a "machine"')
    assert found.find("moves.bf16", "cpu") == 1.5  # what holds for moves
    assert found.find("moves.fp32", "cpu") == 0.25
    assert found.find("inner.latency.send", "cpu") == 1e-5


def test_what_was_measured_takes_the_place_of_the_catalogue(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(as_toml({"cpu": {"peak.fp32": 3e11, "bandwidth": 7e9}}, "", ""))
    setting = cost_inputs_of(load_config(None, []), read_calibration(path))
    assert setting.cluster.device.peaks["fp32"] == 3e11
    assert setting.cluster.device.bandwidth == 7e9


@pytest.mark.slow
def test_bench_device_writes_what_plan_reads(tmp_path, capsys):
    """The command and `plan` with its file are run by the docs: docs/commands/bench.md."""
    path = tmp_path / "here.toml"
    command = ["bench", "device", "--budget", "0.01", "--out", str(path), "--json"]
    assert main([*command, "train.compile=false"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ranks"] == 2
    calibration = read_calibration(path)
    for name in ("peak.fp32", "products.half.bf16", "overhead.layer.fp32", "inner.rate"):
        assert calibration.constants[f"cpu.{name}"] == pytest.approx(
            document["constants"][name], rel=1e-5
        )
    assert plan(load_config(None, SMALL), calibration=calibration).best is not None


@pytest.mark.slow
def test_layouts_are_measured_side_by_side(tmp_path, capsys):
    out = tmp_path / "rows.json"
    words = ["--rounds", "1", "--steps", "2", "--memory", "--shares", "--json"]
    words += ["--out", str(out)]
    # How far predicted peaks may be off: through shared memory an exchange has no buffers.
    labels = {"dp2 mb2": 0.01, "pp2 1f1b mb2": 0.01, "tp2 mb2": 0.01, "shard2 zero3 mb2": 0.05}
    assert main(["bench", "layouts", *SMALL, "--layout", *labels, *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    rows = document["rows"]
    assert sorted(row["layout"] for row in rows) == sorted(labels)
    assert rows == sorted(rows, key=lambda row: row["step_time_s"])
    for row in rows:
        assert len(row["step_times_s"]) == 2
        assert row["predicted_peak_bytes"] == pytest.approx(
            row["peak_bytes"], rel=labels[row["layout"]]
        )
        for kind in ("products", "attention", "norms", "rotation", "optimizer"):
            assert all(each[kind] > 0 for each in row["shares_s"]), kind
    waits = {row["layout"]: row["shares_s"] for row in rows}
    assert waits["dp2 mb2"][0]["waiting: data"] > 0
    assert waits["dp2 mb2"][0]["waiting: bubble"] == 0
    assert waits["pp2 1f1b mb2"][1]["waiting: bubble"] > 0
    assert waits["tp2 mb2"][0]["waiting: tp"] > 0
    assert waits["shard2 zero3 mb2"][0]["waiting: data"] > 0
    # The last stage alone has the loss.
    assert waits["pp2 1f1b mb2"][1]["loss"] > waits["pp2 1f1b mb2"][0]["loss"] == 0


@pytest.mark.perf  # operations are timed by another clock than waits, and overlap on a busy machine
def test_the_shares_of_a_step_do_not_overlap(capsys):
    labels = ("dp2 mb2", "tp2 mb2", "shard2 zero3 mb2")
    words = ["--rounds", "1", "--steps", "2", "--shares", "--json"]
    assert main(["bench", "layouts", *SMALL, "--layout", *labels, *words]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        for each in row["shares_s"]:
            assert min(each.values()) > -1e-3 - 0.05 * sum(each.values()), (row["layout"], each)


def test_an_operation_is_of_the_kind_of_what_called_it():
    def kind(*names):
        event = None
        for name in names:  # the outermost first
            event = SimpleNamespace(name=name, cpu_parent=event)
        return layouts._kind(event)

    assert kind("_RMSNormBackward", "aten::mul") == "norms"
    assert kind("_LossBackward", "aten::mm") == "products"
    assert kind("_LossBackward", "aten::exp_") == "loss"
    assert kind("meshwright::attention", "aten::bmm") == "attention"
    assert kind("Optimizer.step#AdamW.step", "aten::lerp_") == "optimizer"
    assert kind("AddBackward0", "aten::sum") == "other operations"
    assert kind("_Gather", "c10d::allgather_", "aten::empty") is None
    assert kind("_LossBackward", "meshwright_channel::wait_tensor", "aten::add") is None


def seconds_by_kind(world):
    """What a step takes in which rank 1 comes late to a message, and whose end computes a while.

    Rank 1 sleeps once rank 0 waits. Returns the seconds of the computation, too.
    """
    fresh = World(world.rank, 2, world.device, world.store, world.opened)
    link = open_groups(Layout.parse("tp2"), fresh).tp
    numbers, took = torch.rand(1 << 21), []
    key, wait = exchange(uuid.uuid4().hex, dist.group.WORLD)[0], fresh.recorder.wait

    def waits(*entries):
        wait(*entries)
        fresh.store.set(f"{key}/{world.rank}", "waits")

    def compute(*_):
        began = time.perf_counter()
        while time.perf_counter() - began < COMPUTED_S:
            numbers.sort()
        took.append(time.perf_counter() - began)

    def step():
        fresh.recorder.step(1)
        if world.rank == 1:
            fresh.store.wait([f"{key}/0"])
            time.sleep(LATE_S)
        x = torch.ones(8)
        with mock.patch.object(shared, "_sum", compute):
            all_reduce(x, link)

    fresh.recorder.wait = waits
    step()
    key += "/again"
    return layouts.shares(fresh, step, pp=1, dp=1), took[-1]


@pytest.mark.slow
def test_what_goes_through_shared_memory_counts_once():
    first, second = on_ranks(2, seconds_by_kind)
    for (found, took), late in ((first, LATE_S), (second, 0.0)):
        # The computation at the message's end is part of the wait for it, and of nothing else.
        assert found["waiting: tp"] > late + took
        assert found[layouts.OTHER] < took / 2
        assert found[layouts.REST] > 0
    assert second[0][layouts.REST] > LATE_S


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to measure: name layouts by --layout, or --top N of the plan"),
        (["--layout", "dp2 mb1", "dp4 mb1"], "has 4 ranks, and the first one 2"),
        (["--layout", "tp4 mb1"], "'tp4 mb1': "),
    ],
)
def test_layouts_that_cannot_be_measured_are_refused(words, message, capsys):
    assert main(["bench", "layouts", *SMALL, "cluster.device=cpu", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("device", "has_rows"), [("cpu", True), ("cuda", False)])
def test_a_gpu_sends_no_rows_one_by_one(device, has_rows, monkeypatch):
    """Around a circle of ranks, NCCL's first sends would wait for each other."""
    monkeypatch.setattr(links, "_seconds", lambda world, sizes, make, times: [])
    world = SimpleNamespace(device=torch.device(device), rank=0, size=4)
    assert ("rows" in links.collectives(world)) == has_rows
    assert "all_gather" in links.collectives(world)


def test_a_gpu_is_measured_with_blocks_that_outlast_its_host(monkeypatch):
    """On an H200 a block of one row took its host longer, and bytes seemed to take 4 times so."""
    config = load_config(None, ["model.preset=llama-3.2-1b"])
    shape = blocks.Shape(config.model, 4096, 1)
    by_row = 2e-3

    def seconds(device, precision, budget_s, shape):
        return max(3e-3, by_row * shape.rows if shape.length == 4096 else 0)

    monkeypatch.setattr(blocks, "seconds", seconds)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert blocks.outlasting(gpu, "bf16", 0.1, shape).rows == 4
    assert blocks.outlasting(cpu, "bf16", 0.1, shape) == shape
    by_row = 0  # more would take too long to be repeated
    assert blocks.outlasting(gpu, "bf16", 0.1, shape).rows == 8
