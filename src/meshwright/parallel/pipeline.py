"""Executes a rank's pipeline schedule: forwards, backwards and the transfers between stages.

Without pipeline parallelism it is gradient accumulation on one stage: there is no separate path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.flight_recorder import FlightRecorder, Pending
from meshwright.comm.groups import Link
from meshwright.parallel.batch import Batch
from meshwright.parallel.data_parallel.sharded import (
    end_backward,
    finish_backward,
    prepare_backward,
)
from meshwright.parallel.tensor_parallel.deferred import Deferral, Work
from meshwright.program.schedule import Action, Table

Key = tuple[int, int]  # stage, microbatch
# an action, and when it began and ended by time.perf_counter()
Observe = Callable[[Action, float, float], None]
Edge = Any  # torch.autograd.graph.GradientEdge


class Stages(Protocol):
    """The interface of a rank's part of the model for the pipeline; `Parallel` implements it."""

    modules: dict[int, nn.Module]
    deferral: Deferral
    device: torch.device

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""

    @property
    def pp(self) -> Link:
        """The link along the pipeline."""

    @property
    def zero(self) -> int:
        """The ZeRO stage."""

    @property
    def recorder(self) -> FlightRecorder:
        """The flight recorder of this rank."""

    def stream(self, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the hidden states that a stage outputs for a microbatch."""

    def forward(self, stage: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Return the hidden states after a stage, or the summed loss if it is the last stage."""


class Departure(NamedTuple):
    """A send in flight."""

    work: Pending
    tensor: Tensor


class Arrival(NamedTuple):
    """A receive in flight.

    Both ranks of a pair issue their transfers in the same order, so its completion proves that
    earlier sends to the same rank, `sent`, have completed.
    """

    work: Pending
    buffer: Tensor
    sent: list[Departure]


@dataclass(frozen=True)
class Scale:
    """The factors of the summed loss: `loss` is 1 / targets, `extra` the loss scale of fp16."""

    loss: Tensor
    extra: float = 1.0


class Pipeline:
    """One execution of a schedule's actions over the microbatches of a step."""

    def __init__(
        self, stages: Stages, table: Table, microbatches: Sequence[Batch], scale: Scale | None
    ) -> None:
        """Prepare to execute the actions of `table`; a `scale` of None runs forwards only."""
        self.stages, self.table, self.microbatches, self.scale = stages, table, microbatches, scale
        self.last = len(stages.stage_ranks) - 1
        self.losses: list[Tensor] = []
        self._inputs: dict[Key, list[Tensor]] = {}  # their gradients go to the stage before
        self._outputs: dict[Key, Tensor] = {}  # until they are sent, or taken by the next stage
        self._edges: dict[Key, Edge] = {}
        self._gradients: dict[Key, Tensor] = {}  # of outputs
        self._arriving: dict[Action, Arrival] = {}
        self._leaving: dict[int, list[Departure]] = {}  # by the peer's rank in the pipeline
        self._deferred: dict[Key, list[Work]] = {}
        self._ends = _last_backwards(table)

    def run(self, observe: Observe | None = None) -> Tensor:
        """Execute the actions; return the unscaled summed loss of this rank's microbatches.

        It is fp64, and zero on ranks without the last stage. `observe` gets each action with its
        start and end times.
        """
        perform = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
            "SEND_F": self._send_output,
            "RECV_F": self._receive,
            "SEND_B": self._send_gradient,
            "RECV_B": self._receive,
        }
        with nullcontext() if self.scale is not None else torch.no_grad():
            for action in self.table:
                self.stages.recorder.action(*action)
                started = time.perf_counter()
                perform[action.kind](action)
                if observe is not None:
                    observe(action, started, time.perf_counter())
        if self.scale is not None:
            self.stages.recorder.phase("reduce")
        for departures in self._leaving.values():
            _wait(departures)
        total = torch.zeros((), dtype=torch.float64, device=self.stages.device)
        return sum(self.losses, total)

    def _forward(self, action: Action) -> None:
        stage, index = key = action.stage, action.microbatch
        hidden = None
        if stage > 0:
            arrived = self._arriving.pop(Action("RECV_F", stage, index), None)
            hidden = self._arrived(arrived) if arrived else self._outputs.pop((stage - 1, index))
            if self.scale is not None:
                self._inputs[key] = []
                start = torch.empty(0, requires_grad=True)
                hidden = _Enter.apply(start, hidden, self._inputs[key])  # type: ignore[no-untyped-call]
        out = self.stages.forward(stage, hidden, self.microbatches[index])
        if stage == self.last:
            self.losses.append(out.detach())
            if self.scale is not None:
                out = out * self.scale.loss * self.scale.extra
        if self.scale is not None:
            # The edge keeps the graph and lets the values go: nothing computes with them any more.
            self._edges[key] = torch.autograd.graph.get_gradient_edge(out)
        if stage != self.last:
            self._outputs[key] = out.detach()

    def _backward(self, action: Action) -> None:
        prepare_backward(
            self.stages.modules[action.stage],
            self.stages.zero,
            is_last=action == self._ends[action.stage],
        )
        self._differentiate(action)

    def _backward_inputs(self, action: Action) -> None:
        module = self.stages.modules[action.stage]
        prepare_backward(module, self.stages.zero, is_last=False, defers=True)
        deferral, key = self.stages.deferral, (action.stage, action.microbatch)
        deferral.pending = self._deferred[key] = []
        try:
            self._differentiate(action)
        finally:
            deferral.pending = None

    def _backward_weights(self, action: Action) -> None:
        for work in self._deferred.pop((action.stage, action.microbatch)):
            work()
        is_last = action == self._ends[action.stage]
        finish_backward(self.stages.modules[action.stage], self.stages.zero, is_last=is_last)

    def _differentiate(self, action: Action) -> None:
        stage, index = key = action.stage, action.microbatch
        gradient = None
        if stage != self.last:
            arrived = self._arriving.pop(Action("RECV_B", stage, index), None)
            gradient = self._arrived(arrived) if arrived else self._gradients.pop((stage, index))
        torch.autograd.backward((self._edges.pop(key),), (gradient,))
        end_backward(self.stages.modules[stage])
        if stage > 0:
            (self._gradients[stage - 1, index],) = self._inputs.pop(key)

    def _arrived(self, arrival: Arrival) -> Tensor:
        arrival.work.wait()
        # Only waiting for a send lets go of what was sent: gloo never says that it is over.
        _wait(arrival.sent)
        return arrival.buffer

    def _receive(self, action: Action) -> None:
        shape, dtype = self.stages.stream(self.microbatches[action.microbatch])
        buffer = torch.empty(shape, dtype=dtype, device=self.stages.device)
        pp, stage = (
            self.stages.pp,
            action.stage - 1 if action.kind == "RECV_F" else action.stage + 1,
        )
        peer = self.stages.stage_ranks[stage]
        work = Pending(self.stages.recorder, dist.irecv(buffer, pp.ranks[peer], pp.group))
        self._arriving[action] = Arrival(work, buffer, self._leaving.pop(peer, []))

    def _send_output(self, action: Action) -> None:
        self._send(self._outputs.pop((action.stage, action.microbatch)), action.stage + 1)

    def _send_gradient(self, action: Action) -> None:
        self._send(self._gradients.pop((action.stage - 1, action.microbatch)), action.stage - 1)

    def _send(self, tensor: Tensor, to_stage: int) -> None:
        pp, tensor = self.stages.pp, tensor.contiguous()
        peer = self.stages.stage_ranks[to_stage]
        work = Pending(self.stages.recorder, dist.isend(tensor, pp.ranks[peer], pp.group))
        self._leaving.setdefault(peer, []).append(Departure(work, tensor))


class _Enter(torch.autograd.Function):
    """Start a stage's graph with a received tensor, whose gradient is appended to a list.

    A leaf tensor would keep the received values in memory until its gradient exists, even if no
    operation needs them.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, arrived: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradients.append(gradient)
        return None, None, None


def _wait(departures: list[Departure]) -> None:
    """Wait until sends have completed, and release their tensors."""
    while departures:
        departures.pop().work.wait()


def _last_backwards(table: Table) -> dict[int, Action]:
    """Return, by stage, the last backward action, after which the stage's gradients are
    complete.
    """
    return {action.stage: action for action in table if action.kind in ("B", "W")}
