"""Supervises a run with elastic replicas: a failure ends and restarts one replica alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from meshwright.comm.flight_recorder_file import read_flight_recorder
from meshwright.comm.generations import Announcements, ReplicaGeneration, ranks_of, replica_of
from meshwright.errors import EXIT_DONE, EXIT_STOPPED
from meshwright.runtime.supervise.supervisor import (
    BEGIN_S,
    LocalRanks,
    RankFailure,
    Timing,
    Watchdog,
    raise_failure,
    raise_hang,
)
from meshwright.training.run_folder import Job
from meshwright.units import format_seconds

_ENDED: Final = (EXIT_DONE, EXIT_STOPPED)


class ElasticSupervisor:
    """Watches the ranks of a run, and says which replicas train together.

    `living` are the replicas of the newest generation. Others are loading, or are left out: because
    they were started again `checkpoint.restarts` times in a row without training a step, or because
    they read other files than the ranks that train.
    """

    def __init__(
        self,
        job: Job,
        ranks: LocalRanks,
        announced: Announcements,
        timing: Timing,
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Announce the first generation, of all replicas; `tell` receives the events."""
        self._job, self._ranks, self._announced = job, ranks, announced
        self._timing, self._tell = timing, tell
        self._number, self._is_asked = 0, False
        self._failures: Counter[int] = Counter()  # in a row, of each replica without a step
        self._started_at: dict[int, float] = {}
        self._left_out: set[int] = set()
        self.living: tuple[int, ...] = ()
        self._announce(tuple(range(job.layout.dp_replicate)))

    def _announce(self, replicas: tuple[int, ...]) -> None:
        self._number += 1
        self.living = replicas
        self._announced.announce(ReplicaGeneration(self._number, replicas))
        job = self._job
        cluster, training = job.config.cluster, self._of(replicas)
        self._watchdog = Watchdog(
            job.folder, job.layout.world, cluster.hang, ranks=training, hang_of=cluster.hang_of
        )

    def _of(self, replicas: Collection[int]) -> list[int]:
        """Return the ranks of some replicas, in order."""
        return sorted(rank for replica in replicas for rank in ranks_of(self._job.layout, replica))

    def watch(self, on_poll: Callable[[Watchdog], None], stop: Callable[[], bool]) -> int:
        """Watch the ranks until the run ends, and return its exit code.

        `on_poll` is called at every look; when `stop` returns true, the ranks are asked to stop.
        Raises `RanksFailed` if no replica is left, or if starting one again would not help.
        """
        looked_at = time.monotonic()
        while True:
            on_poll(self._watchdog)
            codes, clock_s = self._ranks.codes(), time.monotonic()
            training = [codes[rank] for rank in self._of(self.living)]
            failed = [rank for rank in self._in_use() if codes[rank] not in (None, *_ENDED)]
            if any(code in _ENDED for code in training):
                return self._end(on_poll)
            if failed:
                self._lose(failed, clock_s - looked_at)
            looked_at = clock_s
            if not self._is_asked and stop():
                self._is_asked = True
                self._ranks.ask_to_stop()
            self._look_for_hangs()
            if not self._is_asked:
                self._let_join()
            time.sleep(self._timing.poll_s)

    def _end(self, on_poll: Callable[[Watchdog], None]) -> int:
        """Return the exit code of a run of which a rank has ended by itself.

        The last thing that a rank does is to wait until all others have written everything. So what
        still runs is about to end, or it is a replica that came to join too late.
        """
        until = time.monotonic() + self._timing.settle_s
        while None in self._ranks.codes() and time.monotonic() < until:
            time.sleep(self._timing.poll_s)
        on_poll(self._watchdog)
        return EXIT_STOPPED if EXIT_STOPPED in self._ranks.codes() else EXIT_DONE

    def _in_use(self) -> list[int]:
        """Return the ranks of all replicas that are not left out."""
        replicas = range(self._job.layout.dp_replicate)
        return self._of([replica for replica in replicas if replica not in self._left_out])

    def _lose(self, failed: Sequence[int], detect_s: float) -> None:
        """Replace the replicas of ranks that have ended.

        Raises `RanksFailed` if they are all that are left, or if a rank says that another start
        would not help: what it raised on purpose, all would.
        """
        layout, codes = self._job.layout, self._ranks.codes()
        if any((codes[rank] or 0) > 0 for rank in failed):  # others may raise the same
            time.sleep(self._timing.settle_s)
        in_use = set(self._in_use())
        failures = [failure for failure in self._ranks.failures() if failure.rank in in_use]
        lost = {replica_of(layout, failure.rank) for failure in failures}
        in_training = [f for f in failures if replica_of(layout, f.rank) in self.living]
        is_final = any(not failure.can_retry or failure.deed for failure in in_training)
        # Whoever has only lost a peer, and waited in vain, does not say which one.
        is_unexplained = not any(failure.is_first_hand for failure in failures)
        if is_final or is_unexplained or lost.issuperset(self.living):
            raise_failure(self._ranks, self._timing, detect_s)
        joins_never = {replica_of(layout, f.rank) for f in failures if not f.can_retry}
        self._left_out |= joins_never - set(self.living)
        self._replace(lost, failures[0], detect_s)

    def _look_for_hangs(self) -> None:
        """Replace a replica that the others wait for, or that does not come to join.

        Raises `RanksFailed` if the flight recorders do not tell who is missing.
        """
        layout, clock_s = self._job.layout, time.monotonic()
        if (hang := self._watchdog.look(self._ranks.pids())) is not None:
            lost = {replica_of(layout, rank) for rank in hang.missing}
            if not lost or lost.issuperset(self.living):
                raise_hang(self._ranks, hang, self._timing)
            self._ranks.ask_for_stacks()
            time.sleep(self._timing.poll_s)
            failure = RankFailure(hang.missing[0], hang.cause, kind="hang")
            self._replace(lost, failure, hang.silent_s)
        cluster = self._job.config.cluster
        limit_s = cluster.hang_of.get("setup", cluster.hang)
        for replica, started_at in list(self._started_at.items()):
            waited_s = clock_s - started_at
            is_late = bool(limit_s) and waited_s > max(limit_s, BEGIN_S)
            if is_late and replica not in self.living and replica not in self._left_out:
                ranks = ranks_of(layout, replica)
                cause = f"replica {replica} has not loaded after {format_seconds(waited_s)}"
                self._replace({replica}, RankFailure(ranks[0], cause, kind="hang"), waited_s)

    def _replace(self, lost: Collection[int], failure: RankFailure, detect_s: float) -> None:
        """End the ranks of some replicas, let the others go on, and start the lost ones again."""
        noticed, ranks = time.time(), self._of(lost)
        self._ranks.end(ranks)
        if not set(lost).isdisjoint(self.living):
            self._announce(tuple(replica for replica in self.living if replica not in lost))
        for replica in lost:
            if any(map(self._has_trained, ranks_of(self._job.layout, replica))):
                self._failures[replica] = 0
            self._failures[replica] += 1
            is_often = self._failures[replica] > self._job.config.checkpoint.restarts
            if is_often or self._is_asked:  # a run that is about to stop needs nobody to join
                self._left_out.add(replica)
        restarted = [replica for replica in sorted(lost) if replica not in self._left_out]
        self._tell(
            {
                "event": "replica_lost",
                "time": noticed,
                "replicas": sorted(lost),
                "ranks": ranks,
                "cause": failure.cause,
                "kind": failure.kind,
                "detect_s": detect_s,
                "left": sorted(self.living),
                "restarts": restarted,
            }
        )
        for replica in restarted:
            self._started_at[replica] = time.monotonic()
        self._ranks.start_again(self._of(restarted))

    def _has_trained(self, rank: int) -> bool:
        """Whether a rank has done a step since it was started."""
        reading = read_flight_recorder(self._job.folder.flight_recorder(rank))
        return reading is not None and reading.stepped_s > 0

    def _let_join(self) -> None:
        """Announce a generation with the replicas whose ranks have all loaded.

        Those that have read something else than the ranks that train are left out.
        """
        layout, joining = self._job.layout, []
        expected = self._digests(self.living[0])
        if None in expected:  # those that are to train are not so far themselves
            return
        for replica in range(layout.dp_replicate):
            if replica in self.living or replica in self._left_out:
                continue
            digests = self._digests(replica)
            if None in digests:
                continue
            if digests <= expected:
                joining.append(replica)
                continue
            self._left_out.add(replica)
            rank = ranks_of(layout, replica)[0]
            cause = (
                f"replica {replica} reads other files, or runs other code, than those that train"
            )
            self._replace({replica}, RankFailure(rank, cause, can_retry=False), 0.0)
        if joining:
            self._announce((*self.living, *joining))

    def _digests(self, replica: int) -> set[str | None]:
        """Return the digests of what a replica's ranks have read; of one that loads still, None."""
        pids = self._ranks.pids()
        ranks = ranks_of(self._job.layout, replica)
        return {self._announced.digest(rank, pids[rank]) for rank in ranks}
