"""Whose a step, a job or a datum is: nothing of another run is taken for a run's own.

The numbers are those of docs/records/fault-cases.md.
"""

import errno
import io
import json
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from faulty import flip, start_train, wait_for_steps, wait_until_gone
from meshwright.checkpoint.commit import LOCK, begin, run_of, seal, set_aside, step_name, steps
from meshwright.checkpoint.restore import newest_good
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import Chunks
from meshwright.checkpoint.tensors import Chunk
from meshwright.comm.rendezvous import Rendezvous
from meshwright.data import open_data
from meshwright.errors import CheckpointError, ConfigError, RankFailed
from meshwright.runtime.checks.notes import run_notes
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.machines.gather import check_sights, hand_over, sight
from meshwright.runtime.ranks.worker import differences, digests_of, refuse_unlike
from meshwright.runtime.session import locked, prepare_job, train
from meshwright.runtime.supervise.attempts import read_word, recorded, tell
from meshwright.runtime.supervise.disk import forget_gone
from meshwright.runtime.supervise.lock import RunLock
from meshwright.training.run_folder import create, read_job
from outcomes import refused
from ranks import on_ranks
from runs import clean_environ

ONE = ("layout.dp_replicate=1", "checkpoint.every=1")
torch = pytest.importorskip("torch")


def put_step(root, step, run):
    """Commit a step without tensors, as a run would."""
    root.mkdir(parents=True, exist_ok=True)
    folder = begin(root, step, run)
    (folder / "model.json").write_text("{}")
    return seal(folder, step, {}, {"run": run, "identity": {}})


# --- one run in a checkpoint folder (case 30) ------------------------------------------------


@pytest.mark.case(30)
def test_two_runs_do_not_save_into_one_folder_at_once(config, tmp_path, outcome):
    steps_of_both = f"checkpoint.dir={tmp_path / 'both'}"
    first = prepare_job(config(*ONE, steps_of_both, "log.name=a"), clean_environ())
    second = config(*ONE, steps_of_both, "log.name=b", "train.seed=2")
    with ExitStack() as held:
        locked(first, held)
        with outcome.refused(ConfigError, f"checkpoint folder {tmp_path / 'both'} is in use by"):
            train(second, clean_environ(), io.StringIO())
    # One that has looked before the other had saved, and starts once that one is done
    late = prepare_job(second, clean_environ())
    put_step(tmp_path / "both", 4, first.run)
    with ExitStack() as held, outcome.refused(ConfigError, "holds steps of another run"):
        locked(late, held)


@pytest.mark.case(30)
def test_a_step_is_not_saved_among_those_of_another_run(tmp_path, outcome):
    root = tmp_path / "root"
    path = put_step(root, 1, "aaaa")
    assert run_of(path) == "aaaa"
    assert begin(root, 1, "aaaa") is None  # its own, committed before a restart
    for step in (1, 2):
        told = "run aaaa has written step-00000001, and this is run bbbb"
        with outcome.refused(CheckpointError, told):
            begin(root, step, "bbbb")
    put_step(root, 2, "aaaa")
    (root / LOCK).write_text(json.dumps({"run": "cccc"}))
    with outcome.refused(CheckpointError, "run cccc has locked it, and this is run aaaa"):
        begin(root, 3, "aaaa")
    assert [one.name for one in steps(root)] == [step_name(1), step_name(2)]
    shutil.rmtree(root)
    with outcome.refused(CheckpointError, "was not written: No such file"):
        begin(root, 3, "aaaa")
    assert not root.exists()


def test_a_run_may_save_its_steps_into_its_own_folder(config, tmp_path):
    folder = tmp_path / "runs" / "mine"
    words = (f"log.dir={folder.parent}", "log.name=mine", f"checkpoint.dir={folder}")
    job = prepare_job(config(*ONE, *words), clean_environ())
    with ExitStack() as held:
        locked(job, held)
        create(job)
        told = json.loads(hand_over(job))
        assert sight(told) == [True, True]
        check_sights(told, [("node", sight(told))])
        assert begin(folder, 1, job.run).parent == folder


