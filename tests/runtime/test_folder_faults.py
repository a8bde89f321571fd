"""Harm to a run's own folder: damaged events, files that are links, an end that was cut off.

The numbers are those of docs/records/fault-cases.md.
"""

import io
import json
import re
import shutil
import time
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from faulty import events_of, of
from meshwright.checkpoint.commit import LOCK, clean, purge, steps
from meshwright.cli import main
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.program.events import Events
from meshwright.report.figure import Html, escape
from meshwright.report.page import Page, grid, prose, titled
from meshwright.report.record import read_run
from meshwright.report.run_page import comparison_page, report, run_page
from meshwright.runtime.ranks import local
from meshwright.runtime.ranks.worker import record_failure
from meshwright.runtime.session import train
from meshwright.runtime.supervise.attempts import restarted, run_attempts
from meshwright.runtime.supervise.diagnosis import diagnose
from meshwright.runtime.supervise.lock import read_holder, refused
from meshwright.runtime.supervise.supervisor import RanksFailed, failure_of
from meshwright.spec.loading import load_config
from meshwright.training.events import JsonLines, _Scalars
from meshwright.training.held_out import LOSSES
from meshwright.training.run_folder import read_job, restore, resumed_folder
from meshwright.training.sinks import Opened
from run_folders import write_run
from runs import TINY, clean_environ

TWO = ["train.steps=2", "layout.dp_replicate=1", "log.trace=0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, corpus):
    """Return a finished run of two steps, to be copied."""
    root = tmp_path_factory.mktemp("made")
    where = [f"data.source={corpus}", f"data.cache={root / 'cache'}", f"log.dir={root / 'runs'}"]
    config = load_config(None, [*TINY, *where, *TWO, "log.name=run", "train.eval_every=2"])
    assert train(config, clean_environ(), io.StringIO()).exit_code == 0
    return root / "runs" / "run"


@pytest.fixture
def folder(made, tmp_path):
    """A copy of the finished run."""
    return Path(shutil.copytree(made, tmp_path / "runs" / "run", symlinks=True))


def resumed(folder, capsys, *words):
    """Return the exit code of `train --resume` and what it printed."""
    code = main(["train", "--resume", str(folder), *words])
    said = capsys.readouterr()
    return code, said.out + said.err


# --- damaged events (case 37) ----------------------------------------------------------------


@pytest.mark.case(37)
def test_a_run_goes_on_over_damaged_events(folder, capsys, outcome):
    events = folder / "events.jsonl"
    before = events.read_bytes()
    at = before.index(b'"step": 1')
    damaged = bytearray(before)
    damaged[at + 1] ^= 0x80  # no UTF-8 any more
    damaged[before.index(b'{"event": "step"', at)] ^= 0x01  # the next one is not JSON
    events.write_bytes(damaged)
    started = time.monotonic()
    code, said = resumed(folder, capsys, "train.steps=3", "--json")
    outcome.add(None, "two lines of events.jsonl are left out", time.monotonic() - started)
    assert code == 0, said
    assert json.JSONDecoder().raw_decode(said)[0]["steps"] == 3
    assert [event["step"] for event in of(Events.read(events), "step")] == [3]
    assert "damaged: 2 lines cannot be read" in (folder / "report" / "index.html").read_text()


def test_no_flipped_bit_of_an_event_is_in_the_way(config):
    """A damaged line is left out, or what is wrong in it is shown as it is."""
    restart = {"event": "restart", "time": 1.0, "attempt": 1, "cause": "killed", "lost_steps": 1}
    folder = write_run(config("layout.dp_replicate=1"), profile=False, more=[restart])
    file = folder / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    # An event of each kind, and every bit that tells JSON, names and numbers apart.
    kept = {json.loads(line)["event"]: line for line in lines}
    for kind, line in kept.items():
        for place in range(0, len(line), 7):
            harmed = bytearray(line)
            harmed[place] ^= 1 << place % 8
            file.write_bytes(b"".join({**kept, kind: bytes(harmed)}.values()))
            diagnose(folder)
            for event in Events.read(file):
                assert isinstance(event["event"], str)
    assert report([folder])


@pytest.mark.parametrize("name", ["lock", "logs/rank-0.failure.json"])
def test_no_flipped_bit_of_a_note_is_in_the_way(config, name):
    """Of who holds a run's lock, and of what ended a rank: what is damaged tells nothing."""
    job = read_job(write_run(config("layout.dp_replicate=1"), profile=False))
    job.folder.lock.write_text(json.dumps({"pid": 1, "host": "node", "time": 1.0}))
    record_failure(job.folder, 0, RuntimeError("a fault"))
    file = job.folder.path / name
    whole = file.read_bytes()
    for place in range(0, min(len(whole), 400), 3):
        harmed = bytearray(whole)
        harmed[place] ^= 1 << place % 8
        file.write_bytes(harmed)
        if name == "lock":
            assert refused(file, read_holder(file)).startswith("run folder ")
        else:
            assert failure_of(job.folder, 0, 3).cause.startswith("rank 0 ")
            assert restarted(job, SimpleNamespace(attempt=1, job=None))["attempt"] == 1
        diagnose(job.folder.path)


def test_a_tracker_that_fails_ends_no_run(capsys):
    lost = _Scalars("tensorboard", Opened(lambda numbers, step: 1 / 0, lambda: 1 / 0))
    for step in (1, 2):
        lost.write({"event": "step", "step": step, "loss": 1.0})
    lost.close()
    said = "note: tensorboard gets no more numbers, which events.jsonl has: division by zero\n"
    assert capsys.readouterr().err == said


# --- an end that was cut off (case 38) -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.case(38)
def test_a_run_killed_after_its_last_save_comes_to_its_end(folder, capsys, outcome):
    """Its evaluation and its end are made up for; nothing is trained again."""
    before = events_of(folder)
    cut = [event for event in before if event["event"] not in ("eval", "end")]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in cut))
    (folder / "checkpoints" / LOSSES).unlink()
    started = time.monotonic()
    code, said = resumed(folder, capsys)
    outcome.add(code, said.strip().splitlines()[-2], time.monotonic() - started)
    assert code == 0, said
    after = events_of(folder)
    (held_out,) = of(after, "eval")
    assert held_out["loss"] == of(before, "eval")[0]["loss"]
    assert [event["step"] for event in of(after, "step")] == [1, 2]
    assert after[-1] == of(before, "end")[0]
    assert f"done after 2 steps: loss {after[-1]['loss']:.4f} nats" in said
    code, said = resumed(folder, capsys)
    assert (code, "To train longer, give a larger train.steps=N" in said) == (2, True)


