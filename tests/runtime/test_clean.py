"""`meshwright clean`: what it lists, what it removes, and what it never does."""

import json
import mmap
import os
import time

import pytest

from meshwright.cli import main
from meshwright.cli.clean import format_age
from meshwright.runtime.supervise.attempts import Word
from meshwright.runtime.supervise.disk import DiskEntry, DiskSelection, size_of
from meshwright.runtime.supervise.lock import RunLock

DAY = 86400


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three runs, of today, of 10 and of 20 days ago, and what is none."""
    monkeypatch.chdir(tmp_path)
    for name, days in (("new", 0), ("mid", 10), ("old", 20)):
        folder = tmp_path / "runs" / name
        (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
        (folder / "checkpoints" / "step-00000002" / "weights").write_bytes(bytes(50_000))
        for file in ("plan.json", "config.toml", "events.jsonl", "lock"):
            (folder / file).write_text("")
        then = time.time() - days * DAY
        os.utime(folder / "events.jsonl", (then, then))
    (tmp_path / "runs" / "latest").symlink_to("old")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "plan.md").write_text("mine")
    (tmp_path / "runs" / ".job-1").write_text(word_of(tmp_path / "runs" / "old"))
    return tmp_path / "runs"


def word_of(folder):
    """What a job that is to come back leaves of its run."""
    return json.dumps(Word(str(folder), "", "", [], None, [0, 0])._asdict())


def left(runs):
    return sorted(path.name for path in runs.iterdir())


def clean(capsys, *words):
    code = main(["clean", *words])
    return code, capsys.readouterr().out.splitlines()


def test_nothing_goes_without_being_told_to(runs, capsys):
    before = left(runs)
    code, lines = clean(capsys)
    assert (code, [line.split()[0] for line in lines]) == (0, ["keep", "keep", "keep", "3"])
    code, lines = clean(capsys, "--keep", "1")
    assert [line.split()[0] for line in lines] == ["keep", "remove", "remove", "would"]
    assert [line.split()[4] for line in lines[:3]] == ["runs/new", "runs/mid", "runs/old"]
    assert lines[1].endswith("1 step saved")
    assert lines[-1].startswith("would remove 2 of 3, ")
    assert left(runs) == before


def test_delete_has_to_say_what(runs, capsys):
    before = left(runs)
    assert main(["clean", "--delete"]) == 2
    assert "--delete removes what --keep N or --older-than AGE chooses" in capsys.readouterr().err
    assert left(runs) == before
    assert main(["clean", "nowhere"]) == 2


def test_what_is_chosen_goes_and_nothing_else(runs, capsys):
    code, lines = clean(capsys, "--keep", "2", "--delete")
    assert (code, lines[-1].partition(",")[0]) == (0, "removed 1 of 3")
    assert left(runs) == ["mid", "new", "notes"]  # nor what pointed to it
    code, lines = clean(capsys, "--older-than", "15d", "--delete")
    assert lines[-1] == "removed 0 of 2, 0 B"
    clean(capsys, "--older-than", "9d", "--delete")
    assert left(runs) == ["new", "notes"]


def test_a_live_run_is_never_removed(runs, capsys):
    with RunLock(runs / "old" / "lock"):
        code, lines = clean(capsys, "--keep", "0", "--delete")
        assert code == 0
        assert lines[2].startswith("in use ")
        assert f"in use by process {os.getpid()}" in lines[2]
        assert left(runs) == [".job-1", "latest", "notes", "old"]
    holder = {"pid": 1, "host": "another-host", "time": 0.0}
    (runs / "old" / "lock").write_text(json.dumps(holder))  # whose locks are not seen here
    clean(capsys, "--keep", "0", "--delete")
    assert "old" in left(runs)


def test_links_are_not_followed(runs, tmp_path, capsys):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    (runs / "old" / "link").symlink_to(kept)
    (runs / "mid" / "lock").unlink()
    (runs / "mid" / "lock").symlink_to(kept / "file")
    (runs / "linked").symlink_to(runs / "new")
    code, lines = clean(capsys, "--keep", "0", "--delete")
    assert code == 1
    assert lines[-2] == (
        "not removed: runs/mid: runs/mid/lock is a link, and nothing is written through it"
    )
    assert (kept / "file").read_text() == "mine"
    assert "old" not in left(runs)


def test_steps_that_are_elsewhere_stay(runs, tmp_path, capsys):
    steps = tmp_path / "steps"
    (steps / "step-00000001").mkdir(parents=True)
    (runs / "old" / "config.toml").write_text(f'[checkpoint]\ndir = "{steps}"\n')
    _, lines = clean(capsys, "--keep", "2", "--delete")
    assert lines[2].endswith(f"1 step saved; steps in {steps} stay")
    assert (steps / "step-00000001").is_dir()


def test_prepared_corpora_go_unless_somebody_reads_them(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / "stores" / name).mkdir(parents=True)
        (tmp_path / "stores" / name / "tokens").write_bytes(bytes(8192))
    (tmp_path / "calibrations").mkdir()
    words = [str(tmp_path), "--caches", "--keep", "0"]
    with open(tmp_path / "stores" / "a" / "tokens", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    clean(capsys, *words)
    assert len(left(tmp_path / "stores")) == 2
    _, lines = clean(capsys, *words, "--delete")
    assert any(f"in use by process {os.getpid()}" in line for line in lines)
    assert left(tmp_path / "stores") == ["a"]
    mapped.close()
    clean(capsys, *words, "--delete")
    assert left(tmp_path) == ["calibrations", "stores"]
    assert left(tmp_path / "stores") == []


def test_json_says_what_went(runs, capsys):
    main(["clean", "--keep", "2", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [one["chosen"] for one in told["entries"]] == [False, False, True]
    assert told["removed"] == []
    main(["clean", "--keep", "2", "--json", "--delete"])
    assert json.loads(capsys.readouterr().out)["removed"] == ["runs/old"]


def test_both_choices_have_to_agree(tmp_path):
    made = [DiskEntry(tmp_path / str(days), 1, -days * DAY, "") for days in range(5)]
    assert DiskSelection(keep=3).of(made, unix_time=0.0) == made[3:]
    assert DiskSelection(age_s=2 * DAY).of(made, unix_time=0.0) == made[2:]
    assert DiskSelection(keep=1, age_s=3 * DAY).of(made, unix_time=0.0) == made[3:]
    assert DiskSelection().of(made, unix_time=0.0) == []


def test_sizes_and_ages(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert 100_000 <= size_of(tmp_path) < 150_000
    assert [format_age(s) for s in (5, 90, 7300, 3 * DAY)] == ["0m", "1m", "2h", "3d"]
