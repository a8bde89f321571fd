"""Ranks that share out the experts: parity, faults that proofs must catch, checkpoints, plans."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from meshwright.checkpoint.commit import steps
from meshwright.checkpoint.restore import StoredSource, newest_good, restore, stored_of
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import OPTIMIZER, WEIGHTS, Trained, chunks_of, scalars_of
from meshwright.cli import main
from meshwright.comm import measured_step
from meshwright.comm.flight_recorder_file import Group
from meshwright.comm.groups import Link, open_groups
from meshwright.layout import Layout
from meshwright.models.experts import Experts
from meshwright.models.routers import Routing, same
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.data_parallel.sharded import replicas_of
from meshwright.parallel.expert_parallel.dispatch import send_to_experts
from meshwright.planner.plan import plan
from meshwright.program.lower import lower
from meshwright.program.messages import Axis
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.parity import prove_parity
from meshwright.prove.shrink import shrink
from meshwright.report import causes
from meshwright.runtime.supervise.explain import mismatch
from meshwright.spec.loading import load_config
from meshwright.spec.parts import active_parameter_count
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update
from ranks import on_ranks
from seeded import without_sums

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = model_spec(
    family="qwen3_moe",
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    vocab_size=72,
    ffn_dim=48,
    experts=4,
    top_k=2,
    expert_ffn_dim=24,
)
TRAIN = TrainSpec(batch=8, seq_len=16, seed=3)


def case_of(label):
    return Case(MODEL, TRAIN, Layout.parse(label))


def proven(world, label, fault=None):
    case = case_of(label)
    return prove_parity(case, open_groups(case.layout, world), world, fault=fault)


def traded(world, ids):
    """Return how far results and gradients of shared out experts are from those of all of them."""
    torch.manual_seed(5)
    whole = Experts(MODEL).double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    each = MODEL.experts // world.size
    own = Experts(MODEL.model_copy(update={"experts": each})).double()
    rows = slice(world.rank * each, (world.rank + 1) * each)
    with torch.no_grad():
        for mine_of, theirs in zip(own.parameters(), whole.parameters(), strict=True):
            mine_of.copy_(theirs[rows])
    every = torch.randn(world.size, 6, MODEL.dim, dtype=torch.float64)
    shares = torch.rand(world.size, 6, 2, dtype=torch.float64)
    routed = torch.tensor(ids)
    leaves = [
        (one.clone().requires_grad_(), two.clone().requires_grad_())
        for one, two in zip(every, shares, strict=True)
    ]
    total = torch.stack([whole(x, Routing(routed[at], s)) for at, (x, s) in enumerate(leaves)])
    total.square().sum().backward()
    x = every[world.rank].clone().requires_grad_()
    share = shares[world.rank].clone().requires_grad_()
    link = Link(torch.distributed.group.WORLD, tuple(range(world.size)), world.rank)
    routing = Routing(routed[world.rank], share)
    out = send_to_experts(own, MODEL.experts, link, int, world.recorder, x, routing)()
    out.square().sum().backward()
    pairs = [(out, total[world.rank]), (x.grad, leaves[world.rank][0].grad)]
    pairs.append((share.grad, leaves[world.rank][1].grad))
    pairs += [
        (a.grad, b.grad[rows]) for a, b in zip(own.parameters(), whole.parameters(), strict=True)
    ]
    return max((a - b).abs().max().item() for a, b in pairs)


SPREAD = [[[0, 3], [1, 2], [3, 0], [2, 1], [0, 1], [3, 2]], [[2, 0], [1, 0], [3, 1]] * 2]
# All tokens meet the experts of rank 0, and none those of rank 1; and the other way round.
CROWDED = [[[0, 1]] * 6, [[1, 0]] * 6]
ACROSS = [[[2, 3]] * 6, [[0, 1]] * 6]


@pytest.mark.parametrize("ids", [SPREAD, CROWDED, ACROSS], ids=["spread", "crowded", "across"])
def test_shared_out_experts_are_all_experts(ids):
    assert max(on_ranks(2, traded, ids=ids)) < 1e-12


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "label", ["dp2 ep2 mb2", "shard2 zero3 ep2 mb2", "dp2 shard2 zero2 ep2 mb1", "tp2 dp2 ep2 mb2"]
)
def test_a_layout_that_shares_out_experts_is_one_device(label):
    verdicts = on_ranks(Layout.parse(label).world, proven, label=label)[0]
    assert [verdict.claim for verdict in verdicts if not verdict.passed] == []


def of_experts(parallel):
    return [held for held in parallel.held if held.sharding.ep > 1]


def scaled_gradients(parallel, factor):
    replicas = replicas_of(parallel.modules[0])
    finish = replicas.finish

    def scaled():
        finish()
        for held in of_experts(parallel):
            held.gradient.mul_(factor)

    replicas.finish = scaled


def doubled_gradients(parallel):
    """Gradients of experts are sums of each rank's mean: pytorch#160285, DeepSpeed#5259."""
    scaled_gradients(parallel, parallel.program.layout.ep)


