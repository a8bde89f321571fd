"""Values between ranks: what is read equals what was written, and runs no code."""

import math
import pickle
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from meshwright.comm.values import (
    broadcast_bytes,
    from_bytes,
    gather_values,
    receive_bytes,
    send_bytes,
    to_bytes,
)
from meshwright.spec.training import OptimizerSpec
from ranks import on_ranks


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True)
class Record:
    name: str
    tensors: dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -1, 2**70, 0.1, -0.0, math.inf, "", "ä\0\U0001f600", [], (), {}),
        [1, (2, [3.5, ("x",)]), {"a": None, 3: (4,), (1, 2): "pair"}],
        {"tuple": 1, "tensor": [2], "Pair": 3},
        Pair(Pair(1, (2,)), [Pair("a", None)]),
        OptimizerSpec(lr=1 / 3, betas=(0.9, 0.95)),
    ],
)
def test_a_value_comes_back(value):
    back = from_bytes(to_bytes(value), Pair, OptimizerSpec)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan_comes_back():
    assert math.isnan(from_bytes(to_bytes(math.nan)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (5, 7)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(getattr(torch, dtype))
    record = Record("x", {"first": tensor, "second": torch.randn(9, 4).t()})
    back = from_bytes(to_bytes([record, tensor]), Record)
    assert back[0].name == "x"
    for read, written in [
        (back[1], tensor),
        *zip(back[0].tensors.values(), record.tensors.values(), strict=True),
    ]:
        assert (read.dtype, read.shape) == (written.dtype, written.shape)
        assert torch.equal(read, written)


def test_only_expected_classes_are_made():
    with pytest.raises(ValueError, match="Pair"):
        from_bytes(to_bytes(Pair(1, 2)), Record)
    with pytest.raises(TypeError, match="set"):
        to_bytes([{1, 2}])
    crafted = to_bytes(torch.zeros(3)).replace(b"float32", b"  load ")
    with pytest.raises(ValueError, match="dtype"):
        from_bytes(crafted)


class Opens:
    """Opens a file for writing where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_nothing_is_unpickled(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ValueError):
            from_bytes(pickle.dumps(Opens(str(tmp_path / "opened")), protocol))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [0, 7, 8, 30, -200])
def test_bytes_that_are_cut_off_are_refused(kept):
    with pytest.raises(ValueError):
        from_bytes(to_bytes(torch.zeros(100))[:kept])


def exchanged(world):
    """Return what a rank gathers and receives, for the test below."""
    everyone = gather_values(Pair(world.rank, torch.full((world.rank,), 7.0)), Pair)
    if world.rank == 1:
        send_bytes(b"from 1", 0)
    received = bytes(receive_bytes(1)) if world.rank == 0 else b""
    nothing = broadcast_bytes(b"" if world.rank == 0 else None, 0)
    of_last = broadcast_bytes(b"x" * 1000 if world.rank == 2 else None, 2)
    return [(p.left, p.right.tolist()) for p in everyone], received, bytes(nothing), bytes(of_last)


def test_ranks_exchange_values_of_different_sizes():
    for rank, (everyone, received, nothing, of_last) in enumerate(on_ranks(3, exchanged)):
        assert everyone == [(0, []), (1, [7.0]), (2, [7.0, 7.0])]
        assert received == (b"from 1" if rank == 0 else b"")
        assert nothing == b""
        assert of_last == b"x" * 1000
