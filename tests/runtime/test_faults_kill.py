"""Ranks that are killed, or raise, once or again and again: the run goes on as before.

The numbers are those of docs/records/fault-cases.md. Every case ends within its bound, with its own
exit code and the cause named, leaves no process, and its last good step loads.
"""

import re
import subprocess
import sys
import time

import pytest

from faulty import RUN, TENSOR, events_of, last_files, of
from meshwright.checkpoint.commit import PLACES, step_name, steps
from meshwright.errors import ConfigError, NoProgress, RankFailed
from meshwright.runtime.ranks.fault import ACTIONS, Fault
from meshwright.runtime.supervise.attempts import recoveries
from meshwright.runtime.supervise.diagnosis import diagnose
from runs import TINY, clean_environ

# --- a killed rank (cases 1, 25) -------------------------------------------------------------


def kill_and_compare(go, whole, fault, *overrides):
    rank, phase, step = fault.split(":")[:3]
    folder, _, events = go(fault, *overrides)
    restart = of(events, "restart")[0]
    assert re.match(
        rf"rank {rank} was killed by SIGKILL, possibly by the system because memory ran out "
        rf"\(its process held \d+\.\d+ MiB and the ranks of this machine \d+\.\d+ [MG]iB of "
        rf"\d+\.\d+ GiB at step {int(step) - 1}\), in step {step}, {phase}",
        restart["cause"],
    ), restart["cause"]
    assert restart["attempt"] == 1
    assert restart["detect_s"] > 0
    starts = of(events, "start")
    assert [start["from_step"] for start in starts] == [0, restart["from_step"]]
    assert restart["from_step"] + restart["lost_steps"] >= int(step) - 1
    cost = next(recoveries(events))
    assert cost.detect_s == restart["detect_s"]
    assert cost.restart_s > 0
    assert cost.seconds >= cost.detect_s + cost.restart_s
    assert last_files(folder) == whole(*overrides)
    return restart


@pytest.mark.perf
def test_a_killed_rank_is_noticed_within_two_seconds(go):
    _, _, events = go("1:forward:4:kill")
    assert of(events, "restart")[0]["detect_s"] < 2


@pytest.mark.case(1, 25)
def test_a_killed_rank_is_named_and_the_run_goes_on_bit_for_bit(go, whole):
    restart = kill_and_compare(go, whole, "1:forward:4:kill")
    assert (restart["from_step"], restart["lost_steps"]) == (2, 1)


@pytest.mark.faults
@pytest.mark.case(1)
@pytest.mark.parametrize("phase", ["data", "backward", "reduce", "update"])
def test_a_rank_killed_in_any_phase(go, whole, phase):
    kill_and_compare(go, whole, f"0:{phase}:4:kill", *TENSOR)


@pytest.mark.faults
@pytest.mark.case(1)
@pytest.mark.parametrize("phase", ["start", "load"])
def test_a_rank_killed_before_the_first_step(go, whole, phase):
    folder, _, events = go(f"1:{phase}:0:kill")
    restart = of(events, "restart")[0]
    where = "before it joined the others" if phase == "start" else "loading"
    assert re.match(rf"rank 1 was killed by SIGKILL, .*, {where}$", restart["cause"])
    assert (restart["from_step"], restart["lost_steps"]) == (0, 0)
    assert last_files(folder) == whole()


# --- a rank killed in a save (cases 2, 4) ----------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "beside"),
    [
        *(pytest.param(p, False, marks=pytest.mark.case(2), id=p) for p in PLACES[:-1]),
        *(
            pytest.param(p, True, marks=pytest.mark.case(4), id=f"{p}, beside")
            for p in ("shard", "pointer", "purge")
        ),
        pytest.param("purge", False, marks=pytest.mark.case(4), id="purge"),
    ],
)
def test_a_rank_killed_in_a_save(go, whole, place, beside):
    """In the save of step 4: what is committed counts, what is not is cleaned up."""
    words = [f"checkpoint.async={str(beside).lower()}", "checkpoint.keep=1"]
    folder, _, events = go(f"0:save.{place}:4:kill", *words)
    restart = of(events, "restart")[0]
    assert "rank 0 was killed by SIGKILL" in restart["cause"]
    is_committed = place in ("pointer", "purge")
    assert restart["from_step"] == (4 if is_committed else 2)
    assert of(events, "start")[1]["from_step"] == restart["from_step"]
    root = folder / "checkpoints"
    assert {path.name for path in root.iterdir()} == {step_name(6), "latest", "lock"}
    assert (root / "latest").read_text().strip() == step_name(6)
    assert last_files(folder) == whole()


