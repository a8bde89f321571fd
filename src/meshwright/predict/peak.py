"""`peak`: the peak moment of a step on a rank: the same as `timeline`'s, found faster.

Most actions of a step repeat an earlier one: what an action allocates and releases depends on its
kind, the layers of its stage and the state of the stage's units, not on its microbatch. So each
distinct action is performed once, and its repetitions, in any stage with the same layers, are added
up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshwright.predict.byte_count import ByteCount, PredictedMoment
from meshwright.predict.timeline import Walk, of_layer
from meshwright.predict.unit_sizes import UnitsState
from meshwright.program.actions import Action, Table
from meshwright.program.lower import Program


def peak(program: Program, rank: int, table: Table | None = None) -> PredictedMoment:
    """Return the first moment at which a rank of the world holds most: `Timeline.peak`.

    `table` replaces the program's own action table.
    """
    highest = _Highest()
    _Repeated(program, rank, highest, table).run()
    return highest.moment


class _Highest(ByteCount):
    """A count that keeps the highest moment alone."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.most = -1
        self.moment = PredictedMoment("", "", {})

    def add(self, category: str, size: int) -> None:
        """Count more bytes."""
        self.held[category] = self.held.get(category, 0) + size
        self.total += size

    def note(self, what: str) -> None:
        """Keep a moment if it is the highest."""
        if self.total > self.most:
            self.most = self.total
            held = {category: size for category, size in self.held.items() if size}
            self.moment = PredictedMoment(self.action, what, held)


class _Done(NamedTuple):
    """What an action of a stage did: to what was held at its highest moment and at its end, to the
    units, and what it had wait for the gradients of weights."""

    stage: int
    most: int
    what: str
    highest: Mapping[str, int]
    total: int
    end: Mapping[str, int]
    state: int
    deferred: int


class _Repeated(Walk):
    """A walk in which an action that was performed before is added up."""

    bytes_held: _Highest

    def __init__(
        self, program: Program, rank: int, bytes_held: _Highest, table: Table | None
    ) -> None:
        super().__init__(program, rank, bytes_held, table)
        self._states: dict[tuple[int, UnitsState], int] = {}
        self._known: list[UnitsState] = []
        self._done: dict[tuple[object, ...], _Done] = {}
        self._alike = self._first_alike()
        self._now = {index: self._number(index) for index in self.units}
        self._actual = dict(self._now)  # the states that the units themselves are in

    def _first_alike(self) -> dict[int, int]:
        """Return for each stage the first that the rank holds with the same layers and ends."""
        firsts: dict[tuple[object, ...], int] = {}
        found = {}
        for index, stage in self.stages.items():
            kinds = tuple(self.program.model.layer(layer) for layer in stage.layers)
            key = kinds, index == 0, stage.is_last
            found[index] = firsts.setdefault(key, index)
        return found

    def compute(self, action: Action) -> None:
        """Perform an action, or add the effect of an equal earlier one."""
        stage, held = action.stage, self.bytes_held
        left = self.moves.before(action)
        found = None if left is None else (self._alike[left[0]], left[1])
        key = action.kind, self._alike[stage], action == self.ends[stage], self._now[stage], found
        done = self._done.get(key)
        if done is None:
            done = self._done[key] = self._perform(action)
        else:
            if held.total + done.most > held.most:
                held.most = held.total + done.most
                sums = _sum(held.held, done.highest)
                held.moment = PredictedMoment(held.action, self._what(done, stage), sums)
            for category, size in done.end.items():
                held.add(category, size)
            self.deferred[stage] = done.deferred
            self.moves.skip(action)
        self._now[stage] = done.state

    def _what(self, done: _Done, stage: int) -> str:
        """Return what was at work at the highest moment of an action, in another stage like it."""
        layers = zip(self.stages[done.stage].layers, self.stages[stage].layers, strict=True)
        names = {of_layer(one): of_layer(other) for one, other in layers}
        return names.get(done.what, done.what)

    def _perform(self, action: Action) -> _Done:
        """Perform an action, and return what it did."""
        stage, held = action.stage, self.bytes_held
        self._settle(stage)
        before, total, (most, moment) = dict(held.held), held.total, (held.most, held.moment)
        held.most = -1
        super().compute(action)
        highest, own = held.moment, held.most
        if own <= most:
            held.most, held.moment = most, moment
        self._actual[stage] = self._number(stage)
        return _Done(
            stage,
            own - total,
            highest.what,
            _difference(highest.held, before),
            held.total - total,
            _difference(held.held, before),
            self._actual[stage],
            self.deferred.get(stage, 0),
        )

    def finish(self) -> None:
        """End the backwards of a step."""
        for stage in self.units:
            self._settle(stage)
        super().finish()

    def _settle(self, stage: int) -> None:
        """Bring the units of a stage into the state that they are counted to be in."""
        if self._actual[stage] != self._now[stage]:
            self.units[stage].state = self._known[self._now[stage]]
            self._actual[stage] = self._now[stage]

    def _number(self, stage: int) -> int:
        """Return the number of the state that a stage's units are in, among stages like it."""
        key = self._alike[stage], self.units[stage].state
        if key not in self._states:
            self._states[key] = len(self._known)
            self._known.append(key[1])
        return self._states[key]


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    sums = {**one, **{category: one.get(category, 0) + size for category, size in other.items()}}
    return {category: size for category, size in sums.items() if size}


def _difference(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    found = {name: one.get(name, 0) - other.get(name, 0) for name in {**other, **one}}
    return {name: size for name, size in found.items() if size}
