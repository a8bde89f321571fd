"""What is chosen without being asked for: with its measured gain, its key, and the microbatch."""

import json

import pytest

from meshwright.cli import bench
from meshwright.cli.main import main
from meshwright.cost.calibration import as_toml
from meshwright.layout import Layout, Machine
from meshwright.planner.choices import CompileChoice, choices, rows_of
from meshwright.planner.plan import cost_inputs_of
from meshwright.runtime.ranks.local import ALLOCATOR, rank_environ, sets_allocator
from meshwright.spec.loading import load_config

MACHINE = Machine("cpu", 2, 2, "two cores", is_fixed=False)
MEASURED = {
    "matmul.gain": 1.25,
    "products.fp32": 0.9,
    "products.half.fp32": 40.0,
    "products.fp32.torch": 0.6,
    "products.half.fp32.torch": 10.0,
    "compile.gain.fp32": 1.1,
    "blocks.allocator.fp32": 1.5,
    "blocks.rows.1.fp32": 3e-6,
    "blocks.rows.2.fp32": 2e-6,
    "blocks.rows.8.fp32": 2.5e-6,
    "blocks.rows.8.bf16": 1e-6,
    "blocks.message": 2.0**20,
    "blocks.sum.gloo": 3e-3,
    "blocks.sum.channel": 1e-3,
}


@pytest.fixture
def here(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(as_toml({"cpu": MEASURED}, "2026-01-01", "a test"))
    return ["cluster.device=cpu", f"cluster.calibration={path}"]


def test_each_choice_has_its_gain_and_what_changes_it(here):
    config = load_config(None, here)
    setting, layout = cost_inputs_of(config), Layout.parse("tp2 mb8")
    found = {
        one.subject: one for one in choices(config, setting, layout, CompileChoice(True, "it pays"))
    }
    gains = {what: one.gain for what, one in found.items()}
    expected = {"products": 1.25, "blocks": 1.1, "memory": 1.5, "microbatch": 1.2, "messages": 3}
    assert gains == pytest.approx(expected)
    assert found["memory"].key == "GLIBC_TUNABLES, cluster.memory"
    assert found["microbatch"].key == "layout.microbatch"
    assert found["microbatch"].text.startswith("8 rows, 1.20 x the speed of blocks with 1")
    assert "fastest are 2 of 1, 2, 8" in found["microbatch"].text
    assert "1.0 ms through shared memory, 3.0 ms by gloo" in found["messages"].text
    assert rows_of(setting) == {1: 3e-6, 2: 2e-6, 8: 2.5e-6}


def told_of(words, layout):
    config = load_config(None, words)
    choice = CompileChoice(False, "as asked for")
    found = choices(config, cost_inputs_of(config), Layout.parse(layout), choice)
    return {one.subject: one for one in found}


def test_what_was_not_measured_is_not_told(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(as_toml({"cpu": {"peak.fp32": 1e11}}, "", ""))
    told = told_of([f"cluster.calibration={path}"], "tp2 mb8")
    assert not told.keys() & {"memory", "microbatch", "messages"}


def test_what_a_layout_or_a_config_does_without_is_not_told(here):
    assert told_of(here, "dp2 mb2").keys() == {"products", "blocks", "memory", "microbatch"}
    assert told_of(here, "dp2 mb2")["microbatch"].text.startswith("2 rows, 1.50 x")
    assert "microbatch" not in told_of(here, "dp2 mb4")  # none of those that were measured
    assert "memory" not in told_of([*here, "cluster.memory=1GiB"], "dp2 mb2")


def test_products_that_take_the_slower_library_are_told_and_priced_so(here):
    one = told_of([*here, "train.matmul=torch"], "dp2 mb2")["products"]
    assert one.gain == pytest.approx(0.8)
    assert one.text.startswith("torch's, 0.80 x the speed of auto's")
    auto, own = (
        cost_inputs_of(load_config(None, [*here, *words])).kernels()
        for words in ([], ["train.matmul=torch"])
    )
    assert own.peak == own.head_peak == pytest.approx(0.6 / 0.9 * auto.peak)
    assert auto.head_peak == auto.peak
    assert (auto.half, own.half) == (40, 10)
    onednn = cost_inputs_of(load_config(None, [*here, "train.matmul=onednn"])).kernels()
    assert (onednn.peak, onednn.half) == (auto.peak, 40)  # as auto, where it was not told apart
    bf16 = [*here, "train.matmul=torch", "train.precision=bf16"]
    assert cost_inputs_of(load_config(None, bf16)).kernels().half != 10


def test_plan_prints_and_hands_on_what_is_chosen(here, capsys):
    assert main(["plan", *here]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for text in ("products: 1.25 x", "blocks: ", "memory: "):
        assert text in said
    assert "(GLIBC_TUNABLES, cluster.memory)" in said
    assert main(["plan", *here, "--json"]) == 0
    found = {one["what"]: one["gain"] for one in json.loads(capsys.readouterr().out)["choices"]}
    assert found["memory"] == 1.5


def test_the_allocator_is_compared_where_ranks_are_started_with_it(monkeypatch):
    assert sets_allocator({})
    assert not sets_allocator({"GLIBC_TUNABLES": "glibc.malloc.check=1"})
    assert not sets_allocator({"LD_PRELOAD": "libtcmalloc.so"})
    assert ALLOCATOR not in str(rank_environ({}, keeps_memory=False))
    asked = []

    def measure(request, ranks, environ, show, *, threads, keeps_memory):
        asked.append((request["what"], ranks, keeps_memory))
        assert threads == 1
        show({"seconds": 1.0 if keeps_memory else 1.5})

    monkeypatch.setattr(bench, "measure_on_ranks", measure)
    monkeypatch.setattr(bench.os, "environ", {})
    assert bench._allocator_gain({"what": "device"}, MACHINE) == 1.5
    assert asked == [("blocks", 2, keeps) for keeps in (False, True)]
    monkeypatch.setattr(bench.os, "environ", {"LD_PRELOAD": "libtcmalloc.so"})
    assert bench._allocator_gain({"what": "device"}, MACHINE) is None
