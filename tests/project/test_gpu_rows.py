"""What the benchmark for one GPU measures in a time, what it refuses, and how it keeps results."""

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.gpu import planned
from benchmarks.gpu_bench import Answer, Worker, document, run_module, versions
from benchmarks.gpu_check import NEEDED, compiler_advice, driver_advice, lacking
from benchmarks.gpu_predicted import layers_within, peak
from benchmarks.gpu_rows import LARGE_4K, MARGIN_S, ROWS, SMALL_4K, SMALL_8K, plan, rows

from meshwright.layout import Layout
from meshwright.spec.loading import load_config

BEGINNING = {
    1: ["train llama-3-8b, 4096 tokens, eager", "train llama-3.2-1b, 4096 tokens, eager"],
    5: [
        *("train llama-3-8b, 4096 tokens, eager", "train llama-3.2-1b, 4096 tokens, eager"),
        *("train llama-3-8b, 4096 tokens, compiled", "train llama-3.2-1b, 4096 tokens, compiled"),
        "calibrate, llama-3-8b, 4096 tokens",
        "prove train.precision=fp32 train.compile=false",
        "prove train.precision=bf16 train.compile=false layout.zero=3",
        "prove train.precision=bf16 train.compile=true",
    ],
}


@pytest.mark.parametrize("minutes", [1, 5, 10, 20])
def test_a_time_has_rows_in_the_order_of_their_worth(minutes):
    found = list(plan(60 * minutes, ROWS))
    keys = [one.row.key for one in found]
    assert keys[: len(BEGINNING.get(minutes, ()))] == BEGINNING.get(minutes, [])
    assert found[0].begins < 30
    for one, after in pairwise(found):
        assert one.begins + one.row.seconds == after.begins
    assert found[-1].begins + found[-1].row.seconds <= 60 * minutes - MARGIN_S
    # What is left out is what no time is left for.
    left = 60 * minutes - MARGIN_S - found[-1].begins - found[-1].row.seconds
    assert all(row.seconds > left for row in ROWS if row.key not in keys)
    assert len(ROWS) == len({row.key for row in ROWS})
    assert (len(found) == len(ROWS)) == (minutes == 20)


def test_a_second_call_plans_what_is_missing():
    first = [one.row.key for one in plan(300, ROWS)]
    second = [one.row.key for one in plan(900, ROWS, first)]
    assert set(first).isdisjoint(second)
    assert {*first, *second} == {row.key for row in ROWS}
    assert "llama-3-8b, 4096 tokens, eager\n" in planned(60, ROWS)
    assert planned(60, ROWS).endswith(f"of {len(ROWS)} rows")


def test_without_a_compiler_eager_rows_take_the_place_of_compiled_ones():
    found = rows(compiles=False)
    assert not any(row.compiles for row in found)
    trained = [row.shape for row in found if row.work == "train"]
    assert len(trained) == 5
    assert trained[:2] == [LARGE_4K, SMALL_4K]
    assert {row.part for row in rows(["checks"])} == {"checks"}


def driver(root, *, amd=False):
    """Return the root of a machine whose driver is there."""
    if amd:
        node = root / "sys/class/kfd/kfd/topology/nodes/1"
        node.mkdir(parents=True)
        (node / "properties").write_text("simd_count 304\n")
    else:
        (root / "proc/driver/nvidia/gpus/0000:00:01.0").mkdir(parents=True)
    return root


def refusal(tmp_path, torch="2.11.0+cu130", cuda="'13.0'", device="cuda", environ=None, **more):
    file = tmp_path / "version.py"
    file.write_text(f"__version__ = '{torch}'\ncuda: Optional[str] = {cuda}\nhip = None\n")
    return lacking(device, environ or {}, version_file=file, **{"root": tmp_path, **more})


def without(*missing):
    def load(name):
        if name in missing:
            raise ImportError(name)
        return ModuleType(name)

    return load


