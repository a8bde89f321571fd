"""Folding: ranks of tp among those that share out experts; layouts, faults, rules, pieces."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from meshwright.comm.groups import open_groups
from meshwright.cost.catalogue import cluster_of, find_device
from meshwright.layout import Layout, broken, nearest_legal
from meshwright.parallel.context_parallel.context import positions
from meshwright.planner.space import divisions
from meshwright.program.lower import lower
from meshwright.program.pieces import pieces_of
from meshwright.prove.case import Case
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.parity import check, prove_parity
from meshwright.report.causes import link_of
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import on_ranks

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 48}
MODELS = {
    "softmax": model_spec(family="qwen3_moe", vocab_size=72, experts=4, top_k=2, **SIZES),
    "shared": model_spec(
        family="qwen2_moe", vocab_size=72, experts=4, top_k=2, shared_ffn_dim=32, **SIZES
    ),
}
TRAIN = TrainSpec(batch=8, seq_len=24, seed=3, router_aux_loss=1.0)


def case_of(label, model="softmax", **train):
    return Case(MODELS[model], TRAIN.model_copy(update=train), Layout.parse(label))


def proven(world, case, fault=None):
    groups = open_groups(case.layout, world)
    return [
        *prove_parity(case, groups, world, fault=fault),
        *prove_conformance(case, groups, world),
    ]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "case",
    [
        case_of("tp2 sp ep2 etp1 mb4", expert_capacity=1.0),
        case_of("tp2 sp ep4 etp1 cp2-ring mb2 recompute-full", expert_capacity=1.0),
        case_of("zero1 tp2 sp ep2 etp1 cp2-ring mb4", "shared", expert_capacity=1.0),
        case_of("shard2 zero3 tp2 sp ep2 etp1 mb2", "shared", precision="bf16"),
        case_of("tp2 sp ep2 etp1 pp2 zbv v2 mb2", "shared"),
        case_of("tp4 sp ep4 etp1 mb4 recompute-selective", expert_capacity=1.0),
        replace(case_of("shard2 zero2 tp2 sp ep4 etp1 mb2", "shared"), fsdp2=True),
    ],
    ids=lambda case: case.layout.label,
)
def test_a_folded_layout_computes_what_one_device_does(case):
    if case.layout.stages > 2:
        case = replace(case, model=case.model.model_copy(update={"n_layers": 4}))
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert all(one.passed for one in verdicts), [one for one in verdicts if not one.passed]


# Faults in what ranks of tp tell each other of their parts of a sequence.


def own_counts(parallel):
    """Take the tokens of a rank's own part for those of the sequence."""
    for router in parallel.routers.values():
        router.balance.summed = lambda counts: counts


def first_rank_alone(parallel):
    """Add the load-balancing loss on the first rank of tp alone, as where all see all tokens."""
    if parallel.groups.tp.rank:
        for router in parallel.routers.values():
            of = router.balance.to_shares
            router.balance.to_shares = lambda *given, of=of: 0 * of(*given)


def as_long_as_its_part(parallel):
    """Take a rank's part of a sequence for a whole one."""
    for router in parallel.routers.values():
        router.balance.ranks = 1


def pieces_of_others(parallel):
    """Take the last part of a sequence for the first."""
    for router in parallel.routers.values():
        router.balance.pieces = (1 - parallel.groups.tp.rank,)


FAULTS = {
    own_counts: "gradients",
    first_rank_alone: "gradients",
    as_long_as_its_part: "gradients",
    pieces_of_others: "loss",
}