# --- again and again (case 5) ----------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.case(5)
@pytest.mark.timeout(600)
def test_twenty_restarts_of_twenty(go, whole):
    """Each attempt saves one step, and is killed in the next."""
    more = ["train.steps=21", "checkpoint.every=1"]
    folder, _, events = go("1:forward:*:kill:always", *more, bound_s=500, body=EVERY_OTHER)
    assert [event["attempt"] for event in of(events, "restart")] == list(range(1, 21))
    assert last_files(folder, 21) == last_files(go(None, *more, name="whole")[0], 21)


# Acts from the second step of an attempt on, so that each attempt commits one.
EVERY_OTHER = """
import meshwright.runtime.ranks.worker as inject
act = inject.Injector.__call__
seen = set()
def later(self, phase, step):
    if phase == "forward":
        seen.add(step)
        if len(seen) < 2:
            return
    act(self, phase, step)
inject.Injector.__call__ = later
"""


@pytest.mark.faults
@pytest.mark.case(5)
def test_no_progress_ends_the_run(go):
    words = ["checkpoint.every=3"]
    folder, text, events = go("0:update:5:raise=no luck:always", *words, error=NoProgress)
    assert text.startswith(
        "no progress beyond step 3 though the ranks were restarted 3 times "
        "(checkpoint.restarts = 3). The last failure: rank 0 raised RuntimeError: no luck\n"
    )
    assert NoProgress.exit_code == 5
    # The first failure came after a new step, so it does not count.
    assert [event["from_step"] for event in of(events, "restart")] == [3, 3, 3]
    last_files(folder, 3)


@pytest.mark.faults
@pytest.mark.case(5)
def test_without_checkpoints_later_steps_are_progress(go):
    limits = ["checkpoint.restarts=1", "checkpoint.every=0"]
    _, text, events = go("0:update:4:raise:always", *limits, error=NoProgress)
    assert "no progress beyond step 3 though the ranks were restarted once" in text
    assert len(of(events, "restart")) == 1


@pytest.mark.slow
def test_what_another_attempt_cannot_help_is_not_tried(go):
    body = (
        "import meshwright.runtime.ranks.worker as worker\n"
        "from meshwright.errors import DataError\n"
        "def refuse(*a, **k):\n    raise DataError('the data is gone')\n"
        "worker.open_data = refuse"
    )
    folder, text, _ = go(None, error=RankFailed, body=body)
    assert "the data is gone" in text
    assert '"restart"' not in (folder / "events.jsonl").read_text()


# --- a clock that is wrong (case 26) ---------------------------------------------------------

SKEW = """
if rank == 0:
    real = time.time
    time.time = lambda: real() - 86400.0
"""


@pytest.mark.faults
@pytest.mark.case(26)
def test_a_wrong_clock_on_one_rank_changes_nothing(go, whole):
    folder, _, events = go("1:forward:4:kill", body=SKEW)
    starts = of(events, "start")
    assert starts[0]["time"] < time.time() - 80000
    done = of(events, "step")
    assert [event["step"] for event in done] == [1, 2, 3, 3, 4, 5, 6]
    assert all(event["step_time_s"] > 0 for event in done)
    assert of(events, "restart")[0]["detect_s"] > 0
    assert next(recoveries(events)).restart_s is None  # rather than a day less than nothing
    assert last_files(folder) == whole()


