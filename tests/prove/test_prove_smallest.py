"""`prove --smallest -- COMMAND`: what is left out of a program, and down to which case."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.prove.trainers.reduction import InputCut, Reduction, case_of, input_shape
from meshwright.prove.trainers.smallest import SmallCase, SmallestSearch

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_loop.py"
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
COMMAND = ("torchrun", "--nproc-per-node=4", "train.py")
FAULT = {"quantity": "gradient", "kind": "scaled", "axes": ["dp"], "step": 1}


def verdict_of(case, faults, ranks=4, rows=16, length=64, layers=8, hidden=48):
    """Return the JSON of a verdict on a run with these sizes, or what a reduction leaves of it."""
    less = case.reduction
    return {
        "refused": None,
        "faults": faults,
        "world": case.ranks or ranks,
        "steps": case.steps,
        "case": {
            "layers": {"Block": less.layers.get("Block", layers)},
            "sizes": {"hidden_size": less.sizes.get("hidden_size", hidden)},
            "rows": less.rows or rows,
            "length": less.length or length,
            "data_rank_of": list(range(case.ranks or ranks)),
        },
    }


def reduced(shows, run=None):
    """Return a search of a program whose runs have the fault if `shows` says so."""
    fault = {**FAULT, "tensors": ["blocks.1.up.weight"]}
    case = SmallCase(COMMAND, 2)

    def run_program(small):
        verdict = verdict_of(small, [])
        return {**verdict, "faults": [fault] if shows(verdict["case"], verdict) else []}

    first = verdict_of(case, [fault])
    search = SmallestSearch(case, first, run or run_program, lambda line: None)
    search.search()
    return search


def test_everything_is_reduced_where_the_fault_is_always_there():
    search = reduced(lambda case, verdict: True)
    assert search.case.command == ("torchrun", "--nproc-per-node=2", "train.py")
    expected = Reduction({"Block": 1}, {"hidden_size": 8}, rows=1, length=2)
    assert (search.case.steps, search.case.reduction) == (1, expected)
    assert all(attempt.shows for attempt in search.attempts)


def test_each_quantity_stops_where_the_fault_would_be_gone():
    def shows(case, verdict):
        enough = case["rows"] >= 3 and case["layers"]["Block"] >= 2 and case["length"] >= 20
        return enough and verdict["world"] >= 4

    search = reduced(shows)
    assert search.case.reduction == Reduction({"Block": 2}, {"hidden_size": 8}, 4, 32)
    assert search.case.command == COMMAND
    gone = [str(attempt) for attempt in search.attempts if not attempt.shows]
    assert "2 of 4 ranks: the fault is gone" in gone
    assert "1 of 8 Block: the fault is gone" in gone
    assert len(gone) == 1 + 1 + 2 + 4


def test_another_fault_a_refusal_or_a_crash_is_no_smaller_case():
    others = [{**FAULT, "tensors": ["blocks.0.norm.weight"]}]
    for verdict, why in (
        (lambda case: None, "without a verdict"),
        (lambda case: {**verdict_of(case, []), "refused": "dead"}, "refused: dead"),
        (lambda case: verdict_of(case, others), "another fault"),
        (lambda case: verdict_of(replace(case, reduction=Reduction()), others), "as much as"),
    ):
        search = reduced(None, run=verdict)
        assert search.case == SmallCase(COMMAND, 2)
        assert any(why in attempt.reason for attempt in search.attempts), why


def test_data_ranks_that_would_read_the_same_rows_are_no_smaller_case():
    def run(small):
        verdict = verdict_of(small, [{**FAULT, "tensors": ["blocks.1.up.weight"]}])
        if verdict["case"]["length"] < 8:
            verdict["case"]["data_rank_of"] = [0] * verdict["world"]
        return verdict

    search = reduced(None, run=run)
    assert search.case.reduction.length == 8
    assert [a.reason for a in search.attempts if not a.shows] == [
        "ranks that read other rows read the same ones"
    ] * 2


def test_inputs_are_cut_and_outputs_have_their_places_again():
    cut = InputCut(Reduction(rows=2, length=3))
    mask = torch.ones(4, 1, 6, 6)
    places, inputs = torch.arange(6)[None], torch.arange(24).view(4, 6)
    ids, options = cut.inputs((inputs, {"mask": mask, "places": places, "cache": False}))
    assert torch.equal(ids, inputs[:2, :3])
    assert [options[key].shape for key in ("mask", "places")] == [(2, 1, 3, 3), (1, 3)]
    assert input_shape((ids, options)) == (2, 3)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    output = cut.output(logits)
    assert output.shape == (4, 6, 5)
    output.sum().backward()
    assert torch.equal(logits.grad, torch.ones(2, 3, 5))
    assert output.count_nonzero() == 2 * 3 * 5
    assert cut.output(torch.tensor(1.0)).shape == ()


def test_a_run_says_which_lists_of_layers_it_has():
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    without = nn.ModuleList([nn.GELU(), nn.GELU()])
    model = nn.ModuleDict({"blocks": blocks, "mixed": mixed, "without": without})
    case = case_of(model, input_shape(torch.zeros(2, 7, dtype=torch.long)), 4)
    assert case["layers"] == {"Linear": 3}
    assert (case["rows"], case["length"], case["microbatches"]) == (2, 7, 4)


def test_a_config_loses_the_lists_of_its_layers():
    config = SimpleNamespace(
        num_hidden_layers=4, hidden_size=32, layer_types=["full", "window", "full", "window"]
    )
    Reduction(sizes={"num_hidden_layers": 2, "hidden_size": 64}).reduce_config(config)
    assert (config.num_hidden_layers, config.hidden_size) == (2, 32)
    assert config.layer_types == ["full", "window"]


@pytest.mark.parametrize(
    "text", ["[]", '{"rows": 0}', '{"depth": 1}', '{"layers": {"A": "x"}}', "{"]
)
def test_a_reduction_that_says_nothing_is_refused(text):
    with pytest.raises(ConfigError, match="--case"):
        Reduction.from_json(text)


def proven(tmp_path, monkeypatch, capsys, source, ranks, *words):
    script = tmp_path / "train.py"
    script.write_text(source)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [*LAUNCHER, str(ranks), str(script)]
    options = ["--json", "--folder", str(tmp_path / "steps"), *words]
    code = main(["prove", *options, "--", *command])
    return code, json.loads(capsys.readouterr().out)


def with_fault(line):
    """Return the example of a loop, with a line after its backward."""
    backward = "            loss.backward()\n"
    source = EXAMPLE.read_text()
    assert backward in source
    return source.replace(backward, f"{backward}        {line}\n")


@pytest.mark.slow
@pytest.mark.execs
def test_a_fault_of_a_loop_is_reduced_to_what_it_needs(tmp_path, monkeypatch, capsys):
    """It needs the second block, and eight tokens: with less of either, it is gone."""
    line = "len(ids[0]) and getattr(model.blocks[1], 'length', 8) >= 8 and "
    source = with_fault(f"{line}model.blocks[1].up.weight.grad.mul_(2)")
    source = source.replace(
        "        places =", "        self.length = x.shape[1]\n        places ="
    )
    code, verdict = proven(tmp_path, monkeypatch, capsys, source, 2, "--smallest")
    smallest = verdict["smallest"]
    assert (code, verdict["faults"][0]["kind"]) == (1, "scaled")
    assert smallest["case"]["rows"] == 1
    assert smallest["case"]["length"] == 8
    assert smallest["case"]["layers"] == {"Block": 2}
    assert smallest["script"] is None
    attempts = {attempt["change"]: attempt for attempt in smallest["attempts"]}
    assert attempts["1 of 2 Block"]["reason"] == "the program ends without a verdict"
    assert attempts["4 of 16 length"]["reason"] == "the fault is gone"
    issue = (tmp_path / "steps" / "issue.md").read_text()
    assert smallest["repeat"] in issue
    assert "2 ranks, 1 step, 2 microbatches of 1 x 8 a step and rank; 2 Block" in issue
    assert verdict["versions"]["torch"] in issue


@pytest.mark.slow
@pytest.mark.execs
def test_the_smallest_case_can_be_repeated_and_a_right_program_passes_it(
    tmp_path, monkeypatch, capsys
):
    case = Reduction(layers={"Block": 1}, rows=2, length=4).as_json()
    words = ("--steps", "1", "--case", case)
    wrong = with_fault("model.blocks[-1].up.weight.grad.mul_(2)")
    code, verdict = proven(tmp_path, monkeypatch, capsys, wrong, 2, *words)
    assert (code, verdict["faults"][0]["tensors"]) == (1, ["blocks.0.up.weight"])
    code, verdict = proven(tmp_path, monkeypatch, capsys, EXAMPLE.read_text(), 2, *words)
    assert (code, verdict["faults"]) == (0, []), verdict
    assert (verdict["case"]["rows"], verdict["case"]["length"]) == (2, 4)
    assert verdict["case"]["layers"] == {}
