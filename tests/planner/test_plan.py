"""`meshwright plan` and `predict`: quick, without torch, and every number accounted for."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import ConfigError, nearest
from meshwright.layout import Layout, Machine
from meshwright.planner import prices
from meshwright.planner.plan import digest, plan
from meshwright.runtime.machines.machine import gpu_name
from meshwright.runtime.pricing import planned

ROOT = Path(__file__).parents[2]
SEVENTY = [
    "model.preset=llama-3-70b",
    "cluster.preset=h100-sxm",
    "cluster.nodes=64",
    "train.batch=1024",
    "train.seq_len=8192",
    "train.precision=bf16",
]
SEVEN = [
    "model.preset=llama-2-7b",
    "cluster.preset=a40",
    "train.batch=64",
    "train.seq_len=2048",
    "train.precision=bf16",
]


def run(capsys, *words):
    code = main(list(words))
    return code, capsys.readouterr()


def seventy_billion():
    """Plan in a process of its own: the document, whether torch was loaded, its CPU seconds."""
    code = (
        "import sys, time\n"
        "from meshwright.cli.main import main\n"
        f"code = main(['plan', '--json', *{SEVENTY!r}])\n"
        "print('torch' in sys.modules, time.process_time(), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    has_torch, seconds = done.stderr.split()
    return json.loads(done.stdout), has_torch == "True", float(seconds)


def test_seventy_billion_on_512_devices_without_torch():
    found, has_torch, _ = seventy_billion()
    assert not has_torch
    assert found["considered"] > 1_000_000
    assert found["ledger"]["fits"]
    assert 0.3 < found["ledger"]["mfu"] < 0.65
    assert Layout(**found["layout"]).world == 512


@pytest.mark.perf
def test_seventy_billion_on_512_devices_is_quick():
    """Imports and all, 1.4 s of an idle core."""
    assert seventy_billion()[2] < 3


@pytest.mark.slow
def test_few_of_the_layouts_are_priced(monkeypatch):
    """What makes planning quick, counted: most layouts are left out by a bound of their cores."""
    calls = []
    whole = prices.closed_form
    monkeypatch.setattr(prices, "closed_form", lambda *a: calls.append(1) or whole(*a))
    found = plan(mw.load_config(overrides=SEVENTY)).found
    assert found.considered > 1_000_000
    assert len(calls) < found.considered / 200


def test_the_table_the_winner_and_the_losers(capsys):
    code, out = run(capsys, "plan", *SEVEN, "--top", "3", "--fewest")
    assert code == 0
    text = out.out
    for word in (
        "legal layouts considered",
        "best:",
        "step time:",
        "pipeline rank",
        "ruled out:",
    ):
        assert word in text
    assert "fewest devices that fit" in text


def ranking(capsys, monkeypatch, columns):
    """Return the words of the first and of the last column of a plan's ranking."""
    monkeypatch.setenv("COLUMNS", columns)
    config = ROOT / "examples/plans/llama-2-7b-8-a40.toml"
    code, out = run(capsys, "plan", str(config), "train.compile=false", "--top", "6")
    assert code == 0
    lines = out.out.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("layout "))
    last = lines.index("", first)
    at, before = lines[first].index("why not"), lines[first].index("memory")
    reasons = " ".join(line[at:].strip() for line in lines[first + 1 : last])
    return " ".join(line[:before] for line in lines[first + 1 : last]).split(), reasons.split()


@pytest.mark.often(1)
@pytest.mark.parametrize("columns", ["80", "100", "140"])
def test_the_ranking_cuts_no_word(capsys, monkeypatch, columns):
    """It told of a layout that is "faster, but les simple"."""
    layouts, reasons = ranking(capsys, monkeypatch, columns)
    whole_layouts, whole_reasons = ranking(capsys, monkeypatch, "400")
    assert reasons == whole_reasons
    assert sorted(layouts) == sorted(whole_layouts)
    assert "best" in reasons
    assert "interleaved_zero_bubble" in layouts


@pytest.mark.often(1)
@pytest.mark.parametrize("columns", ["100", "120", "130", "160"])
def test_reasons_have_room_beside_long_labels(capsys, monkeypatch, columns):
    """On 130 columns a label of 91 left three to the reasons: a letter or two on each line."""
    monkeypatch.setenv("COLUMNS", columns)
    cluster = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.nodes=2"]
    code, out = run(capsys, "plan", *cluster, "train.seq_len=131072", "train.batch=16")
    assert code == 0
    lines = out.out.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("layout "))
    last = lines.index("", first)
    at = lines[first].index("why not")
    assert int(columns) - at >= 32
    assert max(map(len, lines[first:last])) <= int(columns)


