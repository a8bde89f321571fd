"""The ledger of a rank: what is entered, and that another process reads it."""

import time

import pytest
import torch
import torch.distributed as dist

from meshwright.execute.borders import all_reduce, begin_gather, begin_scatter
from meshwright.execute.groups import open_groups
from meshwright.execute.ledger import Ledger, Pending
from meshwright.execute.ledger_file import SIZE, SLOTS, LedgerFile, ranges_of, ranks_of, read_ledger
from meshwright.execute.recorder import Recorder
from meshwright.execute.tape import Tape
from meshwright.execute.world import World
from meshwright.layout import Layout
from ranks import ranks


def test_a_reader_sees_where_the_rank_is(tmp_path):
    path = tmp_path / "rank-1.ledger"
    seen = []
    ledger = Ledger.open(path, 1, 2, attempt=3, on_phase=lambda *at: seen.append(at))
    file = LedgerFile(path)
    assert (file.read().attempt, file.read().rank, file.read().world) == (3, 1, 2)
    assert file.read().place() == "before it joined the others"
    ledger.step(7)
    moves = file.moves
    ledger.action("B", 1, 2)
    assert file.moves == moves + 1
    assert file.read().place() == "step 7, backward of microbatch 2 on stage 1"
    ledger.action("RECV_F", 1, 3)
    assert file.read().place() == (
        "step 7, forward of microbatch 3 on stage 1, asking for what goes in"
    )
    ledger.phase("update")
    assert file.read().place() == "step 7, update"
    assert seen == [("start", 0), ("data", 7), ("backward", 7), ("forward", 7), ("update", 7)]
    assert path.stat().st_size == SIZE


def test_collectives_are_counted_by_group_and_waited_for(tmp_path):
    path = tmp_path / "rank-0.ledger"
    ledger = Ledger.open(path, 0, 4)
    tp, unnamed = ledger.group("5", (0, 1), "tp"), ledger.group("6", (0, 2, 3))
    ledger.step(1)
    ledger.end(ledger.begin("all_reduce", tp, 64, waits=True))
    ledger.begin("send", unnamed, 8, peer=2)
    ledger.begin("send", unnamed, 8, peer=3)
    ledger.begin("all_gather", tp, 128, waits=True)
    assert ledger.group("5", (0, 1)) == tp
    found = read_ledger(path)
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
        ledger.end(ledger.begin("all_reduce", tp, 1))
    found = read_ledger(path)
    assert len(found.records) == SLOTS
    assert found.records[-1].sequence == 2 + 2 * SLOTS
    assert found.begun(found.groups[0]) == 2 + 2 * SLOTS


def test_a_wait_for_what_has_not_ended_may_be_over_for_a_while(tmp_path):
    path = tmp_path / "rank-0.ledger"
    ledger = Ledger.open(path, 0, 2)
    group = ledger.group("5", (0, 1), "tp")
    entries = [ledger.begin("all_reduce", group, 8) for _ in range(2)]
    ledger.tape = Tape()

    def waited_for():
        return [record.is_waited_for for record in read_ledger(path).records]

    seconds = 0.0
    for leave in (ledger.go_on, ledger.go_on, ledger.end):
        ledger.wait(*entries)
        assert waited_for() == [True, True]
        time.sleep(0.01)
        leave(*entries)
        assert waited_for() == [False, False]
        seconds = sum(wait.until - wait.since for wait in ledger.tape.waits)
    assert all(record.ended for record in read_ledger(path).records)
    assert len(ledger.tape.waits) == 3
    ledger.step(1)
    assert 0.03 <= LedgerFile(path).pace().waited_s == pytest.approx(seconds, abs=1e-3)


def test_no_ledger_is_none(tmp_path):
    assert read_ledger(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"MWLEDG01")
    assert read_ledger(tmp_path / "short") is None
    (tmp_path / "other").write_bytes(bytes(SIZE))
    assert read_ledger(tmp_path / "other") is None


def test_ranks_of_any_group_are_kept():
    for group in ((0,), (0, 1), (3, 7), tuple(range(0, 4096, 8)), (0, 1, 4, 5, 8, 9), (0, 5, 6)):
        assert ranks_of(ranges_of(group)) == group
    assert len(ranges_of(range(0, 4096, 8))) == 1


def entered(ledger):
    file = ledger._memory
    from meshwright.execute.ledger_file import RECORD, RING_AT

    rows = [RECORD.unpack_from(file, RING_AT + slot * RECORD.size) for slot in range(SLOTS)]
    return sorted(row for row in rows if row[0])


@ranks(2)
def test_every_collective_is_entered(world: World):
    from meshwright.execute.ledger_file import KINDS

    fresh = World(world.rank, 2, world.device, world.store, world.opened)
    groups = open_groups(Layout.parse("tp2"), fresh)
    with Recorder(fresh.ledger):
        x = torch.ones(1, 4, 8)
        fresh.sum_on_host([1.0])
        all_reduce(x, groups.tp)
        begin_gather(x, groups.tp)()
        begin_scatter(x, groups.tp)()
        group = groups.tp.required
        pending = Pending(fresh.ledger, dist.all_reduce(x, group=group, async_op=True))
        open_ = entered(fresh.ledger)[-1]
        pending.wait()
        peer = 1 - world.rank
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, x + 0, peer, group)]
        )
        sent = Pending(fresh.ledger, *works)
        sent.wait()
    fresh.sum_on_host([1.0])  # outside: not entered
    rows = entered(fresh.ledger)
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

    from meshwright.execute.ledger_file import KINDS

    fresh = World(world.rank, 2, world.device, world.store, world.opened)
    groups = open_groups(Layout.parse("shard2 zero3"), fresh)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=groups.parameters["shard"])
    with Recorder(fresh.ledger):
        model(torch.ones(2, 8)).sum().backward()
    kinds = [KINDS[row[9]] for row in entered(fresh.ledger)]
    assert kinds == ["all_gather", "reduce_scatter"]
    names = {row[7] for row in entered(fresh.ledger)}
    assert [fresh.ledger._groups[at].label for at in names] == ["shard"]
