"""Tokens on their way to experts of other ranks: what is computed meanwhile, what that saves."""

from dataclasses import replace

import pytest

from meshwright.comm.groups import open_groups
from meshwright.cost.inputs import work_of
from meshwright.layout import Layout
from meshwright.parallel.expert_parallel.dispatch import _Trade
from meshwright.planner.plan import cost_inputs_of
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import build_small, mine, program_of
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from meshwright.training.update import gradients
from ranks import on_ranks

MODEL = model_spec(
    family="qwen2_moe",
    dim=32,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    vocab_size=72,
    ffn_dim=48,
    experts=4,
    top_k=2,
    expert_ffn_dim=24,
    shared_ffn_dim=48,
)
TRAIN = TrainSpec(batch=2, seq_len=16, seed=3)


def order_of_a_step(world, label, recompute):
    """Return what a rank begins, computes and waits for in a layer with a shared expert."""
    seen = []

    def noted(name):
        real = getattr(_Trade, name)

        def noting(trade, *of):
            seen.append(name)
            return real(trade, *of)

        return noting

    layout = Layout.parse(label).model_copy(update={"recompute": recompute})
    case = Case(MODEL, TRAIN, layout)
    program = program_of(case, world)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("begin_there", "begin_back", "wait"):
            patch.setattr(_Trade, name, noted(name))
        parallel = build_small(program, open_groups(case.layout, world), world, None)
        for mlp in [block.mlp for module in parallel.modules.values() for block in module.blocks]:
            mlp.shared.down.register_forward_hook(lambda *_: seen.append("shared"))
            mlp.shared.gate.weight.register_hook(lambda _: seen.append("shared's gradient"))
        gradients(parallel, mine(make_batch(case, 0), program, world), world, 1.0)
    return seen


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_shared_expert_computes_while_tokens_travel(recompute):
    forward = ["begin_there", "begin_there", "shared", "wait"]
    backward = ["begin_back", "begin_back", "shared's gradient", "wait"]
    again = forward if recompute == "full" else []
    seen = on_ranks(2, order_of_a_step, label="dp2 ep2 mb1", recompute=recompute)
    assert seen == [forward + again + backward] * 2


def test_what_travels_beside_the_shared_expert_costs_less():
    cluster = ["cluster.preset=h100-sxm", "cluster.nodes=2", "train.batch=64", "layout.ep=16"]
    model = ["model.preset=qwen2-57b-a14b", "train.seq_len=4096"]
    setting = cost_inputs_of(load_config(None, [*model, *cluster]))
    layout = Layout.parse("shard16 zero3 ep16 mb1")
    work = work_of(setting, layout)
    kind = next(one for one in work.layers if any(p.of_shared for p in one.products))
    beside = [m for m in kind.messages if m.overlaps == "shared"]
    assert {m.phase for m in beside} == {"forward", "backward"}
    kernels, plain = setting.kernels(), replace(setting.system, overlaps_shared=False)
    shown, hidden = (
        replace(setting, system=system).kernels().layer(work, kind, 1, 1, "ring", "none", 16)
        for system in (plain, setting.system)
    )
    assert hidden.ep_forward < shown.ep_forward
    assert hidden.ep_backward < shown.ep_backward
    products = [kernels.product(p, kernels.peak, 2) for p in kind.products if p.of_shared]
    assert shown.ep_forward - hidden.ep_forward <= sum(products) * 1.001
