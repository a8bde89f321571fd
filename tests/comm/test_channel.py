"""Collectives through memory that ranks share: against gloo's, full rooms, ranks that end."""

from __future__ import annotations

import errno
import os
import signal
import time
import uuid
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.comm import channel, shared
from meshwright.comm.channel import LARGEST, ROOM, open_channel
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.flight_recorder_file import RECORD, RING_AT, SLOTS
from meshwright.comm.groups import open_groups
from meshwright.comm.tape import Tape
from meshwright.comm.world import World, exchange
from meshwright.layout import Layout
from meshwright.runtime.supervise.explain import TIMED_OUT, lost_a_peer
from ranks import on_ranks, ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def opened(world):
    group = dist.group.WORLD
    kept = shared.share(group, world.recorder, 30.0)
    assert kept is not None
    return getattr(torch.ops, shared.SPACE), torch.ops._c10d_functional, group.group_name, kept


def drawn(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)  # sums are exact in bf16


def pairs(ops, like, name, world, dtype, seed):
    """Begin each collective in a channel and by torch; yields what waits for either."""
    n, x = world.size, drawn((4 * world.size, 3 + seed % 7), dtype, seed + 1000 * world.rank)
    for op in ("sum", "max"):
        yield ops.all_reduce(x, op, name), like.all_reduce(x, op, name)
        yield ops.all_reduce_(x.clone(), op, name), like.all_reduce_(x.clone(), op, name)
    yield (
        ops.reduce_scatter_tensor(x, "sum", n, name),
        like.reduce_scatter_tensor(x, "sum", n, name),
    )
    yield ops.all_gather_into_tensor(x, n, name), like.all_gather_into_tensor(x, n, name)


@pytest.mark.parametrize("n", [2, 3])
def test_collectives_are_those_of_torch(n):
    on_ranks(n, same_as_torch)


def same_as_torch(world):
    ops, like, name, _kept = opened(world)
    for at, dtype in enumerate(DTYPES):
        begun = []
        for seed in range(5):
            begun += pairs(ops, like, name, world, dtype, seed + 10 * at)
        # Waited for out of order: a later one has those before it arrive, too.
        for ours, theirs in reversed(begun):
            assert torch.equal(ops.wait_tensor(ours), like.wait_tensor(theirs))


