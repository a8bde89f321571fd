"""Predictions: the program's bytes and messages, forms against events."""

import re
from itertools import accumulate
from pathlib import Path

import pytest

from meshwright.cost.calibration import parse_calibration, shipped_calibration
from meshwright.cost.catalogue import (
    catalogue,
    cluster_of,
    device_named,
    find_device,
    find_link,
)
from meshwright.cost.data_messages import data_messages
from meshwright.cost.elements import weights
from meshwright.cost.inputs import CostInputs, work_of
from meshwright.cost.memory import (
    kept_per_layer,
    model_states,
)
from meshwright.cost.network import Network, place
from meshwright.cost.pipeline import (
    Costs,
    action_times,
    by_events,
    closed_form,
    held_together,
    in_flight,
    least_in_flight,
)
from meshwright.cost.price import price, worst_memory
from meshwright.cost.systems import SYSTEMS
from meshwright.cost.work import RankLayers, layout_work
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.program.collectives import collectives
from meshwright.program.lower import lower
from meshwright.program.operations import operations
from meshwright.program.schedule import compute_tables, peak_in_flight
from meshwright.program.target import Target
from meshwright.spec.parts import parameter_count, parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

SEVEN = model_spec(preset="llama-2-7b")
OURS = SYSTEMS["meshwright"]
SMALL = model_spec(
    dim=64, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=128, context=32
)


def setting(model=SEVEN, device="h100-sxm", devices=8, system=OURS, **train):
    values = {"batch": 64, "seq_len": 4096, "precision": "bf16"} | train
    cluster = cluster_of(find_device(device), devices)
    spec = TrainSpec(**values)
    return CostInputs(
        model, spec, OptimizerSpec(), cluster, system, shipped_calibration(), spec.precision
    )


def states(layout, element=2, system=OURS, device="h100-sxm"):
    held, sums = RankLayers((SEVEN.n_layers,), True, True, 1), {}
    one = setting(device=device, system=system, precision={2: "bf16", 4: "fp32"}[element])
    for term in model_states(one, layout, held):
        sums[term.category] = sums.get(term.category, 0) + term.bytes
    return sums


@pytest.mark.parametrize("each", [[5.0], [5.0, 7.0, 11.0]])
def test_a_sum_over_layers_needs_one_number_for_each_kind(each):
    held = RankLayers((2, 3), True, True, 1)
    assert held.total([5.0, 7.0]) == 31.0
    with pytest.raises(ValueError, match="zip"):
        held.total(each)


