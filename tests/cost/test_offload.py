"""Offloaded activations: the same gradients to the bit, where the tensors are, what stays."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

from conformance_cases import CASES, labelled
from meshwright.bench.memory_breakdown import measure
from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.cost.host import host_bytes
from meshwright.cost.moves import has_own_input, input_kept, moved_bytes
from meshwright.cost.peak import peak
from meshwright.cost.price import price
from meshwright.cost.timeline import timeline
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken, nearest_legal
from meshwright.parallel.build import build, seeded
from meshwright.parallel.offload import Stay
from meshwright.parallel.user_models.parallelize import parallelize
from meshwright.planner.advice import warnings
from meshwright.planner.plan import cost_inputs_of, plan
from meshwright.program.lower import lower
from meshwright.program.operations import operations
from meshwright.program.sizes import Sizes
from meshwright.program.target import Processor, Target, route
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine, program_of
from meshwright.simulate.dry_run import dry_run
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import on_ranks

SIZES = {"dim": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 128, "ffn_dim": 128}
WITHOUT = [case for case in CASES if case.layout.world <= 4 and case.layout.offload == "none"]
MODELS = {
    "llama": model_spec(**SIZES, n_kv_heads=2),
    "olmo2": model_spec(family="olmo2", **SIZES),
    "experts": model_spec(
        family="qwen2_moe", **SIZES, experts=4, top_k=2, expert_ffn_dim=64, shared_ffn_dim=64
    ),
}


def both(world, label, precision, model):
    """The names of loss and gradients of a step, and of those that differ with offload."""
    found = []
    for more in ("", " offload-activations"):
        train = TrainSpec(batch=8, seq_len=32, precision=precision)
        case = Case(MODELS[model], train, Layout.parse(label + more))
        program = program_of(case, world)
        groups = open_groups(case.layout, world)
        parallel = build(program, groups, world.device, seeded(case.model, 0))
        loss = parallel.backward(mine(make_batch(case, 0), program, world))
        gradients = {held.name: held.gradient.clone() for held in parallel.trained}
        found.append({"loss": loss, **gradients})
    plain, moved = found
    assert plain.keys() == moved.keys()
    return list(plain), [name for name in plain if not torch.equal(plain[name], moved[name])]


@pytest.mark.often(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("label", "model"),
    [
        ("mb2", "llama"),
        ("mb2 recompute-full", "llama"),
        ("mb2 recompute-selective", "llama"),
        ("mb2", "olmo2"),
        ("mb2 recompute-selective", "experts"),
        ("tp2 sp mb2", "llama"),
        ("tp2 sp mb2 recompute-selective", "llama"),
        ("pp2 1f1b mb1", "llama"),
        ("pp2 gpipe mb1 recompute-full", "llama"),
        ("pp2 zbv v2 mb1", "llama"),
        ("shard2 zero3 mb2 recompute-full", "llama"),
        ("shard2 zero3 ep2 mb2", "experts"),
        ("cp2-ring mb2", "llama"),
        ("cp2-ulysses mb2 recompute-full", "llama"),
    ],
)
def test_gradients_are_those_without_it_to_the_bit(label, model, precision):
    world = Layout.parse(label).world
    for names, other in on_ranks(world, both, label=label, precision=precision, model=model):
        assert len(names) > 4
        assert other == []


PLANNED = [
    *("model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.devices_per_node=8"),
    *("train.precision=bf16", "train.batch=64", "train.seq_len=8192"),
]
WIDE = model_spec(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=512)


def peaks(world, label, precision):
    train = TrainSpec(batch=8, seq_len=128, precision=precision, matmul="torch")
    return measure(world, Case(WIDE, train, Layout.parse(label))).peak.total


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("label", "precision", "bound"),
    [
        ("mb4 offload-activations", "fp32", 0.01),
        ("mb4 recompute-full offload-activations", "fp32", 0.01),
        # Also without offload: the result of attention's product, while an MLP goes back.
        ("mb4 recompute-selective offload-activations", "fp32", 0.015),
        ("pp2 gpipe mb2 offload-activations", "fp32", 0.01),
        ("pp2 1f1b mb1 recompute-full offload-activations", "fp32", 0.01),
        ("pp2 zbv v2 mb2 offload-activations", "fp32", 0.015),
        ("tp2 sp mb2 offload-activations", "fp32", 0.04),
        ("shard2 zero3 mb2 offload-activations", "bf16", 0.08),
        ("cp2-ring mb2 offload-activations", "fp32", 0.04),
    ],
)
def test_the_predicted_peak_is_what_the_profiler_sees(label, precision, bound):
    """Each rank's highest moment without what is on the host, and by the shorter walk alike."""
    train = TrainSpec(batch=8, seq_len=128, precision=precision)
    program = lower(
        WIDE,
        train,
        OptimizerSpec(),
        Layout.parse(label),
        Target("cpu", route("torch", Processor())),
    )
    found = on_ranks(program.layout.world, peaks, label=label, precision=precision)
    for rank, measured in enumerate(found):
        expected = timeline(program, rank).peak
        assert peak(program, rank) == expected
        assert expected.total == pytest.approx(measured, rel=bound)