def test_what_is_lacking_is_told_before_anything_is_imported(tmp_path):
    found = refusal(tmp_path, python=(3, 10))
    assert found.startswith("Python 3.10 is too old, 3.11 is needed: make gpu PYTHON=")
    found = refusal(tmp_path, python=(3, 12), load=without("pydantic", "rich"))
    assert found.startswith("pydantic, rich cannot be imported by Python 3.12. ")
    assert found.endswith("make gpu-wheels GPU_PYTHON=3.12, then bring build/gpu here")
    assert refusal(tmp_path).startswith("there is no GPU of NVIDIA or AMD, or its driver")
    assert refusal(tmp_path, device="cpu") is None
    driver(tmp_path)
    assert refusal(tmp_path) is None
    assert refusal(tmp_path, "2.10.1+cu129").startswith("torch 2.10.1+cu129 is too old, 2.11 ")
    assert refusal(tmp_path, "nightly").startswith("torch nightly is too old")
    hidden = refusal(tmp_path, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert hidden == "CUDA_VISIBLE_DEVICES hides the GPUs of this machine: unset it"
    built = refusal(tmp_path, "2.11.0+cpu", "None")
    assert "1 NVIDIA GPU, but torch 2.11.0+cpu was built for CPUs only" in built
    nowhere = lacking("cuda", {}, version_file=tmp_path / "none", root=tmp_path)
    assert nowhere.startswith(f"torch is not installed for {sys.executable}: make gpu PYTHON=PATH")


def test_a_gpu_of_amd_needs_its_own_torch(tmp_path):
    assert "1 AMD GPU, but" in refusal(driver(tmp_path, amd=True))


def test_what_is_needed_is_what_the_wheels_bring():
    text = Path("Makefile").read_text().replace("\\\n", " ")
    (line,) = (one for one in text.splitlines() if one.startswith("GPU_WHEELS :="))
    names = {"yaml": "pyyaml", "annotated_types": "annotated-types"}
    assert {names.get(name, name) for name in NEEDED} <= set(line.split())


def test_a_driver_that_is_too_old_is_told_with_the_one_that_is_needed():
    said = driver_advice("The NVIDIA driver on your system is too old", "13.0")
    assert "is too old; CUDA 13.0 needs an NVIDIA driver 580 or newer. nvidia-smi says" in said
    assert "needs an NVIDIA driver" not in driver_advice("no", None)


def test_a_missing_compiler_is_told(tmp_path):
    advice = compiler_advice({"PATH": str(tmp_path)}, "cpu")
    assert advice.startswith("nothing is compiled, eager rows alone are measured: there is no C++")


def test_layers_are_as_many_as_are_predicted_to_fit():
    words, layout = ["train.precision=bf16", "train.compile=true"], Layout.parse("mb2")
    words += ["cluster.device=cuda", "cluster.preset=h200"]
    sizes = [layers_within(room * 2**30, LARGE_4K, words, layout) for room in (20, 100, 132)]
    assert sizes == sorted(sizes)
    assert 20 <= sizes[-1] < LARGE_4K.layers
    config = load_config(None, [*LARGE_4K.words(sizes[-1] + 1), *words])
    assert peak(config, layout) > 132 * 2**30
    assert layers_within(132 * 2**30, SMALL_8K, words, layout) == SMALL_8K.layers
    assert layers_within(1, SMALL_8K, words, layout) == 1


MACHINE = {"name": "NVIDIA H200", "torch": "2.11.0", "python": "3.12.3", "cuda": "13.0"} | {
    "driver": "580.1",
}


def test_versions_change_with_the_source(tmp_path):
    (tmp_path / "one.py").write_text("1")
    before = versions(MACHINE, tmp_path)
    assert before.startswith("NVIDIA H200, torch 2.11.0, Python 3.12.3, cuda 13.0, driver 580.1, ")
    (tmp_path / "notes.md").write_text("2")
    assert versions(MACHINE, tmp_path) == before
    (tmp_path / "one.py").write_text("2")
    assert versions(MACHINE, tmp_path) != before


# Answers by what it is asked: with a line, with its end, or not at all.
PROCESS = """
import json, sys, time
for line in sys.stdin:
    do = json.loads(line)["do"]
    print(json.dumps({"step": do}), flush=True)
    if do == "die":
        print("last words", file=sys.stderr)
        sys.exit(3)
    if do == "hang":
        time.sleep(60)
    print(json.dumps({"failed": "why", "told": ["a line"]} if do == "fail" else {"ended": True}))
    sys.stdout.flush()
"""


def test_a_process_that_ends_or_hangs_takes_nothing_else_with_it():
    worker = Worker([sys.executable, "-c", PROCESS], {})
    assert worker.ask({"do": "well"}, 60) == Answer({"step": "well"})
    assert worker.ask({"do": "fail"}, 60) == Answer({"step": "fail"}, "why", ["a line"])
    died = worker.ask({"do": "die"}, 60)
    assert died == Answer({"step": "die"}, "the process ended with exit code 3", ["last words"])
    assert worker.ask({"do": "hang"}, 0.5).failed == "took longer than 0 s"
    assert worker.ask({"do": "well"}, 60) == Answer({"step": "well"})
    worker.end()


def test_a_module_gives_its_document_or_why_not():
    assert run_module("this", environ={}, limit_s=60).found["code"] == 0  # prints a poem
    missing = run_module("nothing_here", environ={}, limit_s=60)
    assert missing.found["code"] == 1
    assert run_module("json.tool", "--nonsense", environ={}, limit_s=60).failed.startswith(
        "exit code 2: "
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a":\n 1}', {"a": 1}),
        ('[Gloo] Rank 0 is connected\n{"a": 1}\n', {"a": 1}),
        ("", None),
        ("no JSON\nat all", None),
        ("1", None),
    ],
)
def test_the_document_of_a_command_is_all_of_it_or_its_last_line(text, found):
    assert document(text) == found
