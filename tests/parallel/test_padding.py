"""Rows that are filled up: padding does not count in losses, corrections, capacities, reports."""

import json
import random

import numpy as np
import pytest
import torch

from loops import CHAT
from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.data import open_data
from meshwright.data.sampler import IGNORE, PADDING, filled_row
from meshwright.layout import Layout
from meshwright.models.balance import Balance, Sequences
from meshwright.models.context import Context, Unpadded
from meshwright.models.experts import ExpertMLP
from meshwright.parallel.build import build, seeded
from meshwright.parallel.expert_parallel.routing import correct_routers, take_counts
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.oracle_routers import router_losses
from meshwright.prove.parity import check, prove_parity
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 48}
LATENT = {
    "n_kv_heads": 4,
    "expert_groups": 2,
    "top_groups": 1,
    "dense_layers": 0,
    "q_lora_rank": 0,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 16,
    "expert_ffn_dim": 16,
    "shared_ffn_dim": 16,
}
MODELS = {
    "softmax": model_spec(family="qwen3_moe", vocab_size=72, experts=4, top_k=2, **SIZES),
    "sigmoid": model_spec(
        family="deepseek_v3", vocab_size=72, experts=8, top_k=3, **{**SIZES, **LATENT}
    ),
}
ASKED = {
    "softmax": {"router_aux_loss": 1.0, "router_z_loss": 0.3, "expert_capacity": 1.0},
    "sigmoid": {"router_aux_loss": 1.0, "router_bias_rate": 0.05},
}
TRAIN = TrainSpec(batch=8, seq_len=16, seed=3)


def case_of(label, model="softmax", **train):
    spec = TRAIN.model_copy(update={**ASKED[model], **train})
    return Case(MODELS[model], spec, Layout.parse(label), packed=True, chat=True)


def proven(world, case):
    groups = open_groups(case.layout, world)
    return [*prove_parity(case, groups, world), *prove_conformance(case, groups, world)]