def test_json_is_alone_on_stdout_and_saved(capsys, tmp_path):
    path = tmp_path / "plan.json"
    code, out = run(capsys, "plan", *SEVEN, "--top", "2", "--json", "--save", str(path))
    assert code == 0
    found = json.loads(out.out)
    assert json.loads(path.read_text()) == found
    assert len(found["ranked"]) == 2
    assert found["ranked"][0]["why"] == "best"
    profile = found["ledger"]
    assert sum(profile["seconds"].values()) == pytest.approx(profile["step_time_s"])
    total = sum(profile["memory_bytes"].values())
    assert total == pytest.approx(profile["peak_memory_bytes"], abs=20)
    config = mw.load_config(overrides=SEVEN)
    layout = Layout(**found["layout"])
    assert found["digest"] == digest(config, layout)
    assert digest(config, layout.model_copy(update={"zero": 0})) != found["digest"]


def test_the_terms_of_a_layout(capsys):
    code, out = run(capsys, "plan", *SEVEN, "--explain", "shard8 zero3 mb1")
    assert code == 0
    assert "elements x 4 B" in out.out
    code, out = run(capsys, "plan", *SEVEN, "--explain", "shard8 zero3 mb1", "--json")
    found = json.loads(out.out)
    assert sum(size for _, size, _ in found["terms"]) == pytest.approx(
        found["peak_memory_bytes"], abs=1
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.preset=h100-smx"], "h100-sxm"),
        (["--top", "0"], "--top 0"),
        (["--margin", "1"], "--margin"),
        (["--explain", "tq2"], "unknown word"),
        (["--explain", "dp3 mb1"], "must be a multiple"),
    ],
)
def test_what_is_wrong_is_refused(capsys, words, message):
    base = [word for word in SEVEN if not words[0].startswith(word.partition("=")[0])]
    code, out = run(capsys, "plan", *base, *words)
    assert code == 2
    assert message in out.err


def test_no_layout_fits(capsys):
    code, out = run(capsys, "plan", *SEVEN, "cluster.memory=1GiB")
    assert code == 1
    assert "no layout fits" in out.out
    assert "nearest:" in out.out


def test_the_default_config_is_planned_on_the_machine_at_hand(capsys):
    code, out = run(capsys, "plan", "cluster.device=cpu", "--json")
    assert code == 0
    assert json.loads(out.out)["cluster"]["device"] == "cpu"


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples/plans").glob("*.toml"), reverse=True), ids=str
)
def test_the_guide_recommends_what_the_planner_does(path):
    guide = (ROOT / "docs/guides/plans.md").read_text()
    section = guide.split(f"meshwright plan examples/plans/{path.name} ")[1].split("\n## ")[0]
    made = mw.plan(mw.load_config(path), top=3)
    assert f"best: {made.best.layout.label}\n" in section
    assert f"{made.found.considered:,} legal layouts" in section


@pytest.mark.slow
@pytest.mark.parametrize("at", range(7))
def test_the_guide_prints_what_the_command_prints(at):
    place = ROOT / "docs/print_plans.py"
    spec = importlib.util.spec_from_file_location("print_plans", place)
    printing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(printing)
    words, block = printing.BLOCKS.findall(printing.GUIDE.read_text())[at]
    assert block == printing.output(words), "run docs/print_plans.py"


def test_the_gpu_at_hand_is_named_by_its_driver(tmp_path, monkeypatch):
    (tmp_path / "0000:01:00.0").mkdir()
    file = tmp_path / "0000:01:00.0" / "information"
    config = mw.load_config(overrides=SEVEN[3:])
    machine = Machine("cuda", 4, 16, "CUDA GPU", is_fixed=True)
    for model, preset in (
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("Tesla T4", "t4"),
    ):
        file.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 70\n")
        assert gpu_name(tmp_path) == model
        monkeypatch.setattr(planned, "gpu_name", lambda: gpu_name(tmp_path))
        cluster = planned.on_machine(config, machine).cluster
        assert (cluster.preset, cluster.devices_per_node) == (preset, 4)
    # An A4000 is not an A40, and no Quadro RTX 6000 is an RTX 6000 Ada.
    for unknown in ("Quadro FX", "NVIDIA RTX A4000", "Quadro RTX 6000", "NVIDIA T400"):
        file.write_text(f"Model: {unknown}\n")
        with pytest.raises(ConfigError, match=f"{unknown} is not in the catalogue"):
            planned.on_machine(config, machine)


def test_plan_from_python():
    made = mw.plan(mw.load_config(overrides=SEVEN), top=2)
    assert made.best.memory.fits
    assert made.best.layout.world == 8


def test_rows_are_predicted_one_for_one(capsys, tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    row = {"gpu": "H100", "n_gpus": 8, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008}
    row |= {"model": "llama", "seq": 4096, "gbs": 64, "zero_stage": 3, "framework": "torchtitan"}
    rows.write_text(json.dumps({"id": "a", **row}) + "\n\n" + json.dumps({"id": "b"}) + "\n")
    code, printed = run(capsys, "predict", "--rows", str(rows), "--out", str(out), "--json")
    assert code == 0
    assert json.loads(printed.out)["refused"] == 1
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["id"], second["id"]) == ("a", "b")
    assert first["step_time_s"] > 0
    assert "lacks" in second["refused"]


