"""Memory of sources that no constant was fitted to, and the interval that holds most of them.

    python -m benchmarks.published_memory --rows ROWS.jsonl [--sweeps 3]

Each source is predicted with constants of memory that were fitted to the others. Prints the errors
of rows that state their memory, how many out-of-memory verdicts are right, and `interval.memory`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published import Measured, read, says_of_memory, stated_memory, summary
from benchmarks.published_fit import fit_memory
from benchmarks.published_left_out import (
    coverage,
    coverage_widened,
    log_error,
    unfitted,
    widened,
    widening,
)
from meshwright.cost.calibration import Calibration, shipped_calibration
from meshwright.units import GIB


@dataclass(frozen=True)
class LeftOut:
    """A row of a source that no constant was fitted to, and what is predicted of it, in bytes.

    `predicted` is of what the row states, or of all that has to fit into `limit` where it states no
    size; `states` is how much of it is model states.
    """

    of: Measured
    predicted: float
    states: float
    limit: float

    @property
    def size(self) -> float:
        """What the row states."""
        return (self.of.gib or 0.0) * GIB

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.size - 1

    @property
    def is_right(self) -> bool:
        """Whether it ran out where that is predicted."""
        return (self.predicted > self.limit) == (self.of.row["status"] == "oom")

    def contradicts(self, low: float, high: float) -> bool:
        """Whether it ran out, or did not, against every size in an interval of factors."""
        rest = self.predicted - self.states
        if self.of.row["status"] == "oom":
            return self.states + high * rest <= self.limit
        return self.states + low * rest > self.limit


def left_out(said: Sequence[Measured], sweeps: int) -> Iterator[LeftOut]:
    """Yield each row by constants that were fitted to the other sources."""
    start = unfitted(shipped_calibration())
    for source in sorted({one.source for one in said}):
        fitted = fit_memory([one for one in said if one.source != source], start, sweeps)
        yield from (_predicted(one, fitted) for one in said if one.source == source)


def _predicted(one: Measured, calibration: Calibration) -> LeftOut:
    held, times = stated_memory(one, calibration)
    size = times * held.allocated if one.gib else held.total
    return LeftOut(one, size, (times if one.gib else 1.0) * held.states, held.limit)


def show(rows: Sequence[LeftOut]) -> None:
    """Print the errors, the verdicts and the interval."""
    stated = [one for one in rows if one.of.gib]
    whole = [one for one in stated if one.of.row.get("mbs") and one.of.row.get("precision")]
    wanted: tuple[tuple[str, Callable[[LeftOut], object]], ...] = (
        *((name, _is_of(name)) for name in sorted({one.of.source for one in whole})),
        ("precision and microbatch stated", lambda one: True),
        ("attention's kernel stated, too", lambda one: one.of.row.get("attn_impl")),
    )
    print(f"memory of sources left out, {len(stated)} rows: {summary(o.error for o in stated)}")
    for name, keep in wanted:
        errors = [one.error for one in whole if keep(one)]
        print(f"  {name:32} {len(errors):3} rows  {summary(errors) if errors else '-'}")
    verdicts = [one for one in rows if not one.of.gib]
    kernel = [one for one in verdicts if one.of.row.get("attn_impl")]
    for name, some in (("all", verdicts), ("attention's kernel stated", kernel)):
        right = sum(one.is_right for one in some) / max(len(some), 1)
        print(f"out of memory or not, {name}: {len(some)} rows, {right:.1%} right")
    pairs = [(one.of.source, log_error(one.predicted, one.states, one.size)) for one in whole]
    low, high = widened(pairs)
    against = sum(one.contradicts(math.exp(-high), math.exp(-low)) for one in verdicts)
    print(
        f"interval.memory: {math.exp(-high):.3f} to {math.exp(-low):.3f} of what is predicted "
        f"beside model states; of sources left out it holds {coverage_widened(pairs):.1%}, where "
        f"percentiles, {widening(pairs):.1f} times narrower, hold {coverage(pairs):.1%}; "
        f"{against} of {len(verdicts)} verdicts contradict it"
    )


def _is_of(source: str) -> Callable[[LeftOut], bool]:
    return lambda one: one.of.source == source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--sweeps", type=int, default=3)
    args = parser.parse_args()
    rows, _ = read(args.rows, shipped_calibration())
    show(list(left_out(says_of_memory(rows), args.sweeps)))


if __name__ == "__main__":
    main()
