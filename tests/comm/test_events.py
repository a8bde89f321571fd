"""`events.jsonl` on a full disk: the run goes on, and no event is lost or torn."""

import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import threading
import time
import traceback

import pytest

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.flight_recorder_file import forget, read_flight_recorder
from meshwright.runtime.session import train
from meshwright.runtime.supervise.supervisor import failure_of
from meshwright.training.events import JsonLines
from meshwright.training.run_folder import RunFolder
from runs import clean_environ, faulty_worker


def limit(size):
    """Set how large a file of this process may become; None: any size."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


def apart(body):
    """Run a test in a process of its own: pytest writes files, too, which no limit may stop."""

    def test(tmp_path):
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                body(tmp_path)
            except BaseException:
                limit(None)
                os.write(theirs, traceback.format_exc().encode()[-4000:])
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as failure:
            said = failure.read()
        os.waitpid(pid, 0)
        assert not said, said

    test.__name__ = body.__name__
    return test


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@apart
def test_what_finds_no_room_is_written_later(tmp_path):
    path, said = tmp_path / "events.jsonl", []
    lines = JsonLines(path, said.append)
    events = [{"event": "step", "step": step} for step in range(1, 7)]
    lines.write(events[0])
    whole = path.read_bytes()
    limit(len(whole) + 10)  # of the next line a part goes in: a short write
    for event in events[1:4]:
        lines.write(event)
    full = path.read_bytes()
    other = JsonLines(path, said.append)  # the supervisor's, meanwhile
    other.write({"event": "slow_rank"})
    limit(None)
    other.write({"event": "restart"})
    lines.write(events[4])
    lines.write(events[5])
    lines.close()
    other.close()
    assert full == whole
    found = read(path)
    assert [event for event in found if event["event"] == "step"] == events
    assert [event["event"] for event in found if event["event"] != "step"] == [
        *("slow_rank", "restart")
    ]
    full_words = "cannot be written, the disk is full; the run continues"
    assert [full_words in text for text in said] == [True, True, False, False]
    assert said[3].endswith("it has all events, 4 of them late")


@apart
def test_what_waits_for_room_waits_for_no_other_event(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = JsonLines(path, lambda text: None)
    limit(5)
    lines.write({"event": "restart"})
    lines.catch_up()
    assert path.read_bytes() == b""
    limit(None)
    lines.catch_up()
    lines.catch_up()
    assert read(path) == [{"event": "restart"}]


@apart
def test_what_never_finds_room_is_told(tmp_path):
    path, said = tmp_path / "events.jsonl", []
    lines = JsonLines(path, said.append)
    limit(5)
    lines.write({"event": "end"})
    lines.close()
    assert path.read_bytes() == b""
    assert said[-1].endswith("events.jsonl lacks the last 1 events: the disk is full")


class Short:
    """A file that has room for a part of the next line only, and lets another process write."""

    def __init__(self, file, meanwhile):
        self._file, self._meanwhile = file, meanwhile

    def write(self, line):
        self._file.write(line[:9])
        self._meanwhile()
        return 9

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.case(41)
def test_what_is_cut_off_again_is_ones_own(tmp_path, outcome):
    """The supervisor writes between a short write of rank 0 and its repair: it has to wait."""
    path, said = tmp_path / "events.jsonl", []
    mine, other = (JsonLines(path, said.append) for _ in "12")
    mine.write({"event": "step", "step": 1})
    writer = threading.Thread(target=lambda: other.write({"event": "slow_rank"}))

    def meanwhile():
        writer.start()
        writer.join(0.2)

    whole, mine._file = mine._file, Short(mine._file, meanwhile)
    started = time.monotonic()
    mine.write({"event": "step", "step": 2})
    writer.join()
    mine._file = whole
    mine.close()
    other.close()
    assert [event.get("step") for event in read(path)] == [1, None, 2]
    assert said[1].endswith("it has all events, 1 of them late")  # written as it was closed
    outcome.add(None, said[0].replace(str(path), "events.jsonl"), time.monotonic() - started)


FILL = """
from pathlib import Path
from meshwright.training.events import JsonLines
real, filler = JsonLines.write, Path(FILLER)
def write(self, event):
    if event["event"] == "step" and event["step"] == 2:
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(512)) == 512:
                    pass
            except OSError:
                pass
        while not Path(NOTICED).exists():  # until the supervisor has looked
            time.sleep(0.01)
    if event["event"] == "step" and event["step"] == 5:
        filler.unlink()
    real(self, {**event, "long": 8192 * "x"})  # more than the file's last page has room for
