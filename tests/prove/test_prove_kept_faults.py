"""Faults that show only where a small case has what its config has: each must be caught.

A fault is a patch of one function, on every rank, and acts on no case whose reduction removed what
it is about: where each token takes all experts, in rows of one block, in the first three steps.
"""

from unittest.mock import patch

import pytest
import torch

from meshwright.comm.groups import open_groups
from meshwright.layout import Layout
from meshwright.models import balance, blockwise, transformer
from meshwright.models.balance import Balance
from meshwright.models.planned_cut import PlannedCut
from meshwright.models.routers import SigmoidRouter
from meshwright.parallel.context_parallel import ring
from meshwright.prove import trial
from meshwright.prove.parity import check
from meshwright.prove.rates import prove_rates
from meshwright.prove.shrink import shrink
from meshwright.spec.presets import PRESETS
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training import update
from meshwright.training.optimizers import sgd
from ranks import on_ranks

EVEN = {"router_aux_loss": 1.0}


def worst_experts():
    return patch.object(Balance, "picked", lambda self, x, k: x.topk(k, largest=False))


def groups_by_their_best():
    real = torch.Tensor.topk

    def topk(self, k, *args, **kwargs):
        found = real(self, k, *args, **kwargs)
        if self.dim() == 3:  # tokens, groups, experts
            found.values[..., 1:] = 0
        return found

    return patch.object(torch.Tensor, "topk", topk)


def uncorrected():
    real = SigmoidRouter.pick

    def pick(self, scores):
        with patch.object(self, "correction", torch.zeros_like(self.correction)):
            return real(self, scores)

    return patch.object(SigmoidRouter, "pick", pick)


def doubled_capacity():
    real = balance.full_at
    return patch.object(balance, "full_at", lambda f, *sizes: real(2 * f, *sizes))


def loss_averaged_over_cp():
    real = Balance.to_shares

    def mean(self, every, ids, rows):
        return real(self, every, ids, rows) / self.ranks

    return patch.object(Balance, "to_shares", mean)


def no_momentum():
    real = sgd.DecoupledSGD._descend

    def descend(self, weights, group):
        real(self, weights, {**group, "momentum": 1e-9})

    return patch.object(sgd.DecoupledSGD, "_descend", descend)


def long_rows():
    """The own kernel of a CPU is off where a row has several blocks."""
    real = blockwise.attention

    def off(q, *others):
        out, lse = real(q, *others)
        return (out * 1.01 if q.shape[2] > 64 else out), lse

    return patch.object(blockwise, "attention", off)


def windows_of_a_block():
    """A query sees no keys before the block before its own."""
    real = PlannedCut.seen_by

    def seen_by(self, queries):
        found = real(self, queries)
        return slice(max(found.start, queries.start - 64), found.stop)

    return patch.object(PlannedCut, "seen_by", seen_by)


def pieces_of_a_ring():
    """Pieces of more than a block lose their last queries' gradient."""
    real = ring._Piece.backward

    def backward(self, *args):
        grads = real(self, *args)
        if grads[0].shape[2] > 64:
            grads[0][:, :, 64:] *= 0.99
        return grads

    return patch.object(ring._Piece, "backward", backward)


def schedule_a_step_early():
    real = trial.learning_rate

    def early(step, steps, spec):
        return real(step + 1 if step > spec.warmup_steps else step, steps, spec)

    return patch.object(trial, "learning_rate", early)


def no_clipping_from_the_fourth_step():
    real, taken = update.step_scaled, [0]

    def some(optimizer, norm, scale, clip):
        taken[0] += 1
        real(optimizer, norm, scale, clip if taken[0] < 4 else 0)

    return patch.object(update, "step_scaled", some)


def rounded_embedding_scale():
    real = transformer._scaled
    rounded = lambda factor: torch.tensor(factor).bfloat16().item()  # noqa: E731
    return patch.object(transformer, "_scaled", lambda x, factor: real(x, rounded(factor)))


# The fault's preset, layout, and what else the config says
FAULTS = {
    worst_experts: ("qwen3-30b-a3b", "shard2 zero2 ep2 mb2", {"seq_len": 64}),
    groups_by_their_best: ("deepseek-v3", "dp2 mb1", {"seq_len": 64}),
    uncorrected: ("kimi-k2", "dp2 mb1", {"seq_len": 64}),
    doubled_capacity: ("olmoe-1b-7b", "dp2 mb1", {"seq_len": 64, "expert_capacity": 2.0}),
    loss_averaged_over_cp: ("qwen3-30b-a3b", "cp2-ring mb1", {"seq_len": 64, **EVEN}),
    no_momentum: (None, "dp2 mb1", {"seq_len": 64, "name": "sgd", "momentum": 0.9}),
    long_rows: (None, "dp2 mb1", {"seq_len": 512}),
    windows_of_a_block: ("gemma-3-1b", "dp2 mb1", {}),
    pieces_of_a_ring: (None, "cp2-ring mb1", {}),
    schedule_a_step_early: (None, "dp2 mb1", {"seq_len": 64, "schedule": "wsd"}),
    no_clipping_from_the_fourth_step: (None, "dp2 mb1", {"seq_len": 64}),
    rounded_embedding_scale: ("gemma-2-2b", "dp2 mb1", {"seq_len": 64}),
}


def small(preset, label, settings):
    trained = {key: value for key, value in settings.items() if key in TrainSpec.model_fields}
    others = {key: value for key, value in settings.items() if key not in trained}
    spec = OptimizerSpec(warmup_steps=20, **others)
    train = TrainSpec(**{"batch": 4, "seq_len": 2048, **trained})
    (case,) = shrink(model_spec(preset=preset), train, Layout.parse(label), spec)
    return case


def failed(world, name, faulty):
    fault = next(fault for fault in FAULTS if fault.__name__ == name)
    case = small(*FAULTS[fault])
    groups = open_groups(case.layout, world)
    if not faulty:
        return [verdict for verdict in check(case, groups, world) if not verdict.passed]
    with fault():
        return [verdict for verdict in check(case, groups, world) if not verdict.passed]


@pytest.mark.often(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [fault.__name__ for fault in FAULTS])
def test_a_fault_is_caught(name):
    assert on_ranks(2, failed, name=name, faulty=True)[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [fault.__name__ for fault in FAULTS])
def test_without_the_fault_all_is_well(name):
    assert on_ranks(2, failed, name=name, faulty=False)[0] == []


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("steps", [1, 7, 200, 1_000_003])
@pytest.mark.parametrize("length", [None, 5, 150, 2_000_000])
def test_the_rates_of_a_whole_run_are_those_of_the_formula(schedule, steps, length):
    spec = OptimizerSpec(schedule=schedule, warmup_steps=20, schedule_steps=length)
    for one in (spec, spec.model_copy(update={"decay_steps": 3, "warmup_steps": 0})):
        assert prove_rates(steps, one).passed


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_rate_that_is_one_step_off_is_told(schedule, monkeypatch):
    real = trial.learning_rate
    monkeypatch.setattr(
        "meshwright.prove.rates.learning_rate", lambda step, *of: real(step + 1, *of)
    )
    verdict = prove_rates(100_000, OptimizerSpec(schedule=schedule, warmup_steps=100))
    assert not verdict.passed
    assert "instead of" in verdict.observed


def test_the_faults_use_presets_that_there_are():
    assert {preset for preset, *_ in FAULTS.values()} - {None} <= PRESETS.keys()
