"""`peak`: the moment of a step at which a rank has most bytes allocated; equals `timeline`'s,
computed faster.

Most actions of a step repeat an earlier one: what an action allocates and releases depends on its
kind, the layers of its stage and the state of its gathered weights and gradients (`units`), not on
its microbatch. So each distinct action is simulated once, and its effect is added for repetitions
in any stage with the same layers. The same holds for the layers within an action.
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
    """Return the first moment at which rank `rank` of the world has most bytes allocated:
    `Timeline.peak`.

    `table` replaces the program's action table for the rank's place in the pipeline.
    """
    highest = _Highest()
    _Repeated(program, rank, highest, table).run()
    return highest.moment


class _Effect(NamedTuple):
    """What an action or layer changed: the rise to its highest moment (`most`, and `highest` by
    category), the operation there, and the change by category at its end."""

    most: int
    what: str
    highest: Mapping[str, int]
    end: Mapping[str, int]


class _Highest(ByteCount):
    """A byte count that records only the highest moment."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.most = -1
        self.moment = PredictedMoment("", "", {})

    def add(self, category: str, size: int) -> None:
        """Add `size` bytes to a category."""
        self.held[category] = self.held.get(category, 0) + size
        self.total += size

    def note(self, operation: str) -> None:
        """Record the present moment if it is the highest so far."""
        if self.total > self.most:
            self.most = self.total
            sizes = {category: size for category, size in self.held.items() if size}
            self.moment = PredictedMoment(self.action, operation, sizes)

    def watch(self, do: Callable[[], None]) -> _Effect:
        """Call `do`, and return what it changed."""
        before, total, (prior, moment) = dict(self.held), self.total, (self.most, self.moment)
        self.most = -1
        do()
        highest, effect_peak = self.moment, self.most
        if effect_peak <= prior:
            self.most, self.moment = prior, moment
        rise, change = _difference(highest.held, before), _difference(self.held, before)
        return _Effect(effect_peak - total, highest.what, rise, change)

    def repeat(self, effect: _Effect, operation: Callable[[], str]) -> None:
        """Add an effect again; `operation` returns the name of the operation at its highest
        moment."""
        if self.total + effect.most > self.most:
            self.most = self.total + effect.most
            self.moment = PredictedMoment(self.action, operation(), _sum(self.held, effect.highest))
        for category, size in effect.end.items():
            self.add(category, size)


class _Done(NamedTuple):
    """The result of simulating an action of a stage: its effect, the number of the state that it
    leaves the units in, and the bytes of its deferred weight gradients."""

    stage: int
    effect: _Effect
    state: int
    deferred: int


class _LayerDone(NamedTuple):
    """The result of simulating a pass through a layer, as in `_Done`; the state is that of the
    neighboring units."""

    layer: int
    effect: _Effect
    state: UnitsState
    deferred: int


class _Repeated(Walk):
    """A walk over the action table in which repeated actions and layers add a cached effect."""

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
        """Return the index of the kind of each layer of a stage."""
        number = {kind: place for place, kind in enumerate(self.layers)}
        return tuple(number[self.program.model.layer(layer)] for layer in stage.layers)

    def _first_alike(self) -> dict[int, int]:
        """Return, for each stage of the rank, the first one with the same kinds of layers and the
        same ends."""
        firsts: dict[tuple[object, ...], int] = {}
        first_of = {}
        for index, stage in self.stages.items():
            key = self._kinds[index], index == 0, stage.is_last
            first_of[index] = firsts.setdefault(key, index)
        return first_of

    def compute(self, action: Action) -> None:
        """Simulate an action, or add the effect of an equal earlier one."""
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
        """Return the name of the operation at an action's highest moment, with layer numbers of
        stage `stage`."""
        operation = done.effect.what
        if stage == done.stage:
            return operation
        layers = zip(self.stages[done.stage].layers, self.stages[stage].layers, strict=True)
        names = {of_layer(layer): of_layer(other) for layer, other in layers}
        return names.get(operation, operation)

    def _perform(self, action: Action) -> _Done:
        """Simulate an action, and return its result."""
        stage = action.stage
        self._settle(stage)
        effect = self.bytes_held.watch(lambda: super(_Repeated, self).compute(action))
        self._actual[stage] = self._number(stage)
        return _Done(stage, effect, self._actual[stage], self.deferred.get(stage, 0))

    def forward_layer(self, action: Action, index: int) -> None:
        """Simulate a layer's forward, or add the effect of an equal earlier one."""
        self._layer(action, index, super().forward_layer)

    def backward_layer(self, action: Action, index: int) -> None:
        """Simulate a layer's backward, or add the effect of an equal earlier one."""
        self._layer(action, index, super().backward_layer)

    def _layer(self, action: Action, index: int, go: Callable[[Action, int], None]) -> None:
        """Simulate a pass through a layer by `go`, or add the effect of an equal earlier one.

        The effect depends on the layer and on its two neighbors, whose weights are gathered ahead
        or released. The first and last layers of a stage are always simulated.
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
        """Complete the gradient reductions after the last backward."""
        for stage in self.units:
            self._settle(stage)
        super().finish()

    def _settle(self, stage: int) -> None:
        """Put the units of a stage into the state that cached effects have left them in."""
        if self._actual[stage] != self._now[stage]:
            units = self.units[stage]
            units.restore(units.all, self._known[self._now[stage]])
            self._actual[stage] = self._now[stage]

    def _number(self, stage: int) -> int:
        """Return the number of the present state of a stage's units, the same for equal states of
        equal stages."""
        units = self.units[stage]
        key = self._alike[stage], units.state_of(units.all)
        if key not in self._states:
            self._states[key] = len(self._known)
            self._known.append(key[1])
        return self._states[key]


def _what_in(layer: int, done: _LayerDone) -> str:
    """Return the name of the operation at a layer's highest moment, with the number `layer`."""
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
