"""`Interruptible`: the batches of an evaluation, until any rank is asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from meshwright.comm.world import World
from meshwright.parallel.batch import Batch

# Seconds between two votes, about: how long a request to stop waits for its answer.
_VOTE_S: Final = 0.5


class Interruptible:
    """Yields batches; in between, all ranks vote whether to continue.

    Every rank creates one and iterates over it alike. The ranks vote before the first batch and
    then every half second; in the vote, they agree on the number of batches until the next one.
    `is_broken_off` says, after the iteration, whether batches were left out.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        world: World,
        asked_to_stop: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batches, self._world = batches, world
        self._asked_to_stop, self._clock = asked_to_stop, clock
        self.is_broken_off = False

    def __iter__(self) -> Iterator[Batch]:
        since, done, due = self._clock(), 0, 0
        for batch in self._batches:
            if done == due:
                current = self._clock()
                report = [float(self._asked_to_stop()), current - since]
                votes, seconds = self._world.sum_on_host(report)
                if votes > 0:
                    self.is_broken_off = True
                    return
                # Every rank computes the same from the sum over all of them.
                mean = seconds / self._world.size
                due = max(1, min(2 * done, int(done * _VOTE_S / max(mean, 1e-9))))
                since, done = current, 0
            done += 1
            yield batch