@pytest.mark.case(30)
def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path, outcome):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine")
    with outcome.refused(ConfigError, "is a link"), RunLock(tmp_path / LOCK):
        pass
    assert (tmp_path / "mine").read_text() == "kept"


def save_twice(world, root):
    """Save a step twice as one run, then as another; returns the bytes that were told of."""
    told = []
    chunks = Chunks([Chunk(f"w{world.rank}", (0,), torch.ones(8))], [])
    for _ in range(2):
        Saver(Path(root), world, 2, told.append, run="aaaa").save(1, chunks, {}, {})
    with refused(CheckpointError, "run aaaa has written") as caught:
        Saver(Path(root), world, 2, told.append, run="bbbb").save(1, chunks, {}, {})
    return [saved.bytes for saved in told], caught.outcome


@pytest.mark.case(30)
def test_no_save_of_0_bytes_is_told_of(tmp_path, outcome):
    found = on_ranks(2, save_twice, root=str(tmp_path))
    for bytes_told, _ in found:
        assert bytes_told[0] == bytes_told[1] > 0
    outcome.add(*found[1][1])


# --- a run folder removed from under a run (case 31) -----------------------------------------


def test_a_lock_is_lost_where_a_file_replaces_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with RunLock(folder / "lock") as lock:
        assert not lock.is_lost
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", Mock(side_effect=OSError(errno.EIO, "not now")))
            assert not lock.is_lost  # a file system that does not answer has removed nothing
        folder.rename(tmp_path / "moved")
        folder.write_text("another")
        assert lock.is_lost


@pytest.mark.faults
@pytest.mark.case(31)
def test_a_run_whose_folder_is_replaced_ends_and_leaves_the_new_one_alone(
    corpus, tmp_path, outcome
):
    words = ["train.steps=100000", "layout.dp_replicate=1", "checkpoint.every=1"]
    process = start_train(corpus, tmp_path, *words)
    folder = tmp_path / "runs" / "run"
    wait_for_steps(folder, process)
    folder.rename(tmp_path / "gone")
    began = time.monotonic()
    with RunLock(folder / "lock", "new"):
        said, _ = process.communicate(timeout=120)
        seconds = time.monotonic() - began
        left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    assert process.returncode == 3, said
    last = next(line for line in said.splitlines() if "was removed or replaced" in line)
    assert left in (["lock"], ["logs", "lock"]), left
    wait_until_gone(folder)
    outcome.add(3, last, seconds)


# --- going on with the steps of another run (case 32) ----------------------------------------


@pytest.mark.slow
@pytest.mark.case(32)
def test_a_run_does_not_go_on_from_the_step_of_another(config, tmp_path, outcome):
    words = (*ONE, "train.steps=1")
    shared = f"checkpoint.dir={tmp_path / 'steps'}"
    first = train(config(*words, shared, "log.name=a"), clean_environ(), io.StringIO())
    own = train(config(*words, "optimizer.lr=0.1", "log.name=b"), clean_environ(), io.StringIO())
    # As though both had been given the folder: the rates differ, which a resume may change.
    longer = config("train.steps=2", *ONE, shared, "optimizer.lr=0.1", "log.name=b")
    ids = [read_job(run.folder).run for run in (first, own)]
    assert ids[0] != ids[1]
    assert run_of(steps(tmp_path / "steps")[0]) == ids[0]
    with outcome.refused(CheckpointError, f"run was {ids[0]}, is {ids[1]}.*--allow-changed run$"):
        train(longer, clean_environ(), io.StringIO(), resume=Resume(own.folder))
    resume = Resume(own.folder, ("run",))
    job = prepare_job(longer, clean_environ(), resume=resume)
    assert (job.run, job.resume) == (ids[0], True)


def test_what_a_resume_changes_is_said(config):
    job = prepare_job(config(*ONE), clean_environ())
    create(job)
    put_step(job.checkpoints, 2, job.run)
    changes = ["optimizer.weight_decay=0.2", "train.clip_norm=0.5", "train.precision=bf16"]
    now = replace(job, config=config(*ONE, *changes), resume=True)
    assert next(run_notes(now, clean_environ())) == (
        "from step 3 on: optimizer.weight_decay was 0.1, is 0.2; train.precision was fp32, is "
        "bf16; train.clip_norm was 1.0, is 0.5"
    )


