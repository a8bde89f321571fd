"""The step with the lowest held-out loss stays; a run that waits in vain for a lower one ends."""

import json
from types import SimpleNamespace

import pytest
import torch

from meshwright.checkpoint.commit import old_steps, point, prune, steps
from meshwright.cli import main
from meshwright.comm.world import World
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models.hf import load_hf
from meshwright.report.record import read_run
from meshwright.report.run_words import verdict
from meshwright.runtime.supervise.diagnosis import diagnose
from meshwright.spec.loading import load_config
from meshwright.spec.stored import BEST, best_step, find_step
from meshwright.training.held_out import LOSSES, Best, HeldOut
from runs import TINY

RUN = [
    *TINY,
    *(
        "train.eval_every=2",
        "train.eval_batches=1",
        "data.validation=0.2",
        "data.source=corpus.txt",
    ),
    *("data.tokenizer=bytes", "checkpoint.keep=1", "checkpoint.keep_best=true", "log.name=run"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.weight_decay=0"),
]
STANDS_STILL = ["train.steps=40", "optimizer.lr=1e-30", "train.stop_after_evals=2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{n} times {n} is {n * n}\n\n" for n in range(3000)]
    (tmp_path / "corpus.txt").write_text("".join(lines))
    return tmp_path / "runs" / "run"


def events(folder, kind):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def names(folder):
    return [path.name for path in steps(folder / "checkpoints")]


def test_a_loss_that_is_no_lower_is_no_better():
    losses = [(2, float("nan")), (4, 3.0), (6, 2.0), (8, 2.0), (10, 2.5)]
    assert Best.of(losses[:1]) == Best(since=1)
    best = Best.of(losses)
    assert best == Best(6, 2.0, 2)
    assert [best.is_final(patience) for patience in (0, 1, 2, 3)] == [False, True, True, False]


def test_losses_are_kept_up_to_the_step_that_a_run_goes_on_from(tmp_path):
    config = load_config(None, ["train.eval_every=2", "train.stop_after_evals=1"])
    job = SimpleNamespace(checkpoints=tmp_path, config=config)

    def kept(step):
        return HeldOut(job, World(0, 1, torch.device("cpu"), None), None, step)

    held_out = kept(0)
    for step, loss in ((2, float("nan")), (4, 3.0), (6, 2.0), (8, 2.5)):
        held_out.add(step, loss)
    assert kept(8).best == held_out.best == Best(6, 2.0, 1)
    assert kept(8).is_over
    again = kept(5)
    assert not again.is_over
    assert again.best == Best(4, 3.0)
    again.add(6, 4.0)
    assert kept(8).best == Best(4, 3.0, 1)
    assert kept(0).losses == []  # a run that begins anew
    (tmp_path / LOSSES).write_text("{")
    with pytest.raises(CheckpointError, match="held-out"):
        kept(8)


def test_pruning_leaves_the_best(tmp_path):
    for step in range(1, 6):
        (tmp_path / f"step-{step:08d}").mkdir()
    point(tmp_path, BEST, "step-00000002")
    assert best_step(tmp_path) == find_step(tmp_path / "best") == tmp_path / "step-00000002"
    assert [path.name[-1] for path in old_steps(tmp_path, 2)] == ["1", "3"]
    point(tmp_path, BEST, "../elsewhere")
    assert best_step(tmp_path) is None
    assert find_step(tmp_path / "best") is None


@pytest.mark.slow
def test_the_best_step_stays_and_is_what_best_names(folder, capsys):
    """The loss falls for six steps, then rises: the run goes on at a rate that is far too high."""
    assert main(["train", *RUN, "train.steps=6", "layout.dp_replicate=2"]) == 0
    losses = [event["loss"] for event in events(folder, "eval")]
    assert losses == sorted(losses, reverse=True)
    assert names(folder) == ["step-00000006"]
    assert main(["train", "--resume", str(folder), "train.steps=10", "optimizer.lr=3"]) == 0
    assert min(event["loss"] for event in events(folder, "eval")[3:]) > losses[-1]
    assert names(folder) == ["step-00000006", "step-00000010"]
    assert find_step(folder / "best") == folder / "checkpoints" / "step-00000006"

    prune(folder / "checkpoints", 1)
    assert len(names(folder)) == 2
    capsys.readouterr()
    words = ["checkpoint", "export-hf", str(folder / "best"), "best", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["source"].endswith("step-00000006")
    load_hf(folder.parent.parent / "best")
    words = ["--max-tokens", "3", "--prompt", "2 times"]
    assert main(["generate", str(folder / "best"), *words]) == 0
    assert main(["generate", str(folder / "worst"), *words]) == 2
    assert main(["eval", str(folder / "best"), "--json"]) == 0
    assert "step-00000006" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_ends_that_waits_in_vain(folder, capsys):
    """Nothing is learnt at such a rate, and a loss that is alike is no lower."""
    assert main(["train", *RUN, *STANDS_STILL]) == 0
    (end,) = events(folder, "end")
    assert (end["step"], end["stopped"]) == (6, False)
    assert end["early"].endswith("at step 2, and no lower one in 2 evaluations")
    assert f"Ended early: {end['early']}" in capsys.readouterr().out
    assert names(folder) == ["step-00000002", "step-00000006"]
    assert f"Ended early after step 6 of 40: {end['early']}." in verdict(read_run(folder))
    assert diagnose(folder).state == "done"

    # It goes on for who waits longer, as long as it has not waited yet.
    assert main(["train", "--resume", str(folder), "train.stop_after_evals=3"]) == 0
    assert events(folder, "end")[1]["step"] == 8
    assert [event["step"] for event in events(folder, "eval")] == [2, 4, 6, 8]


@pytest.mark.slow
def test_a_run_that_is_over_takes_no_further_step(folder):
    assert main(["train", *RUN, *STANDS_STILL]) == 0
    assert main(["train", "--resume", str(folder)]) == 0
    assert [event["step"] for event in events(folder, "end")] == [6, 6]
    assert len(events(folder, "step")) == 6


@pytest.mark.parametrize(
    ("word", "legal"),
    [
        ("train.stop_after_evals=2", "train.stop_after_evals = 0"),
        ("checkpoint.keep_best=true", "checkpoint.keep_best = false"),
    ],
)
def test_what_goes_by_the_held_out_loss_needs_one(word, legal):
    with pytest.raises(ConfigError, match=r"train\.eval_every = 0.*" + legal.replace(".", r"\.")):
        load_config(None, [word])


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6], ids=["between", "at the end"])
def test_an_evaluation_that_a_kill_left_out_is_made_up_for(folder, monkeypatch, step):
    """The step was saved, so that a resumed run does not come to it again."""
    whole = [*RUN, "train.steps=6", "checkpoint.every=2", "layout.dp_replicate=2"]
    assert main(["train", *whole]) == 0
    undisturbed = [(event["step"], event["loss"]) for event in events(folder, "eval")]
    monkeypatch.setenv("FAULT", f"1:eval:{step}:kill")
    assert main(["train", *whole, "log.name=killed"]) == 0
    (resumed,) = events(folder.parent / "killed", "resume")
    assert resumed["step"] == step
    losses = [(event["step"], event["loss"]) for event in events(folder.parent / "killed", "eval")]
    assert losses == undisturbed
