"""Capacities of experts: what is dropped, on every layout the same; faults; what is told of it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.inputs import imbalance_of
from meshwright.layout import Layout
from meshwright.models.balance import Balance, Sequences, full_at
from meshwright.models.experts import ExpertMLP
from meshwright.parallel.build import build, seeded
from meshwright.parallel.expert_parallel.routing import take_counts
from meshwright.program.events import dropped_share
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.parity import check, prove_parity
from meshwright.runtime.supervise.view import experts_line
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 48}
MODELS = {
    "softmax": model_spec(family="qwen3_moe", vocab_size=72, experts=4, top_k=2, **SIZES),
    "shared": model_spec(
        family="qwen2_moe", vocab_size=72, experts=4, top_k=2, shared_ffn_dim=32, **SIZES
    ),
}
TRAIN = TrainSpec(batch=8, seq_len=16, seed=3, router_aux_loss=1.0, expert_capacity=1.0)


def case_of(label, model="softmax", **train):
    return Case(MODELS[model], TRAIN.model_copy(update=train), Layout.parse(label))


def proven(world, case):
    groups = open_groups(case.layout, world)
    return [*prove_parity(case, groups, world), *prove_conformance(case, groups, world)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        case_of("dp2 tp2 ep2 mb2"),
        case_of("shard2 zero3 ep2 mb2 recompute-full"),
        case_of("cp2-ulysses mb4", "shared"),
        case_of("tp2 sp mb4"),
        case_of("dp2 ep2 mb2", "shared", precision="bf16"),
        case_of("pp2 zbv v2 mb2"),
        case_of("shard2 zero1 ep2 mb4 recompute-selective", "shared"),
        case_of("zero1 cp2-ring ep2 mb2 recompute-selective"),
        case_of("cp4-ring mb2 recompute-full"),
        case_of("tp2 sp cp2-ring mb2", precision="bf16"),
    ],
    ids=lambda one: one.label,
)
def test_layouts_drop_the_same(case):
    if case.layout.stages > 2:
        case = replace(case, model=case.model.model_copy(update={"n_layers": 4}))
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_the_first_tokens_of_each_sequence_have_precedence():
    """Two sequences of four tokens, three experts, one each: two tokens fill an expert."""
    ids = torch.tensor([0, 0, 0, 1, 2, 0, 2, 2])[:, None]
    assert full_at(1.5, 4, 1, 3) == 2
    found = Balance(capacity=1.5).bounded(ids, Sequences(2), 3)
    assert found.flatten().tolist() == [0, 0, 3, 1, 2, 0, 2, 3]


def plain(mlp, x, capacity):
    """The mixture in plain operations, with all experts for all tokens."""
    every = (x @ mlp.router.weight.t()).softmax(-1)
    ids = every.topk(mlp.router.top_k).indices
    picked = torch.zeros_like(every).scatter(-1, ids, 1.0)
    shares = every * picked
    shares = shares / shares.sum(-1, keepdim=True)
    shares = shares * (picked.cumsum(1) <= capacity)
    ex = mlp.experts
    gate = torch.einsum("bsd,efd->bsef", x, ex.gate.weight)
    hidden = torch.nn.functional.silu(gate) * torch.einsum("bsd,efd->bsef", x, ex.up.weight)
    return torch.einsum("bsef,edf,bse->bsd", hidden, ex.down.weight, shares), shares


@pytest.mark.parametrize("full", [2, 3, 8])
def test_gradients_are_those_of_what_is_left(full):
    torch.manual_seed(0)
    mlp = ExpertMLP(MODELS["softmax"]).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(3, 8, 32, dtype=torch.float64, requires_grad=True)
    wanted, shares = plain(mlp, x, full)
    assert ((shares > 0).sum() < 3 * 8 * 2) == (full < 8)
    mlp.router.balance = Balance(capacity=full / 4)  # an even share is 8 x 2 / 4 tokens
    found, towards = mlp(x), torch.randn_like(x)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    inputs = [x, *mlp.parameters()]
    ours, theirs = (torch.autograd.grad((one * towards).sum(), inputs) for one in (found, wanted))
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


def told(world, label):
    """What a rank tells of its routers after one backward."""
    case = case_of(label)
    program, device = (
        lower(case.model, case.train, case.optimizer, case.layout),
        torch.device("cpu"),
    )
    parallel = build(program, open_groups(case.layout, world), device, seeded(case.model, 0))
    parallel.backward(mine(make_batch(case, 0), program, world))
    return take_counts(parallel.routers, {0: 0, 1: 1}, case.model.experts, world.device).tolist()


@pytest.mark.parametrize("label", ["dp2 ep2 mb1 recompute-full", "tp2 mb4", "cp2-ring mb4"])
def test_what_is_dropped_is_counted_once(label):
    one, other = (
        torch.tensor(on_ranks(Layout.parse(each).world, told, label=each)).double().sum(0)
        for each in ("mb8", label)
    )
    torch.testing.assert_close(other, one, rtol=1e-4, atol=0)
    met, dropped = one[:8].view(2, 4), one[8:10]
    assert (met.sum(1) == TRAIN.batch * TRAIN.seq_len * 2).all()  # those that asked for an expert
    assert (dropped > 0).all()
    assert (dropped < met.sum(1) / 2).all()


# Faults.


def joined(bounded, ids, of, experts):
    return bounded(ids, Sequences(1), experts)


def by_microbatch(parallel):
    """Count a microbatch's tokens for those of a sequence."""
    for router in parallel.routers.values():
        bounded = router.balance.bounded
        router.balance.bounded = partial(joined, bounded)


