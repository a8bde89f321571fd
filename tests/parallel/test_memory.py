"""What each ZeRO stage really keeps: counted at the moments that matter, and the peaks' order."""

import weakref

import pytest
import torch

from meshwright.bench.memory_breakdown import measure
from meshwright.comm.groups import open_groups
from meshwright.layout import Layout
from meshwright.parallel.batch import Batch
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.gradients import local_shard
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.data_parallel.sharded import _param_groups, _state, replicas_of, wrapped
from meshwright.parallel.tensor_parallel.deferred import Deferral, linear
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update
from ranks import on_ranks

RANKS, LAYERS, MIDDLE = 2, 6, 3
MODEL = model_spec(
    dim=64, n_layers=LAYERS, n_heads=2, n_kv_heads=2, ffn_dim=128, vocab_size=64, context=16
)
TRAIN = TrainSpec(batch=4, seq_len=16)  # two microbatches a rank
WHOLE = sum(part.numel for part in parts(MODEL))
BLOCK = sum(part.numel for part in parts(MODEL) if part.name.startswith("layers.0."))
LABELS = ("dp2 mb1", "shard2 zero1 mb1", "shard2 zero2 mb1", "shard2 zero3 mb1")


def held_whole(parallel):
    """Elements of the blocks' weights, and of their gradients, that are whole on this rank.

    Only those beside what is trained: ordinary parameters and gradients do not count.
    """
    weights = gradients = 0
    replicas = replicas_of(parallel.modules[0])
    for name, weight in {} if replicas is None else replicas.weights.items():
        if name.startswith("layers.") and weight.used is not weight.master:
            local = local_shard(weight.used.detach())
            weights += local.untyped_storage().nbytes() // local.itemsize
            gradients += 0 if weight.gradient is None else weight.gradient.numel()
    for block in parallel.modules[0].blocks:
        for module in wrapped(block):
            for group in _param_groups(_state(module)):
                for parameter in group.fsdp_params:
                    for output in parameter.all_gather_outputs:
                        weights += output.untyped_storage().nbytes() // output.itemsize
                    gradient = parameter.unsharded_accumulated_grad
                    if gradient is None and hasattr(parameter, "_unsharded_param"):
                        gradient = parameter._unsharded_param.grad
                    gradients += 0 if gradient is None else gradient.numel()
    return weights, gradients


def conformance(world, label):
    """What is whole in the backwards of a middle block, between microbatches and after them."""
    layout = Layout.parse(label)
    program = lower(MODEL, TRAIN, OptimizerSpec(), layout)
    parallel = build(program, open_groups(layout, world), world.device, seeded(MODEL, 0))
    shards = Shards(parallel.held, on_host=False)
    optimizer = build_optimizer(shards.leaves, shards.parts, OptimizerSpec())
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(world.rank))
    seen = {"in block": [], "after B": [], "sharded": []}

    def note_in_backward(module, args, out):
        out.register_hook(lambda _: seen["in block"].append(held_whole(parallel)))

    parallel.modules[0].blocks[MIDDLE].attn.o.register_forward_hook(note_in_backward)

    def observe(action, started, ended):
        if action.kind == "B":
            seen["after B"].append(held_whole(parallel))
            kept = [held.gradient for held in parallel.held if held.gradient is not None]
            seen["sharded"].append(sum(gradient.numel() for gradient in kept))

    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for _ in range(2):  # the second step is the ordinary one
        for values in seen.values():
            values.clear()
        parallel.observe = observe
        update(parallel, batch, world, shards, optimizer, LossScale.of(TRAIN), 1.0)
    states = [t for s in optimizer.state.values() for t in s.values() if t.dim() > 0]
    return {
        **seen,
        "optimizer": sum(t.numel() for t in states),
        "shards": sum(leaf.numel() for leaf in shards.leaves),
        "left": sum(held.gradient is not None for held in parallel.held),
        "whole left": held_whole(parallel)[1],
    }


@pytest.mark.often(2)
@pytest.mark.parametrize("label", LABELS)
def test_what_each_stage_keeps(label):
    zero = Layout.parse(label).zero
    for found in on_ranks(RANKS, conformance, label=label):
        # The first row is of the first microbatch, the second of the last.
        (early, early_grads), (late, late_grads) = found["in block"]
        (between, between_grads), (after, after_grads) = found["after B"]
        blocks = LAYERS * BLOCK
        if zero == 0:  # the weights are the rank's own, and nothing is gathered
            assert early == late == between == 0
            assert between_grads == late_grads == 0  # nor kept beside the parameters
            assert found["sharded"] == [WHOLE] * 2
            assert found["optimizer"] == 2 * WHOLE
            continue
        if zero == 3:  # the block itself, and the one that is gathered ahead
            assert BLOCK <= early <= 2 * BLOCK
            assert BLOCK <= late <= 2 * BLOCK
            assert between == after == 0
        else:  # all of them, always
            assert early == late == between == after == blocks
        if zero == 1:  # gradients stay whole until the last backward, which sends them off
            assert 0 < early_grads <= (LAYERS - MIDDLE) * BLOCK
            assert between_grads == blocks
            assert MIDDLE * BLOCK < late_grads <= (MIDDLE + 1) * BLOCK
            assert found["sharded"] == [0, WHOLE // RANKS]
        else:  # the block's own; those behind it are reduced already
            assert 0 < early_grads <= BLOCK
            assert 0 < late_grads <= BLOCK
            assert between_grads == 0
            assert found["sharded"] == [WHOLE // RANKS] * 2
        assert after_grads == found["left"] == found["whole left"] == 0
        assert found["shards"] == found["optimizer"] // 2 == WHOLE // RANKS


def peak(world, label):
    return measure(world, Case(MODEL, TRAIN, Layout.parse(label))).peak


@pytest.mark.slow  # test_timeline holds peaks of each stage of ZeRO against the measured ones
def test_peaks_fall_with_the_stage():
    peaks = {label: on_ranks(RANKS, peak, label=label)[0] for label in LABELS}
    totals = [peaks[label].total for label in LABELS]
    none, first, second, third = peaks.values()
    assert totals == sorted(set(totals), reverse=True)
    for found, whole, ranks in ((none, 1, 1), (first, 1, 2), (second, 1, 2), (third, 2, 2)):
        assert found.parameters == 4 * WHOLE // whole
        # Beside the two moments AdamW counts its steps, a number for each parameter.
        assert found.optimizer == pytest.approx(8 * WHOLE // ranks, rel=0.01)
    assert none.gradients >= 4 * LAYERS * BLOCK
    assert first.gradients >= 4 * LAYERS * BLOCK
    assert none.gathered == first.gathered == second.gathered == 0
    assert second.gradients <= 4 * (WHOLE // RANKS + 2 * BLOCK)
    assert third.gathered <= 4 * (WHOLE - (LAYERS - 2) * BLOCK)


def test_a_deferred_weight_gradient_lets_go_of_its_factors():
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4, requires_grad=True)
    deferral = Deferral()
    deferral.pending = works = []
    inputs = x * 2
    linear(inputs, weight, None, deferral).sum().backward()
    alive = weakref.ref(inputs)
    del inputs
    assert alive() is not None  # the work still needs it
    while works:
        works.pop()()
    assert alive() is None
    assert not weight.grad.requires_grad
    assert weight.grad.equal(torch.full((4, 4), 4.0))
