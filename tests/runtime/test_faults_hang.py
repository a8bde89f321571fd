"""Ranks that hang, lag or go astray: who is named, by whom, and when.

The numbers are those of docs/records/fault-cases.md.
"""

import re
import signal
import time

import pytest

from faulty import (
    HANG,
    TENSOR,
    ZERO,
    end_supervisor,
    last_files,
    of,
    start_train,
    wait_for_phase,
    wait_for_steps,
    wait_until_gone,
)
from meshwright.errors import RankFailed

pytestmark = pytest.mark.faults

# --- a slow rank (case 12) -------------------------------------------------------------------


@pytest.mark.case(12)
def test_a_slow_rank_is_named(go):
    _, text, events = go("1:forward:*:sleep=0.3", "train.steps=24")
    slow = of(events, "slow_rank")
    assert slow
    assert {event["rank"] for event in slow} == {1}
    assert slow[0]["others_wait"] > 0.5 > 2 * slow[0]["waits"]
    assert "rank 1 is slow: from step" in text


# Whichever of gloo's messages times out first closes the connection, which fails the others.
GLOO = "Timed out waiting 4000ms|Application timeout caused pair closure"


# --- hanging (cases 13, 14, 15) --------------------------------------------------------------


@pytest.mark.case(13)
def test_a_stopped_rank_is_named_with_what_the_others_wait_in(go, whole):
    pipeline = ["layout.pp=2", "layout.dp_replicate=1", "layout.microbatch=1"]
    folder, _, events = go("1:forward:5:stop", *HANG, *pipeline)
    cause = of(events, "restart")[0]["cause"]
    assert "rank 1 is stopped (SIGSTOP) in step 5, forward of microbatch 0 on stage 1" in cause
    assert "rank 0 waits in recv #" in cause
    assert "of pp from rank 1 (" in cause
    assert "which rank 1 has not begun" in cause
    assert of(events, "restart")[0]["detect_s"] >= 3
    assert last_files(folder) == whole(*pipeline)


@pytest.mark.case(13)
@pytest.mark.parametrize(
    ("words", "inside"),
    [
        (TENSOR, "all_reduce # of tp ("),
        (ZERO, "send # of shard to rank 1 ("),
    ],
)
def test_a_stopped_rank_is_named_where_ranks_share_memory(go, whole, words, inside):
    folder, _, events = go("1:forward:5:stop", *HANG, *words)
    cause = of(events, "restart")[0]["cause"]
    assert "rank 1 is stopped (SIGSTOP) in step 5, forward of microbatch 0 on stage 0" in cause
    assert f"rank 0 waits in {inside}" in re.sub(r"#\d+", "#", cause)
    assert "which rank 1 has not begun" in cause
    assert last_files(folder) == whole(*words)


@pytest.mark.case(13)
@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("1:load:0:stop", "setup"),
        ("1:forward:5:stop", "step"),
        ("1:save:4:stop", "save"),
        ("1:eval:4:stop", "eval"),
    ],
)
def test_each_part_of_a_run_has_a_limit(go, whole, fault, part):
    """It ends a hang of its part long before the limit of all others."""
    evaluates = ["train.eval_every=4", "data.validation=0.1"]
    limits = ["cluster.timeout=600", "cluster.hang=300", f"cluster.hang_{part}=4"]
    folder, _, events = go(fault, *limits, *evaluates)
    (restart,) = of(events, "restart")
    assert "rank 1 is stopped (SIGSTOP)" in restart["cause"]
    assert 4 <= restart["detect_s"] < 60
    assert last_files(folder) == whole(*evaluates)


@pytest.mark.case(13)
@pytest.mark.parametrize(
    ("words", "raised"),
    [
        ([], ("RuntimeError", GLOO)),
        (TENSOR, ("DistError", "Timed out after 4 s of waiting for rank 1,")),
        (ZERO, ("RuntimeError", GLOO)),
    ],
)
def test_a_time_out_names_the_rank_that_was_waited_for(go, words, raised):
    limits = ["cluster.timeout=4", "cluster.hang=0", "checkpoint.restarts=0", *words]
    _, text, events = go("1:forward:4:stop", *limits, error=RankFailed)
    assert text.startswith(f"rank 0 raised {raised[0]}: ")
    assert re.search(raised[1], text)
    assert "rank 1 is stopped (SIGSTOP) in step 4, forward of microbatch 0 on stage 0" in text
    assert "rank 1 is stopped" in of(events, "failed")[0]["cause"]


