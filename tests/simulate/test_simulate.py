"""Rehearsals on fake ranks: what they send and compute is the program's, what they hold is real."""

import json
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from conformance_cases import make
from meshwright.bench.memory_breakdown import measure
from meshwright.cli import main
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.cost.timeline import timeline
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of
from meshwright.program.lower import lower
from meshwright.program.profile import MEMORY, from_json
from meshwright.program.shards import data_rank
from meshwright.program.target import Target
from meshwright.prove.case import Case
from meshwright.prove.matrix import matrix
from meshwright.simulate.dry_run import dry_run
from meshwright.simulate.fake import fake_tensors, fake_world
from meshwright.simulate.memory_tracker import HOST, START, MemoryTracker
from meshwright.simulate.simulation import LEAST_TOLERANCE, layout_of, ranks_of, simulate
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import on_ranks

pytestmark = pytest.mark.early

SMALL = [
    *("model.dim=64", "model.n_layers=4", "model.n_heads=8", "model.n_kv_heads=8"),
    *("model.ffn_dim=128", "model.vocab_size=128", "train.batch=16", "train.seq_len=32"),
]


def simulated(case, ranks):
    """The simulation of a case of `make`."""
    config = load_config(None, [f"data.packing={'documents' if case.packed else 'stream'}"])
    config = config.model_copy(update={"model": case.model, "train": case.train})
    return simulate(config, case.layout, ranks)


def layers_of_ranks(case, rank):
    """Elements and number of the shards that a rank holds, by the program."""
    program = lower(case.model, case.train, case.optimizer, case.layout)
    at = case.layout.mesh.coordinates(rank)
    names = [n for stage in program.held(at["pp"]) for n in program.parameters(stage)]
    place = data_rank(case.layout, at)
    shapes = [program.shardings[name].shape(at["tp"], place) for name in names]
    return sum(map(math.prod, shapes)), len(shapes)


def keeps_whole(case):
    """How many ranks' rows the trained weights are views of memory with."""
    layout = case.layout
    is_own = not Target("cpu").uses_fsdp2(layout) and layout.zero < 3
    return layout.shard_ranks if is_own and case.train.precision == "fp32" else 1


# Each parallelism alone, then together; a rank of each.
CASES = [
    (make("mb4 recompute-selective", "neox"), 0),
    (make("dp2 mb2", "tied", "bf16"), 1),
    (make("dp2 mb2"), 0),
    (make("shard2 zero1 mb2", "biased", "bf16"), 1),
    (make("shard2 zero2 mb1 recompute-selective"), 0),
    (make("shard2 zero3 mb2 recompute-full offload-params", packed=True), 1),
    (make("dp2 shard2 zero2 mb1", "tied"), 3),
    (make("tp2 mb4 recompute-full", "dropout"), 1),
    (make("tp2 sp mb2", "sequential neox", "fp16", packed=True), 0),
    (make("cp2-ring mb4", packed=True), 1),
    (make("cp2-ring mb4 recompute-selective", "gemma2", packed=True), 1),
    (make("cp2-ulysses mb4 zero2", "neox", packed=True), 0),
    (make("cp2-ring mb2 recompute-full", "gemma3", "bf16"), 0),
    (make("tp2 sp mb2 recompute-selective", "olmo2"), 1),
    (make("pp2 1f1b mb1 recompute-full", "tied"), 1),
    (make("pp2 gpipe mb2", "biased"), 0),
    (make("pp2 interleaved_zero_bubble v2 mb1", "neox", "bf16"), 1),
    (make("pp2 dualpipev v2 mb1 recompute-full", "tied"), 0),
    (make("shard2 zero3 tp2 sp pp2 zbv v2 mb1", "llama", "bf16"), 5),
    (make("shard2 zero3 cp2-ring tp2 mb4", "biased"), 6),
]
OF_FOUR_AXES = [case for case in matrix(16) if case.refused is None][3::37]


