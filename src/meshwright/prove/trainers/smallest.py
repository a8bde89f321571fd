"""Looks for the smallest case in which a program still has a fault, by running it again.

Each run leaves out more: steps, ranks, layers, rows, tokens, sizes. What still shows the fault is
kept, so that with less of anything that was tried the fault is gone, or the program fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from meshwright.prove.trainers.reduction import DEPTH, SIZES, Reduction

MOST_RUNS: Final = 40
_LEAST_LENGTH: Final = 2
# Options of launchers that state the number of processes.
_RANKS: Final = re.compile(r"^(--nproc[-_]per[-_]node|--num[-_]processes|--num[-_]gpus|-np)(=|$)")


@dataclass(frozen=True)
class SmallCase:
    """What is run: a command, how many steps are compared, and what the command leaves out."""

    command: tuple[str, ...]
    steps: int
    reduction: Reduction = field(default_factory=Reduction)

    @property
    def ranks(self) -> int | None:
        """The number of processes that the command states, None if it is not sure."""
        places = list(_rank_places(self.command))
        if len(places) != 1:
            return None
        number = self.command[places[0]].rpartition("=")[2]
        return int(number) if number.isdigit() else None

    def with_ranks(self, count: int) -> SmallCase:
        """Return the case with another number of processes."""
        (place,) = _rank_places(self.command)
        option, equals, _ = self.command[place].rpartition("=")
        word = f"{option}{equals}{count}"
        return replace(self, command=(*self.command[:place], word, *self.command[place + 1 :]))


@dataclass(frozen=True)
class Attempt:
    """A run with less of something, and whether it shows the fault."""

    change: str
    shows: bool
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.change}: " + ("shows it" if self.shows else self.reason)


@dataclass
class SmallestSearch:
    """Reduces a case; `run` returns the verdict that a run has written, None if it has none.

    `verdict` is that of the smallest case so far, `attempts` what was tried.
    """

    case: SmallCase
    verdict: dict[str, Any]
    run: Callable[[SmallCase], dict[str, Any] | None]
    say: Callable[[str], None]
    most_runs: int = MOST_RUNS
    attempts: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fault: dict[str, Any] = self.verdict["faults"][0]

    def search(self) -> SmallCase:
        """Return the smallest case that shows the first fault."""
        for candidates in self._quantities():
            for change, small in candidates:
                if len(self.attempts) >= self.most_runs:
                    return self.case
                if self._try(change, small):
                    break
        return self.case

    def _try(self, change: str, small: SmallCase) -> bool:
        verdict = self.run(small)
        shows, reason = False, "the program ends without a verdict"
        if verdict is not None and verdict["refused"] is not None:
            reason = f"refused: {verdict['refused'][:90]}"
        elif verdict is not None and _size(verdict) == _size(self.verdict):
            reason = "the program computes as much as before"
        elif verdict is not None and verdict["case"]["data_rank_of"] != self._data_ranks(small):
            reason = "ranks that read other rows read the same ones"
        elif verdict is not None:
            shows = any(is_alike(fault, self._fault) for fault in verdict["faults"])
            reason = "another fault" if verdict["faults"] else "the fault is gone"
        attempt = Attempt(change, shows, reason)
        self.attempts.append(attempt)
        self.say(f"  {attempt}")
        if shows and verdict is not None:
            self.case, self.verdict = small, verdict
        return shows

    def _data_ranks(self, small: SmallCase) -> list[int]:
        """Return the data rank of each rank, as far as there are so many ranks."""
        by_rank: list[int] = self.verdict["case"]["data_rank_of"]
        return by_rank if small.ranks is None else by_rank[: small.ranks]

    def _quantities(self) -> Iterator[Iterator[tuple[str, SmallCase]]]:
        """Yield smaller cases of one quantity after another, the smallest first.

        Steps and ranks begin: each run costs less of the next ones.
        """
        yield self._fewer_steps()
        yield self._fewer_ranks()
        for name in self.verdict["case"]["layers"]:
            yield self._fewer("layers", name, 1)
        if DEPTH in self.verdict["case"]["sizes"]:
            yield self._fewer("sizes", DEPTH, 1)
        yield self._fewer("rows", None, 1)
        yield self._fewer("length", None, _LEAST_LENGTH)
        for name, lowest in SIZES.items():
            if name != DEPTH and name in self.verdict["case"]["sizes"]:
                yield self._fewer("sizes", name, lowest)

    def _fewer_steps(self) -> Iterator[tuple[str, SmallCase]]:
        steps = self._fault["step"]
        if steps < self.case.steps:
            yield f"{steps} of {self.case.steps} steps", replace(self.case, steps=steps)

    def _fewer_ranks(self) -> Iterator[tuple[str, SmallCase]]:
        ranks = self.case.ranks
        for count in range(2, ranks or 0):
            if ranks is not None and ranks % count == 0:
                yield f"{count} of {ranks} ranks", self.case.with_ranks(count)

    def _fewer(self, kind: str, name: str | None, lowest: int) -> Iterator[tuple[str, SmallCase]]:
        """Yield cases with less of a quantity: the least, and twice as much each time."""
        facts = self.verdict["case"][kind]
        before: int = facts if name is None else facts.get(name, 0)
        count = lowest
        while count < before:
            reduction = self.case.reduction
            value: Any = count
            if name is not None:
                value = {**getattr(reduction, kind), name: count}
            changes: dict[str, Any] = {kind: value}
            smaller = replace(reduction, **changes)
            change = f"{count} of {before} {kind if name is None else name}"
            yield change, replace(self.case, reduction=smaller)
            count *= 2


def is_alike(fault: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two faults are of one kind, over the same axes, and of the same weight of a layer."""
    keys = ("quantity", "kind", "axes")
    names, other_names = ({_of_any_layer(n) for n in f["tensors"]} for f in (fault, other))
    is_same = all(fault[key] == other[key] for key in keys)
    return is_same and (names == other_names or bool(names & other_names))


def _of_any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _size(verdict: Mapping[str, Any]) -> list[Any]:
    """Return what a smaller case has less of."""
    case = verdict["case"]
    facts = (case[key] for key in ("layers", "sizes", "rows", "length"))
    return [verdict["world"], verdict["steps"], *facts]


def _rank_places(command: Sequence[str]) -> Iterator[int]:
    """Yield the places of words that state a number of processes."""
    for place, word in enumerate(command):
        match = _RANKS.match(word)
        if match is not None:
            yield place if match[2] else min(place + 1, len(command) - 1)
