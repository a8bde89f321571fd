"""Recorded steps: what a tape keeps, what is made of it, and that it agrees with the program."""

import io
import json
import time
from collections import Counter

import pytest
import torch

from meshwright.comm.clock import DeviceClock, clock_offset
from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import open_groups
from meshwright.comm.measured_step import MeasuredMoment, memory_points, recorded
from meshwright.comm.tape import Tape
from meshwright.comm.wire import Wire, WireMessage, expected_messages
from meshwright.comm.world import World
from meshwright.cost.timeline import timeline
from meshwright.layout import Layout
from meshwright.parallel.allocations import AllocatedPiece, LabellingTape, MemoryProfile, moments_of
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.program.profile import (
    MEMORY,
    MemoryPoint,
    RankProfile,
    Span,
    StepProfile,
    Traffic,
    from_json,
)
from meshwright.program.target import Processor, Target, route
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.session import train
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.run_folder import RunFolder, put_step
from meshwright.training.step_recording import gather_ranks, is_detailed
from meshwright.training.update import LossScale, update
from ranks import on_ranks, ranks
from runs import clean_environ

MODEL = model_spec(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=512)
TRAIN = TrainSpec(batch=8, seq_len=128)


class Times:
    """A clock that says what it is told to."""

    def __init__(self, *times):
        self.times = iter(times)

    def stamp(self):
        return next(self.times)

    def seconds(self, stamp):
        return 100.0 + stamp


def test_a_step_is_told_by_what_the_rank_waited_for():
    recorder = FlightRecorder()
    pp, tp = recorder.group("1", (0, 1), "pp"), recorder.group("2", (0, 2), "tp")
    own = recorder.group("3", (0, 1, 2, 3))  # of a save beside the training
    recorder.end(recorder.begin("all_reduce", tp, 8, waits=True))  # before: not on the tape
    recorder.tape = Tape(Times(0, 0, 1, 2, 2, 4, 5, 6, 7, 7, 8, 8, 8, 9, 10))
    recorder.step(3)  # 0
    recorder.action("RECV_F", 1, 0)  # 1
    received = recorder.begin("recv", pp, 64, peer=0)
    recorder.action("F", 1, 0)  # 2
    recorder.wait(received)  # 2
    recorder.end(received)  # 4
    recorder.end(recorder.begin("all_reduce", tp, 128, waits=True))  # 5 to 6
    recorder.end(recorder.begin("all_gather", own, 4, waits=True))  # 7 to 7
    recorder.phase("update")  # 8
    sent = recorder.begin("send", pp, 64, peer=0)
    recorder.end(sent)  # was not waited for
    recorder.phase("log")  # 8
    recorder.end(recorder.begin("all_reduce", tp, 16, waits=True))  # 8 to 9
    tape, recorder.tape = recorder.tape, None
    tape.stop()  # 10
    recorder.phase("save")
    found = recorded(tape, recorder.label, pp=2, dp=1)
    assert (found.began, found.seconds, found.turns) == (100, 10, (0, 1, 2, 8, 8, 10))
    assert found.spans == (
        Span("host", "input", 0, 1),
        Span("messages", "RECV_F", 1, 2, 1, 0, "pp"),
        Span("messages", "RECV_F", 2, 4, 1, 0, "pp", 64),
        Span("compute", "F", 4, 8, 1, 0),  # begins where its input is there
        Span("messages", "all_reduce", 5, 6, -1, -1, "tp", 128),
        Span("host", "update", 8, 8),
        Span("host", "log", 8, 10),
        Span("messages", "all_reduce", 8, 9, -1, -1, "tp", 16),
    )
    assert found.traffic == (
        Traffic("all_reduce", "tp", 128, 1, 1),
        Traffic("recv", "pp", 64, 1, 2),
        Traffic("send", "pp", 64, 1, 0),
    )
    told = {cause: seconds for cause, seconds in found.causes.items() if seconds}
    assert told == {"compute": 3, "bubble": 3, "tp": 2, "input": 1, "host": 1}
    assert sum(told.values()) == 10