def divided_gradients(parallel):
    """Gradients of experts are means over the ranks with the same experts: Megatron#7165."""
    scaled_gradients(parallel, 1 / parallel.program.layout.expert_replica_ranks)


def experts_not_in_the_norm(parallel):
    """The norm leaves out what ranks share out: Megatron#5916."""
    parallel.held[:] = [
        held._replace(copies=0) if held.sharding.ep > 1 else held for held in parallel.held
    ]


def summed_over_other_experts(parallel):
    """Gradients of experts are summed over ranks that have others: Megatron#5916."""
    link = parallel.groups.replicate
    for unit in replicas_of(parallel.modules[0]).units:
        if is_of_experts(parallel, unit):
            unit.peers = replace(unit.peers, sums=link, replicas=link)


def stream_below_not_summed(parallel):
    """Each rank of tp goes on with the gradient of its part of experts: torchtitan#4054."""
    for mlp in mixtures(parallel):
        mlp.enter = same


def no_sum_of_copies(parallel):
    """Ranks that have the same experts keep the gradients of their own tokens."""
    for unit in replicas_of(parallel.modules[0]).units:
        if is_of_experts(parallel, unit):
            unit.peers = replace(unit.peers, sums=None)


def is_of_experts(parallel, unit):
    masters = {id(weight.master) for weight in unit.weights}
    return any(id(held.parameter) in masters for held in of_experts(parallel))


def anothers_experts(parallel):
    """Each rank has the experts that belong to its neighbour."""
    link = parallel.groups.experts.ep
    for held in of_experts(parallel):
        parts = [torch.empty_like(held.shard) for _ in link.ranks]
        torch.distributed.all_gather(parts, held.shard.contiguous(), group=link.group)
        held.shard.copy_(parts[1 - link.rank])


def mixtures(parallel):
    return [block.mlp for module in parallel.modules.values() for block in module.blocks]


def no_gradient_of_shares(parallel):
    """Routers do not learn from what their experts make."""
    for mlp in mixtures(parallel):
        begin = mlp.begin
        mlp.begin = partial(
            lambda begin, x, routing: begin(x, Routing(routing.ids, routing.shares.detach())),
            begin,
        )


def another_expert(parallel):
    """A rank takes the tokens that come for one of its experts for those of another."""
    for mlp in mixtures(parallel):
        forward = mlp.experts.forward
        mlp.experts.forward = partial(
            lambda forward, x, routing: forward(x, Routing(1 - routing.ids, routing.shares)),
            forward,
        )


def no_sum_of_routers(parallel):
    """Each rank of tp keeps its part of the routers' gradients."""
    without_sums(parallel, ".router.weight")


