"""Conformance: what a program says against what its ranks hold, send and multiply."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from conformance_cases import CASES, SHARED_OUT, labelled, make
from meshwright.comm.groups import open_groups
from meshwright.comm.wire import Wire, WireMessage, WorkCounter
from meshwright.layout import Layout
from meshwright.parallel.build import build, seeded
from meshwright.program.collectives import collectives
from meshwright.program.flops import attention_flops, matmul_flops
from meshwright.program.lower import lower
from meshwright.program.model_flops import flops_per_token
from meshwright.program.schedule import SCHEDULES, compute_tables, microbatch_rule
from meshwright.prove import conformance
from meshwright.prove.batches import make_batch
from meshwright.prove.compare import mine, program_of
from meshwright.prove.conformance import prove_conformance, torch_order
from meshwright.prove.matrix import matrix
from meshwright.spec.parts import delta_shape, mamba_shape, parts
from meshwright.spec.recurrences import chunk_flops, state_space_flops
from meshwright.training.update import gradients
from ranks import on_ranks, ranks


def counted(world, case, parallel=None, groups=None):
    """The verdicts by claim."""
    groups = groups or open_groups(case.layout, world)
    return {v.claim: v for v in prove_conformance(case, groups, world, parallel)}


@pytest.mark.often(2)
@pytest.mark.parametrize("case", labelled([*CASES, *SHARED_OUT]))
def test_a_program_is_what_its_ranks_do(case):
    for verdicts in on_ranks(case.layout.world, counted, case=case):
        failed = {claim: v.observed for claim, v in verdicts.items() if not v.passed}
        assert not failed
        claims = {"parameters", "first weights", "collectives", "matrix products"}
        if case.layout.is_pipelined and case.layout.schedule != "naive":
            claims.add("action table")
        assert set(verdicts) == claims


# What is wrong must be found.

COLLECTIVES = "meshwright.comm.wire.collectives"


def lying(change):
    """A `collectives` that changes what the true one says of the first reduce-scatter."""

    def lie(program, rank):
        found = list(collectives(program, rank))
        place = next(i for i, one in enumerate(found) if one.kind == "reduce_scatter")
        found[place : place + 1] = change(found[place])
        return tuple(found)

    return lie


@pytest.mark.slow
@ranks(2)
def test_a_wrong_collective_is_found(world):
    case = make("tp2 sp mb4")
    groups = open_groups(case.layout, world)
    for change, sign in (
        (lambda one: [], "over tp: 36 where the program has 20"),
        (lambda one: [replace(one, bytes=one.bytes + 4)], "0 where the program has 16"),
        (lambda one: [replace(one, kind="all_gather")], "52 where the program has 68"),
        (lambda one: [replace(one, axis="cp")], "over cp: 0 where the program has 16"),
        (lambda one: [replace(one, count=one.count + 1)], "36 where the program has 37"),
    ):
        with mock.patch(COLLECTIVES, lying(change)):
            verdict = counted(world, case, groups=groups)["collectives"]
        assert not verdict.passed
        assert any(sign in text for text in verdict.observed), verdict.observed
        assert {text[:6] for text in verdict.observed} == {"rank 0", "rank 1"}
    with mock.patch(COLLECTIVES, lying(lambda one: [replace(one, reason="")])):
        assert counted(world, case, groups=groups)["collectives"].passed


WRONG = [
    ("tp2 mb4", "tp2 sp mb4", {"collectives"}),
    ("tp2 sp mb4", "tp2 sp mb4 recompute-full", {"collectives", "matrix products"}),
    ("tp2 sp mb4", "tp2 sp mb2", {"collectives"}),
    ("shard2 zero2 mb4", "shard2 zero3 mb4", {"collectives"}),
    ("shard2 zero2 mb2", "shard2 zero1 mb2", {"collectives"}),
    ("cp2-ring mb4", "cp2-ulysses mb4", {"collectives"}),
    ("pp2 1f1b mb2", "pp2 1f1b mb1", {"collectives"}),
    ("pp2 1f1b mb2", "pp2 zbv v2 mb2", {"parameters", "collectives"}),
]


@pytest.mark.often(2)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: f"{one[0]} as {one[1]}")
def test_another_layouts_model_is_found(wrong):
    on_ranks(2, another_layouts, wrong=wrong)


def another_layouts(world, wrong):
    for said, done, claims in [wrong]:
        case, other = make(said), make(done)
        groups = open_groups(case.layout, world)
        program = lower(other.model, other.train, other.optimizer, other.layout)
        parallel = build(program, groups, world.device, seeded(other.model, 0))
        verdicts = counted(world, case, parallel, groups)
        failed = {claim for claim, v in verdicts.items() if not v.passed}
        assert failed >= claims, (said, done, failed)
        assert all(v.observed for v in verdicts.values())


@ranks(1)
def test_another_model_is_found(world):
    case, other = make("mb4"), make("mb4", "biased")
    groups = open_groups(case.layout, world)
    program = lower(other.model, other.train, other.optimizer, other.layout)
    parallel = build(program, groups, world.device, seeded(other.model, 0))
    verdicts = counted(world, case, parallel, groups)
    assert not verdicts["parameters"].passed
    texts = verdicts["parameters"].observed
    shard = "rank 0: shard stage 0, layers.0.attn.k.weight"
    assert texts[0] == f"{shard}: (16, 64) where the program has (32, 64)"
    assert len(texts) == conformance.SHOWN + 1
    assert texts[-1].startswith("and ")
    assert not verdicts["matrix products"].passed
    assert verdicts["matrix products"].error > 0.01


@ranks(2)
def test_another_order_is_found(world):
    case = make("pp2 1f1b mb1")
    with mock.patch.object(
        conformance, "torch_order", lambda *at: compute_tables("gpipe", *at[1:])
    ):
        verdict = counted(world, case)["action table"]
    assert not verdict.passed
    assert "position 2: the program has 0B0, torch 0F2" in verdict.observed[0]


def test_orders_of_torch():
    for name in SCHEDULES:
        for pp, v, count in ((2, 2, 8), (2, 1, 4), (4, 2, 8)):
            if name != "naive" and microbatch_rule(name, pp, v, count) is None:
                assert torch_order(name, pp, v, count) == compute_tables(name, pp, v, count)


# The conformance check's own instruments.


@ranks(2)
def test_the_wire_sees_every_kind_of_call(world):
    groups = open_groups(Layout(cp=2), world)
    alone = dist.new_subgroups_by_enumeration([[0], [1]])[0]
    x, pair = torch.ones(6), torch.ones(12)
    group, name = groups.cp.group, groups.cp.name
    functional = torch.ops._c10d_functional
    with Wire(groups) as wire:
        dist.all_gather(list(pair.split(6)), x, group=group)
        dist.reduce_scatter(x, list(pair.split(6)), group=group)
        dist.all_to_all_single(torch.empty(6), x, group=group)
        dist.broadcast(x, 0, group=group)
        dist.barrier(group=group)
        dist.all_reduce(x, group=alone)
        dist.all_reduce(x.bfloat16())
        functional.wait_tensor(functional.all_gather_into_tensor(x, 2, name))
        functional.wait_tensor(functional.reduce_scatter_tensor(pair, "sum", 2, name))
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        leaf.register_hook(lambda grad: dist.all_reduce(grad.clone(), group=group))
        leaf.sum().backward()
        (dist.send if world.rank == 0 else dist.recv)(x, 1 - world.rank, group)
    kinds = Counter({(m.kind, m.bytes, m.axis): n for m, n in wire.messages.items()})
    assert kinds.pop(("c10d::broadcast_", 24, "cp")) == 1
    assert kinds.pop(next(kind for kind in kinds if "barrier" in kind[0])) == 1
    assert kinds == {
        ("all_gather", 48, "cp"): 2,
        ("reduce_scatter", 48, "cp"): 2,
        ("all_to_all", 24, "cp"): 1,
        ("all_reduce", 12, wire.axis("world")): 1,
        ("all_reduce", 24, "cp"): 1,
        ("send" if world.rank == 0 else "recv", 24, "cp"): 1,
    }


@ranks(2)
def test_axes_that_share_a_group_go_by_one_name(world):
    """Only axes of one rank do; those that span the same ranks have a group each."""
    wire = Wire(open_groups(Layout(tp=2), world))
    assert (wire.axis("tp"), wire.axis("world"), wire.axis("shard")) == ("tp", "world", "shard")
    wire = Wire(open_groups(Layout(cp=2), world))
    assert (wire.axis("cp"), wire.axis("world")) == ("cp", "world")
    assert wire.axis("replicate") == "replicate"
    assert wire.axis("ends") == "ends"
    assert WireMessage("send", "pp", 1) == ("send", "pp", 1)


def test_work_counts_products():
    x, w = torch.randn(2, 3, 8), torch.randn(5, 8, requires_grad=True)
    q, k = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 2, 16, 8)
    with WorkCounter() as work:
        torch.nn.functional.linear(x, w, torch.ones(5)).sum().backward()
        torch.nn.functional.linear(x, w).sum()
    assert work.products == 3 * 2 * 6 * 8 * 5
    with WorkCounter() as work:
        core = torch.nn.functional.scaled_dot_product_attention
        core(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
        torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert work.attention == 7 * 2 * 8 * (2 * 4 * 16 * 16 / 2) + 2 * 2 * 3 * 4 * 5
    assert work.products == 0


def test_work_counts_the_products_of_experts_in_one_kernel():
    rows, weights = torch.ones(16, 8).bfloat16(), torch.ones(2, 8, 24).bfloat16()
    ends = torch.tensor([5, 16], dtype=torch.int32)
    with WorkCounter() as work:
        torch._grouped_mm(rows, weights, offs=ends)
        torch._grouped_mm(torch.ones(16, 24).bfloat16().t(), rows, offs=ends)
    assert work.products == 2 * 2 * 16 * 8 * 24


ATTENDING = [
    case for case in CASES if case.layout.world <= 2 and (case.layout.cp > 1 or case.packed)
]


@pytest.mark.often(3)
@pytest.mark.parametrize("case", labelled(ATTENDING))
def test_attention_flops(case):
    for expected, found in on_ranks(case.layout.world, attended, case=case):
        assert expected == found


def attended(world, case):
    groups = open_groups(case.layout, world)
    program = program_of(case, world)
    parallel = build(program, groups, world.device, seeded(case.model, 0))
    with WorkCounter() as work:
        gradients(parallel, mine(make_batch(case, 0), program, world), world, case.loss_scale)
    return attention_flops(program, groups.at["pp"], groups.at["cp"]), work.attention


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_a_whole_table_adds_up(world):
    """Products are six FLOPs per weight and token, and what is sent is received."""
    for case in matrix(world):
        if case.refused is not None:
            continue
        layout, found = case.layout, Counter()
        plain = lower(
            case.model, case.train, case.optimizer, layout.model_copy(update={"recompute": "none"})
        )
        flops = sum(matmul_flops(plain, rank) for rank in range(layout.pp))
        tokens = case.train.batch * case.train.seq_len
        model = plain.model
        # The head also scores the padding of its vocabulary.
        padding = (
            (6 if model.lora is None else 4) * model.dim * (model.vocab_rows - model.vocab_size)
        )
        # Each rank of tp scores all tokens, unless it routes its own: routers are not cut.
        # Nor is what makes latent vectors, or the side of an adapter that meets the stream.
        each = [part for part in parts(model) if len(part.shape) == 2]
        whole = [one for one in each if one.axes[0] in ("routes", "latent")]
        if layout.folds > 1:
            whole = [one for one in whole if not one.name.endswith("router.weight")]
        whole += [one for one in each if set(one.axes) == {"rank", "dim"}]
        scores = sum((6 if one.trained else 4) * one.numel for one in whole)
        of_experts = [one for one in parts(model) if one.is_of_experts and len(one.shape) == 3]
        met = [one for one in of_experts if set(one.axes[1:]) == {"rank", "dim"}]
        pairs = [6 * one.numel * model.top_k // model.experts for one in met]
        scores += sum(pairs) if layout.folds == 1 else 0
        per_token = flops_per_token(model, 0) + (layout.tp - 1) * scores + padding
        layers = [model.layer(layer) for layer in range(model.n_layers)]
        if model.has_delta:
            deltas = sum(layer.delta for layer in layers)
            per_token -= 3 * deltas * chunk_flops(*delta_shape(model))
        if model.has_mamba:
            mambas = sum(layer.mamba for layer in layers)
            per_token -= 3 * mambas * state_space_flops(*mamba_shape(model))
        assert flops * layout.world / layout.pp == per_token * tokens, case.label
        program = lower(case.model, case.train, case.optimizer, layout)
        for rank in range(world):
            for one in collectives(program, rank):
                assert one.count > 0
                # A rank with all rows of few experts sends none of their gradients.
                assert one.bytes > 0 or (one.kind, one.axis) == ("all_to_all", "expert_shard")
                assert one.reason
                found[one.kind, one.axis, one.bytes] += one.count
        for (kind, axis, size), count in found.items():
            if kind == "send":
                assert found["recv", axis, size] == count, case.label