def checked(world, fault):
    case = case_of("tp2 sp ep2 etp1 mb4", expert_capacity=1.0)
    return check(case, open_groups(case.layout, world), world, fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught(fault):
    failed = {one.claim for one in on_ranks(2, checked, fault=fault)[0] if not one.passed}
    assert FAULTS[fault] in failed


# Pieces, rules and names.


@pytest.mark.parametrize("tp", [2, 3, 4, 6])
@pytest.mark.parametrize(("kind", "cp"), [("ring", 1), ("ring", 2), ("ring", 3), ("ulysses", 2)])
def test_pieces_are_where_a_rank_has_its_tokens(kind, cp, tp):
    layout = Layout(cp=cp, tp=tp, cp_kind=kind, sp=True, ep=tp, etp=1)
    count = len(pieces_of(layout, 0, 0)) * cp * tp
    seq_len = 2 * count
    seen = []
    for cp_rank in range(cp):
        at = torch.arange(seq_len)
        if cp > 1:
            at = positions(kind, seq_len, cp, cp_rank)
        for tp_rank in range(tp):
            mine = list(pieces_of(layout, cp_rank, tp_rank))
            whole = torch.arange(seq_len).view(count, -1)[mine].flatten()
            assert torch.equal(whole, at.chunk(tp)[tp_rank])
            seen += mine
    assert sorted(seen) == list(range(count))


def test_a_layout_that_does_not_fold_has_the_pieces_of_its_context_rank():
    assert pieces_of(Layout(tp=2, sp=True), 0, 1) == (0,)
    assert pieces_of(Layout(cp=2, tp=2, sp=True), 1, 1) == (1, 2)


def test_ranks_of_experts_follow_from_the_degrees():
    layout = Layout.parse("shard4 zero2 tp2 sp ep4 etp1 mb1")
    assert (layout.expert_data, layout.expert_shard_ranks, layout.folds) == (2, 2, 2)
    assert Layout.parse(layout.label) == layout
    program = lower(MODELS["softmax"], TRAIN, OptimizerSpec(), layout)
    gate = program.shardings["layers.0.mlp.experts.gate.weight"]
    held = [
        gate.region(at["tp"], at["dp_shard"])[0]
        for at in map(layout.mesh.coordinates, range(layout.world))
    ]
    # One of four experts on each of four ranks; the four others have the rows after its only one.
    assert held == [(0, 1), (1, 2), (2, 3), (3, 4), (1, 1), (2, 2), (3, 3), (4, 4)]


def test_illegal_foldings_are_refused_with_the_nearest_legal():
    model = MODELS["softmax"]
    for label, rule, legal in (
        ("tp2 ep2 etp1", "layout.etp = 1 requires layout.sp = true", "layout.sp = true"),
        ("tp2 sp etp1", "layout.ep = 1 must be a multiple of layout.tp = 2", "layout.ep = 2"),
        ("tp4 sp ep4 etp2", "layout.etp = 2 must be 1 or layout.tp = 4", "layout.etp = 1"),
        ("tp2 sp ep4 etp1", "layout.ep = 4 must divide the dp_replicate x cp x tp", "ep = 2"),
    ):
        layout = Layout.parse(f"{label} mb4")
        assert rule in broken(model, TRAIN, layout)
        found = nearest_legal(model, TRAIN, layout)
        assert any(legal in one for one in found), found


@pytest.mark.parametrize(
    ("label", "link"),
    [
        ("shard8 zero1 ep4 mb1", "nvlink4"),
        ("shard8 zero1 ep8 mb1", "infiniband-400"),
        ("shard8 zero1 tp2 ep4 mb1", "infiniband-400"),
        ("shard8 zero1 tp2 sp ep4 etp1 mb1", "nvlink4"),
    ],
)
def test_the_link_that_tokens_cross_follows_from_the_ranks_of_ep(label, link):
    cluster = cluster_of(find_device("h100-sxm"), 16, per_node=4)
    assert link_of("ep", Layout.parse(label), cluster) == link


def test_the_search_has_each_legal_folding():
    model, train = MODELS["softmax"], TRAIN.model_copy(update={"router_aux_loss": 0.0})
    found = {
        (one.layout.mesh.shape, one.layout.ep)
        for one in divisions(model, train, 8)
        if one.layout.folds > 1
    }
    legal = set()
    for pp, dp, cp, tp in product((1, 2, 4, 8), repeat=4):
        if pp * dp * cp * tp != 8 or tp == 1:
            continue
        for ep in range(1, 9):
            layout = Layout(pp=pp, dp_replicate=dp, cp=cp, tp=tp, sp=True, ep=ep, etp=1)
            if broken(model, train, layout) is None:
                legal.add((layout.mesh.shape, ep))
    assert found == legal
    assert len(legal) > 5
