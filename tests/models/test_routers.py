"""What training asks of routers: losses of sequences on any layout, balanced routing, reports."""

from types import SimpleNamespace

import pytest
import torch

from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.layout import Layout, broken
from meshwright.models.balance import Balance
from meshwright.models.experts import ExpertMLP
from meshwright.parallel.build import build, seeded
from meshwright.parallel.expert_parallel.routing import take_counts
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.oracle_routers import router_losses
from meshwright.prove.parity import prove_parity
from meshwright.report.run_page import report
from meshwright.runtime.supervise.view import experts_line
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from meshwright.training import routing as reporting
from meshwright.training.routing import routing_event
from ranks import on_ranks
from run_folders import write_run

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 48}
MODEL = model_spec(family="qwen3_moe", vocab_size=72, experts=4, top_k=2, **SIZES)
TRAIN = TrainSpec(batch=8, seq_len=16, seed=3, router_aux_loss=1.0, router_z_loss=0.3)
EVEN = {"layers": [0, 3], "tokens": [[4, 0, 6, 2], [3, 3, 3, 3]]}


def case_of(label, **train):
    return Case(MODEL, TRAIN.model_copy(update=train), Layout.parse(label))


def proven(world, label):
    case = case_of(label)
    groups = open_groups(case.layout, world)
    return [*prove_parity(case, groups, world), *prove_conformance(case, groups, world)]


@pytest.mark.slow
@pytest.mark.parametrize("label", ["cp2-ring mb2", "tp2 sp mb4", "shard2 zero3 ep2 mb2"])
def test_losses_of_routers_are_the_same_on_a_layout(label):
    verdicts = on_ranks(2, proven, label=label)[0]
    assert all(one.passed for one in verdicts), verdicts