def test_waits_that_overlap_count_once():
    recorder = FlightRecorder()
    groups = [recorder.group(axis, (0, 1), axis) for axis in ("shard", "cp")]
    recorder.tape = Tape(Times(0, 0, 1, 2, 4, 5, 6))
    recorder.action("B", 0, 0)  # 0
    first, second = (recorder.begin("all_gather", group, 8) for group in groups)
    recorder.wait(first)  # 1
    recorder.wait(second)  # 2
    recorder.end(first)  # 4
    recorder.end(second)  # 5
    recorder.tape.stop()  # 6
    found = recorded(recorder.tape, recorder.label, pp=1, dp=2)
    assert {k: v for k, v in found.causes.items() if v} == {"compute": 2, "data": 3, "cp": 1}
    assert [one.seconds for one in found.traffic] == [3, 3]


def step_of(world, label, precision, matmul):
    """What the second step was made of on this rank, and what the program says of its messages."""
    train = TRAIN.model_copy(update={"precision": precision, "matmul": matmul})
    case = Case(MODEL, train, Layout.parse(label))
    layout, fresh = case.layout, World(world.rank, 2, world.device, world.store, world.opened)
    program, groups = lower(MODEL, case.train, case.optimizer, layout), open_groups(layout, fresh)
    recorder, batch = fresh.recorder, mine(make_batch(case, 0), program, fresh)
    parallel = build(program, groups, fresh.device, seeded(MODEL, 0))
    shards = Shards(parallel.held, on_host=layout.offload == "optimizer")
    optimizer = build_optimizer(shards.leaves, shards.parts, OptimizerSpec())

    def step():
        recorder.step(1)
        update(parallel, batch, fresh, shards, optimizer, LossScale.of(case.train), 1.0)

    with CollectiveRecorder(recorder):
        step()
        with MemoryProfile(parallel, shards, optimizer) as profile:
            recorder.tape = labelled = LabellingTape()
            step()
            labelled.stop()
        recorder.tape = tape = Tape()
        step()
        tape.stop()
        recorder.tape = None
    found = recorded(tape, recorder.label, pp=layout.pp, dp=layout.dp)
    points = memory_points(labelled.turns, profile.moments(), found.turns)
    return found, points, expected_messages(program, world.rank, Wire(groups))


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("label", "precision", "bound", "matmul"),
    [
        ("pp2 1f1b mb2", "fp32", 0.01, "torch"),
        ("dp2 mb2", "bf16", 0.06, "torch"),
        ("pp2 1f1b mb2", "fp32", 0.01, "onednn"),
        ("pp2 zbv v2 mb1", "fp32", 0.03, "torch"),
        ("pp2 zbv v2 mb1", "fp32", 0.03, "onednn"),
        ("shard2 zero3 mb2", "fp32", 0.06, "onednn"),
        ("tp2 sp mb4", "fp32", 0.06, "torch"),
        ("cp2-ring mb4", "fp32", 0.06, "torch"),
        ("cp2-ring mb4", "fp32", 0.06, "onednn"),
    ],
)
def test_a_recorded_step_is_the_programs(label, precision, bound, matmul):
    train = TRAIN.model_copy(update={"precision": precision})
    program = lower(
        MODEL,
        train,
        OptimizerSpec(),
        Layout.parse(label),
        Target("cpu", route(matmul, Processor())),
    )
    steps = on_ranks(2, step_of, label=label, precision=precision, matmul=matmul)
    for rank, (found, points, expected) in enumerate(steps):
        messages = {WireMessage(one.kind, one.axis, one.bytes): one.times for one in found.traffic}
        assert messages == expected
        table = program.tables[program.layout.mesh.coordinates(rank)["pp"]]
        work = [(s.name, s.stage, s.microbatch) for s in found.spans if s.track == "compute"]
        assert work == [tuple(action) for action in table if action.kind in ("F", "B", "I", "W")]
        assert sum(found.causes.values()) == pytest.approx(found.seconds)
        assert all(seconds >= 0 for seconds in found.causes.values()), found.causes
        assert all(0 <= span.start <= span.end <= found.seconds for span in found.spans)
        waited = {one.axis for one in found.spans if one.track == "messages"}
        assert waited <= {message.axis for message in expected}
        peak = max(points, key=lambda point: point.total)
        assert peak.total == pytest.approx(timeline(program, rank).peak.total, rel=bound)
        assert (points[0].at, points[-1].at) == ("input", "end")
        assert points[-1].bytes.keys() >= {"parameters", "optimizer"}
        times = [point.time for point in points]
        assert times == sorted(times)
        assert times[-1] == found.seconds