JsonLines.write = write
"""


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small disk needs root, who mounts one")
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("this system mounts no tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.faults
@pytest.mark.case(41)
def test_training_goes_on_while_the_logs_disk_is_full(config, disk, tmp_path, outcome):
    noticed = tmp_path / "noticed"

    class Terminal(io.StringIO):
        def write(self, text):
            if "is full" in text:
                noticed.touch()
            return super().write(text)

    out, started = Terminal(), time.monotonic()
    fill = FILL.replace("FILLER", repr(str(disk / "filler")))
    run = train(
        config(
            *(f"log.dir={disk}", f"checkpoint.dir={tmp_path / 'steps'}", "train.steps=6"),
            "log.trace_memory=false",
        ),
        clean_environ(),
        out,
        command=faulty_worker(fill.replace("NOTICED", repr(str(noticed)))),
    )
    assert run.exit_code == 0
    (said,) = [line for line in out.getvalue().splitlines() if " is full" in line]
    outcome.add(None, said.replace(str(disk), "..."), time.monotonic() - started)
    assert [event["step"] for event in run.events("step")] == [1, 2, 3, 4, 5, 6]
    log = (run.folder / "logs" / "rank-0.log").read_text()
    assert "events.jsonl can be written again; it has all events, 4 of them late" in log
    assert f"the disk of {run.folder} is full: the run continues without its log" in out.getvalue()


def filled(folder, name):
    """Fill what is left of a small disk with a file."""
    with (folder / name).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)) == 512:
            pass


def test_a_recorder_takes_the_room_of_the_one_before_it(disk):
    path = disk / "rank-0.recorder"
    FlightRecorder.open(path, 0, 2).step(7)
    filled(disk, "filler")
    forget(path)
    filled(disk, "more")  # of somebody else, as soon as there is room
    assert read_flight_recorder(path) is None
    recorder = FlightRecorder.open(path, 0, 2, attempt=1)
    found = read_flight_recorder(path)
    assert (found.attempt, found.step, found.place()) == (1, 0, "before it joined the others")
    recorder.step(3)
    assert read_flight_recorder(path).step == 3
    assert sorted(os.listdir(disk)) == ["filler", "more", path.name]


def test_one_that_was_killed_comes_before_one_that_could_not_say_why(tmp_path, monkeypatch):
    """On a full disk rank 0 leaves no word of having lost rank 1."""
    folder = RunFolder(tmp_path)
    full = "; the disk of {} is full, so that it could not say why"
    monkeypatch.setattr(
        "meshwright.runtime.supervise.supervisor.is_full", lambda path: path == tmp_path
    )
    mute, killed = failure_of(folder, 0, 3), failure_of(folder, 1, -9)
    assert mute.cause.endswith(full.format(tmp_path))
    assert (mute.is_first_hand, killed.is_first_hand) == (False, True)
    assert failure_of(folder, 0, 7).is_first_hand  # not a code of ours


def test_a_recorder_without_any_room_says_so(disk):
    filled(disk, "filler")
    with pytest.raises(OSError, match=r"No space left|bytes were written"):
        FlightRecorder.open(disk / "rank-0.recorder", 0, 2)
    assert os.listdir(disk) == ["filler"]


def test_what_is_no_recorder_is_not_kept(tmp_path):
    """Neither one that was cut short, nor a link, through which nothing is written."""
    short, other, link = (tmp_path / name for name in ("short", "other", "link"))
    short.write_bytes(b"MWLEDG01")
    FlightRecorder.open(other, 0, 1)
    link.symlink_to(other)
    before = other.read_bytes()
    for path in (short, link, tmp_path / "none"):
        forget(path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert other.read_bytes() == before


REFILL = """
from pathlib import Path

attempt = int(os.environ["MESHWRIGHT_ATTEMPT"])
def fill(name):
    with (Path(DISK) / name).open("wb", buffering=0) as file:
        try:
            while file.write(bytes(512)) == 512:
                pass
        except OSError:
            pass
if attempt:
    fill(f"again-{rank}")
from meshwright.runtime.ranks.worker import FlightRecorder
phase = FlightRecorder.phase
def entered(self, name):
    phase(self, name)
    if not attempt and rank == 1 and name == "update" and "step 3" in self.place:
        fill("filler")
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt and name == "update" and "step 5" in self.place:
        for one in Path(DISK).glob("again-*"):
            one.unlink(missing_ok=True)
        (Path(DISK) / "filler").unlink(missing_ok=True)
FlightRecorder.phase = entered
"""


@pytest.mark.faults
@pytest.mark.case(51)
def test_ranks_start_again_while_the_logs_disk_is_full(config, disk, tmp_path, outcome):
    """Others of the disk take every byte that is let go of; there is room again two steps later."""
    out, started = io.StringIO(), time.monotonic()
    run = train(
        config(
            *(f"log.dir={disk}", f"checkpoint.dir={tmp_path / 'steps'}", "train.steps=6"),
            *("checkpoint.every=2", "log.trace=0", "layout.dp_replicate=2"),
        ),
        clean_environ(),
        out,
        command=faulty_worker(REFILL.replace("DISK", repr(str(disk)))),
    )
    seconds = time.monotonic() - started
    assert run.exit_code == 0, out.getvalue()
    (restart,) = run.events("restart")
    assert restart["cause"].startswith("rank 1 was killed by SIGKILL")
    assert [event["step"] for event in run.events("step")][-4:] == [3, 4, 5, 6]
    outcome.add(0, restart["cause"], seconds)
