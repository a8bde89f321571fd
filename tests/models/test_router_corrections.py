"""Routers of sigmoids: corrections that steps move and a load-balancing loss, on any layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from meshwright.checkpoint.commit import steps
from meshwright.checkpoint.restore import stored_of
from meshwright.checkpoint.state import WEIGHTS
from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.layout import Layout, broken
from meshwright.models.balance import Balance
from meshwright.models.experts import ExpertMLP
from meshwright.models.routers import SigmoidRouter
from meshwright.parallel.expert_parallel.routing import correct_routers
from meshwright.prove.case import Case
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.oracle_routers import router_losses
from meshwright.prove.parity import prove_parity
from meshwright.spec.lora import Lora
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks

SIZES = {
    "family": "deepseek_v3",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "vocab_size": 72,
    "ffn_dim": 48,
    "experts": 8,
    "top_k": 3,
    "expert_ffn_dim": 24,
    "shared_ffn_dim": 24,
    "expert_groups": 2,
    "top_groups": 1,
    "routed_scale": 0.7,
    "dense_layers": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
MODEL = model_spec(**SIZES)
TRAIN = TrainSpec(batch=8, seq_len=16, seed=3, router_aux_loss=1.0, router_bias_rate=0.05)
CLAIM = "corrections of routers, bit for bit"


def proven(world, label, fault=None):
    layout = Layout.parse(label)
    case = Case(MODEL.model_copy(update={"n_layers": max(2, layout.stages)}), TRAIN, layout)
    groups = open_groups(case.layout, world)
    found = prove_parity(case, groups, world, fault=fault)
    return [*found, *(() if fault else prove_conformance(case, groups, world))]


LAYOUTS = ("mb4", "dp2 mb2", "cp2-ring mb2", "tp2 sp mb4", "shard2 zero3 ep2 mb2")


@pytest.mark.often(1)
@pytest.mark.parametrize("label", [*LAYOUTS, "pp2 zbv v2 mb1"])
def test_corrections_and_losses_are_those_of_one_device(label):
    verdicts = on_ranks(Layout.parse(label).world, proven, label=label)[0]
    assert [one for one in verdicts if not one.passed] == []
    assert CLAIM in [one.claim for one in verdicts]


def own_tokens(parallel):
    """Each rank moves corrections by its own tokens alone."""
    forget(parallel, lambda *given: None)


def forget(parallel, instead):
    import meshwright.parallel.apply as module

    backward, theirs = parallel.backward, module.sum_counts

    def own(*args):
        module.sum_counts = instead
        try:
            return backward(*args)
        finally:
            module.sum_counts = theirs

    parallel.backward = own


@pytest.mark.slow
def test_counts_of_own_tokens_are_caught_and_located():
    verdicts = on_ranks(2, proven, label="dp2 mb2", fault=own_tokens)[0]
    (found,) = [one for one in verdicts if one.claim == CLAIM]
    assert not found.passed
    assert found.first_divergence.quantity == "router correction"
    assert found.first_divergence.tensor == "layers.1.mlp.router.correction"
    assert found.first_divergence.step == 1


def test_the_gradient_is_that_of_the_loss_as_written():
    torch.manual_seed(0)
    train = TrainSpec(router_aux_loss=0.7)
    mlp = ExpertMLP(MODEL).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    mlp.router.balance = Balance(train.router_aux_loss, scale=0.5)
    x = torch.randn(3, 5, MODEL.dim, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(mlp(x).sum(), [x, mlp.router.weight])
    mlp.router.balance = Balance()
    plain = mlp(x).sum() + 0.5 * router_losses(MODEL, train, x @ mlp.router.weight.t())
    wanted = torch.autograd.grad(plain, [x, mlp.router.weight])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_a_step_moves_corrections_towards_the_mean_unless_it_is_skipped():
    router = SigmoidRouter(MODEL)
    router.balance.rate = 0.25
    router.balance.lately = torch.tensor([0, 8, 4, 4, 4, 4, 5, 3])
    correct_routers({1: router}, torch.tensor(1.0))
    assert router.correction.tolist() == [0.25, -0.25, 0, 0, 0, 0, -0.25, 0.25]
    correct_routers({1: router}, torch.tensor(torch.nan))
    assert router.correction.tolist() == [0.25, -0.25, 0, 0, 0, 0, -0.25, 0.25]


def test_corrections_are_of_routers_with_sigmoids_that_train():
    softmax = model_spec(family="mixtral", experts=4, top_k=2)
    train = TrainSpec(router_bias_rate=0.1)
    assert "is of routers with a sigmoid, but" in str(broken(softmax, train, Layout()))
    adapted = MODEL.model_copy(update={"lora": Lora(rank=4, alpha=8)})
    assert "changes a buffer, which adapters do not store" in str(broken(adapted, train, Layout()))


ASKED = (
    *("model.family=deepseek_v3", "model.dim=32", "model.n_layers=2", "model.n_heads=4"),
    *("model.experts=4", "model.top_k=2", "model.dense_layers=1", "model.expert_groups=1"),
    *("model.top_groups=1", "model.q_lora_rank=0", "model.kv_lora_rank=16", "model.ffn_dim=48"),
    *("model.qk_nope_head_dim=4", "model.qk_rope_head_dim=4", "model.v_head_dim=8"),
    *("model.expert_ffn_dim=24", "model.shared_ffn_dim=24", "train.batch=4", "train.seq_len=16"),
    *("train.router_bias_rate=0.125", "cluster.devices_per_node=2", "layout.dp_shard=2"),
    *("layout.zero=1", "layout.ep=2", "layout.microbatch=1"),
)


@pytest.mark.slow
def test_a_run_on_two_ranks_exports_what_steps_have_moved(tmp_path):
    where = [f"data.cache={tmp_path}", f"log.dir={tmp_path}", "log.name=r", "train.steps=3"]
    assert main(["train", *ASKED, *where]) == 0
    name = "layers.1.mlp.router.correction"
    kept = stored_of(steps(tmp_path / "r" / "checkpoints")[-1], WEIGHTS).whole(name)
    assert set((kept / 0.125).tolist()) <= {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0}
    assert kept.any()
    assert main(["checkpoint", "export-hf", str(tmp_path / "r"), str(tmp_path / "hf")]) == 0
    assert torch.equal(
        stored(tmp_path / "hf", "model.layers.1.mlp.gate.e_score_correction_bias"), kept
    )


def stored(folder: Path, name: str) -> torch.Tensor:
    (path,) = folder.glob("*.safetensors")
    with safe_open(str(path), "pt") as found:
        return found.get_tensor(name)


@pytest.mark.slow
def test_a_resumed_run_with_shared_out_experts_is_certified(capsys):
    assert main(["prove", "--resume", *ASKED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
