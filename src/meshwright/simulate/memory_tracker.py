"""`MemoryTracker`: the lifetime and purpose of every storage of a rank.

torch's own trackers refuse a second iteration and count memory that DTensor never allocates. This
one is a dispatch mode: it sees the result of every operation of the forward, the backward, the
optimizer and torch's data parallelism. It doesn't see temporary memory inside of kernels.
"""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.parallel.data_parallel.gradients import local_shard
from meshwright.torch_private import TorchDispatchMode, replaced, tree_leaves

# What a storage is for. `activations` outlive the action that made them, `temporary` do not;
# `buffers` are what data parallelism sends from and receives in; `inputs` are the batch and the
# model's tables.
CATEGORIES: Final = (
    "weights",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "temporary",
    "buffers",
    "inputs",
)
# The phase with which a step begins.
START: Final = "start"
# Of no concern to the device: mirrors and states that offloading keeps in the host's memory.
HOST: Final = "host"


class StoragePiece:
    """The bytes, lifetime (by the tracker's clock) and category of a storage while it had one
    size."""

    __slots__ = ("end", "kind", "size", "start")

    def __init__(self, size: int, start: int) -> None:
        self.size, self.start = size, start
        self.end: int | None = None
        self.kind = ""


class Phase(NamedTuple):
    """A phase of a rank, with its memory at the peak and at the end, in bytes by category."""

    name: str
    peak: dict[str, int]
    end: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Breach:
    """The first moment above a memory limit: the phase, bytes by category, and the failing
    allocation.

    `asked` is the allocation's category, `size` its bytes.
    """

    phase: str
    held: dict[str, int]
    asked: str
    size: int

    @property
    def tensors(self) -> int:
        """Bytes that were allocated before the failing allocation."""
        return sum(self.held.values()) - self.size

    @property
    def largest(self) -> str:
        """The category with the most bytes."""
        return max(self.held, key=lambda kind: self.held[kind])


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records all storages that are created and freed while it is active.

    `begin` starts a phase of the rank. `label` sets the category of a tensor's memory, also
    afterwards: it applies from the storage's beginning.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = 0
        self._pieces: list[StoragePiece] = []
        self._live: dict[int, tuple[StoragePiece, weakref.ref[Any]]] = {}
        self._names, self._begun = ["build"], [0]
        self._resizing: Any = None

    def begin(self, phase: str) -> None:
        """Record the beginning of a phase."""
        self._clock += 1
        self._names.append(phase)
        self._begun.append(self._clock)

    def label(self, kind: str, tensor: Tensor | None) -> None:
        """Set the category of a tensor's storage; the last label counts."""
        if tensor is None:
            return
        entry = self._live.get(local_shard(tensor).untyped_storage()._cdata)
        if entry is not None:
            entry[0].kind = kind

    def __enter__(self) -> MemoryTracker:
        self._resizing = replaced(torch.UntypedStorage, "resize_", self._noted)
        self._resizing.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resizing.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and record the storages of its results."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # It comes again with this rank's parts, or with values and scales in float8.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(local_shard(leaf).untyped_storage())
        return out

    def _noted(self, resize: Any) -> Any:
        """Return a wrapper of `UntypedStorage.resize_` that records the change: FSDP2 frees and
        allocates by it."""

        def run(storage: Any, size: int) -> Any:
            out = resize(storage, size)
            self._note(storage)
            return out

        return run

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None and known[0].size == size:
            return
        self._clock += 1
        piece = StoragePiece(size, self._clock)
        self._pieces.append(piece)
        if known is None:
            reference = weakref.ref(storage, partial(self._freed, key))
        else:
            known[0].end = self._clock
            piece.kind, reference = known[0].kind, known[1]
        self._live[key] = (piece, reference)

    def _freed(self, key: int, _: Any) -> None:
        self._clock += 1
        piece, _ = self._live.pop(key)
        piece.end = self._clock

    def phases(self) -> tuple[Phase, ...]:
        """Return the rank's phases, in order, without host memory."""
        peaks: dict[int, dict[str, int]] = {}
        ends: dict[int, dict[str, int]] = {}
        highest = Counter[int]()
        for phase, allocated, _ in self._moments():
            total = sum(allocated.values())
            if phase not in peaks or total > highest[phase]:
                highest[phase], peaks[phase] = total, dict(allocated)
            ends[phase] = dict(allocated)
        return tuple(
            Phase(self._names[index], peaks[index], ends[index]) for index in sorted(peaks)
        )

    def breach(self, first: str, limit: float) -> Breach | None:
        """Return the first moment, from the phase `first` on, with more than `limit` bytes; None if
        there is none."""
        from_there = self._names.index(first)
        for phase, allocated, piece in self._moments():
            if phase >= from_there and piece is not None and sum(allocated.values()) > limit:
                return Breach(self._names[phase], dict(allocated), self._kind(piece), piece.size)
        return None

    def _moments(self) -> Iterator[tuple[int, dict[str, int], StoragePiece | None]]:
        """Yield, at each change, the index of the phase, the bytes by category, and the piece if it
        was allocated."""
        changes: list[tuple[int, int, StoragePiece | int]] = [
            (time, 0, phase) for phase, time in enumerate(self._begun)
        ]
        for piece in self._pieces:
            if piece.kind != HOST:
                changes.append((piece.start, piece.size, piece))
                if piece.end is not None:
                    changes.append((piece.end, -piece.size, piece))
        changes.sort(key=lambda change: change[0])
        phase, allocated = 0, dict.fromkeys(CATEGORIES, 0)
        for _, size, event in changes:
            if isinstance(event, int):
                phase = event
                yield phase, allocated, None
            else:
                allocated[self._kind(event)] += size
                yield phase, allocated, event if size > 0 else None

    def _kind(self, piece: StoragePiece) -> str:
        """Return a piece's category: its label, or else "inputs", "activations" or "temporary" by
        its lifetime."""
        if piece.kind:
            return piece.kind
        if piece.start < self._begun[self._names.index(START)]:
            return "inputs"
        end = self._clock if piece.end is None else piece.end
        begun = bisect.bisect(self._begun, piece.start)
        return "activations" if bisect.bisect(self._begun, end) > begun else "temporary"