@pytest.mark.parametrize("text", ["no json\n", "[1]\n"])
def test_rows_that_are_no_objects_are_refused(capsys, tmp_path, text):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    code, printed = run(capsys, "predict", "--rows", str(rows), "--out", str(tmp_path / "o"))
    assert code == 2
    assert "rows.jsonl:1" in printed.err
    code, _ = run(capsys, "predict", "--rows", str(tmp_path / "none"), "--out", str(tmp_path / "o"))
    assert code == 2


def test_a_layout_on_fewer_devices_than_there_are_says_so(capsys):
    _, out = run(capsys, "plan", *SEVEN, "layout.zero=3", "--explain", "tp2 mb1")
    text = " ".join(out.out.split())
    told = "note: this prices 2 ranks, each on a device of its own; the cluster has 8 devices"
    assert told in text
    assert "note: this layout does not have the config's layout.zero = 3" in text
    _, out = run(capsys, "plan", *SEVEN, "--explain", "tp2 dp4 mb1")
    assert "note:" not in out.out


def test_ranks_of_a_cpu_are_as_many_as_the_degrees_ask_for(capsys):
    words = ["plan", "cluster.device=cpu", "--json", "--top", "1", "model.n_kv_heads=4"]
    found = {}
    for tp in (2, 4):
        code, out = run(capsys, *words, f"layout.tp={tp}")
        assert code == 0
        found[tp] = json.loads(out.out)["ranked"][0]
        assert found[tp]["layout"]["tp"] == tp
    # Four ranks share the cores that two have: no product is faster for it.
    assert found[4]["seconds"]["compute"] >= 0.9 * found[2]["seconds"]["compute"]


@pytest.mark.parametrize(
    ("words", "batch", "length", "precision"),
    [
        (["model.preset=llama-3-8b", "cluster.preset=a100-80gb"], 256, 8192, "bf16"),
        (["model.preset=llama-2-7b", "cluster.preset=v100-32gb"], 512, 4096, "fp16"),
        (["model.preset=pythia-160m", "cluster.preset=a40"], 256, 2048, "bf16"),
        (["model.preset=llama-3.2-1b", "cluster.preset=h100-sxm"], 64, 8192, "bf16"),
        (["model.preset=llama-3-70b", "cluster.preset=a40", "train.batch=8"], 8, 8192, "bf16"),
        (
            ["model.preset=pythia-160m", "cluster.preset=a40", "train.seq_len=500"],
            1024,
            500,
            "bf16",
        ),
        (
            ["model.preset=pythia-160m", "cluster.preset=a40", "train.precision=fp32"],
            256,
            2048,
            "fp32",
        ),
        (["cluster.preset=a40"], 16, 256, "bf16"),  # our own small model
        (["model.preset=llama-3-8b"], 16, 256, "fp32"),  # on the machine at hand
    ],
)
def test_a_published_model_has_a_batch_of_its_size(words, batch, length, precision):
    train = mw.load_config(overrides=words).train
    assert (train.batch, train.seq_len, train.precision) == (batch, length, precision)


def test_what_nobody_has_given_is_said(capsys):
    words = ["plan", "model.preset=pythia-1b", "cluster.preset=a100-80gb", "--top", "1"]
    _, out = run(capsys, *words)
    text = " ".join(out.out.split())
    assert "note: train.batch = 256, derived: 524k tokens for 1.01B parameters" in text
    assert "note: train.precision = bf16, derived" in text
    _, out = run(capsys, *words, "train.batch=64", "train.seq_len=2048", "train.precision=bf16")
    assert "note: train." not in out.out
    _, out = run(capsys, "plan", "model.preset=pythia-14m", "cluster.device=cpu", "--top", "1")
    told = "train.batch, train.seq_len, train.precision: defaults for a first look"
    assert told in " ".join(out.out.split())


def test_a_device_whose_name_goes_on_is_nearer_than_one_spelled_alike(capsys):
    code, out = run(capsys, "plan", "cluster.preset=h100-sxm-")
    assert code == 2
    assert "nearest legal: h100-sxm" in out.err
    devices = ["a10", "a800-80gb", "a100-40gb", "a100-80gb"]
    assert nearest("a100", devices, 3) == ["a100-80gb", "a100-40gb", "a10"]
    assert nearest("h100-sxm-80gb", ["h100-pcie", "h200", "h100-sxm"]) == ["h100-sxm"]
    assert nearest("b", ["b200", "bf16"]) == []  # one letter begins too many


def test_a_plan_for_this_machine_tells_of_ranks_that_share_cores(capsys):
    cores = len(os.sched_getaffinity(0))
    words = (f"layout.dp_replicate={2 * cores}", f"train.batch={2 * cores}", "layout.zero=0")
    code, out = run(capsys, "plan", "cluster.device=cpu", *words)
    told = " ".join(out.out.split())
    assert code == 0
    assert f"has {2 * cores} ranks on this machine, which share {cores} cores" in told
    assert "memory counts tensors alone" in told
    assert "brings nothing" not in told
