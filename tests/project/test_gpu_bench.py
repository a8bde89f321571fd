"""The benchmark for one GPU, tried on a CPU: what it measures, keeps and goes on with."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from benchmarks import gpu_worker
from benchmarks.gpu import main
from benchmarks.gpu_bench import Answer, Results
from benchmarks.gpu_page import page
from benchmarks.gpu_predicted import Trained, peak
from benchmarks.gpu_profile import Ran, as_text
from benchmarks.gpu_rows import LARGE_4K, ROWS, TINY, is_there, rows
from benchmarks.gpu_run import Run, has_failed, resolved
from benchmarks.gpu_worker import serve
from benchmarks.syncs import CASES

from meshwright.cost.calibration import as_toml
from meshwright.cost.catalogue import find_device
from meshwright.layout import Layout
from meshwright.prove.case import Case
from meshwright.prove.shrink import shrink
from meshwright.spec.loading import load_config
from ranks import on_ranks

# Two blocks (four products of 64 x 64, three of 64 x 128, two norms), vocabulary twice, last norm.
TINY_WEIGHTS = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 128 * 64 + 64


class Scripted:
    """Stands for the process that measures: answers as it is told to, and takes its time."""

    def __init__(self, *answers):
        self.environ = {}
        self.answers, self.asked, self.time = list(answers), [], 0.0

    def ask(self, request, limit_s):
        self.asked.append(request)
        self.time += 10
        answer = self.answers.pop(0) if self.answers else Answer(trained(request))
        if answer.failed and answer.failed.startswith("took"):
            self.time += limit_s
        return answer

    def end(self):
        self.asked.append("end")


def trained(request):
    length = Case.from_json(request["case"]).train.seq_len if "case" in request else 0
    return {"step_times_s": [3.0, 2.0, 4.0], "peak_bytes": [100 * length], "profile": "a table"}


MACHINE = {"name": "NVIDIA H200", "torch": "2.11.0", "python": "3.12.3", "cuda": "13.0"} | {
    "driver": "580.1",
    "flops_per_s": 791e12,
    "copied_bytes_per_s": 4.3e12,
    "free_bytes": 139 * 2**30,
}


def run_of(tmp_path, worker, seconds=300.0, device="cuda"):
    run = Run(device, False, seconds, out=tmp_path, clock=lambda: worker.time)
    run.worker = worker
    assert run.look() is None
    return run


@pytest.mark.slow
def test_rows_are_kept_as_they_are_measured_and_a_second_call_goes_on(tmp_path, capsys):
    asked = rows(["train"])[:8]  # the page is written anew after each of them
    run = run_of(tmp_path, Scripted(Answer(MACHINE)), seconds=80)
    run.measure(asked)
    said = capsys.readouterr().out
    assert "NVIDIA H200" in said.splitlines()[0]
    assert "bf16 products 791 TFLOP/s (80% of h200's peak), copies 4.30 TB/s" in said
    assert "MFU" in said
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    first = [line["key"] for line in lines]
    assert first[:2] == [row.key for row in asked[:2]]
    assert 2 < len(first) < len(asked)
    assert "| llama-3.2-1b | 16 | 4096 | eager |" in (tmp_path / "gpu.md").read_text()
    # The last line is cut off, as by a time limit.
    text = (tmp_path / "gpu.jsonl").read_text()
    (tmp_path / "gpu.jsonl").write_text(text[:-40])
    again = run_of(tmp_path, Scripted(Answer(MACHINE)), seconds=500)
    again.measure(asked)
    before, count = len(first) - 1, len(asked)
    assert f"{before} of {count} rows were measured before" in capsys.readouterr().out
    assert [one["do"] for one in again.worker.asked] == ["look"] + (count - before) * ["train"]
    third = run_of(tmp_path, Scripted(Answer(MACHINE)))
    assert set(third.results.found) == {row.key for row in asked}
    # With another torch nothing of this counts.
    other = run_of(tmp_path, Scripted(Answer(MACHINE | {"torch": "2.12.0"})))
    assert other.results.found == {}


@pytest.mark.slow
def test_what_failed_is_tried_again_after_the_rest(tmp_path):
    asked = rows(["train"])[:3]
    late = Answer({}, "took longer than 60 s", ["last words"])
    run = run_of(tmp_path, Scripted(Answer(MACHINE), late), seconds=400)
    run.measure(asked)
    assert run.results.failed == {asked[0].key: "took longer than 60 s"}
    assert f"- left out: {asked[0].key}: took longer than 60 s\n" in run.page()
    assert json.loads((tmp_path / "gpu.jsonl").open().readline())["told"] == ["last words"]
    (tmp_path / "gpu.jsonl").write_text((tmp_path / "gpu.jsonl").open().readline())
    again = run_of(tmp_path, Scripted(Answer(MACHINE)), seconds=400)
    again.measure(asked)
    assert list(again.results.found) == [asked[1].key, asked[2].key, asked[0].key]
    assert again.results.failed == {}
    assert not has_failed(again.results.found, asked)
    assert has_failed({}, asked)


def test_a_shape_that_did_not_fit_is_tried_with_fewer_layers(tmp_path):
    worker = Scripted(Answer(MACHINE), Answer({}, "out of memory"))
    run = run_of(tmp_path, worker)
    run.measure(rows(["train"])[:1])
    layers = [Case.from_json(one["case"]).model.n_layers for one in worker.asked[1:]]
    assert 1 < layers[1] < layers[0] < LARGE_4K.layers
    (found,) = run.results.found.values()
    assert found["step_time_s"] == 3.0
    assert found["date"] in run.page()


def test_a_profile_that_failed_leaves_what_was_timed(tmp_path):
    found = {"step_times_s": [1.0], "peak_bytes": [1]}
    worker = Scripted(Answer(MACHINE), Answer(found, "the process ended with exit code -11"))
    run = run_of(tmp_path, worker)
    run.measure(rows(["train"])[:1])
    text = run.page()
    assert "| llama-3-8b | " in text
    assert "eager: the process ended with exit code -11" in text


def test_an_allocator_that_cannot_grow_is_left_alone(tmp_path, monkeypatch):
    first, second = Scripted(Answer({}, "the process ended", ["abort"])), Scripted(Answer(MACHINE))
    run = Run("cuda", False, 300.0, out=tmp_path, clock=lambda: 0.0)
    made = []
    monkeypatch.setattr(Run, "_worker", lambda self, more: made.append(more) or second)
    run.worker = first
    assert run.look() is None
    assert first.asked[-1] == "end"
    assert set(made[0].values()) == {"expandable_segments:False"}
    run.worker = Scripted(Answer({"unreachable": "driver is too old", "cuda": "13.0"}))
    assert "driver 580" in run.look()


def test_predictions_stand_beside_what_was_measured(tmp_path):
    run = run_of(tmp_path, Scripted(Answer(MACHINE)))
    run.measure(rows(["train"])[:1])
    (found,) = run.results.found.values()
    config, layout = load_config(None, found["config"]), Layout.parse(found["layout"])
    slow = as_toml({find_device("h200").kind: {"overhead.step": 9.0}}, "", "")
    row = Trained.of_found(found, [slow])
    assert row.predicted_peak == peak(config, layout)
    assert row.predicted < 9 < row.calibrated
    assert row.tokens_per_s == pytest.approx(4 * 2 * 4096 / 3)
    assert Trained.of_found(found, []).calibrated is None
    run.results.add("calibrate", Answer({"toml": slow}), 1.0)
    assert f"| {row.calibrated:.4f} s (+" in run.page()
    assert "| calibrate | |" in run.page()


def test_checks_are_on_the_page():
    results = Results("here")
    wrong = {"claim": "gradients", "passed": False}
    results.add("prove this", Answer({"verdicts": 3, "failed": [wrong]}), 1.0)
    rows_of = [{"of": "fp32 dp1", "waits": None}, {"of": "bf16", "waits": "called .item()"}]
    results.add("syncs", Answer({"checked": True, "rows": rows_of, "code": 1}), 1.0)
    results.add("tests", Answer({"said": ["..", "9 passed"], "code": 0}), 1.0)
    text = page(MACHINE, "h200", results, ["nothing is compiled"])
    assert "| `this` | 2 of 3 verdicts passed; WRONG: gradients |" in text
    assert "| fp32 dp1 | nowhere |\n| bf16 | called .item() |" in text
    assert "`pytest`: 9 passed" in text
    assert text.endswith("- nothing is compiled\n")
    asked = [row for row in ROWS if row.key in ("syncs", "tests")]
    assert has_failed(results.found, asked)
    assert not has_failed(results.found, asked[1:])


def served(world, requests):
    """Return what the process that measures says of some requests; the body of a rank."""
    said = []
    serve(world, io.StringIO("".join(json.dumps(one) + "\n" for one in requests)), said.append)
    return said


@pytest.mark.slow
def test_the_process_measures_profiles_and_proves():
    words = [*TINY.words(2), "train.compile=false", "cluster.device=cpu"]
    config = load_config(None, words)
    case = Case(config.model, config.train, Layout.parse("mb4")).as_json()
    requests = [
        {"do": "look"},
        {"do": "train", "case": case, "steps": 2, "profiles": True},
        {"do": "prove", "case": case},
        {"do": "dance"},
    ]
    (said,) = on_ranks(1, served, requests=requests)
    look, _, timed, profiled, _, proven, _, failed = said
    assert look["torch"]
    assert len(timed["step_times_s"]) == 2
    # fp32 weights, their gradients and both moments of AdamW are there at once.
    assert timed["peak_bytes"][0] > 16 * TINY_WEIGHTS
    assert timed["peak_bytes"][0] == pytest.approx(peak(config, Layout.parse("mb4")), rel=0.05)
    assert profiled["profile"].startswith("a profiled step: ")
    assert "aten::mm" in profiled["profile"]
    assert proven["verdicts"] > 5
    assert proven["failed"] == []
    assert failed["failed"].endswith("has no attribute 'dance'")


PROOFS = [row for row in ROWS if row.work == "prove" and is_there(row.needs)]


@pytest.mark.slow
@pytest.mark.parametrize("row", PROOFS, ids=lambda row: row.key)
def test_each_proof_passes_on_a_cpu(row):
    config, _, layout = resolved([*row.words, "cluster.device=cpu"])
    packed = config.data.packing == "documents"
    (case,) = shrink(config.model, config.train, layout, packed=packed)
    ((proven, end),) = on_ranks(1, served, requests=[{"do": "prove", "case": case.as_json()}])
    assert proven["verdicts"] > 5
    assert proven["failed"] == []
    assert end == {"ended": True}


def test_a_profile_tells_what_took_longest_in_shares_of_the_step():
    ran = [Ran("gemm", 0.25), Ran("gemm", 0.25), Ran("copy", 0.1), Ran("a" * 80, 0.05)]
    lines = as_text(ran, 1.0, "GPU", most=2).splitlines()
    assert lines[0] == (
        "a profiled step: 1000.0 ms; what the GPU ran adds up to 65.0% of it, in 4 calls"
    )
    assert lines[2].split() == ["50.0%", "500.00", "2", "gemm"]
    assert lines[4].split() == ["5.0%", "50.00", "1", "others"]
    assert as_text(ran, 1.0, "GPU").splitlines()[-1].endswith("aaa...")


def test_every_case_of_syncs_has_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.slow
@pytest.mark.timeout(570)
def test_the_whole_of_it(tmp_path, capsys):
    words = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    assert main([*words, "--only", "train"]) == 0
    assert main(words) == 0
    said = capsys.readouterr()
    assert "1 of 4 rows were measured before" in said.out
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == [row.key for row in rows(tiny=True)]
    assert not any("failed" in line for line in lines)
    assert "train tiny, 64 tokens, eager: 2 of 2 layers" in said.out
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("verdicts passed") == 2
    assert "| calibrate, tiny, 64 tokens | |" in text
    assert (tmp_path / "gpu-tiny.toml").is_file()
    assert main(["--minutes", "1"]) == 2


def test_a_calibration_leaves_no_compiled_blocks_behind(monkeypatch):
    """On an H100 the next row's memory had 4.4 GiB of them."""
    told, resets = [], []
    monkeypatch.setattr(gpu_worker, "Suite", lambda world: None)
    monkeypatch.setattr(gpu_worker, "calibrate", lambda *_, **__: {"ranks": 1})
    monkeypatch.setattr(gpu_worker.torch.compiler, "reset", lambda: resets.append(list(told)))
    config, _, layout = resolved(["cluster.device=cpu", "cluster.devices_per_node=1"])
    case = Case(config.model, config.train, layout).as_json()
    work = gpu_worker.Work(SimpleNamespace(device=torch.device("cpu")))
    work.calibrate({"case": case, "budget_s": 0.1, "compiles": True}, told.append)
    assert told == [{"ranks": 1}]
    assert resets == [told]