ROUTER, DOWN = "layers.1.mlp.router.weight", "layers.1.mlp.experts.down.weight"
GATE, NORM = "layers.1.mlp.experts.gate.weight", "layers.1.mlp_norm.weight"
GRADIENT = "gradient"
# A fault, a layout, and the first wrong quantity: gradients in the order in which they come to be.
FAULTS = [
    (doubled_gradients, "dp2 ep2 mb2", GRADIENT, DOWN),
    (doubled_gradients, "shard2 zero1 ep2 mb2", GRADIENT, DOWN),
    (
        experts_not_in_the_norm,
        "tp2 dp2 ep2 mb2",
        "gradient norm",
        "layers.0.mlp.experts.gate.weight",
    ),
    (stream_below_not_summed, "tp2 mb2", GRADIENT, NORM),
    (divided_gradients, "dp4 ep2 mb2", GRADIENT, DOWN),
    (summed_over_other_experts, "dp4 ep2 mb2", GRADIENT, DOWN),
    # Our own
    (no_sum_of_copies, "dp4 ep2 mb2", GRADIENT, DOWN),
    (no_sum_of_copies, "shard4 zero2 ep2 mb2", GRADIENT, DOWN),
    (
        anothers_experts,
        "shard2 zero3 ep2 mb2",
        "initial weight",
        "layers.0.mlp.experts.gate.weight",
    ),
    (no_gradient_of_shares, "dp2 ep2 mb2", GRADIENT, ROUTER),
    (another_expert, "dp2 ep2 mb2", "output", "layers.0"),
    (no_sum_of_routers, "tp2 dp2 ep2 mb2", GRADIENT, ROUTER),
    (no_sum_of_routers, "tp2 mb2", GRADIENT, ROUTER),
    # Ranks of tp among those of `ep`
    (doubled_gradients, "dp2 tp2 sp ep2 etp1 mb2", GRADIENT, DOWN),
    (summed_over_other_experts, "dp2 tp2 sp ep4 etp1 mb2", GRADIENT, DOWN),
    (no_sum_of_copies, "dp2 tp2 sp ep2 etp1 mb2", GRADIENT, DOWN),
    (no_sum_of_routers, "tp2 sp ep2 etp1 mb2", GRADIENT, ROUTER),
    (
        experts_not_in_the_norm,
        "tp2 sp ep2 etp1 mb2",
        "gradient norm",
        "layers.0.mlp.experts.gate.weight",
    ),
    (another_expert, "tp2 sp ep2 etp1 mb2", "output", "layers.0"),
]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("fault", "label", "quantity", "tensor"),
    FAULTS,
    ids=[f"{fault.__name__} {label}" for fault, label, *_ in FAULTS],
)
def test_faults_of_shared_out_experts_are_caught_and_located(fault, label, quantity, tensor):
    verdicts = on_ranks(Layout.parse(label).world, proven, label=label, fault=fault)[0]
    failed = [verdict for verdict in verdicts if not verdict.passed]
    places = {(one.first_divergence.quantity, one.first_divergence.tensor) for one in failed}
    assert places == {(quantity, tensor)}


def test_every_axis_of_messages_has_a_cause_and_ranks():
    """A step is measured along each of them, and a report says which link it crosses."""
    assert set(get_args(Axis)) - {"world"} == set(measured_step._CAUSES)
    assert set(get_args(Axis)) == set(causes._JOINED)


def test_tokens_that_differ_in_number_are_no_disagreement():
    def witness(rank, kind, size):
        group = Group("ep", "ep", (0, 1))
        record = SimpleNamespace(
            kind=kind,
            bytes=size,
            group=group,
            sequence=4,
            step=1,
            is_transfer=False,
            phase="forward",
            begun=0.0,
        )
        return SimpleNamespace(rank=rank, reading=SimpleNamespace(records=[record]))

    assert mismatch([witness(0, "all_to_all", 80), witness(1, "all_to_all", 120)]) == ""
    assert mismatch([witness(0, "all_reduce", 80), witness(1, "all_reduce", 120)])
    assert mismatch([witness(0, "all_to_all", 80), witness(1, "all_gather", 80)])


LAYOUTS = (
    *("mb1", "shard2 zero2 ep2 mb2", "dp4 ep4 mb1", "tp2 mb2", "shard4 zero3 ep2 mb2"),
    *("dp2 ep2 tp2 mb2", "pp2 dp2 ep2 1f1b mb1", "shard2 zero1 mb2", "dp2 shard2 zero2 ep2 mb2"),
    *("tp2 sp ep2 etp1 mb2", "shard2 zero3 tp2 sp ep4 etp1 mb2", "dp2 tp2 sp ep2 etp1 mb2"),
)