@pytest.mark.faults
@pytest.mark.case(38)
@pytest.mark.parametrize("phase", ["eval", "end"])
def test_a_rank_killed_after_the_last_save(go, phase):
    words = ["train.eval_every=6", "checkpoint.restarts=1"]
    _, text, told = go(f"1:{phase}:6:kill", *words)
    losses = [event["loss"] for event in of(told, "step")]
    assert len(losses) == 6
    assert told[-1] == {"event": "end", "step": 6, "loss": losses[-1], "stopped": False}
    assert len({event["loss"] for event in of(told, "eval")}) == 1
    assert "nan" not in text


# --- links in place of files (case 43) -------------------------------------------------------


@pytest.mark.case(43)
@pytest.mark.parametrize(
    "name", ["lock", "config.toml", "events.jsonl", "plan.json", "logs/rank-0.log"]
)
def test_a_run_writes_no_file_through_a_link(folder, tmp_path, capsys, outcome, name):
    other = tmp_path / "other"
    shutil.copyfile(folder / name, other)
    content = b"[model]\n" if name == "lock" else other.read_bytes()
    other.write_bytes(content)
    (folder / name).unlink()
    (folder / name).symlink_to(other)
    started = time.monotonic()
    code, said = resumed(folder, capsys, "train.steps=3")
    outcome.add(code, said.strip(), time.monotonic() - started)
    assert code == 2
    assert f"{folder / name} is a link, and a run writes no file through one" in said
    assert other.read_bytes() == content


def test_a_new_run_takes_no_lock_through_a_link(config, tmp_path):
    other = tmp_path / "other"
    other.write_text("of somebody else")
    lock = tmp_path / "runs" / "run" / "lock"
    lock.parent.mkdir(parents=True)
    lock.symlink_to(other)
    with pytest.raises(ConfigError, match=r"runs/run/lock is a link"):
        train(config(*TWO), clean_environ(), io.StringIO())
    assert other.read_text() == "of somebody else"


def test_events_and_flight_recorders_follow_no_link(tmp_path):
    other = tmp_path / "other"
    other.write_text("of somebody else, without an end of line")
    (tmp_path / "events.jsonl").symlink_to(other)
    (tmp_path / "rank-0.tmp").symlink_to(other)
    with pytest.raises(ConfigError, match=r"events\.jsonl is a link, and nothing is written"):
        JsonLines(tmp_path / "events.jsonl")
    FlightRecorder.open(tmp_path / "rank-0.recorder", 0, 1)
    assert not (tmp_path / "rank-0.recorder").is_symlink()
    assert other.read_text() == "of somebody else, without an end of line"