def test_memory_is_followed_through_turns():
    pieces = [
        AllocatedPiece(100, 0, None, "parameters", ""),  # from before
        AllocatedPiece(10, 15, 35, "rest", ""),
        AllocatedPiece(5, 16, 18, "gathered", ""),
        AllocatedPiece(7, 32, None, "gradients", ""),
    ]
    found = moments_of(pieces, [10, 20, 30, 40])
    assert found == [
        MeasuredMoment(0, 0.0, {"parameters": 100}),
        MeasuredMoment(0, 0.6, {"parameters": 100, "activations": 10, "gathered": 5}),
        MeasuredMoment(1, 0.0, {"parameters": 100, "activations": 10}),
        MeasuredMoment(2, 0.0, {"parameters": 100, "activations": 10}),
        MeasuredMoment(2, 0.2, {"parameters": 100, "activations": 10, "gradients": 7}),
        MeasuredMoment(3, 0.0, {"parameters": 100, "gradients": 7}),
    ]
    assert {kind for moment in found for kind in moment.bytes} <= {*MEMORY}
    tape = Tape(Times(0, 0, 1, 2))
    for name, stage in (("data", -1), ("F", 0), ("B", 0)):
        tape.turn(name, stage, 3)
    points = memory_points(tape.turns, found, (0.0, 10.0, 20.0, 40.0))
    assert [(point.at, point.time) for point in points] == [
        ("input", 0),
        ("input", 6),
        ("F 0 3", 10),
        ("B 0 3", 20),
        ("B 0 3", 24),
        ("end", 40),
    ]
    assert {point.time for point in memory_points(tape.turns, found, None)} == {None}


@ranks(2)
def test_clocks_of_two_machines_are_compared(world: World):
    def skewed():
        return time.monotonic() + 1000.0 * world.rank

    apart = clock_offset(world, skewed, lambda: f"host {world.rank}")
    assert apart == pytest.approx(-1000.0 * world.rank, abs=0.05)
    assert clock_offset(world, skewed, lambda: "one host") == 0


@ranks(2)
def test_ranks_are_put_on_one_clock(world: World):
    program = lower(MODEL, TRAIN, OptimizerSpec(), Layout.parse("pp2"))
    point = MemoryPoint("F 0 0", 0.5, {"activations": 64})
    mine = RankProfile(
        *(world.rank, {"pp": world.rank}, (world.rank,)),
        (Span("compute", "F", 0.0, 1.0, world.rank, 0),),
        (point, point._replace(time=None)),
        (Traffic("send", "pp", 8, 1, 0.25),),
        {"compute": 1.0},
    )
    found = gather_ranks(world, program, mine, 10.0 - 4 * world.rank)
    if world.rank == 1:
        assert found == ()
        return
    first, second = found
    assert second.spans == (Span("compute", "F", 0.0, 1.0, 1, 0),)
    assert first.spans == (Span("compute", "F", 4.0, 5.0, 0, 0),)
    assert [one.time for one in first.memory] == [4.5, None]
    assert [one.time for one in second.memory] == [0.5, None]
    assert (first.traffic, first.causes) == (mine.traffic, mine.causes)


@ranks(2)
def test_of_many_ranks_some_tell_all(world: World):
    """As rank 0 and a rank like it in a world of 32, of which two are there."""
    program = lower(
        MODEL, TRAIN.model_copy(update={"batch": 64}), OptimizerSpec(), Layout.parse("pp2 dp16 mb1")
    )
    assert [rank for rank in range(32) if is_detailed(program, rank)] == [0, 16]
    point = MemoryPoint("B 0 0", 0.5, {"activations": 64})
    spans = (Span("compute", "F", 0.0, 1.0, 0, 0),)
    mine = RankProfile(world.rank, {}, (0,), spans, (point,), (), {"compute": 1.0, "host": 0.5})
    found = gather_ranks(world, program, mine, 10.0)
    if world.rank == 0:
        first, second = found
        assert first.spans == spans
        assert (second.spans, second.stages, second.rank) == ((), (0,), 1)
        assert second.coordinates == program.layout.mesh.coordinates(1)
        assert second.causes == mine.causes
        assert second.memory == (MemoryPoint("peak", None, {"activations": 64}),)