CASES = [
    case_of("dp2 ep2 mb2"),
    case_of("shard2 zero3 ep2 mb2 recompute-full", "sigmoid"),
    case_of("cp2-ring mb2"),
    case_of("cp2-ring mb4", "sigmoid"),
    case_of("cp2-ulysses mb4"),
    case_of("tp2 sp mb4", "sigmoid"),
    case_of("tp2 sp ep2 etp1 mb4"),
    case_of("pp2 zbv v2 mb2", "sigmoid"),
    case_of("tp2 sp cp2-ring mb2 recompute-selective"),
    case_of("pp2 1f1b mb1"),
    case_of("dp2 ep2 mb2", "sigmoid", expert_capacity=1.1),
    case_of("cp2-ring ep2 mb2 recompute-full"),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", CASES, ids=lambda one: one.label)
def test_layouts_leave_it_out_alike(case):
    if case.layout.stages > 2:
        case = Case(**{**vars(case), "model": case.model.model_copy(update={"n_layers": 4})})
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_a_proof_has_rows_with_and_without_it():
    batch = make_batch(case_of("mb8"), 0)
    padded = (batch.segments == PADDING).sum(1)
    assert padded.tolist() == [4, 0, 8, 4, 0, 8, 4, 0]
    assert (batch.targets[batch.segments == PADDING] == IGNORE).all()
    assert (batch.targets != IGNORE).any()


# A padded row is the row without its padding, whatever the routers are asked for.

BALANCES = {
    "aux": {"aux": 0.7},
    "z": {"z": 0.4},
    "capacity": {"capacity": 1.2},
    "all": {"aux": 0.7, "z": 0.4, "capacity": 1.0},
}


def mixture(spec):
    torch.manual_seed(0)
    mlp = ExpertMLP(spec).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mlp


def balance(**words):
    counts = {"met": torch.zeros(8, dtype=torch.int64), "losses": torch.zeros(2)}
    more = {"lately": torch.zeros(8, dtype=torch.int64), "dropped": torch.zeros((), dtype=int)}
    return Balance(**words, scale=0.5, **counts, **more)


@pytest.mark.parametrize("kind", BALANCES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_a_padded_row_is_the_row_itself(kind, model, seed):
    """Gradients, losses, counts and dropped tokens, of rows of random lengths."""
    spec, chosen = MODELS[model].model_copy(update={"experts": 8}), random.Random(seed)
    words = {k: v for k, v in BALANCES[kind].items() if k != "z" or model == "softmax"}
    mlp, lengths = mixture(spec), [chosen.randint(1, 12), 12, chosen.randint(1, 11)]
    x = torch.randn(3, 12, spec.dim, dtype=torch.float64)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    towards = torch.randn_like(x) * mask[..., None]
    mlp.router.balance = padded = balance(**words)
    context = Context(unpadded=Unpadded(mask, torch.tensor(lengths)))
    ((mlp(x, context) * towards).sum()).backward()
    gradients = [one.grad.clone() for one in mlp.parameters()]
    mlp.zero_grad()
    mlp.router.balance = alone = balance(**words)
    for row, along, length in zip(x, towards, lengths, strict=True):
        (mlp(row[None, :length]) * along[None, :length]).sum().backward()
    for found, wanted in zip(gradients, mlp.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(padded.losses, alone.losses)
    for name in ("met", "lately", "dropped"):
        assert torch.equal(getattr(padded, name), getattr(alone, name)), name
    assert padded.met.sum() == sum(lengths) * spec.top_k


def test_padding_gets_no_gradient_of_a_router():
    mlp = mixture(MODELS["softmax"])
    mlp.router.balance = Balance(aux=0.7, z=0.4, scale=1.0)
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(6) < torch.tensor([4, 6])[:, None]
    out = mlp(x, Context(unpadded=Unpadded(mask, mask.sum(1))))
    (out * mask[..., None]).sum().backward()
    assert (x.grad[0, 4:] == 0).all()
    assert (x.grad[0, :4] != 0).any(-1).all()


def test_padding_meets_experts_in_turn_or_none():
    """It is all alike: all of it would meet the same experts, and their rank would be late."""
    mask = torch.tensor([True] * 2 + [False] * 6)
    of, ids = Sequences(1, mask, torch.tensor([2])), torch.zeros(8, 1, dtype=torch.int64)
    assert Balance().placed(ids, of, 4).flatten().tolist() == [0, 0, 2, 3, 0, 1, 2, 3]
    assert Balance(capacity=1.0).placed(ids, of, 4).flatten().tolist() == [0] * 8
    assert Balance(capacity=1.0).bounded(ids, of, 4).flatten().tolist() == [0] + [4] * 7


def test_losses_are_those_of_transformers_without_padding():
    """Theirs counts every selection of every layer together: top_k times ours for one layer."""
    moe = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(1)
    scores = torch.randn(1, 10, 4)
    mask = torch.arange(10)[None] < 7
    theirs = moe.load_balancing_loss_func((scores[0],), 4, 2, mask.long())
    ours = router_losses(MODELS["softmax"], TrainSpec(router_aux_loss=1.0), scores, mask)
    assert ours.item() == pytest.approx(theirs.item() / 2, rel=1e-6)


# Layouts: what one rank reports, all ranks report together.


def told(world, label, model):
    case = case_of(label, model)
    program, device = (
        lower(case.model, case.train, case.optimizer, case.layout),
        torch.device("cpu"),
    )
    parallel = build(program, open_groups(case.layout, world), device, seeded(case.model, 0))
    parallel.backward(mine(make_batch(case, 0), program, world))
    correct_routers(parallel.routers, torch.ones(()))
    return take_counts(parallel.routers, {0: 0, 1: 1}, case.model.experts, device).tolist()


@pytest.mark.often(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("label", ["dp2 mb1", "cp2-ring mb2", "tp2 sp mb4", "pp2 1f1b mb2"])
def test_what_is_reported_is_of_data_on_every_layout(label, model):
    one, other = (
        torch.tensor(on_ranks(Layout.parse(each).world, told, label=each, model=model)).sum(0)
        for each in ("mb8", label)
    )
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    spec = MODELS[model]
    data = int((make_batch(case_of("mb8"), 0).segments != PADDING).sum())
    assert one[: spec.experts].sum() == data * spec.top_k


def unmasked(parallel):
    """Count padding as data."""
    parallel._unpadded = lambda batch: None


def whole_rows(parallel):
    """Take the length of the row for that of its data."""
    inner = parallel._unpadded

    def longer(batch):
        found = inner(batch)
        return found._replace(lengths=torch.full_like(found.lengths, batch.segments.shape[1]))

    parallel._unpadded = longer


def natural_order(parallel):
    """Take the first tokens of the row for those that a rank of cp holds."""
    inner = parallel._unpadded

    def moved(batch):
        found = inner(batch)
        first = (batch.segments != PADDING)[:, : found.mask.shape[1]]
        return found._replace(mask=first)

    parallel._unpadded = moved


def failed(world, case, fault):
    groups = open_groups(case.layout, world)
    return [one.claim for one in check(case, groups, world, fault=fault) if not one.passed]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("fault", "label", "model"),
    [
        (unmasked, "dp2 mb2", "softmax"),
        (whole_rows, "dp2 mb2", "softmax"),
        (unmasked, "dp2 mb2", "sigmoid"),
        (natural_order, "cp2-ring mb2", "softmax"),
        (natural_order, "cp2-ring mb2", "sigmoid"),
    ],
)
def test_a_fault_is_caught(fault, label, model):
    assert on_ranks(2, failed, case=case_of(label, model), fault=fault)[0]


# Rows.


def test_what_fills_a_row_is_marked():
    part = np.arange(1, 4), np.array([False, True, True])
    _, targets, segments = filled_row([part, part], 8)
    assert segments.tolist() == [0, 0, 0, 1, 1, 1, PADDING, PADDING]
    assert targets.tolist() == [2, 3, IGNORE, 2, 3, IGNORE, IGNORE, IGNORE]
    _, _, segments = filled_row([part, part], 5)
    assert segments.tolist() == [0, 0, 0, 1, 1]


def test_a_chat_run_reports_tokens_of_conversations(tmp_path, monkeypatch, capsys):
    """Of its events, the tokens that met experts, and the dropped ones."""
    monkeypatch.chdir(tmp_path)
    chosen = random.Random(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "".join(chosen.choices("abcdefgh", k=50))},
                {"role": "assistant", "content": "".join(chosen.choices("abcdefgh", k=30))},
            ]
        }
        for _ in range(40)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [
        *("model.family=mixtral", "model.experts=4", "model.top_k=1", "model.dim=32"),
        *("model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=32"),
        *("data.format=chat", "data.packing=documents", "data.source=chat.jsonl"),
        *(f"data.tokenizer={CHAT / 'tokenizer'}", "data.validation=0", "data.cache=cache"),
        *("train.steps=1", "train.batch=4", "train.seq_len=200", "cluster.device=cpu"),
        *("cluster.devices_per_node=1", "layout.dp_replicate=1", "log.name=r", "log.trace=0"),
        "train.expert_capacity=1.0",
    ]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    lines = (tmp_path / "runs/r/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    told = [event for event in events if event["event"] == "experts"][-1]
    config = load_config(overrides=words)
    sampler = open_data(config.data, tmp_path / "cache", 300).sampler("train", 200, 4)
    data = int((sampler.rows(0).segments != PADDING).sum())
    assert data < 0.7 * 800
    assert sum(map(sum, told["tokens"])) == data
    assert sum(told["dropped"]) < data