def on_one_rank(parallel):
    """Drop on the first rank alone."""
    for router in parallel.routers.values():
        router.balance.capacity = 1.0 if parallel.groups.at["dp_replicate"] == 0 else None


def last_first(parallel):
    """Have the last tokens precedence."""
    for router in parallel.routers.values():
        bounded = router.balance.bounded

        def turned(ids, of, experts, inner=bounded):
            back = ids.view(of.number, -1, ids.shape[-1]).flip(1).reshape(ids.shape)
            found = inner(back, of, experts)
            return found.view(of.number, -1, ids.shape[-1]).flip(1).reshape(ids.shape)

        router.balance.bounded = turned


def of_own_pieces(parallel):
    """Count the tokens before a piece on this rank alone."""
    for router in parallel.routers.values():
        router.balance.summed = lambda counts: counts


def pieces_in_a_row(parallel):
    """Take a rank's pieces for neighbours."""
    for router in parallel.routers.values():
        first = 2 * parallel.groups.cp.rank
        router.balance.pieces = (first, first + 1)


FAULTS = {
    "by_microbatch": (by_microbatch, "dp2 mb4"),
    "on_one_rank": (on_one_rank, "dp2 mb4"),
    "last_first": (last_first, "dp2 mb4"),
    "of_own_pieces": (of_own_pieces, "cp2-ring mb4"),
    "pieces_in_a_row": (pieces_in_a_row, "cp2-ring mb4"),
}


def faulty(world, name):
    fault, label = FAULTS[name]
    case = case_of(label)
    return check(case, open_groups(case.layout, world), world, fault=fault)


@pytest.mark.often(1)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    failed = {one.claim for one in on_ranks(2, faulty, name=name)[0] if not one.passed}
    assert {"loss", "gradients", "evaluation"} <= failed


# What is refused, planned and told.


def test_what_does_not_go_with_it_is_refused(capsys):
    dense = ["train.expert_capacity=1.25", "cluster.device=cpu"]
    assert main(["train", *dense]) == 2
    assert "is of models with experts, but model.experts = 0" in capsys.readouterr().err
    assert main(["train", "train.expert_capacity=0.5", "cluster.device=cpu"]) == 2
    assert "train.expert_capacity" in capsys.readouterr().err


def test_a_plan_knows_that_no_expert_gets_more():
    calibration = shipped_calibration()
    usual = imbalance_of(TRAIN.model_copy(update={"expert_capacity": None}), calibration, "H100")
    assert usual > 1.01
    for capacity, expected in ((1.01, 1.01), (8.0, usual)):
        train = TRAIN.model_copy(update={"expert_capacity": capacity})
        assert imbalance_of(train, calibration, "H100") == expected


def test_what_was_dropped_is_told():
    event = {"step": 9, "tokens": [[5, 3], [4, 4]], "dead": [], "expert_excess": 0.25}
    assert "dropped" not in experts_line(event)
    event["dropped"] = [1, 0]
    assert experts_line(event).endswith("1.25 times the mean, 6.2% of pairs dropped")
    assert dropped_share(event) == 1 / 16
