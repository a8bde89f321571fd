"""What ranks of other nodes leave, in rank 0's run folder: seen there, or gathered at the end."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from meshwright.comm import interfaces
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.errors import ConfigError
from meshwright.runtime.machines import gather
from meshwright.runtime.machines.gather import Gathering, check_sights, logged, make_copy, sight
from meshwright.runtime.supervise.diagnosis import diagnose
from meshwright.runtime.supervise.explain import ELSEWHERE, explain, witnesses
from meshwright.runtime.supervise.supervisor import listen_on_loopback
from meshwright.training.run_folder import RunFolder
from runs import TINY, clean_environ


class Kept(dict):
    """A store that is a dictionary."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


def told(folder, **changes):
    seen = {str(folder / "lock"): "x", str(folder / "checkpoints" / "lock"): "y"}
    return {"folder": str(folder), "texts": {"plan.json": "{}"}, "seen": seen, **changes}


def test_a_node_sees_a_folder_by_the_lock_that_rank_0_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "_LOOK_S", 0.0)
    (tmp_path / "checkpoints").mkdir()
    for name, text in (("", "x"), ("checkpoints", "y")):
        (tmp_path / name / "lock").write_text(text)
    assert sight(told(tmp_path)) == [True, True]
    (tmp_path / "lock").write_text("another run's")
    assert sight(told(tmp_path)) == [False, True]


def test_nodes_that_cannot_save_together_are_refused(tmp_path):
    check_sights(told(tmp_path), [("a", [True, True]), ("b", [False, True])])
    with pytest.raises(
        ConfigError, match=rf"b cannot see {tmp_path}/checkpoints, .*checkpoint.dir on one"
    ):
        check_sights(told(tmp_path), [("a", [True, True]), ("b", [False, False])])


def test_what_a_rank_has_left_is_gathered_whole(tmp_path):
    here, there, store = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b"), Kept()
    for folder in (here, there):
        make_copy(told(folder.path))
    there.log(1).write_text("said\n" * 200_000)
    there.failure(1).write_text('{"rank": 1}')
    FlightRecorder.open(there.flight_recorder(1), 1, 2).step(7)
    Gathering(store, there, (1,)).send(1)
    assert Gathering(store, here, (1,)).collect(is_failure=False) == []
    log = here.log(1).read_text()
    assert 200_000 < len(log) < 300_000  # its end
    assert log.endswith("said\n")
    assert here.failure(1).read_bytes() == there.failure(1).read_bytes()
    assert here.flight_recorder(1).read_bytes() == there.flight_recorder(1).read_bytes()


def test_ranks_that_sent_nothing_are_waited_for_only_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "_FAILED_S", 0.2)
    store = Kept()
    gathering = Gathering(store, RunFolder(tmp_path), (1, 2))
    gathering.send(2)  # it has nothing
    assert gathering.collect(is_failure=True) == [1]
    assert Gathering(store, RunFolder(tmp_path), ()).collect(is_failure=False) == []


def test_a_rank_keeps_what_it_prints(tmp_path, capsys):
    log = tmp_path / "logs" / "rank-1.log"

    def work():
        with logged(log, stdout=True):
            print("hello")
            print("well", file=sys.stderr)
            raise ValueError("no more")

    with pytest.raises(ValueError):
        work()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("hello\n", "well\n")
    text = log.read_text()
    assert text.startswith("hello\nwell\nTraceback")
    assert "ValueError: no more" in text
    with logged(log, stdout=False):
        print("a view")
    assert log.read_text() == text


def test_a_flight_recorder_of_another_machine_is_not_held_against_this_one(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(interfaces, "boot_id", lambda: "another")
    FlightRecorder.open(folder.flight_recorder(0), 0, 2).step(3)
    monkeypatch.undo()
    FlightRecorder.open(folder.flight_recorder(1), 1, 2).step(3)
    found = witnesses(folder, 2)
    assert [one.process == ELSEWHERE for one in found] == [True, False]
    assert "rank 0, on another machine, was last in step 3, data; rank 1 is silent" in explain(
        found
    )


def train_apart(tmp_path, corpus, *words, **environ):
    """Train as two nodes, the second of which has a folder of runs of its own."""
    with listen_on_loopback(None) as listener:
        port = listener.getsockname()[1]
    runs, own = tmp_path / "runs", tmp_path / "own"
    for folder in (runs, own):
        folder.mkdir(exist_ok=True)
    words = [
        *(*TINY, "layout.dp_replicate=2", "cluster.timeout=30", "cluster.hang=20"),
        *(f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}", f"log.dir={runs}", *words),
    ]
    started = []
    for rank, mounts in enumerate(("true", f"mount --bind {own} {runs}")):
        script = f'hostname node{rank} && {mounts} && exec "$@"'
        command = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                [*command, sys.executable, "-m", "meshwright", "train", *words],
                env={**clean_environ(), **told, **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    said = [one.communicate(timeout=120)[0].decode() for one in started]
    return [one.returncode for one in started], said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root and unshare"
)
def test_a_crash_on_a_node_with_disks_of_its_own_is_explained_on_the_first(corpus, tmp_path):
    codes, said = train_apart(tmp_path, corpus, "log.name=torn")
    assert all(codes), said
    assert "node1 cannot see" in said[0]
    assert "node1 cannot see" in said[1]

    saves = f"checkpoint.dir={tmp_path / 'steps'}"
    codes, said = train_apart(tmp_path, corpus, "log.name=bad", saves, FAULT="1:forward:3:raise")
    assert all(codes), said
    run = tmp_path / "runs" / "bad"
    failure = json.loads((run / "logs" / "rank-1.failure.json").read_text())
    assert failure["place"] == "step 3, forward"
    assert failure["type"] in (run / "logs" / "rank-1.log").read_text()
    found = diagnose(run)
    assert found.state == "failed"
    assert f"rank 1 raised {failure['type']}" in found.reason
    assert found.witnesses[1].place.startswith("step 3, forward")

    shutil.rmtree(tmp_path / "steps")
    codes, said = train_apart(tmp_path, corpus, "log.name=good", saves)
    assert codes == [0, 0], said
    run = tmp_path / "runs" / "good"
    assert diagnose(run).state == "done"
    assert (run / "logs" / "rank-1.recorder").is_file()
