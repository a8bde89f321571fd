"""What an optimizer keeps is the same in closed form, in the walk, in a dry run and in torch."""

from dataclasses import replace

import pytest
import torch

from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.catalogue import cluster_of, find_device
from meshwright.cost.inputs import CostInputs, layers_of_ranks
from meshwright.cost.memory import model_states
from meshwright.cost.systems import SYSTEMS
from meshwright.cost.timeline import timeline
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.layout import Layout
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.program.optimizer import saved_bytes
from meshwright.prove.case import GROUPED, Case
from meshwright.prove.draw import draw
from meshwright.simulate.dry_run import dry_run
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from ranks import on_ranks

# Every optimizer, with its states and without those that a key leaves out.
SPECS = [
    *(OptimizerSpec(name=name) for name in OPTIMIZERS),
    OptimizerSpec(name="sgd", momentum=0.9),
    OptimizerSpec(name="muon", groups=GROUPED.groups),
    OptimizerSpec(state_dtype="bf16"),
    OptimizerSpec(state_dtype="bf16", rounding="stochastic"),
    OptimizerSpec(state_dtype="int8"),
]


def label_of(spec: OptimizerSpec) -> str:
    groups = f" {len(spec.groups)} groups" if spec.groups else ""
    return f"{spec.name} {spec.momentum:g} {spec.state_dtype} {spec.rounding}{groups}"


CASES = draw(48, 40, worlds=(2, 3, 4, 6))


def cost_inputs_of(case: Case) -> CostInputs:
    cluster = cluster_of(find_device("cpu"), case.layout.world)
    specs = case.model, case.train, case.optimizer
    system = SYSTEMS["meshwright"]
    return CostInputs(*specs, cluster, system, shipped_calibration(), case.train.precision)


def closed_form(case: Case, pp_rank: int) -> float:
    setting = cost_inputs_of(case)
    terms = model_states(setting, case.layout, layers_of_ranks(setting, case.layout)[pp_rank])
    return sum(term.bytes for term in terms if term.category == "optimizer")


def states_of(optimizer: torch.optim.Optimizer) -> int:
    tensors = [one for state in optimizer.state.values() for one in state.values()]
    assert all(isinstance(one, torch.Tensor) for one in tensors)
    return sum(one.numel() * one.element_size() for one in tensors)


def walked(program, rank: int) -> int:
    return timeline(program, rank).moments[-1].held.get("optimizer", 0)


@pytest.mark.often(25)
@pytest.mark.parametrize("spec", SPECS, ids=label_of)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_closed_form_is_the_walk(case, spec):
    case = replace(case, optimizer=spec)
    program = lower(case.model, case.train, case.optimizer, case.layout)
    for pp_rank in range(case.layout.pp):
        # The first rank of a stage: no other has more rows, where they do not divide evenly.
        rank = case.layout.mesh.rank({"pp": pp_rank})
        assert closed_form(case, pp_rank) == walked(program, rank)


@pytest.mark.often(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("label", ["pp2 zbv v2 mb1", "pp2 1f1b mb1", "mb1"])
def test_a_tied_head_on_the_rank_of_the_embedding_has_its_own_copy(label, tied):
    """In a V, the first rank has both ends; their stages have a weight each."""
    layout = Layout.parse(label)
    model = model_spec(dim=24, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=50)
    model = model.model_copy(update={"tie_embeddings": tied})
    train = TrainSpec(batch=2, seq_len=8)
    case = replace(CASES[0], model=model, train=train, optimizer=SPECS[0], layout=layout)
    setting = cost_inputs_of(case)
    program = lower(case.model, case.train, case.optimizer, layout)
    for rank in range(layout.pp):
        terms = model_states(setting, layout, layers_of_ranks(setting, layout)[rank])
        after = dry_run(program, rank).phases[-1].end
        assert closed_form(case, rank) == after["optimizer"]
        assert sum(one.bytes for one in terms if one.category == "weights") == after["weights"]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.label)