def moved(world, case):
    """What the program says that each block of a forward moves, and the bytes that really do."""
    program = program_of(case, world)
    groups = open_groups(case.layout, world)
    parallel = build(program, groups, world.device, seeded(case.model, 0))
    seen = []
    leave = Stay.leave

    def left(stay):
        leave(stay)
        seen.append(sum(piece.host.untyped_storage().nbytes() for piece in stay._copied))

    with mock.patch.object(Stay, "leave", left):
        parallel.backward(mine(make_batch(case, 0), program, world))
    expected = []
    for stage in program.held(groups.at["pp"]):
        ops = operations(program, stage, cp_rank=groups.at["cp"])
        for layer in stage.layers:
            kind = case.model.layer(layer)
            sizes = moved_bytes(op for op in ops if op.layer == kind)
            expected.append(sum(sizes.values()))
            if layer == stage.layers[0] and has_own_input(case.model, stage):
                expected[-1] -= input_kept(program, Sizes.of(program))[1]
    return expected, seen


@pytest.mark.often(2)
@pytest.mark.parametrize("case", labelled(WITHOUT))
def test_a_block_moves_what_the_program_says(case):
    """To the byte: all but weights, tables, integers, small tensors, a frozen embedding's rows."""
    layout = case.layout.model_copy(update={"offload": "activations"})
    for expected, seen in on_ranks(layout.world, moved, case=replace(case, layout=layout)):
        times = len(seen) // len(expected)
        assert Counter(seen) == Counter(expected * times)
        assert min(seen) > 0


def test_a_layout_that_leaves_all_on_the_device_is_refused():
    layout = Layout.parse("mb1 offload-activations")
    model, train = MODELS["llama"].model_copy(update={"n_layers": 2}), TrainSpec()
    assert broken(model, train, layout) == (
        "layout.offload = activations leaves those of two layers on the device, but "
        "model.n_layers = 2"
    )
    found = nearest_legal(model, train, layout)
    assert found == ["layout.offload = optimizer", "layout.offload = none"]
    assert broken(MODELS["llama"], train, layout) is None


def test_a_users_own_model_is_refused_before_its_mesh_is_asked():
    layout = Layout.parse("mb1 offload-activations")
    with pytest.raises(ConfigError, match=r"offload = activations knows the blocks of .* alone"):
        parallelize(torch.nn.Linear(2, 2), layout, None)


def rehearsed(label, rank=0):
    """A rank's rehearsed step, its program's timeline and the device memory of both."""
    train = TrainSpec(batch=8, seq_len=128)
    program = lower(
        WIDE,
        train,
        OptimizerSpec(),
        Layout.parse(label),
        Target("cpu", route("torch", Processor())),
    )
    return dry_run(program, rank).worst.total, timeline(program, rank).peak.total