@pytest.mark.case(15)
def test_a_held_gil_does_not_stop_the_watchdog(go, whole):
    folder, _, events = go("0:backward:4:hang_gil", *HANG)
    cause = of(events, "restart")[0]["cause"]
    assert re.search(r"rank 0 is silent for ([3-9]|\d\d)\.\d+s in", cause)
    assert "in step 4, backward of microbatch 0 on stage 0 (sleeping)" in cause
    assert "rank 1 waits in all_reduce #" in cause
    # The stacks are in the logs, of threads that could print them.
    assert "replicas.py" in (folder / "logs" / "rank-1.log").read_text()
    assert last_files(folder) == whole()


@pytest.mark.case(15)
def test_a_segfault_is_named_and_its_stack_kept(go, whole):
    folder, _, events = go("1:update:4:segfault")
    assert of(events, "restart")[0]["cause"] == "rank 1 was killed by SIGSEGV, in step 4, update"
    log = (folder / "logs" / "rank-1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "update.py" in log
    assert last_files(folder) == whole()


@pytest.mark.case(15)
def test_a_rank_that_holds_the_gil_does_not_outlive_its_supervisor(corpus, tmp_path, outcome):
    process = start_train(
        corpus,
        tmp_path,
        "train.steps=100000",
        "layout.dp_replicate=2",
        FAULT="1:update:2:hang_gil",
    )
    folder = tmp_path / "runs" / "run"
    wait_for_phase(folder, process, "update")
    wait_for_steps(folder, process)
    time.sleep(1)
    end_supervisor(process)
    seconds = wait_until_gone(folder)
    outcome.add(-signal.SIGKILL, "the ranks end with their supervisor", seconds)


SKIP = """
from meshwright.parallel.apply import Parallel
real, calls = Parallel.count_targets, []
def count(self, batch):
    calls.append(1)
    if rank == 1 and len(calls) == 3:
        return (batch.targets >= 0).sum() * 2
    return real(self, batch)
Parallel.count_targets = count
"""
OTHER = """
import torch
import torch.distributed as dist
from meshwright.parallel.apply import Parallel
real, calls = Parallel.count_targets, []
def count(self, batch):
    calls.append(1)
    if rank == 1 and len(calls) == 3:
        found = [torch.zeros(7) for _ in range(2)]
        dist.all_gather(found, torch.zeros(7), group=self.groups.data.group)
    return real(self, batch)
Parallel.count_targets = count
"""


@pytest.mark.case(14)
def test_a_skipped_collective_is_named_on_both_ranks(go):
    limits = ["checkpoint.restarts=0", *ZERO, *HANG]
    _, text, _ = go(None, *limits, error=RankFailed, body=SKIP)
    assert "rank 0 waits in all_reduce #3 of data (8 bytes), which rank 1 has not begun" in text
    assert "rank 1 waits in send #" in text  # rows of weights
    assert "of shard to rank 0 (" in text


@pytest.mark.case(14)
def test_a_mismatched_collective_is_named_on_both_ranks(go):
    limits = ["checkpoint.restarts=0", *HANG]
    _, text, _ = go(None, *limits, error=RankFailed, body=OTHER)
    assert (
        "ranks disagree: rank 0 is in all_reduce #3 of data (8 bytes) in step 3, data, "
        "but rank 1 is in all_gather #3 of data (56 bytes) in step 3, data"
    ) in text


# --- numbers (case 16) -----------------------------------------------------------------------


@pytest.mark.case(16)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_numbers_that_are_not_finite_end_the_run_with_the_tensor_named(go, number):
    _, text, _ = go(f"1:forward:4:nan={number}:always", error=RankFailed)
    assert "is not finite" in text
