"""Latent attention and routers of sigmoids: parity, faults that proofs must catch, checkpoints."""

from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.commit import steps
from meshwright.checkpoint.restore import StoredSource, newest_good, stored_of
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import OPTIMIZER, WEIGHTS, Trained, chunks_of, scalars_of
from meshwright.checkpoint.weights import load_model
from meshwright.comm.groups import open_groups
from meshwright.layout import Layout, broken
from meshwright.models.balance import Sequences
from meshwright.models.routers import Routing, SigmoidRouter
from meshwright.parallel.build import build
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.parity import check, prove_parity
from meshwright.prove.shrink import shrink
from meshwright.prove.weights import telling, whole_buffers
from meshwright.spec.model import ModelSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from ranks import on_ranks
from seeded import without_sums

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
    "shared_ffn_dim": 48,
    "dense_layers": 1,
    "expert_groups": 4,
    "top_groups": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
YARN = {
    "kind": "yarn",
    "factor": 4.0,
    "original_context": 16,
    "mscale": 0.8,
    "mscale_all_dim": 1.4,
}
# Queries without a low rank, values larger than keys, pairs half of the dims apart.
WIDE = {
    **SIZES,
    "q_lora_rank": 0,
    "v_head_dim": 13,
    "rope_scaling": YARN,
    "rope_interleave": False,
    "norm_eps": 1e-3,
    "routed_scale": 0.7,
    "norm_top_k": False,
    "attention_bias": True,
    "experts": 5,
    "expert_groups": 1,
    "top_groups": 1,
}
MODELS = {"low": SIZES, "wide": WIDE}


def case_of(label, model="low", packed=False, precision="fp32"):
    train = TrainSpec(batch=8, seq_len=16, seed=3, precision=precision)
    return Case(model_spec(**MODELS[model]), train, Layout.parse(label), packed=packed)


def proven(world, case):
    return prove_parity(case, open_groups(case.layout, world), world)


def faulty(world, case, fault):
    return check(case, open_groups(case.layout, world), world, fault=fault)


CASES = [
    case_of("mb4", "wide"),
    case_of("mb2 recompute-selective", packed=True),
    case_of("tp2 mb2", "wide"),
    case_of("tp2 sp mb2 recompute-full"),
    case_of("tp2 sp mb2", precision="bf16"),
    case_of("pp2 1f1b mb2", "wide", packed=True),
    case_of("cp2-ring mb2", packed=True),
    case_of("cp2-ring mb2 recompute-selective", "wide"),
    case_of("cp2-ulysses mb2", "wide", packed=True),
    case_of("shard2 zero1 ep2 mb2"),
    case_of("shard2 zero2 mb2", "wide", precision="bf16"),
    case_of("shard2 zero3 ep2 mb2 recompute-full", packed=True),
    case_of("shard2 zero3 mb2 offload-params", "wide"),
    case_of("tp2 dp2 ep2 mb2"),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in CASES])
def test_a_layout_is_one_device(case):
    verdicts = on_ranks(case.layout.world, proven, case=case)[0]
    assert [verdict.claim for verdict in verdicts if not verdict.passed] == []


def no_sum(*names):
    """Each rank of tp keeps its part of some gradients."""

    return lambda parallel: without_sums(parallel, *names)


def blocks(parallel):
    return [block for module in parallel.modules.values() for block in module.blocks]


def routers(parallel):
    return [block.mlp.router for block in blocks(parallel) if hasattr(block.mlp, "router")]


def shared_key_of_own_heads(parallel):
    """The rotated key, which all heads share, has the gradient of a rank's own heads alone."""
    no_sum(".kv_a.weight")(parallel)


def low_rank_of_own_heads(parallel):
    """So have the latent vectors of queries and their norms."""
    no_sum(".q_a.weight", ".q_a_norm.weight")(parallel)


def norms_of_own_heads(parallel):
    no_sum(".kv_a_norm.weight")(parallel)


def weighed_as_picked(parallel):
    """What experts make is weighed by the corrected scores."""
    for router in routers(parallel):
        forward = router.forward

        def biased(x, rows, router=router, forward=forward):
            found = forward(x, rows)
            return Routing(found.ids, found.shares + router.correction[found.ids])

        router.forward = biased


def no_correction(parallel):
    """A rank has lost the correction, which no optimizer keeps."""
    if parallel.groups.data.rank == parallel.groups.data.size - 1:
        for router in routers(parallel):
            router.correction.zero_()


def no_groups(parallel):
    """Experts are picked from all groups."""
    for router in routers(parallel):
        router.top_groups = router.groups


def no_scale(parallel):
    """YaRN's length and the filled heads are not in the scale."""
    for block in blocks(parallel):
        block.attn.query_scale = 1.0