@pytest.mark.slow
def test_a_run_tells_of_its_steps(config):
    asked = config("layout.pp=2", "layout.microbatch=1", "log.trace=5", "train.steps=7")
    run = train(asked, clean_environ(), io.StringIO())
    predicted, measured = from_json(json.loads((run.folder / "ledger.json").read_text()))
    assert (predicted.source, predicted.label) == ("predicted", measured.label)
    assert [one.rank for one in predicted.ranks] == [0, 1]
    assert (measured.source, measured.step, measured.label) == ("measured", 5, "pp2 1f1b mb1")
    assert [one.rank for one in measured.ranks] == [0, 1]
    assert min(span.start for one in measured.ranks for span in one.spans) == pytest.approx(
        0, abs=0.01
    )
    assert measured.tokens_per_s == pytest.approx(4 * 32 / measured.step_time_s)
    assert 0 < measured.idle < 1
    for one in measured.ranks:
        assert one.stages == (one.coordinates["pp"],)
        assert [span.name for span in one.spans if span.track == "host"] == [
            *("input", "reduce", "update", "log")
        ]
        names = {span.name for span in one.spans if span.track == "compute"}
        assert names == {"F", "B"}
        assert sum(one.causes.values()) <= measured.step_time_s * 1.001
        assert one.peak.bytes.keys() >= {"parameters", "optimizer", "activations"}
        assert all(point.time is not None for point in one.memory)
        assert {"send", "recv"} <= {message.kind for message in one.traffic}
    wanted = ["train.steps=12", "log.trace_memory=false"]
    asked = load_config(run.folder / "config.toml", wanted)
    again = train(asked, clean_environ(), io.StringIO(), resume=Resume(run.folder))
    predicted, measured = from_json(json.loads((again.folder / "ledger.json").read_text()))
    assert predicted.source == "predicted"
    assert (measured.step, measured.worst) == (10, None)  # the third since then, and each fifth


def test_each_source_has_its_newest_profile(tmp_path, capsys):
    def put(source, step):
        put_step(RunFolder(tmp_path), StepProfile(source, {}, "pp2", "", (), step))

    def kept():
        found = from_json(json.loads((tmp_path / "ledger.json").read_text()))
        return [(one.source, one.step) for one in found]

    for source, step in (("measured", 3), ("predicted", None), ("measured", 100)):
        put(source, step)
    assert kept() == [("predicted", None), ("measured", 100)]
    (tmp_path / "ledger.json").write_text('{"schema": 1, "ledg')  # cut short
    put("measured", 200)
    assert kept() == [("measured", 200)]
    put_step(RunFolder(tmp_path / "gone"), StepProfile("measured", {}, "pp2", "", ()))
    said = capsys.readouterr().err
    assert said.startswith("note: cannot write ")
    assert said.endswith("No such file or directory\n")


class Event:
    """Stands for an event of CUDA: is reached as the stream comes to it, `lag` s after the host."""

    now, lag, waited = 0.0, 0.0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "compute"
        self.at = Event.now + Event.lag

    def synchronize(self):
        Event.waited += 1

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_a_gpus_times_are_those_of_its_stream(monkeypatch):
    streams = ["compute"]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    clock = DeviceClock(torch.device("cuda", 0))
    tape = Tape(clock)
    recorder = FlightRecorder()
    group = recorder.group("1", (0, 1), "tp")
    recorder.tape = tape
    Event.now, Event.lag = 1.0, 3.0
    recorder.action("F", 0, 0)
    entry = recorder.begin("all_reduce", group, 8, waits=True)
    Event.lag = 5.0
    recorder.end(entry)
    streams.append("gathers")  # beside what is computed: nothing waits for it
    recorder.end(recorder.begin("all_gather", group, 16, waits=True))
    streams.pop()
    Event.now = 2.0
    tape.stop()
    assert Event.waited == 0  # the loop is not held up
    found = recorded(tape, recorder.label, pp=1, dp=1)
    assert Event.waited > 0
    assert found.seconds == 7
    assert [(one.name, one.start, one.end) for one in found.spans] == [
        ("F", 4, 7),
        ("all_reduce", 4, 6),
    ]
    assert Counter(one.kind for one in found.traffic) == {"all_reduce": 1, "all_gather": 1}
