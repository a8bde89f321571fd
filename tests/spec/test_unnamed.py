"""What is trained where nobody has named weights or data is said, and no job does so unasked."""

import json

import pytest

from meshwright.cli import main
from meshwright.planner.saved import load_planned
from meshwright.runtime.checks.notes import config_notes
from meshwright.spec.loading import load_config
from meshwright.spec.words import unnamed_inputs

GPUS = ["cluster.preset=h100-sxm", "cluster.nodes=2", "train.batch=16"]
LLAMA = ["model.preset=llama-3-8b", *GPUS]
MADE_UP = ["model.dim=64", "model.n_layers=2", "model.n_heads=2", *GPUS]


def notes_of(*words):
    return " ".join(unnamed_inputs(load_config(None, words)))


def test_a_preset_without_data_is_named_as_what_it_is():
    said = notes_of(*LLAMA)
    assert "RANDOM WEIGHTS: model.preset = llama-3-8b" in said
    assert "BUILT-IN DATA: Python's standard library, tokenized by 'bytes'" in said


@pytest.mark.parametrize(
    ("words", "random", "built_in", "tokenizer"),
    [
        ([*LLAMA, "data.source=corpus"], True, False, True),
        ([*LLAMA, "data.source=corpus", "data.tokenizer=gpt2"], True, False, False),
        ([*LLAMA, "data.source=stdlib", "data.tokenizer=bytes"], True, False, False),
        (MADE_UP, False, True, False),
        ([*MADE_UP, "data.source=corpus"], False, False, False),
    ],
)
def test_what_is_named_is_not_noted(words, random, built_in, tokenizer):
    said = notes_of(*words)
    assert ("RANDOM WEIGHTS" in said) == random
    assert ("BUILT-IN DATA" in said) == built_in
    assert ("is the default, which is not the tokenizer" in said) == tokenizer


def test_plan_says_it_beside_the_command(capsys):
    assert main(["plan", *LLAMA, "--top", "1"]) == 0
    before, _, command = capsys.readouterr().out.partition("to train the best:")
    assert "RANDOM WEIGHTS" in before.rpartition("ruled out:")[2]
    assert "BUILT-IN DATA" in before.rpartition("ruled out:")[2]
    assert "meshwright launch torchrun" in command
    assert main(["plan", *LLAMA, "--top", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 2


def test_train_says_it_before_the_first_step():
    assert "RANDOM WEIGHTS" in " ".join(config_notes(load_config(None, LLAMA)))


@pytest.mark.parametrize("target", ["local", "torchrun", "slurm", "ray"])
def test_no_job_trains_on_the_built_in_corpus_unasked(target, capsys):
    words = ["launch", target, *LLAMA, "layout.dp_shard=16", "layout.zero=3"]
    if target == "local":
        words += ["cluster.nodes=1", "layout.dp_shard=8"]
    assert main(words) == 2
    refused = capsys.readouterr()
    assert not refused.out
    assert "nobody has named data.source" in refused.err
    assert "data.source=stdlib" in refused.err
    assert main([*words, "data.source=stdlib"]) == 0
    written = capsys.readouterr()
    assert written.out
    assert "RANDOM WEIGHTS" in written.err


def test_a_saved_plan_keeps_that_nobody_has_named_the_data(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert main(["plan", *LLAMA, "--top", "1", "--save", str(plan)]) == 0
    assert main(["launch", "torchrun", "--plan", str(plan)]) == 2
    assert "nobody has named data.source" in capsys.readouterr().err
    assert main(["launch", "torchrun", "--plan", str(plan), "data.source=stdlib"]) == 0
    config = load_planned(plan, None, ["data.source=corpus"])
    assert config.origins["data.source"] == "override data.source=corpus"
    assert main(["plan", *LLAMA, "data.source=corpus", "--top", "1", "--save", str(plan)]) == 0
    assert load_planned(plan).origins["data.source"] == "plan"