FAULTS = [
    (shared_key_of_own_heads, case_of("tp2 mb2")),
    (low_rank_of_own_heads, case_of("tp2 sp mb2")),
    (norms_of_own_heads, case_of("tp2 mb2", "wide")),
    (weighed_as_picked, case_of("mb4")),
    (no_correction, case_of("shard2 zero2 ep2 mb2")),
    (no_groups, case_of("mb4")),
    (no_scale, case_of("mb4", "wide")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "case"),
    [pytest.param(fault, case, id=fault.__name__) for fault, case in FAULTS],
)
def test_faults_are_caught(fault, case):
    verdicts = on_ranks(case.layout.world, faulty, case=case, fault=fault)[0]
    assert [verdict.claim for verdict in verdicts if not verdict.passed]


def saved(world, label, root, start):
    """Save the first weights, or what is at `start`."""
    case = case_of(label)
    source = telling(case.model, 3)
    if start is not None:
        source = StoredSource(newest_good(Path(start), world, pytest.fail).folder)
    program = lower(case.model, case.train, case.optimizer, case.layout)
    parallel = build(program, open_groups(case.layout, world), world.device, source)
    shards = Shards(parallel.held, on_host=False)
    trained = Trained(
        parallel, shards, build_optimizer(shards.leaves, shards.parts, OptimizerSpec())
    )
    saver = Saver(Path(root), world, 1, lambda one: None)
    text = {"model.json": case.model.model_dump_json()}
    saver.save(1, chunks_of(trained), {"scalars": scalars_of(trained)}, text)


def test_checkpoints_have_corrections_on_every_layout(tmp_path):
    start = None
    expected = whole_buffers(case_of("mb1").model, 3)
    assert [*expected] == ["layers.1.mlp.router.correction"]
    for label in ("pp2 1f1b mb1", "tp2 sp mb2", "shard2 zero3 ep2 mb2"):
        root = str(tmp_path / label.split()[0])
        on_ranks(2, saved, label=label, root=root, start=start)
        start, folder = root, steps(Path(root))[-1]
        found = stored_of(folder, WEIGHTS)
        for name, buffer in expected.items():
            assert torch.equal(found.whole(name), buffer)
        assert not [name for name in stored_of(folder, OPTIMIZER).names if "correction" in name]
        model = load_model(root)
        assert torch.equal(model.layers["1"].mlp.router.correction, expected[name])


def test_a_large_layout_is_proven_by_small_ones_with_all_it_has():
    layout = Layout.parse("shard16 zero1 ep8 tp2 pp2 1f1b mb1")
    model = model_spec(preset="deepseek-v3")
    small = shrink(model, TrainSpec(batch=512, seq_len=4096), layout)
    for case in small:
        found = case.model
        assert (found.is_latent, found.q_lora_rank, found.dense_layers) == (True, 24, 1)
        assert (found.expert_groups, found.top_groups) == (4, 2)
        assert found.v_head_dim < found.head_dim


def test_the_loss_of_softmaxes_is_refused():
    train = TrainSpec(batch=8, seq_len=16, router_z_loss=0.1)
    found = broken(model_spec(**SIZES), train, Layout.parse("mb1"))
    assert "train.router_z_loss = 0.1 is of routers with a softmax" in str(found)


def test_a_forced_balance_counts_tokens():
    """Every expert meets as many tokens, and what it makes is weighed by its score."""
    spec = model_spec(**SIZES)
    router = SigmoidRouter(spec)
    router.balance.is_forced, router.balance.met = True, torch.zeros(8, dtype=torch.int64)
    torch.nn.init.normal_(router.weight)
    shares = router(torch.randn(16, 32), Sequences(2)).shares
    shares.sum().backward()
    assert router.balance.met.tolist() == [6] * 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_dim": 11}, "must be model.qk_nope_head_dim = 6 + model.qk_rope_head_dim = 4"),
        ({"v_head_dim": 0}, "needs model.v_head_dim"),
        ({"kv_lora_rank": 0}, "needs model.kv_lora_rank above 0"),
        ({"n_kv_heads": 2}, "one key/value head per head"),
        ({"expert_groups": 3, "top_groups": 1}, "must give model.experts = 8 groups of at least 2"),
        ({"expert_groups": 8}, "groups of at least 2"),
        ({"top_groups": 1}, "must be at least 2, which have model.top_k = 3 experts"),
        ({"top_groups": 5}, "not more than all"),
        ({"router_scores": "softmax"}, "is not of the deepseek_v3 family"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, why):
    fields = model_spec(**SIZES).model_dump()
    with pytest.raises(ValueError, match=why.replace("+", r"\+")):
        ModelSpec(**{**fields, **change})