# Every other one is slow: real ranks have each of these parts in test_conformance.
REHEARSED = [*CASES, *((case, 9) for case in OF_FOUR_AXES)]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("case", "rank"),
    [*REHEARSED[::2], *(pytest.param(*one, marks=pytest.mark.slow) for one in REHEARSED[1::2])],
    ids=lambda value: getattr(value, "label", str(value)),
)
def test_a_rehearsal_does_what_the_program_says(case, rank):
    (one,) = simulated(case, [rank]).ranks
    assert one.differences == []
    assert one.rehearsal.messages == one.rehearsal.expected
    assert (one.rehearsal.products, one.rehearsal.attention) == (one.products, one.attention)
    assert sum(one.rehearsal.stage_flops.values()) == one.products + one.attention
    assert set(one.rehearsal.stage_flops) == set(one.rehearsal.stages)
    assert one.products > 0
    # States are exact: nothing else holds on to them, and nothing is gathered between steps.
    after = one.rehearsal.phases[-1].end
    if case.model.dim != 60:  # of shards that are as large on every rank
        offload, (elements, tensors) = case.layout.offload, layers_of_ranks(case, rank)
        kept = elements * keeps_whole(case)
        assert after["weights"] == (0 if offload == "params" else 4 * kept)
        # two moments of each, and its number of steps
        assert after["optimizer"] == (8 * elements + 4 * tensors) * (offload == "none")
    assert after["gathered"] == after["buffers"] == after["gradients"] == 0
    assert after["activations"] + after["temporary"] < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1023, 0])
def test_a_thousand_ranks(rank):
    case = make("dp2 shard8 zero2 tp8 sp pp8 1f1b mb1", "wide", batch=128)
    (one,) = simulated(case, [rank]).ranks
    assert case.layout.world == 1024
    assert one.differences == []
    assert sum(one.rehearsal.messages.values()) > 0


@pytest.mark.slow
def test_a_program_that_lies_is_found():
    case = make("tp2 sp mb4")
    with mock.patch("meshwright.comm.wire.collectives", return_value=()):
        found = simulated(case, [0])
    assert not found.agrees
    assert any("all_gather of" in text for text in found.ranks[0].differences)
    with mock.patch("meshwright.simulate.simulation.matmul_flops", return_value=1.0):
        (one,) = simulated(case, [0]).ranks
    assert [text.partition(":")[0] for text in one.differences] == ["matrix products"]


@pytest.mark.slow
def test_memory_that_is_not_the_programs_is_found():
    (one,) = simulated(make("dp2 mb2"), [0]).ranks
    assert one.differences == []
    peak, held = one.timeline, one.timeline.held
    for more, named in (
        ({"optimizer": held["optimizer"] + 4}, "optimizer states"),
        ({"activations: product": 2 * LEAST_TOLERANCE + peak.total}, "peak of tensors"),
    ):
        lying = replace(one, timeline=peak._replace(held={**held, **more}))
        assert [text.partition(":")[0] for text in lying.differences] == [named]


@pytest.mark.parametrize("size", [[], ["layout.tp=2"]], ids=["fused", "sharded"])
def test_the_loss_of_a_gpu_takes_what_the_program_says(size):
    """A compiled loss has logits and their gradient only, and a large vocabulary shows it."""
    of_gpu = ["cluster.preset=a40", "train.precision=bf16", "model.vocab_size=50000"]
    assert main(["simulate", *SMALL, *of_gpu, "--world", "2", *size]) == 0


