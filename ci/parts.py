"""The table of what CI runs: each part with its command, its minutes, and when it is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ci.extras import EXTRAS
from ci.processor_table import TABLE
from ci.turns import order_of, seed_of

# A part is ended after so many times its minutes: other machines are slower, and some are busy.
FACTOR: Final = 3.5
# But not before so many seconds: what takes a minute varies most.
LEAST_LIMIT_S: Final = 600.0
# The slow tests and those of faults are dealt into so many shares, of which a commit has one.
SLOW_SHARES: Final = 30
FAULT_SHARES: Final = 5
# Layouts drawn from the tables of 4, 8 and 16 ranks, and at random; mutants.
DRAWN: Final = {4: 8, 8: 8, 16: 1}
RANDOM_LAYOUTS: Final = 100
# Minutes that these take on a fast machine, and at most.
_DRAWN_MINUTES: Final = {4: (1, 2), 8: (2, 3), 16: (1, 2)}
# At least and at most, of the table of 2 ranks and the random layouts: they take what the others
# leave. A slow machine leaves layouts out and says how many. Their order is random, so that other
# commits prove others.
_SHARED_MINUTES: Final = (2.0, 8.0)
DRAWN_MUTANTS: Final = 6
# On the processor whose turn it is, a commit runs one of so many shares of what `make test` runs.
PROCESSOR_SHARES: Final = 20
# Tests that are drawn to find those that fail now and then, and minutes for the draw.
FLAKES_DRAWN: Final = 200
_FLAKES_MINUTES: Final = (1.5, 4.0)
# What the extras groups test, and so no other part of the slow tests and those of faults.
OF_EXTRAS: Final = tuple(test for one in EXTRAS.values() for test in one.tests)
# What tests may skip: no machine of CI has a GPU, and not all have the shared files.
MAY_SKIP: Final = ("needs a GPU", "the shared", "the published", "no golden folders")
MAYBE: Final = tuple(f"--may-skip={one}" for one in (*OF_EXTRAS, *MAY_SKIP))
_SLOW: Final = ("slow and not perf", "-n", "2", *(f"--may-skip={one}" for one in MAY_SKIP))
PYTHON: Final = ".venv/bin/python"
_PROCESSORS: Final = (PYTHON, "-m", "ci.processors")
_FAULTS: Final = ("faults and not perf", "-n", "2")
MESHWRIGHT: Final = ".venv/bin/meshwright"
MUTANTS: Final = (PYTHON, "-m", "benchmarks.mutants")
REPORT: Final = ("--junitxml", "{junit}")


@dataclass(frozen=True)
class Part:
    """A part: a command, in which {junit} is the file of its report, and how it is run.

    `minutes` is what it takes on two cores. Required ones are always run; the others while the
    time that a commit has allows it. A part with `between` does as much as it can in the minutes
    that replace {minutes} in its command: its share of what is left, but at least and at most
    these. `why` says what chose it where a commit's hash did.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    is_required: bool = True
    needs: frozenset[str] = frozenset({"setup"})
    between: tuple[float, float] | None = None
    why: str = ""

    @property
    def expected_s(self) -> float:
        """Seconds that it takes."""
        return 60 * self.minutes

    @property
    def limit_s(self) -> float:
        """Seconds after which it is ended."""
        return max(LEAST_LIMIT_S, FACTOR * self.expected_s)


def tests(*words: str) -> tuple[str, ...]:
    """Return the command of tests that may not be skipped."""
    return (PYTHON, "-m", "pytest", "-p", "ci.plugin", "--no-skips", *REPORT, *words)


def of_marks(marks: str, *words: str) -> tuple[str, ...]:
    """Return the command of the tests with such marks, but for those of the extras."""
    return tests("-m", marks, *words, *(f"--ignore={test}" for test in OF_EXTRAS))


ALWAYS: Final = (
    Part("setup", ("make", "setup"), 1.2, needs=frozenset()),
    Part("lint", ("make", "lint"), 0.1),
    Part("types", ("make", "types"), 0.5),
)


def of_commit(commit: str) -> list[Part]:
    """Return the parts of a commit: those of every one, and those that its hash draws."""
    first, second, *_ = order_of(commit, "extras", tuple(EXTRAS))
    return [
        *ALWAYS,
        _share("faults", _FAULTS, FAULT_SHARES, 5, commit),
        _test(commit),
        *(_drawn(world, number, commit) for world, number in DRAWN.items()),
        _share("slow", _SLOW, SLOW_SHARES, 4, commit),
        _processor(commit),
        _extra(first, f"one of {len(EXTRAS)} groups"),
        _table_of_two(commit),
        _random_for_minutes(commit),
        _flakes_for_minutes(commit),
        _mutants(commit),
        _extra(second, f"another of {len(EXTRAS)}", is_required=False),
    ]