# --- jobs that others start again (case 33) --------------------------------------------------


@pytest.fixture
def killed(config):
    """Return a function that makes the run of a job that was killed, and its first attempt."""

    def make(*overrides, **place):
        asked = config(*ONE, *overrides)
        at = Rendezvous(0, 2, 0, 2, "localhost", 29500, job="meshwright", **place)
        job = prepare_job(asked, clean_environ())
        create(job)
        tell(job, asked, at)
        return job, asked, at

    return make


@pytest.mark.case(33)
def test_a_job_does_not_take_up_the_run_of_another_with_its_id(killed, config, outcome):
    job, asked, at = killed(agent="/tmp/torchelastic_a/meshwright_x")
    note = next(job.folder.path.parent.glob(".job-*"))
    text = note.read_text()
    said = []
    again = replace(at, attempt=1)
    assert recorded(asked, again, said.append) == job.folder.path.resolve()
    # The same config and id, by a torchrun started after the other's was killed
    word = read_word(note)._asdict()
    note.write_text(json.dumps({**word, "parent": [os.getpid(), 1]}))
    other = replace(again, agent="/tmp/torchelastic_b/meshwright_y")
    began = time.monotonic()
    assert recorded(asked, other, said.append) is None
    outcome.add(None, said[-1], time.monotonic() - began)
    assert "is of another job with the id meshwright: a new run begins" in said[-1]
    assert not note.exists()
    # Another torchrun of the same job, on this machine or on another
    note.write_text(text)
    assert recorded(asked, other, said.append) == job.folder.path.resolve()
    note.write_text(json.dumps({**word, "host": ["elsewhere", "0"]}))
    assert recorded(asked, other, said.append) == job.folder.path.resolve()
    # There with another config
    began = time.monotonic()
    assert recorded(config(*ONE, "train.seed=3"), other, said.append) is None
    outcome.add(None, said[-1], time.monotonic() - began)


@pytest.mark.parametrize("damage", [{"folder": 3}, {"parent": []}, {"parent": None}])
def test_damaged_word_of_a_job_is_none(killed, damage):
    job, asked, at = killed()
    note = next(job.folder.path.parent.glob(".job-*"))
    note.write_text(json.dumps({**read_word(note)._asdict(), **damage}))
    assert read_word(note) is None
    assert recorded(asked, replace(at, attempt=1), pytest.fail) is None
    forget_gone(note.parent)


@pytest.mark.case(33)
def test_word_of_a_killed_job_ends_with_the_first_attempt_of_the_next(killed, outcome):
    job, asked, at = killed()
    began = time.monotonic()
    assert recorded(asked, at, pytest.fail) is None
    assert not list(job.folder.path.parent.glob(".job-*"))
    outcome.add(None, "a first attempt takes up no run", time.monotonic() - began)
    # A run of another job in the folder that the word names
    tell(job, asked, at)
    create(replace(job, run="another"))
    assert recorded(asked, replace(at, attempt=1), lambda text: None) is None


# --- ranks that have read different things (case 34) -----------------------------------------


def unlike(world):
    """Compare digests that are the same, then some of which rank 1 has others."""
    refuse_unlike({"a.toml": "00"}, world)
    own = {"a.toml": "00", "b.bin": f"{world.rank:02}" * 32, "c.py": "11"}
    if world.rank == 1:
        del own["c.py"]
    with refused(ConfigError) as caught:
        refuse_unlike(own, world)
    return caught.outcome


@pytest.mark.case(34)
def test_ranks_that_differ_are_named_with_the_file(outcome):
    found = on_ranks(2, unlike)
    assert (
        found[0].message
        == found[1].message
        == (
            "ranks differ: b.bin is 000000000000 on rank 0, 010101010101 on rank 1; c.py is 11 on "
            "rank 0, missing on rank 1. All ranks must read the same files, and run the same code"
        )
    )
    outcome.add(*found[1])
    assert list(differences([{"a": "1"}, {"a": "1"}])) == []


