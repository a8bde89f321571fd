"""Python values between ranks, as JSON and the raw bytes of tensors: what arrives runs no code.

`torch.distributed` sends objects as pickles, which can call any function of the receiver.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

T = TypeVar("T")
_ALIGNED: Final = 64
_LENGTH: Final = struct.Struct("<Q")


def to_bytes(value: object) -> bytes:
    """Return a value as bytes for `from_bytes`: JSON for its structure, then its tensors.

    It may consist of None, booleans, numbers, texts, lists, tuples, dicts, CPU tensors, named
    tuples, dataclasses and pydantic models. Raises `TypeError` for anything else.
    """
    writer = _Writer()
    structure = json.dumps(writer.described(value)).encode()
    length = _LENGTH.pack(len(structure))
    padding = bytes(_padding(len(length) + len(structure)))
    return b"".join([length, structure, padding, *writer.pieces])


def from_bytes(data: bytes | bytearray, *types: type) -> Any:
    """Return the value of `to_bytes`; tensors share the memory of `data` if it is a bytearray.

    Raises `ValueError` for a class that is not among `types`, and for bytes that are not a value.
    """
    buffer = data if isinstance(data, bytearray) else bytearray(data)
    if len(buffer) < _LENGTH.size:
        raise ValueError(f"{len(buffer)} bytes are not a value")
    (length,) = _LENGTH.unpack_from(buffer)
    structure = json.loads(buffer[_LENGTH.size : _LENGTH.size + length])
    start = _LENGTH.size + length
    read = _Reader(buffer, start + _padding(start), {kind.__name__: kind for kind in types})
    return read.value(structure)


def gather_values(value: T, *types: type) -> list[T]:
    """Gather a value from every rank, in the order of ranks; a collective if there are several.

    `types` are the classes that it may contain, as in `from_bytes`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered = gather_bytes(to_bytes(value), None, _device())
    return [from_bytes(data, *types) for data in gathered]


def gather_bytes(
    data: bytes, group: dist.ProcessGroup | None, device: torch.device
) -> list[bytearray]:
    """Gather bytes from every rank of a group (None: of all ranks), in their order; a collective
    of tensors on `device`.
    """
    size = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    lengths = [int(length) for length in sizes]
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    padded = padded.to(device)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    pairs = zip(gathered, lengths, strict=True)
    return [bytearray(row[:length].cpu().numpy()) for row, length in pairs]


def broadcast_bytes(data: bytes | None, source: int) -> bytearray:
    """Return the bytes that rank `source` gives, on every rank; a collective."""
    return _moved(data, lambda message: dist.broadcast(message, source))


def send_bytes(data: bytes, destination: int) -> None:
    """Send bytes to a rank that calls `receive_bytes`."""
    _moved(data, lambda message: dist.send(message, destination))


def receive_bytes(source: int) -> bytearray:
    """Return the bytes that rank `source` sends with `send_bytes`."""
    return _moved(None, lambda message: dist.recv(message, source))


def _moved(data: bytes | None, move: Callable[[Tensor], object]) -> bytearray:
    """Send or receive a length and as many bytes; None receives."""
    device = _device()
    length = torch.tensor([0 if data is None else len(data)], device=device)
    move(length)
    buffer = bytearray(int(length)) if data is None else bytearray(data)
    if not buffer:
        return buffer
    message = torch.frombuffer(buffer, dtype=torch.uint8)
    on_device = message.to(device)
    move(on_device)
    if on_device is not message:
        message.copy_(on_device)
    return buffer


def _device() -> torch.device:
    """Return the device of messages of all ranks: the CPU if a backend has it."""
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _padding(size: int) -> int:
    return -size % _ALIGNED


class _Writer:
    """Describes values as JSON, in which an object with one key says what JSON lacks; `pieces` are
    the bytes of their tensors.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes | memoryview] = []
        self._size = 0

    def described(self, value: object) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [self.described(entry) for entry in value]
        if type(value) is tuple:
            return {"tuple": [self.described(entry) for entry in value]}
        if isinstance(value, Mapping):
            return {"dict": [[self.described(part) for part in pair] for pair in value.items()]}
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value)}
        name = type(value).__name__
        if isinstance(value, BaseModel):
            return {name: value.model_dump(mode="json")}
        if isinstance(value, tuple):
            return {name: [self.described(entry) for entry in value]}
        if dataclasses.is_dataclass(value):
            names = [entry.name for entry in dataclasses.fields(value)]
            return {name: [self.described(getattr(value, field)) for field in names]}
        raise TypeError(f"a {name} is not sent between ranks")

    def _tensor(self, tensor: Tensor) -> list[Any]:
        """Add a tensor's bytes; return its dtype, shape, and the position of its bytes."""
        start, padding = self._size, _padding(tensor.nbytes)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.pieces += [flat.numpy().data, bytes(padding)]
        self._size += tensor.nbytes + padding
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]


class _Reader:
    """Reads values from their JSON, with tensors in `buffer` from `start` on."""

    def __init__(self, buffer: bytearray, start: int, types: Mapping[str, type]) -> None:
        self._buffer, self._start, self._types = buffer, start, types

    def value(self, described: Any) -> Any:
        if isinstance(described, list):
            return [self.value(entry) for entry in described]
        if not isinstance(described, dict):
            return described
        ((kind, content),) = described.items()
        if kind == "tuple":
            return tuple(self.value(entry) for entry in content)
        if kind == "dict":
            return {self.value(key): self.value(entry) for key, entry in content}
        if kind == "tensor":
            return self._tensor(*content)
        if kind not in self._types:
            raise ValueError(f"a rank sent a {kind}, which is not expected here")
        of_kind = cast("Any", self._types[kind])
        if issubclass(of_kind, BaseModel):
            return of_kind.model_validate(content)
        return of_kind(*map(self.value, content))

    def _tensor(self, dtype_name: str, shape: list[int], start: int) -> Tensor:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a rank sent a tensor of {dtype_name}, which is not a dtype")
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=self._start + start)
        return flat.view(shape)
