"""What is copied from a GPU for a save: little pinned memory, nothing read before it is there."""

import pytest
import torch

from meshwright.checkpoint import saver as saving
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.staging import Staging
from meshwright.comm.world import World


class Late:
    """A stream whose copies arrive when they are waited for: before, the room holds rubbish."""

    def __init__(self):
        self.waited = 0
        self.staging = None

    def record_event(self):
        room, part = self.staging._room((self.staging._turn - 1) % 2), None
        part = room.clone()
        room.fill_(255)
        return Arrived(self, room, part)


class Arrived:
    def __init__(self, stream, room, part):
        self.stream, self.room, self.part = stream, room, part

    def synchronize(self):
        self.stream.waited += 1
        self.room.copy_(self.part)


def test_tensors_of_any_size_go_through_two_small_pieces():
    stream = Late()
    staging = stream.staging = Staging(stream, 64, pins=False)
    given = [torch.randn(3, 5), torch.arange(40), torch.randn(1), torch.randn(200, 2).t()]
    found = [torch.zeros(x.shape, dtype=x.dtype) for x in given]
    for source, into in zip(given, found, strict=True):
        staging.copy(source, into)
    staging.finish()
    assert all(map(torch.equal, given, found))
    assert sum(piece.numel() for piece in staging._pieces) == 128
    assert stream.waited == sum(-(-x.numel() * x.element_size() // 64) for x in given)


def test_a_saver_s_thread_takes_its_rank_s_gpu_first(monkeypatch, tmp_path):
    told = []

    class Stream:
        def __init__(self, device):
            told.append(("stream", device))

        def wait_event(self, event):
            told.append("wait")

        def __enter__(self):
            told.append("on stream")

        def __exit__(self, *_):
            pass

    cuda = saving.torch.cuda
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(cuda, "set_device", lambda device: told.append(("device", device)))
    device = torch.device("cuda", 3)
    saver = Saver(tmp_path, World(0, 1, device, None), 1, lambda saved: None, during_training=True)
    with saver._beside_training("ready"):
        told.append("copy")
    assert told == [("stream", device), ("device", device), "on stream", "wait", "copy"]


@pytest.mark.parametrize("count", [1, 8190, 8191, 8192, 5 * 8191 + 7])
def test_numbers_of_shards_need_little_memory_and_are_those_of_the_whole(count, monkeypatch):
    from meshwright.training import between_steps

    monkeypatch.setattr(between_steps, "_PERIODS", 2)
    shard = torch.randn(count)
    flat = shard.view(torch.int32).to(torch.int64)
    whole = int((flat * (torch.arange(count) % 8191 + 1)).sum())
    most = []
    real = torch.Tensor.to

    def noted(x, dtype, *rest):
        most.append(x.numel())
        return real(x, dtype, *rest)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    assert between_steps.bits(shard) == whole
    assert max(most, default=0) <= 2 * 8191
