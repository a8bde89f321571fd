"""`RoutingReport`: emits the token counts of experts, in about a hundred events per run."""

from __future__ import annotations

import math
from typing import Final

from meshwright.comm.world import World
from meshwright.parallel.apply import Parallel
from meshwright.parallel.expert_parallel.routing import take_counts
from meshwright.program.events import Event
from meshwright.training.events import Emit
from meshwright.training.readings import ArrivingNumbers
from meshwright.training.run_folder import Job

# Events in a run: each has a number for every expert of every layer.
_MOST: Final = 100


class RoutingReport:
    """Sums token counts per expert over ranks, and emits them as `experts` events.

    Every rank creates one and makes the same calls. Does nothing for models without experts.
    """

    def __init__(self, job: Job, world: World, parallel: Parallel, emit: Emit, done: int) -> None:
        """Start to count after the step `done`."""
        model, train = job.config.model, job.config.train
        self._job, self._world, self._parallel, self._emit = job, world, parallel, emit
        layers = [layer for layer in range(model.n_layers) if model.has_experts(model.layer(layer))]
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._every = max(train.log_every, math.ceil(train.steps / _MOST))
        self._told = done
        self._taken: tuple[int, int, ArrivingNumbers] | None = None

    def tell(self, step: int, *, last: bool, waits: bool) -> None:
        """Take the counts since the last event, if one is due after `step`; a collective.

        The event follows in the next call, so that the host does not wait for a GPU, or at once if
        it `waits` anyway. At the `last` step an event is always due.
        """
        self._emit_taken()
        if not self._places or step == self._told or not (last or step % self._every == 0):
            return
        world, experts = self._world, self._job.config.model.experts
        numbers = take_counts(self._parallel.routers, self._places, experts, world.device)
        self._taken = step, step - self._told, ArrivingNumbers(numbers)
        self._told = step
        if last or waits or world.device.type == "cpu":
            self._emit_taken()

    def _emit_taken(self) -> None:
        if self._taken is None:
            return
        step, steps, numbers = self._taken
        self._taken = None
        *met, even, small = self._world.sum_on_host(numbers.read())
        experts = self._job.config.model.experts
        dropped = [met.pop() for _ in self._places][::-1]
        rows = [met[start : start + experts] for start in range(0, len(met), experts)]
        sequences = steps * self._job.config.train.batch
        losses = (even / sequences, small / sequences)
        layers, ep = tuple(self._places), self._job.layout.ep
        routing = self._job.config.train.routing
        event = routing_event(step, steps, layers, rows, ep, losses, routing)
        extra = {"dropped": [int(count) for count in dropped]}
        self._emit(event if self._job.config.train.expert_capacity is None else {**event, **extra})


def routing_event(
    step: int,
    steps: int,
    layers: tuple[int, ...],
    met: list[list[float]],
    ep: int,
    losses: tuple[float, float],
    routing: str = "learned",
) -> Event:
    """Return the `experts` event of some steps; `met` are tokens by layer and expert.

    With capacities, the caller adds `dropped`: the (token, expert) pairs beyond them, per layer.

    `excess` is how much more than the mean the busiest of `ep` ranks computes, summed over the
    layers, since ranks wait for each other in each; `expert_excess` is the same for single experts.
    `dead` are layer and number of each expert without tokens. `routing` is the config's.
    """
    return {
        "event": "experts",
        "step": step,
        "steps": steps,
        "routing": routing,
        "layers": list(layers),
        "tokens": [[int(count) for count in row] for row in met],
        "excess": _excess(met, ep),
        "expert_excess": _excess(met, len(met[0])),
        "dead": [
            [layer, expert]
            for layer, row in zip(layers, met, strict=True)
            for expert, count in enumerate(row)
            if not count
        ],
        "router_aux_loss": losses[0],
        "router_z_loss": losses[1],
    }


def _excess(met: list[list[float]], ranks: int) -> float:
    """Return the relative excess of the busiest of `ranks` ranks' tokens over the mean.

    Both are summed over layers.
    """
    busiest = mean = 0.0
    for row in met:
        experts_per_rank = len(row) // ranks
        sums = [
            sum(row[start : start + experts_per_rank])
            for start in range(0, len(row), experts_per_rank)
        ]
        busiest, mean = busiest + max(sums), mean + sum(sums) / ranks
    return busiest / mean - 1 if mean else 0.0
