"""`events.jsonl` on a full disk: the run goes on, and no event is lost or torn."""

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

from meshwright.launch.session import train
from meshwright.train.events import JsonLines
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
    full_words = "cannot be written, the disk is full; the run goes on"
    assert [full_words in text for text in said] == [True, True, False, False]
    assert said[3].endswith("it has all events, 4 of them late")


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
from meshwright.train.events import JsonLines
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


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root, who mounts one")
@pytest.mark.case(41)
def test_training_goes_on_while_the_logs_disk_is_full(config, tmp_path, outcome):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("this system mounts no tmpfs")
    noticed = tmp_path / "noticed"

    class Terminal(io.StringIO):
        def write(self, text):
            if "is full" in text:
                noticed.touch()
            return super().write(text)

    out, started = Terminal(), time.monotonic()
    fill = FILL.replace("FILLER", repr(str(disk / "filler")))
    try:
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
        assert (
            f"the disk of {run.folder} is full: the run goes on without its log" in out.getvalue()
        )
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