@pytest.mark.parametrize("spec", SPECS, ids=label_of)
def test_the_walk_is_the_dry_run(case, spec):
    program = lower(case.model, case.train, spec, case.layout)
    for rank in (0, case.layout.world - 1):
        after = dry_run(program, rank).phases[-1].end
        assert after["optimizer"] == walked(program, rank)


@pytest.mark.often(1)
@pytest.mark.parametrize("spec", SPECS, ids=label_of)
def test_an_update_takes_the_workspace_that_the_walk_has(spec):
    """Few tokens, and a vocabulary whose rows are updated in several pieces."""
    model = model_spec(dim=512, n_layers=1, n_heads=4, ffn_dim=64, vocab_size=20000)
    program = lower(model, TrainSpec(batch=1, seq_len=8), spec, Layout())
    worst = dry_run(program, 0).worst
    predicted = max(sum(moment.held.values()) for moment in timeline(program, 0).moments)
    assert worst.total == pytest.approx(predicted, rel=0.005)


MODEL = model_spec(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=50)
EXPERTS = model_spec(
    family="mixtral",
    dim=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=40,
    vocab_size=50,
    experts=4,
    top_k=2,
)
LAYOUTS = ["dp2 mb1", "zero1 cp2-ring mb1", "shard2 zero2 mb1", "shard2 zero3 mb1", "tp2 mb1"]
MEASURED = [
    *((label, MODEL) for label in [*LAYOUTS, "pp2 mb1", "shard2 zero3 mb1 offload-optimizer"]),
    *((label, EXPERTS) for label in ["shard2 zero2 ep2 mb1", "tp2 sp mb1", "tp2 sp ep2 etp1 mb1"]),
]


def held_after_a_step(world, case):
    """What torch's optimizer holds on this rank, and what the program says."""
    target = target_of(case.train, world.device)
    program = lower(case.model, case.train, case.optimizer, case.layout, target)
    groups = open_groups(case.layout, world)
    parallel = build(program, groups, world.device, seeded(case.model, 0))
    shards = Shards(parallel.trained, on_host=case.layout.offload == "optimizer")
    matrices = shards.matrices(groups, world.device, case.layout)
    optimizer = build_optimizer(shards.leaves, shards.parts, case.optimizer, matrices)
    for leaf in shards.leaves:
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    on_device = 0 if case.layout.states_on_host else states_of(optimizer)
    return on_device, walked(program, world.rank)


@pytest.mark.often(12)
@pytest.mark.parametrize("spec", SPECS, ids=label_of)
@pytest.mark.parametrize(("label", "model"), MEASURED, ids=str)
def test_the_walk_is_what_torch_holds(label, model, spec):
    train = TrainSpec(batch=4, seq_len=16)
    case = Case(model, train, Layout.parse(label), optimizer=spec)
    for measured, predicted in on_ranks(2, held_after_a_step, case=case):
        assert measured == predicted


def test_sgd_without_momentum_keeps_and_saves_nothing():
    case = Case(
        MODEL, TrainSpec(batch=4, seq_len=16), Layout(), optimizer=OptimizerSpec(name="sgd")
    )
    assert closed_form(case, 0) == 0
    weights = sum(part.numel for part in parts(MODEL))
    assert saved_bytes(MODEL, case.train, case.optimizer) == 4 * weights
    assert saved_bytes(MODEL, case.train, OptimizerSpec()) == 12 * weights


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("adamw", {"Adam's moments"}),
        ("muon", {"Muon's momentum", "Adam's moments"}),  # embedding, head and norms are AdamW's
        ("sgd", set()),
    ],
)
def test_a_plan_names_the_states_of_its_optimizer(name, named, capsys):
    words = [f"optimizer.name={name}", "cluster.preset=h100-sxm"]
    assert main(["plan", *words, "--explain", "dp8 mb1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    every = ("Adam's moments", "Muon's momentum", "SGD's momentum")
    assert {states for states in every if states in out} == named
