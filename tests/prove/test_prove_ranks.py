"""Proofs whose ranks fail, crash or never begin, and those of several numbers of ranks."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.cli import main
from meshwright.errors import RankFailed
from meshwright.prove.draw import WORLDS, draw
from meshwright.prove.matrix import matrix
from meshwright.prove.outcome import Outcome
from meshwright.prove.verdict import Verdict
from meshwright.runtime.proofs import proof
from meshwright.runtime.proofs.proof import by_world, prove_cases
from runs import clean_environ


def legal(world):
    """The legal cases of a table but the two large ones at its beginning."""
    return [case for case in matrix(world) if case.refused is None][2:]


def failing_worker(body):
    """Ranks in which `Suite.prove` does something wrong."""
    code = (
        "import os, sys\n"
        "from meshwright.runtime.proofs import proof_worker\n"
        "from meshwright.prove.suite import Suite\n"
        "prove = Suite.prove\n"
        "def wrong(self, case):\n"
        f"    {body}\n"
        "    return prove(self, case)\n"
        "Suite.prove = wrong\n"
        "proof_worker.main()\n"
    )
    return lambda folder: [sys.executable, "-c", code, str(folder), "cpu"]


@pytest.mark.slow
def test_a_rank_that_fails_costs_its_layout_only(forks):
    cheap = [c for c in legal(2) if c.layout.pp == 1 and c.train.precision == "fp32"]
    cases = sorted(cheap, key=lambda case: (case.steps, case.train.batch, case.model.n_layers))[:3]
    body = f"if case.layout.label == {cases[1].layout.label!r} and self._world.rank == 1: 1 / 0"
    shown = []
    with forks.all_python():
        outcomes = prove_cases(cases, clean_environ(), shown.append, command=failing_worker(body))
    assert shown == outcomes
    assert [outcome.case for outcome in outcomes] == cases
    assert [outcome.passed for outcome in outcomes] == [True, False, True]
    (verdict,) = outcomes[1].verdicts
    assert verdict.claim == "runs on its ranks"
    assert "rank 1 raised ZeroDivisionError" in verdict.observed
    assert any(cases[1].label in line for line in outcomes[1].lines())


@pytest.mark.slow
def test_ranks_are_fresh_after_some_cases(forks, monkeypatch, tmp_path):
    monkeypatch.setattr(proof, "_MOST_CASES", 2)
    pids = tmp_path / "pids"
    body = f"print(self._world.rank, os.getpid(), file=open({str(pids)!r}, 'a'))"
    cases, shown = [legal(2)[0]] * 3, []
    with forks.all_python():
        prove_cases(cases, clean_environ(), shown.append, command=failing_worker(body))
    assert [outcome.passed for outcome in shown] == [True, True, True]
    found = pids.read_text().splitlines()
    assert len(found) == 6
    assert len(set(found)) == 4


def test_where_a_rank_crashed_is_told(forks, monkeypatch):
    def read(core, file):  # gdb takes seconds for torch's symbols; test_core_dumps has it read
        core.unlink()
        return "the stack of the crash"

    monkeypatch.setattr(proof, "_crash_text", read)
    body = "if self._world.rank == 1: os.kill(os.getpid(), 11)"
    with forks.all_python():
        (outcome,) = prove_cases(
            legal(2)[:1], clean_environ(), lambda outcome: None, command=failing_worker(body)
        )
    said = outcome.verdicts[0].observed
    assert "rank 1 was killed by SIGSEGV" in said
    assert "Fatal Python error: Segmentation fault" in said
    assert "in wrong" in said
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        return  # another program has the dump
    assert "the stack of the crash" in said


def test_ranks_that_never_begin_are_an_error():
    cases = legal(2)[:2]
    with pytest.raises(RankFailed, match="exited with code 7"):
        prove_cases(
            cases,
            clean_environ(),
            lambda outcome: None,
            command=lambda folder: [sys.executable, "-c", "raise SystemExit(7)"],
        )


def test_cases_are_run_by_their_number_of_ranks():
    cases = [*legal(4)[:2], *legal(2)[:1]]
    assert [len(some) for some in by_world(cases)] == [1, 2]


@pytest.mark.slow
def test_when_the_time_is_up_the_rest_is_left_out(forks):
    cases = legal(2)[:20]
    with forks.all_python():
        outcomes = prove_cases(cases, clean_environ(), lambda outcome: None, seconds=0.01)
    assert 1 <= len(outcomes) < len(cases)  # one, unless this process had to wait for the cores
    assert all(outcome.passed for outcome in outcomes)


def test_each_number_of_ranks_has_a_part_of_the_time(capsys, monkeypatch):
    limits = []

    def prove(cases, environ, show, device, seconds):
        limits.append(seconds)
        return [Outcome(cases[0], (Verdict("loss", {}, 0.0, 0.0, None, True),), 0.1)]

    monkeypatch.setattr(proof, "prove_cases", prove)
    clock = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=lambda: 0.0)
    monkeypatch.setattr(proof, "time", clock)
    words = ["prove", "--random", "40", "--minutes", "2", "--seed", "5"]
    assert main([*words, "--json"]) == 0
    found = capsys.readouterr()
    drawn = draw(5, 40)
    ranks = {
        world: sum(c.layout.world for c in drawn if c.layout.world == world) for world in WORLDS
    }
    assert limits[0] == pytest.approx(120 * ranks[2] / sum(ranks.values()))
    assert limits[-1] == pytest.approx(120)  # the others took none of it
    assert json.loads(found.out)["left_out"] == 35
    assert "5 of 5 layouts passed, 35 left out: the time was up" in found.err