def test_the_states_are_those_of_the_configs_optimizer(capsys):
    """SGD without momentum keeps nothing, in tensors and in the prediction."""
    assert main(["simulate", *SMALL, "optimizer.name=sgd", "--world", "1", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert "optimizer" not in rank["memory_bytes"]
    assert "optimizer" not in rank["predicted_memory_bytes"]


# Memory.


def test_the_tracker_sees_storages_come_and_go():
    memory = MemoryTracker()
    with fake_tensors(), memory:
        table = torch.empty(10)
        memory.begin(START)
        memory.begin("one")
        kept = torch.zeros(100)
        gone = kept + 1  # 400 bytes beside the others
        view = kept[:50]
        del gone
        weight = torch.empty(25)
        memory.label("weights", weight)
        on_host = torch.empty(1000)
        memory.label(HOST, on_host)
        memory.begin("two")
        del kept  # the view keeps its storage
        storage = torch.empty(7).untyped_storage()
        storage.resize_(4000)
        storage.resize_(0)
        memory.begin("three")
        del view, table
    _, _, one, two, three = memory.phases()
    assert (one.name, one.total) == ("one", 40 + 400 + 400)
    assert one.peak["temporary"] == 400
    assert {kind: size for kind, size in one.end.items() if size} == {
        "inputs": 40,
        "activations": 400,
        "weights": 100,
    }
    assert two.total == 540 + 4000
    assert sum(two.end.values()) == 540
    assert sum(three.end.values()) == 100
    breach = memory.breach(START, 4539)
    assert (breach.phase, breach.size, breach.tensors) == ("two", 4000, 540)
    assert breach.largest == breach.asked == "temporary"
    assert memory.breach(START, 4540) is None


MODEL = model_spec(
    dim=192, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=512, vocab_size=256, context=128
)


def peak_of(world, label, train):
    return measure(world, Case(MODEL, train, Layout.parse(label))).peak


@pytest.mark.slow
@pytest.mark.parametrize("label", ["tp2 mb1", "shard2 zero3 mb1", "pp2 1f1b mb1"])
def test_the_peak_is_that_of_real_ranks(label):
    layout = Layout.parse(label)
    train = TrainSpec(batch=4 * layout.dp, seq_len=128)
    program = lower(MODEL, train, OptimizerSpec(), layout)
    for rank, real in enumerate(on_ranks(2, peak_of, label=label, train=train)):
        worst = dry_run(program, rank).worst
        held = worst.peak
        assert held["weights"] == real.parameters
        assert held["optimizer"] == real.optimizer
        said = timeline(program, rank).peak
        assert worst.total == pytest.approx(said.total, rel=0.01)
        # Where the peak is differs by a little: gloo has buffers of its own.
        assert worst.total == pytest.approx(real.total, rel=0.05)


@pytest.mark.slow
def test_a_second_step_is_as_the_first():
    """The rehearsed step has what a step finds that follows others."""
    program = lower(
        MODEL, TrainSpec(batch=4, seq_len=32), OptimizerSpec(), Layout.parse("shard2 zero2 mb1")
    )
    found = dry_run(program, 1)
    first, last = found.phases[0], found.phases[-1]
    states = ("weights", "optimizer", "gathered", "gradients", "buffers")
    assert [first.peak[kind] for kind in states] == [last.end[kind] for kind in states]
    names = [phase.name for phase in found.phases]
    assert names == ["start", "0F0", "0B0", "0F1", "0B1", "reduce", "update"]


@pytest.mark.slow
def test_out_of_memory_is_found(capsys):
    words = [*SMALL, "layout.pp=2", "layout.microbatch=2", "layout.dp_replicate=1"]
    words += ["model.n_layers=2", "train.batch=4"]
    (first, last) = simulate(load_config(None, words)).ranks
    fits = f"cluster.memory={max(first.peak, last.peak) + 2**16}"
    assert main(["simulate", *words, fits]) == 0
    capsys.readouterr()
    small = f"cluster.memory={(first.peak + last.peak) // 2}"
    assert main(["simulate", *words, small]) == 1
    shown = capsys.readouterr().out
    worst, other = (0, 1) if first.peak > last.peak else (1, 0)
    assert f"out of memory: rank {worst} at " in shown
    assert f"out of memory: rank {other} at " not in shown
    assert "cpu has" in shown
    assert main(["simulate", *words, small, "--json"]) == 1
    profile = json.loads(capsys.readouterr().out)
    rank = profile["ranks"][worst]
    assert not profile["fits"]
    assert rank["breach"]["category"] in rank["breach"]["memory_bytes"]
    assert profile["ranks"][other]["breach"] is None
    at = [moment["at"] for moment in rank["timeline"]]
    assert rank["breach"]["at"] in at
    assert rank["peak_at"] in at


# The command.


@pytest.mark.slow
def test_the_profile(tmp_path, capsys):
    path = tmp_path / "ledger.json"
    words = [*SMALL, "layout.tp=2", "layout.sp=true", "--world", "8", "--ranks", "0,last"]
    assert main(["simulate", *words, "--json", "--save", str(path)]) == 0
    shown = capsys.readouterr()
    profile = json.loads(shown.out)
    assert profile["label"].startswith("dp4 tp2 sp")
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 7]
    assert profile["fits"] is profile["agrees"] is True
    assert set(profile) - {"agrees", "ranks", "predicted"} <= set(profile["predicted"])
    assert profile["peak_memory_bytes"] == sum(profile["memory_bytes"].values())
    for message in profile["ranks"][0]["collectives"]:
        assert message["count"] == message["program_count"] > 0
    assert "rank 7: " in shown.err
    predicted, simulated = from_json(json.loads(path.read_text()))
    assert (predicted.source, simulated.source) == ("predicted", "simulated")
    for one, planned, told in zip(simulated.ranks, predicted.ranks, profile["ranks"], strict=True):
        assert one.rank == planned.rank == told["rank"]
        assert one.peak.total == told["peak_memory_bytes"]
        assert one.peak.bytes["parameters"] == told["memory_bytes"]["weights"]
        assert {point.at for point in planned.memory} - {"start"} < {p.at for p in one.memory}
        assert {name for point in one.memory for name in point.bytes} <= set(MEMORY)
        counts = {(each.kind, each.axis, each.bytes): each.times for each in one.traffic}
        assert counts == {
            (each.kind, each.axis, each.bytes): each.times for each in planned.traffic
        }
        assert planned.spans
        assert planned.peak.total == pytest.approx(one.peak.total, rel=0.02)


def test_ranks_by_words():
    layout = Layout.parse("dp2 tp2 pp4 mb1")
    assert ranks_of("0,last", layout) == [0, 15]
    assert ranks_of("stages", layout) == [0, 4, 8, 12]
    assert ranks_of("middle, 3", layout) == [3, 8]
    assert ranks_of("all", layout) == list(range(16))
    for text, said in {
        "first": "--ranks has 'first'; nearest legal: a number, middle, last, stages or all",
        "16": "--ranks has rank 16; nearest legal: 0 to 15",
        "²": "--ranks has '²'",
        "": "--ranks has no rank",
    }.items():
        with pytest.raises(ConfigError, match=said):
            ranks_of(text, layout)


def test_the_world():
    config = load_config(None, [*SMALL, "cluster.preset=a40", "cluster.nodes=2", "layout.tp=4"])
    assert layout_of(config, cost_inputs_of(config)).world == 16
    assert layout_of(config, cost_inputs_of(config), 64).world == 64
    with pytest.raises(ConfigError, match="needs a multiple of 4 ranks"):
        layout_of(config, cost_inputs_of(config), 6)
    with pytest.raises(ConfigError, match="--world 128, but the layout has"):
        layout_of(config, cost_inputs_of(config), 128)
    assert main(["simulate", *SMALL, "--world", "0"]) == 2


def test_a_rank_is_not_rehearsed_within_another():
    with (
        fake_world(0, 2, FlightRecorder()),
        pytest.raises(MeshwrightError, match="is a rank already"),
        fake_world(1, 2, FlightRecorder()),
    ):
        pass
    assert not torch.distributed.is_initialized()