@pytest.mark.parametrize("kind", ["router_aux_loss", "router_z_loss"])
def test_the_gradient_is_that_of_the_loss_as_written(kind):
    torch.manual_seed(0)
    train = TrainSpec(**{kind: 0.7})
    mlp = ExpertMLP(MODEL).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    mlp.router.balance = Balance(train.router_aux_loss, train.router_z_loss, scale=0.5)
    x = torch.randn(3, 5, MODEL.dim, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(mlp(x).sum(), [x, mlp.router.weight])
    mlp.router.balance = Balance()
    plain = mlp(x).sum() + 0.5 * router_losses(MODEL, train, x @ mlp.router.weight.t())
    wanted = torch.autograd.grad(plain, [x, mlp.router.weight])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def told(world, label, routing="learned"):
    """Return what a rank tells of its routers after one backward."""
    case = case_of(label, routing=routing)
    program, device = (
        lower(case.model, case.train, case.optimizer, case.layout),
        torch.device("cpu"),
    )
    parallel = build(program, open_groups(case.layout, world), device, seeded(MODEL, 0))
    parallel.backward(mine(make_batch(case, 0), program, world))
    return take_counts(parallel.routers, {0: 0, 1: 1}, MODEL.experts, world.device).tolist()


def test_counts_are_taken_without_a_wait():
    """On the meta device, a read by the host is an error."""
    with torch.device("meta"):
        mlp = ExpertMLP(MODEL)
        one = mlp.router.balance
        one.met, one.losses = torch.zeros(MODEL.experts, dtype=torch.int64), torch.zeros(2)
        one.dropped = torch.zeros((), dtype=torch.int64)
    found = take_counts({3: mlp.router}, {3: 0}, MODEL.experts, torch.device("meta"))
    assert found.shape == (MODEL.experts + 3,)


class OneRank:
    """A world of one rank whose device counts as far away; it notes the sums of the host."""

    def __init__(self, device):
        self.device, self.sums = torch.device(device), 0

    def sum_on_host(self, numbers):
        self.sums += 1
        return numbers


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_gpu_tells_of_experts_when_the_next_step_has_begun(device, monkeypatch):
    world, told = OneRank(device), []
    counts = torch.ones(2 * (MODEL.experts + 1) + 2, dtype=torch.float64)
    monkeypatch.setattr(reporting, "take_counts", lambda *_: counts)
    config = load_config(overrides=["train.steps=9", "train.log_every=2"])
    config = config.model_copy(update={"model": MODEL})
    job = SimpleNamespace(config=config, layout=Layout())
    report = reporting.RoutingReport(job, world, SimpleNamespace(routers={}), told.append, 0)
    seen = []
    for step in range(1, 10):
        report.tell(step, last=step == 9, waits=step == 6)
        seen.append([event["step"] for event in told])
    lag = int(device == "meta")
    assert seen[1 + lag][:1] == [2]
    assert seen[3][:2] == ([2] if lag else [2, 4])
    assert seen[5] == [2, 4, 6]
    assert seen[8] == [2, 4, 6, 8, 9]
    assert world.sums == 5


def sums(label, **more):
    world = Layout.parse(label).world
    return torch.tensor(on_ranks(world, told, label=label, **more)).double().sum(0)


@pytest.mark.parametrize("label", ["dp2 mb1", "cp2-ulysses mb2", "tp2 mb4", "pp2 1f1b mb2"])
def test_tokens_and_losses_are_told_alike_on_every_layout(label):
    one, other = sums("mb8"), sums(label)
    tokens = TRAIN.batch * TRAIN.seq_len * MODEL.top_k
    assert one[:4].sum() == one[4:8].sum() == tokens
    torch.testing.assert_close(other, one, rtol=1e-4, atol=0)


def test_balanced_routing_has_tokens_meet_all_experts_equally_often():
    found = sums("dp2 mb2", routing="balanced")
    assert (found[:8] == TRAIN.batch * TRAIN.seq_len * MODEL.top_k / MODEL.experts).all()


def test_what_is_asked_of_routers_needs_routers(capsys):
    dense = model_spec(family="llama", vocab_size=72, **SIZES)
    rule = broken(dense, TRAIN, Layout())
    assert rule == "train.router_aux_loss = 1.0 is of models with experts, but model.experts = 0"
    assert main(["train", "train.router_z_loss=0.5", "cluster.device=cpu"]) == 2
    assert "train.router_z_loss = 0.0" in capsys.readouterr().err


def test_prove_refuses_routing_by_places(capsys):
    asked = ["model.family=mixtral", "model.experts=4", "model.top_k=2"]
    assert main(["prove", *asked, "train.routing=balanced"]) == 2
    assert "which no other layout has" in capsys.readouterr().err


def test_an_event_names_the_excess_and_the_dead():
    event = routing_event(20, 10, (0, 3), EVEN["tokens"], 2, (0.1, 0.2))
    assert event["dead"] == [[0, 1]]
    # Ranks have 4 and 8 tokens of layer 0, 6 and 6 of layer 3.
    assert event["excess"] == pytest.approx((8 + 6) / 12 - 1)
    assert event["expert_excess"] == pytest.approx((6 + 3) / 6 - 1)
    assert experts_line(event) == (
        "step 20: experts: 1 of 8 experts met no token, the busiest of a layer met 1.50 times "
        "the mean"
    )


def test_the_page_shows_which_experts_tokens_met(tmp_path):
    asked = ["model.family=mixtral", "model.experts=4", "model.top_k=2", f"log.dir={tmp_path}"]
    config = load_config(None, [*asked, "layout.dp_replicate=2", "layout.ep=2"])
    event = routing_event(20, 10, (0, 3), EVEN["tokens"], 2, (0.1, 0.2))
    earlier = {**routing_event(10, 10, (0, 3), EVEN["tokens"], 2, (0.1, 0.2))}
    page = report([write_run(config, more=[earlier, event])])
    assert "Tokens by expert of layer 0, by step" in page
    assert "1 of 8 experts met no token: 1 of layer 0." in page
    assert "In steps 11 to 20 the busiest expert of a layer met 1.50 times" in page
    assert "The busiest of 2 ranks that share out the experts computed 17% more" in page


def test_a_forced_balance_is_marked_in_event_terminal_and_page(tmp_path):
    asked = ["model.family=mixtral", "model.experts=4", "model.top_k=2", f"log.dir={tmp_path}"]
    config = load_config(None, [*asked, "train.routing=balanced"])
    event = routing_event(20, 10, (0, 3), EVEN["tokens"], 1, (0.1, 0.2), config.train.routing)
    assert event["routing"] == "balanced"
    assert "in turn, by train.routing = balanced" in experts_line(event)
    page = report([write_run(config, more=[event])])
    assert "Balance was forced" in page
    assert "times the mean number" not in page