def test_model_states_to_the_byte():
    count = parameter_count(SEVEN)
    assert count == 6_738_415_616
    numbers = 4 * len(parts(SEVEN))  # of updates, of each parameter on each rank
    unit = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096  # a block, the largest unit
    assert states(Layout(dp_replicate=8)) == {
        "weights": 4 * count,
        "gathered": 2 * count,
        "gradients": 4 * count,
        "optimizer": 8 * count + numbers,
    }
    shards = {"weights": 4 * count // 8, "optimizer": 8 * count // 8 + numbers}
    one = states(Layout(dp_shard=8, zero=1))
    assert one == {**shards, "gathered": 2 * count, "gradients": 4 * count}
    two = states(Layout(dp_shard=8, zero=2))
    assert two["gradients"] == 4 * count // 8 + 2 * unit * 4
    three = states(Layout(dp_shard=8, zero=3))
    assert three == {**two, "gathered": 2 * unit * 2}
    # In fp32 there is no compute copy without sharding; a system with whole weights has masters.
    assert "gathered" not in states(Layout(dp_replicate=8), element=4)
    megatron = states(Layout(dp_shard=8, zero=1), system=SYSTEMS["megatron-core"])
    assert megatron == {
        "weights": 2 * count,
        "gradients": 4 * count,
        "optimizer": 12 * count // 8,
    }


def test_the_table_of_model_states_is_to_the_byte():
    page = (Path(__file__).parents[2] / "docs/commands/plan.md").read_text()
    rows = re.findall(r"^\| (bf16|fp32) \| (\d) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for precision, zero, numbers in rows:
        data = {"dp_shard": 8, "zero": int(zero)} if int(zero) else {"dp_replicate": 8}
        found = states(Layout(**data), element=2 if precision == "bf16" else 4)
        kinds = ("weights", "gathered", "gradients", "optimizer")
        expected = [found.get(kind, 0) for kind in kinds]
        assert [int(n.replace(",", "")) for n in numbers.split(" | ")] == [*expected, sum(expected)]


LAYOUTS = (
    "tp2 mb2",
    "tp4 sp mb1",
    "tp2 sp cp2-ring mb1 recompute-full",
    "cp4-ulysses mb1 recompute-selective",
    "dp2 shard2 zero3 tp2 sp mb1",
    "shard4 zero1 mb2",
    "shard2 zero2 cp2-ring mb1",
    "dp4 mb1",
)


@pytest.mark.parametrize("label", LAYOUTS)
def test_messages_are_those_of_the_program(label):
    layout = Layout.parse(label)
    train = TrainSpec(batch=8, seq_len=32, precision="bf16")
    program = lower(SMALL, train, OptimizerSpec(), layout, Target("gpu"))
    found = layout_work(
        SMALL,
        train.seq_len,
        train.precision,
        layout.tp,
        layout.sp,
        layout.cp,
        layout.cp_kind,
        layout.microbatch,
        layout.recompute,
    )
    predicted = {}
    for work, times in ((found.layers[0], SMALL.n_layers), (found.first, 1), (found.last, 1)):
        for one in work.messages:
            size = one.bytes * one.times * times * program.microbatches
            predicted[one.kind, one.axis] = predicted.get((one.kind, one.axis), 0) + size
    real = {}
    for one in collectives(program, 0):
        if one.axis in ("tp", "cp") and not one.reason.startswith("gradients of"):
            at = (one.kind, one.axis)
            real[at] = real.get(at, 0) + one.bytes * one.count
    assert predicted == real


def test_zero_on_cpus_keeps_weights_whole():
    count, layout = parameter_count(SEVEN), Layout(dp_shard=8, zero=1)
    assert states(layout, 4, device="cpu") == {
        "weights": 4 * count,
        "gradients": 4 * count,
        "optimizer": count + 4 * len(parts(SEVEN)),
    }
    for element, where in ((4, {}), (2, {"device": "cpu"})):
        found = states(layout, element, **where)
        assert (found["weights"], found["gathered"]) == (4 * count // 8, element * count)
    # What goes to the ranks that sum it, and a gather.
    ours, held = (
        setting(device="cpu", precision="fp32"),
        RankLayers((SEVEN.n_layers,), True, True, 1),
    )
    kernels = ours.kernels()
    gather = kernels.network.seconds("rows", 4 * count, 8, 1)
    exchange = kernels.network.seconds("all_to_all", 4 * count, 8, 1)
    assert data_messages(ours, kernels, layout, held) == pytest.approx(exchange + gather)


@pytest.mark.parametrize("label", [label for label in LAYOUTS if "shard" in label])
def test_what_data_parallelism_sends_is_that_of_the_program(label):
    layout = Layout.parse(label)
    train = TrainSpec(batch=8, seq_len=32, precision="bf16")
    program = lower(SMALL, train, OptimizerSpec(), layout, Target("gpu"))
    found = weights(SMALL, layout.tp, layout.shard_ranks)
    elements = SMALL.n_layers * found.layer + found.embedding + found.norm + found.head
    real = {}
    for one in collectives(program, 0):
        if one.axis == "shard":
            real[one.kind] = real.get(one.kind, 0) + one.bytes * one.count
    count = program.microbatches
    # A backward has no use for the embedding, a forward none for the head.
    each = count * (2 * elements - found.embedding - found.head)
    assert real["all_gather"] == 2 * (each if layout.zero == 3 else elements)
    assert real["reduce_scatter"] == 4 * elements * (count if layout.zero >= 2 else 1)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_kept_activations_are_those_of_the_program(recompute):
    layout = Layout(tp=2, sp=True, microbatch=4, recompute=recompute)
    program = lower(
        SMALL,
        TrainSpec(batch=8, seq_len=32, precision="bf16"),
        OptimizerSpec(),
        layout,
        Target("gpu"),
    )
    ops = operations(program, program.stages[0])
    real = sum(op.saved_bytes for op in ops if op.name.startswith("layers."))
    one = setting(SMALL, batch=8, seq_len=32)
    found = work_of(one, layout)
    kept = kept_per_layer(layout, OURS, found.sizes, found.layers[0], 0.0)
    assert sum(kept.values()) == pytest.approx(real, rel=1e-6)


def tables():
    """Yield schedules with a number of ranks and stages."""
    for name, traits in SCHEDULES.items():
        for pp in (2, 4, 8):
            for virtual in {traits.min_virtual, min(traits.max_virtual or 3, 3)}:
                if microbatch_rule(name, pp, virtual, 4 * pp) is None:
                    yield name, pp, virtual


@pytest.mark.parametrize(("name", "pp", "virtual"), list(tables()))
def test_forms_of_schedules_hold_against_their_tables(name, pp, virtual):
    count = 4 * pp
    layout = Layout(pp=pp, schedule=name, virtual_stages=virtual)
    made = compute_tables(name, pp, virtual, count)
    for rank, table in enumerate(made):
        assert in_flight(layout, rank, count) == peak_in_flight(table)
        waits = accumulate((a.kind == "I") - (a.kind == "W") for a in table)
        assert max(w for _, w in held_together(name, pp, virtual, rank, count)) == max(waits)
    stages = pp * virtual
    events = by_events(layout, count, Costs([1.0] * stages, [2.0] * stages))
    form = closed_form(name, pp, virtual, count, 3.0 * virtual, 3.0 * virtual * pp, 0.0, 0.0)
    assert form == pytest.approx(events, rel=0.02)
    ends = action_times(layout, count, Costs([1.0] * stages, [3.0] * stages, head=1.0))
    first = {a.kind: end - start for a, (start, end) in ends.items() if a.stage == stages - 1}
    expected = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}  # a split one has the head with its inputs
    assert first == pytest.approx({kind: expected[kind] for kind in first})


@pytest.mark.parametrize(("name", "pp", "virtual"), list(tables()))
def test_no_first_rank_holds_fewer_activations_than_the_bound(name, pp, virtual):
    layout = Layout(pp=pp, schedule=name, virtual_stages=virtual)
    bounds = 0
    for count in range(1, 4 * pp + 1):
        if microbatch_rule(name, pp, virtual, count) is None:
            bounds += 1
            flights = accumulate(
                (a.kind == "F") - (a.kind in ("B", "I"))
                for a in compute_tables(name, pp, virtual, count)[0]
            )
            assert least_in_flight(layout, count) <= max(flights), count
    assert bounds


def test_many_microbatches_add_the_same_each():
    layout = Layout(pp=4, schedule="interleaved_1f1b", virtual_stages=2)
    costs = Costs([1.0] * 7 + [1.5], [2.0] * 7 + [3.0], 0.01)
    times = [by_events(layout, count, costs) for count in (32, 128)]
    slowest = 2 * 3.0 + 1.5
    assert times[1] - times[0] == pytest.approx(96 * slowest, rel=0.02)


@pytest.mark.often(8)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "pp", "virtual"), list(tables()))
def test_many_microbatches_take_what_the_slowest_rank_needs(name, pp, virtual, every):
    """A rank that is slightly slower does not yet limit the pace of a few microbatches."""
    layout, count = Layout(pp=pp, schedule=name, virtual_stages=virtual), 64 * pp
    last = pp * virtual - 1
    for slow in range(last + 1) if every else {0, last // 2, last}:
        forward, backward = [
            [each * (1 + 0.03 * (at == slow)) for at in range(pp * virtual)] for each in (1.0, 2.0)
        ]
        costs = Costs(forward, backward, 0.002, 1.0)
        every = max(end for _, end in action_times(layout, count, costs).values())
        assert by_events(layout, count, costs) == pytest.approx(every, rel=1e-2)


def test_catalogue_has_sources():
    devices, links = catalogue()
    assert {"v100-32gb", "a100-80gb", "h100-sxm", "b200", "rtx4090", "mi300x"} <= set(devices)
    for one in (*devices.values(), *links.values()):
        assert len(one.source) > 10
        assert one.bandwidth > 0
    for device in devices.values():
        assert device.memory > 0
        for link in device.links:
            find_link(link)
        assert device.peaks["bf16"] >= device.peaks["fp32"] * 0.5
        # Sparse peaks would be twice as high: a lower precision is twice, not four times as fast.
        if "fp8" in device.peaks:
            assert device.peaks["fp8"] / device.peaks["bf16"] == pytest.approx(2, rel=0.02)
    with pytest.raises(ConfigError, match="h100-sxm"):
        find_device("h100-smx")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200 NVL72", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("MI350X", "mi350x"),
        ("MI355X", "mi355x"),
        ("H100-96GB-HBM2e (500W, 2.4TB/s)", "h100-96gb-hbm2e"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_devices_have_the_names_that_drivers_and_papers_give_them(said, name):
    device = device_named(said)
    assert device is not None
    assert device.name == name


def test_messages_cross_the_links_that_they_span():
    network = Network(cluster_of(find_device("h100-sxm"), 64), shipped_calibration())
    assert place(8, 1, 8) == (8, 8, 1)
    assert place(8, 8, 8) == (8, 1, 8)
    assert place(16, 2, 8) == (16, 4, 4)
    inside = network.seconds("all_gather", 1e9, 8, 1)
    assert network.seconds("all_gather", 1e9, 8, 8) > 5 * inside
    assert network.seconds("all_reduce", 1e9, 8, 1) == pytest.approx(2 * inside)
    assert network.seconds("all_gather", 1e9, 1, 1) == 0
    # A ring with four ranks in each node has four network devices to leave it by.
    across = network.seconds("all_gather", 1e9, 16, 2)
    assert across < network.seconds("all_gather", 1e9, 16, 8) / 3


@pytest.mark.parametrize("category", ["weights", "gradients", "optimizer", "gathered"])
def test_more_ranks_never_hold_more(category):
    sizes = [states(Layout(tp=tp))[category] for tp in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 7 * sizes[3]
    totals = [sum(states(Layout(dp_shard=8, zero=zero)).values()) for zero in (1, 2, 3)]
    assert totals == sorted(totals, reverse=True)


def test_memory_and_time_follow_the_sizes():
    one = setting(devices=8)
    plain = Layout(dp_shard=8, zero=3)
    memory = [
        worst_memory(one, plain.model_copy(update={"recompute": policy})).total
        for policy in ("none", "selective", "full")
    ]
    assert memory == sorted(memory, reverse=True)
    found = price(one, plain)
    longer = price(setting(seq_len=8192), plain)
    assert longer.memory.total > found.memory.total
    assert longer.time.total > 2 * found.time.total
    assert sum(found.time.causes.values()) == pytest.approx(found.time.total)
    assert 0 < found.mfu < 1
    for term in found.memory.terms:
        assert term.formula


def test_constants_fall_back_from_a_kind_to_its_family():
    found = parse_calibration("[any]\nx = 1\ny = 2\n[h100]\nx = 3\n[about]\ndate = 'now'\n")
    assert (found.find("x", "h100-500w"), found.find("y", "h100"), found.date) == (3, 2, "now")
    with pytest.raises(KeyError, match="no calibration of z"):
        found.find("z", "h100")
    assert shipped_calibration().source


@pytest.mark.parametrize(
    ("preset", "nodes", "expected"),
    [
        ("rtx4090", 2, "8 per node over PCIe 4; 25 GbE between nodes"),
        ("h100-sxm", 2, "8 per node over NVLink 4; InfiniBand 400 between nodes"),
        ("h100-sxm", 1, "8 per node over NVLink 4"),
    ],
)
def test_the_links_of_a_cluster_in_words(preset, nodes, expected):
    assert cluster_of(find_device(preset), 8 * nodes).topology == expected
