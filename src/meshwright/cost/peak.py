"""`peak`: the peak moment of a step on a rank: the same as `timeline`'s, found faster.

Most actions of a step repeat an earlier one: what an action allocates and releases depends on its
kind, the layers of its stage and the state of the stage's units, not on its microbatch. So each
distinct action is performed once, and its repetitions, in any stage with the same layers, are added
up. So it is with the layers inside of an action, of which a stage has up to a hundred alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from meshwright.cost.byte_count import ByteCount, PredictedMoment
from meshwright.cost.timeline import Walk, of_layer
from meshwright.cost.unit_sizes import UnitsState
from meshwright.program.actions import Action, Table
from meshwright.program.lower import Program
from meshwright.program.stages import Stage


def peak(program: Program, rank: int, table: Table | None = None) -> PredictedMoment:
    """Return the first moment at which a rank of the world holds most: `Timeline.peak`.

    `table` replaces the program's own action table.
    """
    highest = _Highest()
    _Repeated(program, rank, highest, table).run()
    return highest.moment


class _Effect(NamedTuple):
    """What something did to what was held: at its highest moment, and at its end."""

    most: int
    what: str
    highest: Mapping[str, int]
    end: Mapping[str, int]


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

    def note(self, operation: str) -> None:
        """Keep a moment if it is the highest."""
        if self.total > self.most:
            self.most = self.total
            sizes = {category: size for category, size in self.held.items() if size}
            self.moment = PredictedMoment(self.action, operation, sizes)

    def watch(self, do: Callable[[], None]) -> _Effect:
        """Do something, and return its effect."""
        before, total, (prior, moment) = dict(self.held), self.total, (self.most, self.moment)
        self.most = -1
        do()
        highest, effect_peak = self.moment, self.most
        if effect_peak <= prior:
            self.most, self.moment = prior, moment
        rise, change = _difference(highest.held, before), _difference(self.held, before)
        return _Effect(effect_peak - total, highest.what, rise, change)

    def repeat(self, effect: _Effect, operation: Callable[[], str]) -> None:
        """Add an effect; `operation` names what was at work at its highest moment."""
        if self.total + effect.most > self.most:
            self.most = self.total + effect.most
            self.moment = PredictedMoment(self.action, operation(), _sum(self.held, effect.highest))
        for category, size in effect.end.items():
            self.add(category, size)


class _Done(NamedTuple):
    """What an action of a stage did: its effect on what is held, the state of the units after it,
    and what it had wait for the gradients of weights."""

    stage: int
    effect: _Effect
    state: int
    deferred: int


class _LayerDone(NamedTuple):
    """What a pass through a layer did, as `_Done`: the state is that of the units near it."""

    layer: int
    effect: _Effect
    state: UnitsState
    deferred: int


class _Repeated(Walk):
    """A walk in which an action that was performed before is added up, and so is a layer."""

    bytes_held: _Highest

    def __init__(
        self, program: Program, rank: int, bytes_held: _Highest, table: Table | None
    ) -> None:
        super().__init__(program, rank, bytes_held, table)
        self._states: dict[tuple[int, UnitsState], int] = {}
        self._known: list[UnitsState] = []
        self._done: dict[tuple[object, ...], _Done] = {}
        self._layers_done: dict[tuple[object, ...], _LayerDone] = {}
        self._kinds = {stage.index: self._numbers(stage) for stage in self.stages.values()}
        self._alike = self._first_alike()
        self._now = {index: self._number(index) for index in self.units}
        self._actual = dict(self._now)  # the states that the units themselves are in

    def _numbers(self, stage: Stage) -> tuple[int, ...]:
        """Return a number for the kind of each layer of a stage."""
        number = {kind: place for place, kind in enumerate(self.layers)}
        return tuple(number[self.program.model.layer(layer)] for layer in stage.layers)

    def _first_alike(self) -> dict[int, int]:
        """Return for each stage the first that the rank holds with the same layers and ends."""
        firsts: dict[tuple[object, ...], int] = {}
        first_of = {}
        for index, stage in self.stages.items():
            key = self._kinds[index], index == 0, stage.is_last
            first_of[index] = firsts.setdefault(key, index)
        return first_of

    def compute(self, action: Action) -> None:
        """Perform an action, or add the effect of an equal earlier one."""
        stage = action.stage
        left = self.moves.before(action)
        leaving = None if left is None else (self._alike[left[0]], left[1])
        key = action.kind, self._alike[stage], action == self.ends[stage], self._now[stage], leaving
        done = self._done.get(key)
        if done is None:
            done = self._done[key] = self._perform(action)
        else:
            self.bytes_held.repeat(done.effect, partial(self._what, done, stage))
            self.deferred[stage] = done.deferred
            self.moves.skip(action)
        self._now[stage] = done.state

    def _what(self, done: _Done, stage: int) -> str:
        """Return what was at work at the highest moment of an action, in another stage like it."""
        operation = done.effect.what
        if stage == done.stage:
            return operation
        layers = zip(self.stages[done.stage].layers, self.stages[stage].layers, strict=True)
        names = {of_layer(layer): of_layer(other) for layer, other in layers}
        return names.get(operation, operation)

    def _perform(self, action: Action) -> _Done:
        """Perform an action, and return what it did."""
        stage = action.stage
        self._settle(stage)
        effect = self.bytes_held.watch(lambda: super(_Repeated, self).compute(action))
        self._actual[stage] = self._number(stage)
        return _Done(stage, effect, self._actual[stage], self.deferred.get(stage, 0))

    def forward_layer(self, action: Action, index: int) -> None:
        """Go forward through a layer, or add the effect of an equal earlier one."""
        self._layer(action, index, super().forward_layer)

    def backward_layer(self, action: Action, index: int) -> None:
        """Go back through a layer, or add the effect of an equal earlier one."""
        self._layer(action, index, super().backward_layer)

    def _layer(self, action: Action, index: int, go: Callable[[Action, int], None]) -> None:
        """Go through a layer, or add the effect of an equal earlier one.

        What happens depends on the layer and the one on either side of it, of which the units are
        gathered ahead or let go of. Those at the ends of a stage are like no other.
        """
        stage, place = self.stages[action.stage], action.stage
        if not 0 < index < len(stage.layers) - 1 or self.program.layout.offload == "activations":
            go(action, index)
            return
        units, bytes_held, layer = self.units[place], self.bytes_held, stage.layers[index]
        near = [unit for block in units.blocks[index - 1 : index + 2] for unit in block]
        kinds = self._kinds[place][index - 1 : index + 2]
        key = action.kind, action == self.ends[place], kinds, units.state_of(near)
        done, before = self._layers_done.get(key), self.deferred.get(place, 0)
        if done is None:
            effect = bytes_held.watch(lambda: go(action, index))
            after, deferred = units.state_of(near), self.deferred.get(place, 0) - before
            self._layers_done[key] = _LayerDone(layer, effect, after, deferred)
            return
        bytes_held.repeat(done.effect, partial(_what_in, layer, done))
        units.restore(near, done.state)
        self.deferred[place] = before + done.deferred

    def finish(self) -> None:
        """End the backwards of a step."""
        for stage in self.units:
            self._settle(stage)
        super().finish()

    def _settle(self, stage: int) -> None:
        """Bring the units of a stage into the state that they are counted to be in."""
        if self._actual[stage] != self._now[stage]:
            units = self.units[stage]
            units.restore(units.all, self._known[self._now[stage]])
            self._actual[stage] = self._now[stage]

    def _number(self, stage: int) -> int:
        """Return the number of the state that a stage's units are in, among stages like it."""
        units = self.units[stage]
        key = self._alike[stage], units.state_of(units.all)
        if key not in self._states:
            self._states[key] = len(self._known)
            self._known.append(key[1])
        return self._states[key]


def _what_in(layer: int, done: _LayerDone) -> str:
    """Return what was at work at the highest moment of a layer, in another one like it."""
    operation = done.effect.what
    return of_layer(layer) if operation == of_layer(done.layer) else operation


def _sum(sizes: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    sums = {
        **sizes,
        **{category: sizes.get(category, 0) + size for category, size in other.items()},
    }
    return {category: size for category, size in sums.items() if size}


def _difference(sizes: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    changes = {name: sizes.get(name, 0) - other.get(name, 0) for name in {**other, **sizes}}
    return {name: size for name, size in changes.items() if size}