def everything(commit: str) -> list[Part]:
    """Return all parts: no turns and no draws, but for the seed of the random layouts."""
    return [
        *ALWAYS,
        Part("faults", of_marks(*_FAULTS), 9),
        _test(commit),
        Part("slow", of_marks(*_SLOW), 45),
        *(_extra(name, "") for name in EXTRAS),
        *(
            Part(
                f"matrix-{world}", (MESHWRIGHT, "prove", "--matrix", "--world", str(world)), minutes
            )
            for world, minutes in ((2, 10), (4, 25), (8, 90), (16, 20))
        ),
        _random(commit),
        Part("mutants", MUTANTS, 60),
        Part("processors", (*_PROCESSORS, "--all"), 90),
        _flakes(commit),
        # A machine that CI lends is not idle enough to be held to seconds for each change.
        Part("perf", tests("-m", "perf", *MAYBE), 4),
    ]


def _test(commit: str) -> Part:
    """What `make test` runs, but with other examples of what hypothesis draws."""
    seed = seed_of(commit, "test")
    drawn = ("--hypothesis-profile", "drawn", "--hypothesis-seed", str(seed))
    return Part("test", tests("-n", "auto", *drawn, *MAYBE), 5, why=f"hypothesis seed {seed}")


def _table_of_two(commit: str) -> Part:
    seed = seed_of(commit, "matrix-2")
    words = ("prove", "--matrix", "--world", "2", "--seed", str(seed))
    command = (MESHWRIGHT, *words, "--minutes", "{minutes}")
    return Part("matrix-2", command, 4, between=_SHARED_MINUTES, why=f"seed {seed}")


def _drawn(world: int, number: int, commit: str) -> Part:
    seed = seed_of(commit, f"matrix-{world}")
    words = ("prove", "--matrix", "--world", str(world), "--draw", str(number), "--seed", str(seed))
    minutes, most = _DRAWN_MINUTES[world]
    command = (MESHWRIGHT, *words, "--minutes", str(most))
    return Part(f"matrix-{world}", command, minutes, why=f"{number} layouts, seed {seed}")


def _random(commit: str) -> Part:
    seed = seed_of(commit, "random")
    words = ("prove", "--random", str(RANDOM_LAYOUTS), "--seed", str(seed))
    return Part("random", (MESHWRIGHT, *words), 10, why=f"{RANDOM_LAYOUTS} layouts, seed {seed}")


def _random_for_minutes(commit: str) -> Part:
    whole = _random(commit)
    command = (*whole.command, "--minutes", "{minutes}")
    return replace(whole, command=command, minutes=5, between=_SHARED_MINUTES)


def _processor(commit: str) -> Part:
    """The first that the machine can emulate of all processors, in the order of their turns."""
    order = order_of(commit, "processors", tuple(TABLE))
    share = order_of(commit, "processor-share", range(1, PROCESSOR_SHARES + 1))[0]
    command = (*_PROCESSORS, *order, "--first", "--share", f"{share}/{PROCESSOR_SHARES}")
    why = f"{order[0]}, share {share} of {PROCESSOR_SHARES}"
    return Part("processors", command, 2, why=why)


def _flakes(commit: str) -> Part:
    seed = seed_of(commit, "flakes")
    words = ("--draw", str(FLAKES_DRAWN), "--seed", str(seed))
    why = f"{FLAKES_DRAWN} tests, seed {seed}"
    return Part("flakes", (PYTHON, "-m", "ci.flakes", *words), 15, why=why)


def _flakes_for_minutes(commit: str) -> Part:
    whole = _flakes(commit)
    command = (*whole.command, "--minutes", "{minutes}")
    return replace(whole, command=command, minutes=2, between=_FLAKES_MINUTES)


def _share(name: str, marks: tuple[str, ...], shares: int, minutes: float, commit: str) -> Part:
    share = order_of(commit, name, range(1, shares + 1))[0]
    command = of_marks(*marks, "--share", f"{share}/{shares}")
    return Part(name, command, minutes, why=f"share {share} of {shares}")


def _mutants(commit: str) -> Part:
    seed = seed_of(commit, "mutants")
    words = (*MUTANTS, "--draw", str(DRAWN_MUTANTS), "--seed", str(seed))
    why = f"{DRAWN_MUTANTS} mutants, seed {seed}"
    return Part("mutants", words, 5, is_required=False, why=why)


def _extra(name: str, why: str, is_required: bool = True) -> Part:
    words = (PYTHON, "-m", "ci.extras", name, *REPORT)
    return Part(f"extras-{name}", words, EXTRAS[name].minutes, is_required, why=why)