# --- torchrun --------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.case(1)
def test_torchrun_restarts_go_on_with_the_run(corpus, tmp_path, whole, outcome):
    words = [*TINY, *RUN, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}"]  # no name: the attempts find their run
    at = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *at, "-m", "meshwright", "train", *words],
        capture_output=True,
        text=True,
        env={**clean_environ(), "OMP_NUM_THREADS": "1", "FAULT": "1:backward:4:kill"},
        timeout=150,
    )
    ended = time.time()
    assert done.returncode == 0, done.stderr[-3000:]
    folders = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("run-")]
    assert len(folders) == 1
    assert not list((tmp_path / "runs").glob(".torchrun*"))
    events = events_of(folders[0])
    restart = of(events, "restart")[0]
    assert (restart["attempt"], restart["from_step"], restart["lost_steps"]) == (1, 2, 1)
    assert [event["from_step"] for event in of(events, "start")] == [0, 2]
    outcome.add(0, restart["cause"], ended - restart["time"])  # since it was started again
    assert last_files(folders[0]) == whole()
    assert (folders[0] / "lock").read_text() == ""


@pytest.mark.faults
def test_under_torchrun_doctor_names_who_was_killed_and_not_who_lost_it(corpus, tmp_path):
    """Of ranks that share memory: no supervisor tells who was the first."""
    words = [*TINY, *RUN, *TENSOR, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "log.name=run"]
    at = ["--standalone", "--nproc-per-node", "2", "-m", "meshwright", "train"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *at, *words],
        capture_output=True,
        text=True,
        env={**clean_environ(), "OMP_NUM_THREADS": "1", "FAULT": "1:backward:4:kill"},
        timeout=150,
    )
    assert done.returncode != 0
    found = diagnose(tmp_path / "runs" / "run")
    assert found.state == "failed"
    assert found.failures[0].startswith("DistError: Connection closed by peer: rank 1, with which")
    assert (
        "rank 1 is gone, last seen in step 4, backward of microbatch 0 on stage 0" in found.reason
    )
    assert "raised" not in found.reason


# --- a full disk, as a whole run meets it (case 7) -------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(asked, capture_output=True)
    except OSError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.faults
@pytest.mark.case(7)
def test_a_run_whose_disk_is_full_ends_and_keeps_its_steps(small_disk, go, config):
    root = small_disk / "steps"
    words = ["train.steps=40", "checkpoint.every=1", "checkpoint.keep=100"]
    fill = "os.environ.pop('FAULT', None)"  # nothing: the disk is fault enough
    _, text, events = go(None, *words, f"checkpoint.dir={root}", body=fill, error=RankFailed)
    assert re.match(
        rf"rank \d: {root}/\.tmp-step-\d+-\w+/[\w.-]+ was not written: No space "
        r"left on device, after \d+ of \d+ bytes",
        text,
    ), text
    assert of(events, "failed")
    assert not of(events, "restart")  # another attempt would not help
    kept = steps(root)
    assert [path.name for path in kept] == [step_name(n + 1) for n in range(len(kept))]
    assert len(kept) == of(events, "save")[-1]["step"] > 1
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


# --- the injector itself ---------------------------------------------------------------------


def test_faults_are_parsed_strictly():
    assert Fault.parse("1:save:7:sleep=0.3") == Fault(1, "save", 7, "sleep", "0.3")
    assert Fault.parse("0:save.rename:*:kill") == Fault(0, "save.rename", None, "kill")
    assert Fault.parse("0:forward:*:kill:always") == Fault(0, "forward", None, "kill", always=True)
    for text, said in (
        ("1:forward:3", "FAULT is rank:phase:step:action"),
        ("x:forward:3:kill", "rank and step are numbers"),
        ("1:forwards:3:kill", "'forwards' is unknown; nearest legal: forward"),
        ("1:save.renam:3:kill", r"'save\.renam' is unknown; nearest legal: save\.rename"),
        ("1:forward:3:killl", "'killl' is unknown; nearest legal: kill"),
    ):
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            Fault.parse(text)


def test_every_action_has_a_deed():
    from meshwright.runtime.ranks.worker import _DEEDS

    assert tuple(_DEEDS) == ACTIONS
