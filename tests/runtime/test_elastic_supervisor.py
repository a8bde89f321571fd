"""What a supervisor of elastic replicas decides, with ranks that are not processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.comm.generations import Announcements
from meshwright.layout import Layout
from meshwright.runtime.supervise.elastic import ElasticSupervisor
from meshwright.runtime.supervise.supervisor import RankFailure, RanksFailed, Timing
from meshwright.training.run_folder import RunFolder

TIMING = Timing(poll_s=0.0, settle_s=0.0, trace_s=0.0)


class Ranks:
    """Ranks of two replicas, whose ends are set by a test; each start has another process id."""

    def __init__(self, folder, world):
        self.folder, self.failed = folder, {}
        self.processes = list(range(100, 100 + world))

    def codes(self):
        return [1 if rank in self.failed else None for rank in range(len(self.processes))]

    def pids(self):
        return self.processes

    def failures(self):
        return [failure for _, failure in sorted(self.failed.items())]

    def end(self, ranks):
        pass

    def start_again(self, ranks):
        for rank in ranks:
            self.failed.pop(rank, None)
            self.processes[rank] += 100

    def ask_to_stop(self):
        pass


class Watched:
    """A supervisor of two replicas of one rank each, and the events that it has told."""

    def __init__(self, folder: Path, replicas=2, restarts=3):
        layout = Layout(dp_replicate=replicas)
        config = SimpleNamespace(
            cluster=SimpleNamespace(hang=600.0, hang_of={}),
            checkpoint=SimpleNamespace(restarts=restarts),
        )
        self.run = RunFolder(folder / "run")
        self.announced = Announcements(folder)
        self.ranks, self.events = Ranks(self.run, replicas), []
        job = SimpleNamespace(layout=layout, config=config, folder=self.run)
        self.supervisor = ElasticSupervisor(
            job, self.ranks, self.announced, TIMING, self.events.append
        )
        for rank in range(replicas):
            self.ready(rank)

    def ready(self, rank, digest="same"):
        self.announced.ready(rank, self.ranks.processes[rank], digest)

    def fail(self, *failures):
        self.ranks.failed |= {failure.rank: failure for failure in failures}

    def look(self, times=1, *, stop=False):
        """Watch for some looks, and return who trains together then."""
        count = 0

        def on_poll(watchdog):
            nonlocal count
            count += 1
            if count > times:
                raise StopIteration

        with pytest.raises(StopIteration):
            self.supervisor.watch(on_poll, lambda: stop)
        return self.announced.newest().replicas


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_a_replica_joins_once_it_has_loaded(watched):
    assert watched.look() == (0, 1)
    watched.fail(RankFailure(1, "killed", kind="killed"))
    assert watched.look() == (0,)
    assert watched.events[0]["restarts"] == [1]
    assert watched.look(3) == (0,)
    watched.ready(1)
    assert watched.look() == (0, 1)


def test_a_replica_with_other_files_is_left_out_and_the_others_go_on(watched):
    watched.fail(RankFailure(1, "killed", kind="killed"))
    watched.look()
    watched.ready(1, "other")
    assert watched.look(3) == (0,)
    assert "replica 1 reads other files" in watched.events[-1]["cause"]
    assert watched.events[-1]["restarts"] == []


def test_a_replica_waits_for_those_that_are_to_train_to_load(tmp_path):
    watched = Watched(tmp_path)
    (tmp_path / "ready-0-100").unlink()
    watched.fail(RankFailure(1, "killed", kind="killed"))
    watched.look()
    watched.ready(1)
    assert watched.look(2) == (0,)
    watched.ready(0)
    assert watched.look() == (0, 1)


def test_ranks_that_only_lost_a_peer_restart_all(watched):
    """Else the healthy ones would be ended, and those kept that they waited for."""
    watched.fail(RankFailure(0, "rank 0 raised: Timed out", is_first_hand=False))
    with pytest.raises(RanksFailed):
        watched.supervisor.watch(lambda watchdog: None, lambda: False)


@pytest.mark.parametrize(
    "failure",
    [
        RankFailure(1, "rank 1: its file is missing", can_retry=False),
        RankFailure(1, "rank 1: step 4: a gradient is not finite", deed="step 4"),
    ],
    ids=["refused", "on purpose"],
)
def test_what_all_replicas_would_raise_ends_all(watched, failure):
    watched.fail(failure)
    with pytest.raises(RanksFailed) as failed:
        watched.supervisor.watch(lambda watchdog: None, lambda: False)
    assert failed.value.first.can_retry == failure.can_retry


def test_all_replicas_lost_at_once_restart_all(watched):
    watched.fail(RankFailure(0, "killed", kind="killed"), RankFailure(1, "killed", kind="killed"))
    with pytest.raises(RanksFailed):
        watched.supervisor.watch(lambda watchdog: None, lambda: False)


def test_two_replicas_lost_at_once_leave_the_third(tmp_path):
    watched = Watched(tmp_path, replicas=3)
    watched.fail(RankFailure(0, "killed", kind="killed"), RankFailure(2, "killed", kind="killed"))
    assert watched.look() == (1,)
    watched.ready(2)
    assert watched.look() == (1, 2)
    watched.ready(0)
    assert watched.look() == (1, 2, 0)


def test_a_replica_is_left_out_after_restarts_without_a_step(tmp_path):
    watched = Watched(tmp_path, restarts=2)
    for restarts in ([1], [1], []):
        watched.fail(RankFailure(1, "killed", kind="killed"))
        watched.look()
        assert watched.events[-1]["restarts"] == restarts
        watched.ready(1)
        assert watched.look() == ((0, 1) if restarts else (0,))


def test_a_replica_that_is_lost_while_the_run_stops_is_lost_once(watched):
    """One that still imports is ended by the request itself."""
    watched.look(stop=True)
    watched.fail(RankFailure(1, "killed by SIGTERM", kind="killed"))
    assert watched.look(5) == (0,)
    assert [event["restarts"] for event in watched.events] == [[]]
