"""Several ranks on one GPU, tried out without one: their messages are staged all the same."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.gpu_ranks_cases import NUMBERS, PLAIN, chosen
from benchmarks.gpu_ranks_set import RankSet
from benchmarks.staged import Staged

from ranks import ranks

ROOT = Path(__file__).parents[2]


def run(*words: str) -> tuple[int, list[str]]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_ranks", "--device", "cpu", "--limit", "500", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
    )
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]


@ranks(2)
def test_messages_are_there_once_they_are_waited_for(world):
    other = 1 - world.rank
    with Staged("cpu") as staged:
        x = torch.full((4,), world.rank + 1.0)
        works = [dist.isend(x, other), dist.irecv(got := torch.zeros(4), other)]
        total = x.clone()
        works.append(dist.all_reduce(total, async_op=True))
        assert not any(work.is_completed() for work in works)
        assert got.tolist() == [0.0] * 4, "nothing is there without waiting"
        for work in works:
            work.wait()
        assert all(work.is_completed() for work in works)
        assert got.tolist() == [other + 1.0] * 4
        assert total.tolist() == [3.0] * 4
        assert not staged.pending
    x += 1
    dist.all_reduce(x)  # by torch's own kernels again
    assert x.tolist() == [5.0] * 4


@ranks(2)
def test_every_kind_of_message_brings_what_gloo_brings(world):
    def every() -> list[torch.Tensor]:
        x = torch.arange(8.0) + 10 * world.rank
        found = [torch.empty(16), torch.empty(4), torch.empty(8), x.clone()]
        dist.all_gather_into_tensor(found[0], x)
        dist.reduce_scatter_tensor(found[1], x)
        dist.all_to_all_single(found[2], x)
        dist.broadcast(found[3], 1)
        parts = [torch.empty(8), torch.empty(8)]
        dist.all_gather(parts, x)
        largest = x.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        half = x.bfloat16()
        dist.all_reduce(half)
        uneven = torch.empty(2 if world.rank else 6)
        sizes = [1, 1] if world.rank else [3, 3]
        leaving = [3, 1]
        dist.all_to_all_single(uneven, x[:4].contiguous(), sizes, leaving)
        return [*found, *parts, largest, half, uneven]

    expected = every()
    with Staged("cpu"):
        found = every()
        dist.barrier()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_the_layouts_are_of_all_kinds():
    for world, number in NUMBERS.items():
        cases = chosen(world)
        assert len({one.case for one in cases}) == len(cases) > number + len(PLAIN[world])
        assert all(one.case.layout.world == world for one in cases)
        words = {word for one in cases for word in one.name.replace(",", "").split()}
        assert words >= {"sp", "bf16", "packed", "compiled", "zero1", "zero2", "zero3", "1f1b"}
        assert words >= {"recompute-full", "recompute-selective", "wide", "dropout", "lora"}
        assert words >= {"offload-optimizer", "offload-params", "offload-activations"}
        assert words >= {"interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev", "gpipe"}
        assert {one.case.layout.cp_kind for one in cases} == {"ring", "ulysses"}


@pytest.mark.slow
def test_layouts_are_proven_and_written(tmp_path):
    out = tmp_path / "rows.jsonl"
    code, lines = run("--ranks", "2", "--only", "shard2 zero2 mb1 offload-opt", "--out", str(out))
    assert code == 0, lines
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["found"] == "ok"
    assert all(one["passed"] for one in row["verdicts"])
    assert lines[1].startswith("ok     2r 11/11 "), lines
    assert lines[2].startswith("1 of 1 layouts passed, 0 WRONG, 0 FAILED, 0 left out"), lines


def test_ranks_that_do_not_answer_are_given_up():
    ranks = RankSet("cpu", 2)
    one = next(one for one in chosen(2) if one.name.startswith("dp2 mb2"))
    ends = time.monotonic() + 600
    try:
        assert not ranks.started(ends)
        found = ranks.prove(one.case, 0.2, ends)
    finally:
        ranks.close()
    assert found["raised"] == "no answer of rank 0 and 1"
    assert not found["no time"]
    assert any("suite.py" in line for line in found["told"]), "it says where they were"


def test_a_rank_that_raises_says_what():
    one = next(one for one in chosen(2) if one.name.startswith("dp2 mb2"))
    broken = replace(one.case, model=one.case.model.model_copy(update={"n_heads": 3}))
    ranks = RankSet("cpu", 2)
    ends = time.monotonic() + 600
    try:
        assert not ranks.started(ends)
        found = ranks.prove(broken, 60, ends)
    finally:
        ranks.close()
    assert "raised" in found
    assert found["told"]


@pytest.mark.slow
@pytest.mark.parametrize("world", sorted(NUMBERS))
def test_all_layouts_pass(world):
    code, lines = run("--ranks", str(world), "--minutes", "30")
    assert code == 0, lines