def test_an_old_step_that_is_a_link_is_pruned_and_what_it_leads_to_stays(folder, tmp_path):
    root = folder / "checkpoints"
    (newest,) = steps(root)
    elsewhere = tmp_path / "step"
    shutil.copytree(newest, elsewhere)
    (root / "step-00000001").symlink_to(elsewhere)
    (root / ".old-step-00000000-12345678").symlink_to(elsewhere)
    assert purge(root, 1) == [root / "step-00000001"]
    clean(root)
    assert sorted(path.name for path in root.iterdir()) == [
        "held-out.json",
        "latest",
        LOCK,
        newest.name,
    ]
    assert (elsewhere / "manifest.json").is_file()


def test_folders_of_a_run_may_be_links(folder, tmp_path):
    for name in ("checkpoints", "logs"):
        shutil.move(folder / name, tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    assert resumed_folder(folder).path == folder


# --- a fault that comes again (case 39) ------------------------------------------------------


@pytest.mark.case(39)
def test_a_fault_is_known_again_whichever_rank_tells_of_it(config, outcome):
    """All ranks raise alike, and another one is the first each time."""
    job = read_job(write_run(config("layout.dp_replicate=2")))
    attempts, started = [], time.monotonic()

    def attempt(number):
        attempts.append(number)
        rank = number % 2
        error = MeshwrightError(f"the gradient of head.weight (rank {rank}) is not finite")
        record_failure(job.folder, rank, error, SimpleNamespace(place="step 4, log"))
        raise RanksFailed(str(error), failure_of(job.folder, rank, 3), time.time(), 0.0)

    with pytest.raises(RanksFailed) as caught:
        run_attempts(job, attempt, lambda: False)
    assert attempts == [0, 1]
    outcome.add(caught.value.exit_code, str(caught.value), time.monotonic() - started)


# --- pages (case 42) -------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=pwned()><b>&amp;{0}%{x}"


@pytest.mark.case(42)
def test_the_names_of_runs_are_text_on_every_page(config, outcome):
    folders = [write_run(config(f"log.name={HOSTILE}{n}", "layout.dp_replicate=1")) for n in "12"]
    started = time.monotonic()
    pages = [run_page(read_run(folders[0])), comparison_page([read_run(f) for f in folders])]
    for page in pages:
        html = page.html()
        assert "<img" not in html.partition("<body>")[2].partition("<script")[0]
        assert "<img" not in json.dumps(page.figures)
        assert escape(HOSTILE) in html
        scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
        ours = [sha256(one.encode()) for one in scripts]
        (rule,) = re.findall(r"script-src ([^;]*);", html)
        assert [f"'sha256-{b64encode(one.digest()).decode()}'" for one in ours] == rule.split()[:1]
        assert "unsafe" not in rule
        assert "default-src 'none'" in html
    names = [trace["name"] for trace in pages[1].figures["loss-step"][0]["data"]]
    assert names == [escape(f"{HOSTILE}{n}") for n in "12"]
    outcome.add(None, "names are shown letter by letter", time.monotonic() - started)


def test_what_is_not_html_is_escaped_where_it_enters_a_page():
    page = Page("a title", "")
    page.section("one", "<i>", "<s>", prose("<u>"), titled("<b>", grid("<q>")))
    html = page.html()
    for letter in "isubq":
        assert f"<{letter}>" not in html
        assert f"&lt;{letter}&gt;" in html
    assert isinstance(prose("a") + "<b>", Html)
    assert (prose("a") + "<b>").endswith("&lt;b&gt;")


@pytest.mark.often(1)
@pytest.mark.parametrize("harm", ["plan removed", "plan damaged", "config removed"])
def test_a_restart_writes_a_removed_plan_again(harm, corpus, tmp_path, monkeypatch, capsys):
    """The ranks of the first attempt have read it; those of the next could not."""
    where = [f"data.source={corpus}", f"data.cache={tmp_path / 'c'}", f"log.dir={tmp_path}"]
    words = [*TINY, *where, "train.steps=4", "checkpoint.every=2", "log.name=run", "log.trace=0"]
    name, deed = harm.split()
    file = tmp_path / "run" / {"plan": "plan.json", "config": "config.toml"}[name]

    def harmed(job):
        assert file.is_file()
        file.unlink() if deed == "removed" else file.write_text("{")
        restore(job)

    monkeypatch.setattr(local, "restore", harmed)
    monkeypatch.setenv("FAULT", "0:backward:4:kill")
    assert main(["train", *words, "layout.dp_replicate=1"]) == 0
    assert "written again" in capsys.readouterr().err
    assert read_job(tmp_path / "run").layout.world == 1
    assert [
        event["step"] for event in events_of(tmp_path / "run") if event["event"] == "resume"
    ] == [2]
