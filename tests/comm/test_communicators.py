"""Communicators that hold up the host at their first use, as NCCL's do: nobody waits for ever."""

import itertools

import pytest
import torch

from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.flight_recorder_file import TRANSFERS
from meshwright.comm.groups import open_groups, pairs_of, warm
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.program.schedule import compute_tables, stage_ranks, with_transfers
from meshwright.program.target import Target
from meshwright.program.transfers import _peer
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.simulate.fake import fake_world
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update


def stuck(logs):
    """Return the ranks that wait for ever: a log has the communicators that a rank uses, in order.

    A communicator is its name and its ranks. At its first use a rank waits until all have come.
    """
    places, made, waiting = dict.fromkeys(logs, 0), set(), {}
    moved = True
    while moved:
        moved = False
        for rank, log in logs.items():
            while places[rank] < len(log):
                one = log[places[rank]]
                if one not in made:
                    waiting.setdefault(one, set()).add(rank)
                    if waiting[one] != set(one[1]):
                        break
                    made.add(one)
                places[rank] += 1
                moved = True
    return [rank for rank, log in logs.items() if places[rank] < len(log)]


def tables():
    sizes = itertools.product(SCHEDULES, (2, 3, 4, 8), (1, 2, 4), (1, 2, 3, 4, 8))
    for schedule, pp, virtual, microbatches in sizes:
        traits = SCHEDULES[schedule]
        if microbatch_rule(schedule, pp, virtual, microbatches) is not None:
            continue
        if virtual < traits.min_virtual or virtual > (traits.max_virtual or virtual):
            continue
        ranks = stage_ranks(schedule, pp, virtual)
        yield with_transfers(compute_tables(schedule, pp, virtual, microbatches), ranks), ranks


def test_no_table_hangs_once_its_pairs_are_warm():
    hung = seen = 0
    for everyone, ranks in tables():
        first = [("pp", pair) for pair in pairs_of(ranks)]
        cold = {
            rank: [("pp", tuple(sorted((rank, _peer(a, ranks))))) for a in table if a.is_transfer]
            for rank, table in enumerate(everyone)
        }
        hung += bool(stuck(cold))
        seen += 1
        used = {pair for log in cold.values() for _, pair in log}
        assert used == {pair for _, pair in first}
        warmed = {rank: [one for one in first if rank in one[1]] + cold[rank] for rank in cold}
        assert not stuck(warmed)
    assert seen > 100
    assert hung, "without it some hang, or this test sees nothing"


class Log(FlightRecorder):
    """Keeps which communicators are used, in order."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.log = rank, []

    def begin(self, kind, group, size, peer=-1, *, waits=False):
        found = self._groups[group]
        # A ring's transfers are begun together, which NCCL does by the group's own communicator.
        is_pair = kind in TRANSFERS and found.label != "cp"
        ranks = tuple(sorted((self.rank, peer))) if is_pair else found.ranks
        self.log.append((f"{is_pair and ranks} {found.name}", ranks))
        return super().begin(kind, group, size, peer, waits=waits)


MODEL = model_spec(dim=32, n_layers=8, n_heads=4, vocab_size=64, ffn_dim=64, tie_embeddings=True)


def used_by(rank, label, warms):
    """Return what a rank uses while its groups open, and in a step."""
    model = MODEL
    layout, recorder = Layout.parse(label), Log(rank)
    microbatches = layout.pp if layout.schedule == "1f1b" else 1
    rows = layout.dp * layout.microbatch * microbatches
    spec = TrainSpec(batch=rows, seq_len=16, precision="bf16")
    with fake_world(rank, layout.world, recorder) as world, CollectiveRecorder(recorder):
        program = lower(model, spec, OptimizerSpec(), layout, Target("gpu"))
        groups = open_groups(layout, world)
        if warms:
            warm(groups, layout, torch.device("cpu"))
        parallel = build(program, groups, world.device, seeded(model, 0))
        shards = Shards(parallel.held, on_host=False)
        optimizer = build_optimizer(shards.leaves, shards.parts, OptimizerSpec())
        batch = mine(make_batch(Case(model, spec, layout), 0), program, world)
        scale = LossScale.of(spec)
        update(parallel, batch, world, shards, optimizer, scale, 1.0)
    return recorder.log


# One microbatch round a ring of ranks, which hangs where pairs are not warm.
HANGS = "pp4 interleaved_1f1b v2 mb1"
SLOW = (
    "pp2 1f1b mb1 tp2 sp shard2 zero3",
    "dp2 shard2 zero2 cp2-ring mb1",
    "shard2 zero3 cp2-ulysses mb1",
)


@pytest.mark.parametrize(
    "label", [HANGS, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_no_rank_waits_for_ever_whatever_groups_it_uses(label):
    world = Layout.parse(label).world
    assert not stuck({rank: used_by(rank, label, True) for rank in range(world)})
    if label == HANGS:
        assert stuck({rank: used_by(rank, label, False) for rank in range(world)})


def test_what_is_warm_is_all_that_a_step_uses():
    for label in SLOW[:2]:
        cold = used_by(0, label, warms=False)
        warmed = used_by(0, label, warms=True)
        at_first = warmed[: len(warmed) - len(cold)]
        assert set(cold) <= set(at_first), label


def test_groups_of_experts_are_warm_too():
    layout, recorder = Layout.parse("shard4 zero3 ep2 mb1"), Log(0)
    with fake_world(0, layout.world, recorder) as world, CollectiveRecorder(recorder):
        groups = open_groups(layout, world)
        warm(groups, layout, torch.device("cpu"))
    experts = groups.experts
    expected = {link.ranks for link in (experts.ep, experts.shard)}
    assert expected <= {ranks for _, ranks in recorder.log}
