"""One rank of a run with elastic replicas: it outlives the process groups that it trains in."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.generations import ELASTIC, Announcements, replica_of
from meshwright.comm.regroup import await_generation, join_generation, leave_generation
from meshwright.comm.rendezvous import Rendezvous
from meshwright.comm.world import World, leave
from meshwright.data import Dataset, StreamedDataset, open_data
from meshwright.errors import EXIT_DONE, EXIT_STOPPED
from meshwright.files import sha256_bytes
from meshwright.program.events import Event
from meshwright.runtime.ranks.worker import StopRequest, digests_of, sinks_of
from meshwright.runtime.supervise.explain import lost_a_peer
from meshwright.training.elastic import Elastic, Regroup
from meshwright.training.events import Sink
from meshwright.training.loop import Summary, train
from meshwright.training.run_folder import Job

# The supervisor has this long to see which rank is gone, and to announce the next generation.
_WORD_S: Final = 30.0


class ElasticRank:
    """One rank of a run with elastic replicas; `rendezvous` has its number in the run's layout."""

    def __init__(
        self,
        job: Job,
        rendezvous: Rendezvous,
        recorder: FlightRecorder,
        stop: StopRequest,
        environ: Mapping[str, str],
    ) -> None:
        """Load the data, and say that this rank can join."""
        self._job, self._recorder, self._stop, self._environ = job, recorder, stop, environ
        self._rank, self._resume = rendezvous.rank, rendezvous.attempt > 0 or job.resume
        self._replica = replica_of(job.layout, self._rank)
        recorder.phase("load")
        config = job.config
        self._dataset: Dataset | StreamedDataset = open_data(
            config.data, job.cache, vocab_size=config.model.vocab_size
        )
        digests = digests_of(job, self._dataset, has_weights=not self._resume)
        digest = sha256_bytes(json.dumps(digests, sort_keys=True).encode())
        self._announced = Announcements(Path(environ[ELASTIC]))
        self._replicas = Elastic(self._announced, job.layout, self._rank, digest)
        self._sinks: list[Sink] | None = None
        self._announced.ready(self._rank, os.getpid(), digest)

    def run(self) -> int:
        """Train until the run ends, in one generation after another; returns the exit code."""
        lost: Exception | None = None
        while True:
            after = self._replicas.generation.number
            wait_s = _WORD_S if after else math.inf
            generation = await_generation(self._announced, after, self._replica, wait_s)
            if generation is None:
                assert lost is not None
                raise lost
            self._replicas.generation = generation
            self._recorder.beat()
            try:
                summary = self._train()
            except Regroup:
                self._leave()
            except Exception as error:
                lost = error
                if not is_lost(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they refer to the former model
                self._leave()
            else:
                if summary is not None:
                    return EXIT_STOPPED if summary.stopped else EXIT_DONE

    def _leave(self) -> None:
        """Close this generation's groups, with the step that is under way abandoned."""
        self._replicas.left_at = time.monotonic()
        leave_generation()
        self._replicas.abandon()

    def _train(self) -> Summary | None:
        """Train with the ranks of a generation; None if a newer one is announced before it meets.

        Raises `Regroup` after a step in which the ranks have seen a newer one, and what gloo raises
        when one of them has ended.
        """
        job, generation = self._job, self._replicas.generation
        joined = join_generation(
            self._announced,
            generation,
            job.layout,
            self._rank,
            self._recorder,
            job.config.cluster.timeout,
        )
        if joined is None:
            return None
        world: World = joined
        self._change_sinks(world)
        generation_job = replace(job, layout=generation.layout(job.layout))

        def emit(event: Event) -> None:
            for sink in self._sinks or ():
                sink.write(event)

        with CollectiveRecorder(self._recorder, world.device):
            summary = train(
                generation_job,
                world,
                self._dataset,
                emit,
                lambda: self._stop.asked,
                self._resume,
                self._replicas,
            )
        self._close_sinks()
        world.barrier()
        leave()
        return summary

    def _change_sinks(self, world: World) -> None:
        """Open the log where this rank has become the first, and close it where it no longer is."""
        if world.rank > 0:
            self._close_sinks()
        elif self._sinks is None:
            self._sinks = sinks_of(self._job, self._environ)

    def _close_sinks(self) -> None:
        for sink in self._sinks or ():
            sink.close()
        self._sinks = None


def run_elastic_rank(
    job: Job,
    rendezvous: Rendezvous,
    recorder: FlightRecorder,
    stop: StopRequest,
    environ: Mapping[str, str],
) -> int:
    """Train as one rank of a run with elastic replicas, and return the exit code."""
    return ElasticRank(job, rendezvous, recorder, stop, environ).run()


def is_lost(error: Exception) -> bool:
    """Whether an exception may mean that another rank has ended, or has left its groups."""
    failure = {"type": type(error).__name__, "message": str(error)}
    return lost_a_peer(failure) or (isinstance(error, RuntimeError) and "gloo" in str(error))