@pytest.mark.slow  # the peaks that the profiler sees are tested
@pytest.mark.often(1)
@pytest.mark.parametrize("label", ["mb2", "mb2 recompute-full", "pp2 gpipe mb1", "pp4 gpipe mb1"])
def test_a_rehearsal_has_less_on_the_device(label):
    """By as much as the program says, and what is on the host does not count."""
    plain, of_plain = rehearsed(label)
    moved, of_moved = rehearsed(f"{label} offload-activations")
    assert moved < plain
    assert plain - moved == pytest.approx(of_plain - of_moved, rel=0.05)


def test_a_link_that_is_slow_is_waited_for():
    """A copy beside a layer's work is nearly hidden until it is longer; then the rest counts."""
    plain = cost_inputs_of(load_config(None, PLANNED))
    layout = Layout.parse("shard8 zero1 mb1 recompute-full")
    moving = layout.model_copy(update={"offload": "activations"})
    before, after = price(plain, layout), price(plain, moving)
    assert before.memory.by_category()["activations: block"] == 32 * 8192 * 4096 * 2
    assert 1.8 * 2**30 < before.memory.total - after.memory.total < 2.2 * 2**30
    assert before.time.total < after.time.total < 1.02 * before.time.total  # nearly hidden
    host = replace(plain.cluster.host, bandwidth=plain.cluster.host.bandwidth / 50)
    slow = replace(plain, cluster=replace(plain.cluster, host=host))
    waits = price(slow, moving).time
    assert waits.total > 1.2 * after.time.total
    # Twice each layer's copy, less what its passes hide.
    moved = host_bytes(slow, moving)
    copies = 2 * layout.microbatches(slow.train.batch) * moved / host.bandwidth
    more = waits.causes["host"] - before.time.causes["host"]
    assert 0 < more < copies
    assert more == pytest.approx(waits.total - before.time.total, rel=0.01)


def test_the_planner_offloads_activations_where_nothing_else_fits():
    """On one device, whose layers' inputs are 16 GiB; states on the host leave too little."""
    words = ["model.preset=llama-3.2-1b", "cluster.preset=h100-sxm", "cluster.devices_per_node=1"]
    words += [
        "train.precision=bf16",
        "train.compile=false",
        "train.batch=1",
        "train.seq_len=262144",
    ]
    found = plan(load_config(None, words), 1)
    (best,) = found.found.ranked
    assert (best.layout.offload, best.layout.recompute) == ("activations", "full")
    (told,) = [text for text in warnings(best, found.setting) if "offload" in text]
    assert told.startswith("offload = activations: each node's host has to hold 16.00 GiB")


SLOW = pytest.mark.slow
PROVEN = [
    ("pp2 1f1b recompute-selective", "fp32"),
    ("shard2 zero3 recompute-full", "bf16"),
    pytest.param("tp2 sp", "fp32", marks=SLOW),
    pytest.param("tp2 sp recompute-selective", "bf16", marks=SLOW),
    pytest.param("cp2-ring recompute-full", "fp32", marks=SLOW),
    pytest.param("pp2 interleaved_zero_bubble v2", "bf16", marks=SLOW),
]


@pytest.mark.slow
@pytest.mark.parametrize(("label", "precision"), PROVEN)
def test_layouts_are_proven(label, precision, capsys):
    """Against one rank that offloads nothing, over three steps, at a model of three layers each."""
    layout = Layout.parse(f"{label} mb2 offload-activations")
    keys = layout.model_dump(exclude_defaults=True).items()
    words = [f"layout.{key}={str(value).lower()}" for key, value in keys]
    words += [
        f"train.precision={precision}",
        "train.batch=8",
        "train.seq_len=32",
        "cluster.devices_per_node=2",
    ]
    words.append("model.n_layers=8")
    assert main(["prove", *words]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 layouts passed" in said
    assert f"{3 * layout.stages}L" in said