def rewritten(world, label, root, start):
    """Train two steps, or take what is at `start`, and save."""
    layout = Layout.parse(label)
    source = seeded(MODEL, TRAIN.seed) if start is None else None
    good = None if start is None else newest_good(Path(start), world, pytest.fail)
    if good is not None:
        source = StoredSource(good.folder)
    parallel = build(
        lower(MODEL, TRAIN, OptimizerSpec(), layout),
        open_groups(layout, world),
        world.device,
        source,
    )
    shards = Shards(parallel.held, on_host=False)
    adam = OptimizerSpec(warmup_steps=0, schedule="constant")
    trained = Trained(parallel, shards, build_optimizer(shards.leaves, shards.parts, adam))
    if good is not None:
        restore(trained, good)
    for step in (1, 2) if good is None else ():
        batch = mine(make_batch(case_of(label), step), parallel.program, world)
        update(parallel, batch, world, shards, trained.optimizer, LossScale(), 1.0)
    saver = Saver(Path(root), world, 1, lambda saved: None)
    saver.save(2, chunks_of(trained), {"scalars": scalars_of(trained)}, {})


def tensors(root):
    folder = steps(Path(root))[-1]
    return {
        f"{kind} {name}": stored.whole(name)
        for kind in (WEIGHTS, OPTIMIZER)
        for stored in [stored_of(folder, kind)]
        for name in stored.names
    }


@pytest.mark.slow
def test_a_checkpoint_goes_through_all_layouts_bit_for_bit(tmp_path):
    start, expected = None, None
    for number, label in enumerate((*LAYOUTS[1:], LAYOUTS[0])):
        root = str(tmp_path / str(number))
        world = Layout.parse(label).world
        on_ranks(world, rewritten, label=label, root=root, start=start)
        found = tensors(root)
        expected, start = expected or found, root
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), label


@pytest.mark.slow
def test_a_plan_shares_out_experts_where_that_is_faster():
    words = [
        *("model.preset=qwen3-30b-a3b", "cluster.preset=h100-sxm", "cluster.nodes=2"),
        *("cluster.devices_per_node=8", "train.precision=bf16", "train.batch=512"),
        *("train.seq_len=4096", "train.compile=false", "layout.pp=1"),
    ]
    found = plan(load_config(None, [*words, "train.imbalance=1"]), 10).found.ranked
    skewed = plan(load_config(None, [*words, "train.imbalance=2"]), 1).found.ranked
    assert found[0].layout.ep > 1
    assert skewed[0].layout.ep == 1  # all weights travel, rather than twice as many tokens
    assert found[0].time.causes["ep"] > 0
    assert all(one.layout.world == 16 for one in found)


def test_a_large_layout_is_proven_by_small_ones_that_share_out_experts():
    layout = Layout.parse("shard16 zero1 ep8 tp2 pp2 1f1b mb1")
    model = model_spec(preset="qwen3-30b-a3b")
    small = shrink(model, TrainSpec(batch=512, seq_len=4096), layout)
    assert all(case.layout.world <= 8 for case in small)
    assert any(case.layout.ep > 1 for case in small)
    assert all(case.model.experts == 8 for case in small)


def test_the_example_costs_a_token_what_the_dense_model_does():
    """Its own words say which: a few numbers of the routers are all that differs."""
    path = str(EXAMPLES / "mixture.toml")
    words = re.search(r"mixture\.toml (model\.family=.*?)\n#\n", Path(path).read_text(), re.S)[1]
    dense = load_config(path, words.replace("\\\n#", "").split()).model
    mixture = load_config(path).model
    routers = mixture.n_layers * mixture.experts * mixture.dim
    assert active_parameter_count(mixture) - active_parameter_count(dense) == routers


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    words = ["train.steps=2", "train.batch=4", "train.seq_len=32", "train.eval_every=2"]
    small = ["model.dim=32", "model.n_layers=2", "train.log_every=1", "train.eval_batches=1"]
    where = [f"data.cache={tmp_path}", f"log.dir={tmp_path}", "log.name=r"]
    assert main(["train", str(EXAMPLES / "mixture.toml"), *words, *small, *where]) == 0
    found = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").open()]
    assert [event["step"] for event in found if event["event"] == "step"] == [1, 2]
    assert not [event for event in found if event.get("attempt")]
