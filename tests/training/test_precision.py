"""fp16: the loss scale, and that every rank agrees on an overflow wherever it happens."""

import json
import math

import pytest
import torch

from meshwright.comm.groups import open_groups
from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.parallel.batch import Batch
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.runtime.session import train
from meshwright.spec.parts import Part
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer, step_scaled
from meshwright.training.update import GROWTH_STEPS, START, LossScale, overflowed, update
from ranks import ranks
from runs import clean_environ

SPEC = model_spec(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=64, ffn_dim=64)
TRAIN = TrainSpec(batch=4, seq_len=16, precision="fp16")
MATRIX = Part("head.weight", (4, 3), ("vocab", "dim"))


def test_the_scale_halves_at_an_overflow_and_doubles_after_many_good_steps():
    scale = LossScale.of(TRAIN)
    assert (scale.value, scale.is_dynamic) == (START, True)
    scale.update(overflowed=True)
    assert (scale.value, scale.good_steps) == (START / 2, 0)
    for _ in range(GROWTH_STEPS):
        assert scale.value == START / 2
        scale.update(overflowed=False)
    assert (scale.value, scale.good_steps) == (START, 0)


def test_a_fixed_scale_stays_and_other_precisions_have_none():
    fixed = LossScale.of(TRAIN.model_copy(update={"loss_scale": 128.0}))
    fixed.update(overflowed=True)
    assert fixed.value == 128.0
    assert LossScale.of(TRAIN.model_copy(update={"precision": "bf16"})).value == 1.0


def batch_of(world, layout):
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
    share = 4 // layout.dp
    start = layout.mesh.data_rank(world.rank) * share
    rows = tokens[start : start + share]
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def overflow_of(done, parallel, world, scale):
    return overflowed(done.norm.item(), int(done.first), parallel, world, scale, step=1)


LAYOUTS = {
    "dp": Layout(dp_replicate=2),
    "zero3": Layout(dp_shard=2, zero=3),
    "tp": Layout(tp=2, sp=True),
    "pp": Layout(pp=2),
    "zbv": Layout(pp=2, schedule="zbv", virtual_stages=2),
    "cp": Layout(cp=2),
}


@pytest.mark.often(2)
@pytest.mark.parametrize("name", LAYOUTS)
@ranks(2)
def test_an_overflow_on_one_rank_skips_the_update_on_all_and_is_named(world, name):
    layout = LAYOUTS[name]
    parallel = build(
        lower(SPEC, TRAIN, OptimizerSpec(), layout),
        open_groups(layout, world),
        world.device,
        seeded(SPEC, 0),
    )
    shards = Shards(parallel.held, on_host=False)
    optimizer = build_optimizer(shards.leaves, shards.parts, OptimizerSpec(name="sgd", lr=0.1))
    scale, batch = LossScale.of(TRAIN), batch_of(world, layout)
    before = [h.shard.clone() for h in parallel.held]

    target = "layers.1.attn.q.weight"
    holders = [h for h in parallel.held if h.name == target]
    real = parallel.backward

    def overflow(batch, loss_scale):
        loss = real(batch, loss_scale)
        # One element of one rank's shard, after the sums over data.
        if holders and world.rank == max(holder_ranks):
            holders[0].gradient.view(-1)[0] = math.inf
        return loss

    votes = world.gather_on_host([float(bool(holders))])
    holder_ranks = [rank for rank, row in enumerate(votes) if row[0]]
    parallel.backward = overflow
    done = update(parallel, batch, world, shards, optimizer, scale, 1.0)
    assert overflow_of(done, parallel, world, scale) == f"{target} (rank {max(holder_ranks)})"
    assert scale.value == START / 2
    assert all(torch.equal(a, h.shard) for a, h in zip(before, parallel.held, strict=True))
    assert all(h.parameter.grad is None for h in parallel.held)

    parallel.backward = real
    done = update(parallel, batch, world, shards, optimizer, scale, 1.0)
    assert overflow_of(done, parallel, world, scale) is None
    assert 0 < done.norm < 100  # unscaled
    assert scale.value == START / 2
    moved = [not torch.equal(a, h.shard) for a, h in zip(before, parallel.held, strict=True)]
    assert all(moved)


def test_a_run_in_fp16_reports_and_saves_its_scale(config):
    run = train(
        config("train.precision=fp16", "layout.dp_replicate=2", "train.steps=3"), clean_environ()
    )
    assert run.exit_code == 0
    scales = [event["loss_scale"] for event in run.events("step")]
    assert len(scales) == 3
    assert set(scales) <= {START / 2**n for n in range(4)}
    manifest = json.loads((run.folder / "checkpoints/step-00000003/manifest.json").read_text())
    assert manifest["loss_scale"]["value"] == scales[-1]


def test_a_fixed_scale_too_high_for_fp16_skips_every_step_names_the_tensor_and_stays(config):
    """With a huge scale real fp16 gradients overflow by themselves: nothing is injected."""
    run = train(config("train.precision=fp16", "train.steps=2", "train.loss_scale=1e9"))
    events = list(run.events("overflow"))
    assert [event["step"] for event in events] == [1, 2]
    assert all("(rank 0)" in event["tensor"] for event in events)
    assert {event["loss_scale"] for event in events} == {1e9}