def test_versions_that_begin_alike_are_shown_as_far_as_they_differ():
    found = [{"torch": f"2.11.0+cu128.build{number}"} for number in (1, 2)]
    assert list(differences(found)) == [
        "torch is 2.11.0+cu128.build1 on rank 0, 2.11.0+cu128.build2 on rank 1"
    ]


def test_first_weights_and_code_are_compared(config, tmp_path):
    weights = put_step(tmp_path / "first", 0, "aaaa")
    job = prepare_job(config(*ONE), clean_environ())
    create(job)
    model = job.config.model.model_copy(update={"init_from": str(tmp_path / "first")})
    job = replace(job, config=job.config.model_copy(update={"model": model}))
    data = open_data(job.config.data, job.cache)
    found = digests_of(job, data, has_weights=True)
    assert {str(job.folder.plan), str(weights / "manifest.json")} <= found.keys()
    assert {"meshwright/runtime/ranks/worker.py", "torch", "the tokenizer"} <= found.keys()
    assert data.files.items() <= found.items()
    assert digests_of(job, data, has_weights=False).keys() < found.keys()


@pytest.mark.slow
@pytest.mark.case(34)
def test_a_file_that_is_another_on_one_rank_ends_the_run_before_its_first_step(
    go, corpus, tmp_path
):
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text().replace("cat", "dog"))
    body = (
        "from meshwright.runtime.ranks import worker\nreal = worker.open_data\n"
        f"other = dict(source={str(other)!r}) if rank else {{}}\n"
        "def bound(spec, *a, **k):\n"
        "    found = real(spec.model_copy(update=other), *a, **k)\n"
        f"    files = dict(zip([{str(corpus)!r}], found.files.values()))\n"
        "    return __import__('dataclasses').replace(found, files=files)\n"
        "worker.open_data = bound"
    )
    _, text, events = go(None, body=body, error=RankFailed)
    assert f"ranks differ: {corpus} is " in text
    assert [event["event"] for event in events] == ["failed"]


# --- no step is whole (case 36) --------------------------------------------------------------


def newest(world, root):
    """Look for the newest good step where each one is damaged."""
    with refused(CheckpointError) as caught:
        newest_good(Path(root), world, pytest.fail)
    return caught.outcome


@pytest.mark.slow
@pytest.mark.case(36)
def test_a_run_none_of_whose_steps_is_whole_does_not_begin_anew(go, config, outcome):
    folder, _, _ = go(None, "train.steps=4", "checkpoint.every=2")
    root = folder / "checkpoints"
    names = [path.name for path in steps(root)]
    for name in names:
        flip(root / name / "weights-00000.safetensors", -1)
    said = [one.message for one in on_ranks(2, newest, root=str(root))]
    assert said[0] == said[1]
    with outcome.refused(RankFailed) as caught:
        longer = config("layout.dp_replicate=2", "train.steps=6", "model.dropout=0.1")
        train(longer, clean_environ(), io.StringIO(), resume=Resume(folder))
    text = str(caught.value)
    assert f"no step in {root} is whole, and none was changed: " in text
    for name in names:
        assert f"{root / name / 'weights-00000.safetensors'} is corrupt" in text
    assert "to start over, start a new run in another folder" in text
    assert f"starts over after you move {root} away: mv {root} {root}-damaged" in text
    assert [path.name for path in steps(root)] == names
    for name in names:
        (root / name / "manifest.json").write_text("{}")
    with outcome.refused(ConfigError, r"no step of .* is readable\. Restore .* mv .*-damaged"):
        train(longer, clean_environ(), io.StringIO(), resume=Resume(folder))
    # Those that were set aside are not steps to go on from, either.
    for path in steps(root):
        set_aside(path)
    with outcome.refused(ConfigError, "holds no committed step"):
        train(longer, clean_environ(), io.StringIO(), resume=Resume(folder))