@ranks(2)
def test_rooms_are_used_again_by_ranks_that_are_ahead_of_each_other(world):
    ops, _, name, _kept = opened(world)
    sizes = torch.Generator().manual_seed(3)
    for turn in range(60):
        outs = []
        for part in range(3):
            count = int(torch.randint(1, LARGEST // 4 + 1, (), generator=sizes))
            x = torch.full((count,), float(turn + 100 * part + world.rank))
            outs.append(ops.all_reduce_(x, "sum", name))
        if turn % 5 == world.rank:
            time.sleep(0.01)
        for part, out in enumerate(outs):
            total = ops.wait_tensor(out)
            assert total.min() == total.max() == 2 * (turn + 100 * part) + 1


@ranks(2)
def test_a_full_room_waits_for_the_readers(world):
    ops, _, name, _kept = opened(world)
    # Twice what a room holds is begun before anything is waited for.
    outs = [
        ops.all_reduce_(torch.full((LARGEST // 4,), float(at)), "sum", name)
        for at in range(2 * ROOM // LARGEST)
    ]
    small = [ops.all_reduce_(torch.full((2,), float(at)), "sum", name) for at in range(200)]
    for at, out in [*enumerate(outs), *enumerate(small)]:
        assert torch.all(ops.wait_tensor(out) == 2 * at)


@ranks(2)
def test_many_messages_under_way_do_not_wait_for_a_rank_that_is_elsewhere(world):
    ops, _, name, _kept = opened(world)
    small = ops.all_reduce_(torch.ones(2), "sum", name)
    if world.rank == 0:
        time.sleep(0.05)
    ops.wait_tensor(small)  # the rooms are laid out differently from here on
    outs = [ops.all_reduce_(torch.ones(LARGEST // 4), "sum", name) for _ in range(7)]
    dist.all_reduce(torch.ones(1))
    assert all(torch.all(ops.wait_tensor(out) == 2) for out in outs)


@ranks(2)
def test_parts_of_unequal_size_are_refused(world):
    channel_of_two = open_channel(dist.group.WORLD, 5.0, FlightRecorder())
    channel_of_two.leave(torch.ones(3 + world.rank), lambda parts: None)
    other = 1 - world.rank
    with pytest.raises(dist.DistError, match=f"rank {other} left {4 * (3 + other)} bytes"):
        channel_of_two.collect(0)
    dist.barrier()


def held():
    """How many channels' files this process has open: each once by itself, and once as memory."""
    files = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    return sum("meshwright-" in os.readlink(file) for file in files if os.path.islink(file))


@ranks(2)
def test_a_channel_lasts_as_long_as_what_uses_it(world):
    *_, kept = opened(world)
    assert held() == 2
    for _ in range(3):
        group = dist.new_group([0, 1])
        more = shared.share(group, world.recorder, 5.0)
        assert more is not None
        assert held() == 4
        del more
        assert held() == 2
        dist.destroy_process_group(group)
    del kept
    assert held() == 0
    for label, channels in (
        ("tp2 mb1", 1),
        ("shard2 zero2 mb1", 0),
        ("pp2 mb1", 0),
        ("tp2 mb1", 1),
    ):
        groups = open_groups(Layout.parse(label), world)
        assert held() == 2 * channels, label
        del groups
        assert held() == 0


@ranks(2)
def test_layouts_that_are_used_side_by_side_have_their_channels(world):
    one = open_groups(Layout.parse("tp2 mb1"), world)
    again = open_groups(Layout.parse("tp2 mb2"), world)
    assert one.tp.channel is again.tp.channel is not None
    ops = getattr(torch.ops, shared.SPACE)
    for link in (one.tp, again.tp):
        found = ops.all_reduce(torch.full((3,), world.rank + 1.0), "sum", link.name)
        assert ops.wait_tensor(found).tolist() == [3.0] * 3


@ranks(2)
def test_a_channel_that_one_rank_has_forgotten_is_made_anew_on_all(world):
    groups = open_groups(Layout.parse("tp2 mb1"), world)
    before = groups.tp.channel
    if world.rank:
        shared._process().channels.clear()
    after = open_groups(Layout.parse("tp2 mb1"), world).tp.channel
    assert before is not after is not None


@ranks(2)
def test_what_does_not_fit_goes_by_torch(world):
    opened(world)
    small, large = torch.empty(LARGEST // 4), torch.empty(LARGEST // 4 + 1)
    assert shared.operators(small, is_shared=True) is getattr(torch.ops, shared.SPACE)
    for message, is_shared in ((large, True), (torch.empty(0), True), (small, False)):
        found = shared.operators(message, is_shared=is_shared)
        assert found is torch.ops._c10d_functional


@ranks(2)
def test_groups_have_channels_along_tp(world):
    assert open_groups(Layout(tp=2), world).tp.is_shared
    assert not open_groups(Layout(pp=2), world).pp.is_shared
    two = mock.Mock(wraps=world, rank=world.rank, size=2, opened={}, device=world.device)
    two.node = lambda rank: f"node {rank}"
    assert not open_groups(Layout(tp=2), two).tp.is_shared


@ranks(2)
def test_where_memory_cannot_be_shared_no_rank_has_a_channel_and_no_file_stays(world):
    no_room = mock.Mock(side_effect=OSError(errno.ENOSPC, "no room"))
    found, before = dist.group.WORLD, held()
    with mock.patch.object(channel.os, "posix_fallocate", no_room):
        assert open_channel(found, 5.0, FlightRecorder()) is None
    with mock.patch.object(channel.platform, "machine", return_value="aarch64"):
        assert open_channel(found, 5.0, FlightRecorder()) is None
    # One rank alone that can't open it, or has another process by that number.
    real = channel._opened
    for opens in (lambda *_: None, lambda _, name: real("/proc/self/fd/0", name)):
        with mock.patch.object(channel, "_opened", opens):
            assert open_channel(found, 5.0, FlightRecorder()) is None
    assert held() == before
    assert open_channel(found, 5.0, FlightRecorder()) is not None


def entered(recorder, entry):
    at = RING_AT + entry % SLOTS * RECORD.size
    return RECORD.unpack_from(recorder._memory, at)


class InWaits:
    """A clock on which a second passes in every wait that a recorder sees, and nowhere else."""

    def __init__(self):
        self.recorder = FlightRecorder(clock=self.stamp)
        self.now, self.on_wait, self._wait = 1.0, lambda: None, self.recorder.wait
        self.recorder.wait = self.wait

    def wait(self, *entries):
        self._wait(*entries)
        self.now += 1.0
        self.on_wait()

    def stamp(self):
        return getattr(self, "now", 0.0)

    def seconds(self, stamp):
        return stamp


@ranks(2)
def test_a_wait_inside_of_leaving_is_entered_once(world):
    clock = InWaits()
    recorder = clock.recorder
    channel_of_two = open_channel(dist.group.WORLD, 30.0, recorder)
    group = recorder.group("1", (0, 1), "tp")
    part, entries = torch.ones(LARGEST // 4), []
    key = exchange(uuid.uuid4().hex, dist.group.WORLD)[0]
    recorder.tape = Tape(clock)
    if world.rank == 0:
        clock.on_wait = lambda: world.store.set(key, "rank 0 waits")
    else:
        world.store.wait([key])
    for _ in range(3):  # the third one does not go before the first two have come
        entries.append(recorder.begin("all_reduce", group, LARGEST))
        channel_of_two.leave(part, lambda parts: None, (entries[-1],))
    waited = recorder._waited_s
    assert all(entered(recorder, entry)[2:4] == (0.0, 0.0) for entry in entries)
    assert waited == clock.now - 1.0
    if world.rank == 0:
        assert waited > 0
        assert {wait.entries for wait in recorder.tape.waits} <= {(entry,) for entry in entries}
        assert sum(wait.until - wait.since for wait in recorder.tape.waits) == waited
    for number, entry in enumerate(entries):
        recorder.wait(entry)
        channel_of_two.collect(number)
        recorder.end(entry)
    assert recorder._waited_s == clock.now - 1.0
    assert all(entered(recorder, entry)[3] > 0 for entry in entries)


@ranks(2)
def test_who_hangs_inside_of_leaving_is_seen_to_wait(world):
    recorder = FlightRecorder()
    channel_of_two = open_channel(dist.group.WORLD, 0.5, recorder)
    group = recorder.group("1", (0, 1), "tp")
    if world.rank == 0:
        entries = [recorder.begin("all_reduce", group, LARGEST) for _ in range(3)]
        with pytest.raises(dist.DistError, match="of waiting for rank 1,"):  # noqa: PT012
            for entry in entries:
                channel_of_two.leave(torch.ones(LARGEST // 4), lambda parts: None, (entry,))
        assert [entered(recorder, entry)[2] > 0 for entry in entries] == [True, False, False]
        assert entered(recorder, entries[0])[3] == 0
    dist.barrier()


def one_of_four(rank, file, ends):
    store = dist.FileStore(file, 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    world = World(rank, 4, torch.device("cpu"), store)
    tp = open_groups(Layout(tp=2, dp_replicate=2), world).tp
    channel, ops = shared.channel_of(tp.required), getattr(torch.ops, shared.SPACE)
    channel._timeout_s = 1000.0
    ops.wait_tensor(ops.all_reduce(torch.ones(8), "sum", tp.name))
    if not ends:  # only now: ranks may be late to their first message
        channel._timeout_s = 1.5
    if rank == 3 and ends:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 2:
        time.sleep(1000)
    with pytest.raises(dist.DistError) as caught:
        ops.wait_tensor(ops.all_reduce(torch.ones(8), "sum", tp.name))
    Path(file + ".waited").write_text(str(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_ended_or_does_not_come_is_named_as_in_the_world(tmp_path, ends):
    """By its number in the world: in its group it is the second. The message is recognised.

    A rank that ends is noticed long before the time-out, which is longer than this test may take.
    """
    file = str(tmp_path / "store")
    context = mp.get_context("spawn")
    four = [
        context.Process(target=one_of_four, args=(r, file, ends), daemon=True) for r in range(4)
    ]
    for process in four:
        process.start()
    four[2].join(150)
    for process in four:
        process.kill()
    assert four[2].exitcode == 0
    text = Path(file + ".waited").read_text()
    assert "rank 3, with which this one shares memory" in text
    assert lost_a_peer({"type": "DistError", "message": text}) == ends
    assert bool(TIMED_OUT.search(text)) != ends