@pytest.mark.slow
@ranks(2)
def test_a_scale_too_high_for_fp16_is_halved_until_gradients_fit(world):
    """Real gradients: each overflow halves it and changes no weight, then a step updates."""
    layout = Layout(dp_replicate=2)
    parallel = build(
        lower(SPEC, TRAIN, OptimizerSpec(), layout),
        open_groups(layout, world),
        world.device,
        seeded(SPEC, 0),
    )
    shards = Shards(parallel.held, on_host=False)
    optimizer = build_optimizer(shards.leaves, shards.parts, OptimizerSpec(name="sgd", lr=0.1))
    scale, batch = LossScale(2.0**40, is_dynamic=True, skips=True), batch_of(world, layout)
    before = [held.shard.clone() for held in parallel.held]
    overflows = 0
    while overflows < 40:
        done = update(parallel, batch, world, shards, optimizer, scale, 1.0)
        tensor = overflow_of(done, parallel, world, scale)
        if tensor is None:
            break
        overflows += 1
        assert tensor.split(" (rank ")[0] in {held.name for held in parallel.held}
        assert scale.value == 2.0 ** (40 - overflows)
        assert all(torch.equal(a, h.shard) for a, h in zip(before, parallel.held, strict=True))
    assert 10 < overflows < 40
    assert scale.value == 2.0 ** (40 - overflows)
    assert not any(torch.equal(a, h.shard) for a, h in zip(before, parallel.held, strict=True))


@ranks(2)
def test_outside_of_fp16_it_is_an_error_on_every_rank(world):
    layout, plain = Layout(dp_replicate=2), TRAIN.model_copy(update={"precision": "fp32"})
    parallel = build(
        lower(SPEC, plain, OptimizerSpec(), layout),
        open_groups(layout, world),
        world.device,
        seeded(SPEC, 0),
    )
    with torch.no_grad():
        parallel.held[3].shard.view(-1)[0] = math.nan
    shards = Shards(parallel.held, on_host=False)
    optimizer = build_optimizer(shards.leaves, shards.parts, OptimizerSpec(name="sgd", lr=0.1))
    before = [h.shard.clone() for h in parallel.held]
    done = update(parallel, batch_of(world, layout), world, shards, optimizer, LossScale(), 1.0)
    with pytest.raises(MeshwrightError, match=r"the gradient of embed.weight \(rank 0\) is not"):
        overflow_of(done, parallel, world, LossScale())
    for old, held in zip(before, parallel.held, strict=True):
        torch.testing.assert_close(held.shard, old, rtol=0, atol=0, equal_nan=True)


def test_a_gradient_below_the_limit_is_left_alone():
    moved = []
    for clip_norm in (0.0, 5.0, 10.0):
        weight = torch.nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.full((2, 2), 2.5)  # of norm 5
        optimizer = build_optimizer(
            [weight], [MATRIX], OptimizerSpec(name="sgd", lr=0.1, weight_decay=0)
        )
        step_scaled(optimizer, torch.tensor(5.0, dtype=torch.float64), 1.0, clip_norm)
        moved.append(weight.detach())
    assert torch.equal(moved[0], torch.full((2, 2), -0.25))
    assert torch.equal(moved[1], moved[0])
    assert torch.equal(moved[2], moved[0])


@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.0), ("sgd", 0.0), ("sgd", 0.9)])
def test_a_step_that_is_not_finite_changes_no_weight_and_no_state(name, momentum):
    """Whichever step it is, and the steps after it are those of torch's own optimizer."""
    spec = OptimizerSpec(name=name, lr=0.1, momentum=momentum, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, generator=generator)
    gradients = [torch.randn(4, 3, generator=generator) for _ in range(3)]
    ours, plain = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = build_optimizer([ours], [MATRIX], spec)
    settings = {"lr": 0.1, "weight_decay": 0.1, "betas": spec.betas, "eps": spec.eps}
    wanted = torch.optim.AdamW([plain], **settings)
    if name == "sgd":
        wanted = torch.optim.SGD([plain], lr=0.1, momentum=momentum)
    for gradient in gradients:
        ours.grad = torch.full_like(ours, math.nan)
        before = ours.detach().clone()
        step_scaled(optimizer, torch.tensor(math.nan, dtype=torch.float64), 8.0, 1.0)
        assert torch.equal(before, ours)
        for value in optimizer.state[ours].values():
            assert torch.isfinite(value).all()

        norm = gradient.double().norm()
        ours.grad = gradient * 8  # of a scaled loss
        step_scaled(optimizer, norm, 8.0, 0.5)
        if name == "sgd":
            with torch.no_grad():
                plain.mul_(1 - 0.1 * 0.1)
        plain.grad = gradient * (0.5 / norm).clamp(max=1).float()
        wanted.step()
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
