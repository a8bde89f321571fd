"""Planned and measured steps: the same order on every rank, and about the same idle time.

A rank for each of four stages performs the real tables with the real transfers, but sleeps for as
long as each action of a planned step takes: four ranks that compute would share the two cores of a
small machine, and a rank that waits would make the others faster.
"""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.execute.batch import Batch
from meshwright.execute.deferred import Deferral
from meshwright.execute.groups import Link
from meshwright.execute.ledger import Ledger
from meshwright.execute.pipeline import Pipeline, Scale
from meshwright.layout import Layout
from meshwright.predict.ledger import predicted_ledger
from meshwright.program.ledger import RankLedger, Span, StepLedger
from meshwright.program.lower import lower
from meshwright.report.agreement import agreement
from meshwright.report.terminal import summary
from meshwright.search.plan import on_cluster, setting_of
from meshwright.spec.loading import load_config
from ranks import on_ranks

WORDS = [
    *("model.dim=256", "model.n_layers=12", "model.n_heads=8", "model.n_kv_heads=4"),
    *("train.seq_len=256", "train.batch=8"),
]
POINTS = 5
# How long the actions of a step take together on a rank, at first and on a busy machine.
LENGTHS_S = (1.0, 2.5, 6.0)


def planned(label):
    layout = Layout.parse(label)
    found = on_cluster(setting_of(load_config(None, WORDS)), layout)
    return predicted_ledger(found, layout), lower(found.model, found.train, layout)


class Paced(torch.autograd.Function):
    """A stage that takes the planned times: forward, and both halves of the backward."""

    @staticmethod
    def forward(ctx, x, stages, stage):
        ctx.stages, ctx.stage = stages, stage
        stages.sleep("F", stage)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        stages, stage = ctx.stages, ctx.stage
        if stages.deferral.pending is None:
            stages.sleep("B", stage)
        else:
            stages.sleep("I", stage)
            stages.deferral.pending.append(lambda: stages.sleep("W", stage))
        return grad.clone(), None, None


class PacedStages:
    """The stages of a rank, as `Pipeline` wants them."""

    zero = 0
    device = torch.device("cpu")

    def __init__(self, ranks_of_stage, pp, seconds):
        self.stage_ranks, self.pp, self.seconds = ranks_of_stage, pp, seconds
        self.deferral, self.ledger = Deferral(), Ledger()
        self.modules = {
            at: nn.Module() for at, rank in enumerate(ranks_of_stage) if rank == pp.rank
        }
        self.began = 0.0

    def sleep(self, kind, stage):
        self.began = time.perf_counter()
        time.sleep(self.seconds[kind, stage])

    def stream(self, batch):
        return (1, 8), torch.float32

    def forward(self, stage, hidden, batch):
        x = torch.zeros((1, 8), requires_grad=True) if hidden is None else hidden
        out = Paced.apply(x, self, stage)
        return out.sum() if stage == len(self.stage_ranks) - 1 else out


def performed(world, label, seconds):
    """What a rank of the pipeline did of a plan that was stretched to so many seconds."""
    plan, program = planned(label)
    scale = seconds / plan.step_time_s
    mine = plan.ranks[world.rank].spans
    took = {(s.name, s.stage): scale * s.seconds for s in mine if s.lane == "compute"}
    link = Link(dist.group.WORLD, tuple(range(world.size)), world.rank)
    stages = PacedStages(program.stage_ranks, link, took)
    spans = []

    def observe(action, started, ended):
        if not action.is_transfer:  # a wait for its input is not part of it
            spans.append(Span("compute", action.kind, stages.began, ended, *action[1:]))

    nothing = Batch(torch.zeros(1, 1), torch.zeros(1, 1))
    batches = [nothing] * program.microbatches
    world.barrier()
    Pipeline(stages, program.tables[world.rank], batches, Scale(torch.ones(()))).run(observe)
    return RankLedger(world.rank, {"pp": world.rank}, tuple(stages.modules), tuple(spans))


@pytest.mark.parametrize(
    "label", ["pp4 1f1b mb1", "pp4 interleaved_1f1b v2 mb1", "pp4 interleaved_zero_bubble v2 mb1"]
)
def test_four_stages_go_as_planned(label):
    plan, _ = planned(label)
    on_ranks(4, performed, label=label, seconds=0.05)  # connects the ranks
    for seconds in LENGTHS_S:
        ranks = tuple(on_ranks(4, performed, label=label, seconds=seconds))
        found = agreement(plan, StepLedger("measured", {}, label, "cpu", ranks))
        assert found.difference is None
        if abs(found.points) < POINTS:
            break
    assert 0.05 < found.planned < 0.4
    assert abs(found.points) < POINTS
    works = [span for one in ranks for span in one.spans]
    length = max(span.end for span in works) - min(span.start for span in works)
    assert length == pytest.approx(seconds, rel=0.2)


def test_the_first_difference_is_named():
    plan, _ = planned("pp4 1f1b mb1")
    measured = replace(plan, source="measured", step=3)
    assert agreement(plan, measured).words.startswith("every rank did its actions in the planned")
    second = plan.ranks[1]
    work = [span for span in second.spans if span.lane == "compute"]
    swapped = [work[1]._replace(start=work[0].start), work[0]._replace(start=work[1].start)]
    changed = replace(second, spans=(*swapped, *work[2:]))
    found = agreement(plan, replace(measured, ranks=(plan.ranks[0], changed, *plan.ranks[2:])))
    assert found.difference == (
        "rank 1, action 0: F of stage 1 and microbatch 1 where F of stage 1 and microbatch 0 was "
        "planned"
    )
    cut = replace(second, spans=tuple(work[:-1]))
    found = agreement(plan, replace(measured, ranks=(cut,)))
    assert found.difference.startswith(f"rank 1, action {len(work) - 1}: nothing more where B of")
    assert found.points is None  # of one rank there is no bubble


def test_what_agrees_is_said_beside_the_charts():
    plan, _ = planned("pp4 1f1b mb1")
    later = [
        replace(one, spans=tuple(s._replace(start=s.start * 2, end=s.end * 2) for s in one.spans))
        for one in plan.ranks
    ]
    measured = replace(plan, source="measured", ranks=tuple(later))
    text = summary([plan, measured]).plain
    assert "0.0 points more" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert agreement(plan, replace(measured, ranks=(RankLedger(0, {"pp": 0}),))) is None
