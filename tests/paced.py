"""Stages that pass time instead of computing, run with the real tables and transfers.

Ranks that compute would share the machine's cores, and slow each other down. With the clock
`Carried` no real time passes: every rank keeps its own time, and what it sends carries the time at
which it was ready. The times are those of an executor without any cost, whatever else the machine
does. With the clock `Slept` the ranks sleep, and the executor's own time shows, too.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import Link
from meshwright.parallel.batch import Batch
from meshwright.parallel.pipeline import Pipeline, Scale
from meshwright.parallel.tensor_parallel.deferred import Deferral
from meshwright.program.profile import RankProfile, Span


class Carried:
    """A rank's own time; an action begins when the rank is free and its input is ready.

    Sending to another rank takes the sender `sending_s`.
    """

    def __init__(self, sending_s=0.0):
        self.now, self.sending_s = 0.0, sending_s

    def spend(self, ready, seconds):
        """Return when an action began and ended whose input was ready at a time."""
        began = max(self.now, ready)
        self.now = began + seconds
        return began, self.now

    def send(self):
        """Return when the output of the last action has arrived."""
        self.now += self.sending_s
        return self.now


class Slept:
    """The machine's time."""

    def spend(self, ready, seconds):
        began = time.perf_counter()
        time.sleep(seconds)
        return began, time.perf_counter()

    def send(self):
        return time.perf_counter()


class Paced(torch.autograd.Function):
    """A stage: what goes in and comes out, forward and back, is the time at which it is ready."""

    @staticmethod
    def forward(ctx, x, stages, stage):
        ctx.stages, ctx.stage = stages, stage
        return torch.full_like(x, stages.act("F", stage, x.max().item()))

    @staticmethod
    def backward(ctx, grad):
        stages, stage = ctx.stages, ctx.stage
        is_last = stage == len(stages.stage_ranks) - 1  # there it is the gradient of a sum
        ready = 0.0 if is_last else grad.max().item()
        if stages.deferral.pending is None:
            done = stages.act("B", stage, ready)
        else:
            done = stages.act("I", stage, ready)
            stages.deferral.pending.append(lambda: stages.act("W", stage, 0.0))
        return torch.full_like(grad, done), None, None


class PacedStages:
    """The stages of a rank, as `Pipeline` wants them; `seconds` by kind of action and stage."""

    zero = 0
    device = torch.device("cpu")

    def __init__(self, ranks_of_stage, pp, seconds, clock):
        self.stage_ranks, self.pp, self.seconds, self.clock = ranks_of_stage, pp, seconds, clock
        self.deferral, self.recorder = Deferral(), FlightRecorder()
        self.modules = {
            at: nn.Module() for at, rank in enumerate(ranks_of_stage) if rank == pp.rank
        }
        self.acted = (0.0, 0.0)

    def act(self, kind, stage, ready):
        """Spend an action's time; returns when what it makes is where it is wanted."""
        self.acted = self.clock.spend(ready, self.seconds[kind, stage])
        to = stage + (1 if kind == "F" else -1)
        leaves = kind != "W" and 0 <= to < len(self.stage_ranks)
        if leaves and self.stage_ranks[to] != self.pp.rank:
            return self.clock.send()
        return self.acted[1]

    def stream(self, batch):
        return (1, 8), torch.float64

    def forward(self, stage, hidden, batch):
        first = torch.zeros((1, 8), dtype=torch.float64, requires_grad=True)
        out = Paced.apply(first if hidden is None else hidden, self, stage)
        return out.sum() if stage == len(self.stage_ranks) - 1 else out


def performed(world, tables, ranks_of_stage, microbatches, seconds, clock):
    """Perform a rank's table; returns when it did what, without waits."""
    link = Link(dist.group.WORLD, tuple(range(world.size)), world.rank)
    stages = PacedStages(ranks_of_stage, link, seconds, clock)
    spans = []

    def observe(action, started, ended):
        if not action.is_transfer:
            spans.append(Span("compute", action.kind, *stages.acted, *action[1:]))

    nothing = Batch(torch.zeros(1, 1), torch.zeros(1, 1))
    world.barrier()
    batches = [nothing] * microbatches
    Pipeline(stages, tables[world.rank], batches, Scale(torch.ones(()))).run(observe)
    return RankProfile(world.rank, {"pp": world.rank}, tuple(stages.modules), tuple(spans))


def idle(ranks):
    """Return the share of the ranks' time, from the first start to the last end, without work."""
    spans = [span for one in ranks for span in one.spans if span.track == "compute"]
    length = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - sum(span.end - span.start for span in spans) / length / len(ranks)
