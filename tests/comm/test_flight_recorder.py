"""The flight recorder of a rank: what is entered, and that another process reads it."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.flight_recorder import FlightRecorder, Pending
from meshwright.comm.flight_recorder_file import (
    SIZE,
    SLOTS,
    FlightRecorderFile,
    ranges_of,
    ranks_of,
    read_flight_recorder,
)
from meshwright.comm.groups import open_groups
from meshwright.comm.tape import Tape
from meshwright.comm.world import World
from meshwright.layout import Layout
from meshwright.parallel.tensor_parallel.tp_regions import all_reduce, begin_gather, begin_scatter
from ranks import ranks


def test_a_reader_sees_where_the_rank_is(tmp_path):
    path = tmp_path / "rank-1.recorder"
    seen = []
    recorder = FlightRecorder.open(path, 1, 2, attempt=3, on_phase=lambda *at: seen.append(at))
    file = FlightRecorderFile(path)
    assert (file.read().attempt, file.read().rank, file.read().world) == (3, 1, 2)
    assert file.read().place() == "before it joined the others"
    recorder.step(7)
    moves = file.moves
    recorder.action("B", 1, 2)
    assert file.moves == moves + 1
    assert file.read().place() == "step 7, backward of microbatch 2 on stage 1"
    recorder.action("RECV_F", 1, 3)
    assert file.read().place() == (
        "step 7, forward of microbatch 3 on stage 1, asking for what goes in"
    )
    recorder.phase("update")
    assert file.read().place() == "step 7, update"
    assert seen == [("start", 0), ("data", 7), ("backward", 7), ("forward", 7), ("update", 7)]
    assert path.stat().st_size == SIZE


def test_others_can_read_the_file_before_anything_acts_at_the_start(tmp_path):
    path, seen = tmp_path / "rank-0.recorder", []
    FlightRecorder.open(path, 0, 1, on_phase=lambda *_: seen.append(read_flight_recorder(path)))
    assert [found.phase for found in seen] == ["start"]


def test_collectives_are_counted_by_group_and_waited_for(tmp_path):
    path = tmp_path / "rank-0.recorder"
    recorder = FlightRecorder.open(path, 0, 4)
    tp, unnamed = recorder.group("5", (0, 1), "tp"), recorder.group("6", (0, 2, 3))
    recorder.step(1)
    recorder.end(recorder.begin("all_reduce", tp, 64, waits=True))
    recorder.begin("send", unnamed, 8, peer=2)
    recorder.begin("send", unnamed, 8, peer=3)
    recorder.begin("all_gather", tp, 128, waits=True)
    assert recorder.group("5", (0, 1)) == tp
    found = read_flight_recorder(path)
    texts = [str(record) for record in found.records]
    assert texts == [
        "all_reduce #1 of tp (64 bytes)",
        "send #1 of ranks 0, 2, 3 to rank 2 (8 bytes)",
        "send #1 of ranks 0, 2, 3 to rank 3 (8 bytes)",
        "all_gather #2 of tp (128 bytes)",
    ]
    assert [record.is_waited_for for record in found.records] == [False, False, False, True]
    assert [found.begun(group) for group in found.groups] == [2, 0]
    assert found.records[0].ended >= found.records[0].begun > found.started > 0
    for _ in range(2 * SLOTS):  # the ring holds the newest, and stays whole
        recorder.end(recorder.begin("all_reduce", tp, 1))
    found = read_flight_recorder(path)
    assert len(found.records) == SLOTS
    assert found.records[-1].sequence == 2 + 2 * SLOTS
    assert found.begun(found.groups[0]) == 2 + 2 * SLOTS


def test_a_wait_for_what_has_not_ended_may_be_over_for_a_while(tmp_path):
    path = tmp_path / "rank-0.recorder"
    now = [100.0]
    recorder = FlightRecorder.open(path, 0, 2, clock=lambda: now[0])
    group = recorder.group("5", (0, 1), "tp")
    entries = [recorder.begin("all_reduce", group, 8) for _ in range(2)]
    recorder.tape = Tape(SimpleNamespace(stamp=lambda: now[0]))

    def waited_for():
        return [record.is_waited_for for record in read_flight_recorder(path).records]

    seconds = 0.0
    for leave in (recorder.go_on, recorder.go_on, recorder.end):
        recorder.wait(*entries)
        assert waited_for() == [True, True]
        now[0] += 0.25
        leave(*entries)
        assert waited_for() == [False, False]
        seconds = sum(wait.until - wait.since for wait in recorder.tape.waits)
    assert all(record.ended for record in read_flight_recorder(path).records)
    assert len(recorder.tape.waits) == 3
    recorder.step(1)
    assert FlightRecorderFile(path).pace().waited_s == seconds == 0.75


def test_no_flight_recorder_is_none(tmp_path):
    assert read_flight_recorder(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"MWLEDG01")
    assert read_flight_recorder(tmp_path / "short") is None
    (tmp_path / "other").write_bytes(bytes(SIZE))
    assert read_flight_recorder(tmp_path / "other") is None


def test_ranks_of_any_group_are_kept():
    for group in ((0,), (0, 1), (3, 7), tuple(range(0, 4096, 8)), (0, 1, 4, 5, 8, 9), (0, 5, 6)):
        assert ranks_of(ranges_of(group)) == group
    assert len(ranges_of(range(0, 4096, 8))) == 1


def entered(recorder):
    file = recorder._memory
    from meshwright.comm.flight_recorder_file import RECORD, RING_AT

    rows = [RECORD.unpack_from(file, RING_AT + slot * RECORD.size) for slot in range(SLOTS)]
    return sorted(row for row in rows if row[0])


@ranks(2)
def test_every_collective_is_entered(world: World):
    from meshwright.comm.flight_recorder_file import KINDS

    fresh = World(world.rank, 2, world.device, world.store, world.opened)
    groups = open_groups(Layout.parse("tp2"), fresh)
    with CollectiveRecorder(fresh.recorder):
        x = torch.ones(1, 4, 8)
        fresh.sum_on_host([1.0])
        all_reduce(x, groups.tp)
        begin_gather(x, groups.tp)()
        begin_scatter(x, groups.tp)()
        group = groups.tp.required
        pending = Pending(fresh.recorder, dist.all_reduce(x, group=group, async_op=True))
        open_ = entered(fresh.recorder)[-1]
        pending.wait()
        peer = 1 - world.rank
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, x + 0, peer, group)]
        )
        sent = Pending(fresh.recorder, *works)
        sent.wait()
    fresh.sum_on_host([1.0])  # outside: not entered
    rows = entered(fresh.recorder)
    kinds = [KINDS[row[9]] for row in rows]
    assert kinds[:5] == ["all_reduce"] * 2 + ["all_gather", "reduce_scatter", "all_reduce"]
    assert kinds[5:] == ["send", "recv"]
    assert [row[4] for row in rows] == [8, 128, 256, 128, 128, 128, 128]
    assert open_[2] == open_[3] == 0  # neither waited for nor ended
    assert all(row[3] >= row[2] >= row[1] > 0 for row in rows)
    assert {row[8] for row in rows[5:]} == {peer}


@ranks(2)
def test_what_fsdp_sends_is_entered(world: World):
    from torch.distributed.fsdp import fully_shard

    from meshwright.comm.flight_recorder_file import KINDS

    fresh = World(world.rank, 2, world.device, world.store, world.opened)
    groups = open_groups(Layout.parse("shard2 zero3"), fresh)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=groups.parameters["shard"])
    with CollectiveRecorder(fresh.recorder):
        model(torch.ones(2, 8)).sum().backward()
    kinds = [KINDS[row[9]] for row in entered(fresh.recorder)]
    assert kinds == ["all_gather", "reduce_scatter"]
    names = {row[7] for row in entered(fresh.recorder)}
    assert [fresh.recorder._groups[at].label for at in names] == ["shard"]
