"""`HeldOut`: records losses on the held-out split, and which step has the lowest.

The batches of an evaluation are `Interruptible`: they end when any rank is asked to stop.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import torch.distributed as dist

from meshwright.checkpoint.saver import Saver
from meshwright.comm.world import World, exchange
from meshwright.errors import CheckpointError
from meshwright.files import read_bytes, write_atomic
from meshwright.parallel.batch import Batch
from meshwright.parsing import foreign, parse_json
from meshwright.training.run_folder import Job
from meshwright.units import counted

# Seconds between two votes, about: how long a request to stop waits for its answer.
_VOTE_S: Final = 0.5


class Interruptible:
    """An iterable of batches that ends early, on all ranks together, when any is asked to stop.

    Every rank creates one and iterates over it alike. The ranks vote before the first batch and
    then about every half second; in each vote, they agree on the number of batches until the next.
    After the iteration, `is_broken_off` says whether batches were left out.
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


LOSSES: Final = "held-out.json"


class Best(NamedTuple):
    """The lowest held-out loss, in nats, its step, and the number of evaluations `since` then.

    Before the first finite loss, the step is 0.
    """

    step: int = 0
    loss: float = math.inf
    since: int = 0

    @classmethod
    def of(cls, losses: Iterable[tuple[int, float]]) -> Best:
        """Return the lowest of (step, loss) pairs in order; of equal losses, the first."""
        best = cls()
        for step, loss in losses:
            is_lower = loss < best.loss
            best = cls(step, loss) if is_lower else best._replace(since=best.since + 1)
        return best

    def is_final(self, evaluations: int) -> bool:
        """Whether the last `evaluations` evaluations (0: no limit) were no better, so training
        stops.
        """
        return 0 < evaluations <= self.since

    @property
    def told(self) -> str:
        """A sentence about the lowest loss and the evaluations since."""
        lowest = f"the lowest held-out loss was {self.loss:.4f} at step {self.step}"
        text = lowest if self.step else "no held-out loss was finite"
        return f"{text}, and no lower one in {counted(self.since, 'evaluation')}"


class HeldOut:
    """The held-out losses of a run, in a file next to the saved steps, so that resuming finds them.

    A saved step cannot contain its own loss, because it is saved before it is evaluated.
    """

    def __init__(self, job: Job, world: World, saver: Saver, step: int) -> None:
        """Read the losses up to `step`; a collective. Later losses in the file are discarded."""
        self._path, self._writes, self._saver = job.checkpoints / LOSSES, world.rank == 0, saver
        self._patience = job.config.train.stop_after_evals
        self._keeps_best = job.config.checkpoint.keep_best
        text = "[]"
        if step and self._writes and self._path.is_file():
            text = read_bytes(self._path).decode(errors="replace")
        text = exchange(text, dist.group.WORLD if world.size > 1 else None)[0]
        with foreign(str(self._path), CheckpointError):
            stored = parse_json(text)
            self.losses = [
                (int(evaluated), float(loss)) for evaluated, loss in stored if evaluated <= step
            ]
        self.best = Best.of(self.losses)
        self.keep(self.best.step)

    @property
    def is_over(self) -> bool:
        """Whether early stopping ends the run: too many evaluations without a lower loss."""
        return self.best.is_final(self._patience)

    def wants(self, step: int) -> bool:
        """Whether a step should be saved: it is the best, or early stopping ends the run."""
        return self.is_over or (self._keeps_best and self.best.step == step)

    def lacks(self, step: int) -> bool:
        """Whether a step has not been evaluated; the same on all ranks."""
        return all(evaluated != step for evaluated, _ in self.losses)

    def keep(self, step: int) -> None:
        """Mark a saved step as the best, if it is and the config asks for it; a collective."""
        if self._keeps_best and self.best.step == step:
            self._saver.keep_best(step)

    def add(self, step: int, loss: float) -> None:
        """Record the loss of a step, which may be saved already; a collective.

        Raises `CheckpointError` for a disk error.
        """
        self.losses = [*(entry for entry in self.losses if entry[0] < step), (step, loss)]
        self.best = Best.of(self.losses)
        if self._writes:
            # As text: JSON has no word for what is not finite.
            text = json.dumps([[evaluated, str(loss)] for evaluated, loss in self.losses])
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._path, text.encode())
            except OSError as error:
                raise CheckpointError(f"{self._path} was not written: {error}") from error
        self.keep(step)
