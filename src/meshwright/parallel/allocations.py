"""Categorizes a rank's memory over a step, from the allocations that torch's profiler records.

On a CPU, torch keeps no memory statistics, and the system's count is up to twice too high. Labels
in the profile give the purpose of an allocation: `label` adds one.
"""

from __future__ import annotations

import bisect
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright import torch_private
from meshwright.comm.gloo_threads import wait_for_gloo_threads
from meshwright.comm.measured_step import MeasuredMoment
from meshwright.comm.tape import Tape
from meshwright.parallel.apply import Parallel
from meshwright.parallel.data_parallel.gradients import local_shard
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.data_parallel.sharded import replicas_of
from meshwright.parallel.memory_labels import HOST, labelled_in_data
from meshwright.torch_private import replaced

# How the profile names the operations in which a collective's memory is used.
COLLECTIVES: Final = ("c10d::", "_c10d_functional::", "gloo:")
TURN: Final = "turn "
REST: Final = "rest"


@dataclass
class AllocatedPiece:
    """An allocation: bytes, time in ns, category, and the operations that made it.

    An allocation from before the profile has the start 0; `end` is None if its end was not
    recorded.
    """

    size: int
    start: int
    end: int | None
    kind: str
    maker: str


def label(kind: str, tensor: Tensor | None) -> None:
    """Record in the profile that a tensor's memory has this category; the last label counts."""
    if tensor is None:
        return
    address = local_shard(tensor.detach()).untyped_storage().data_ptr()
    if address:
        with record_function(f"label {kind} {address}"):
            pass


@contextmanager
def labelled_gradients(parallel: Parallel, shards: Shards) -> Iterator[None]:
    """Label the gradients that the optimizer uses."""
    kind = HOST if parallel.program.layout.offload == "params" else "gradients"

    def labelling(take: Any) -> Any:
        def run() -> None:
            take()
            for param in parallel.held:
                label(kind, param.parameter.grad)

        return run

    with replaced(shards, "take", labelling):
        yield


def lasting(
    parallel: Parallel, shards: Shards, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """Yield (category, tensor) for each tensor that exists from step to step."""
    layout = parallel.program.layout
    for param in parallel.held:
        yield HOST if layout.offload == "params" else "parameters", param.parameter
    for module in parallel.modules.values():
        replicas = replicas_of(module)
        for weight in [] if replicas is None else replicas.weights.values():
            if weight.is_copy and not weight.reshards:  # products use it
                yield "gathered", weight.used
        for buffer in module.buffers():
            yield REST, buffer
    for leaf in shards.leaves if shards.on_host else ():
        yield HOST, leaf
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, Tensor):
                yield HOST if layout.states_on_host else "optimizer", tensor


class LabellingTape(Tape):
    """A tape of a step's messages that also marks the beginning of each turn in the profile.

    A turn is one action of the rank's schedule. After each message it waits until gloo's threads
    have released the message's tensors: the profiler misses memory that one of them frees.
    """

    def turn(self, name: str, stage: int, microbatch: int) -> None:
        """Record that the rank begins an action."""
        super().turn(name, stage, microbatch)
        with record_function(f"{TURN}{self.turns[-1]}"):
            pass

    def end(self, *entries: int) -> None:
        """Record that the rank no longer waits for the messages `entries`."""
        super().end(*entries)
        wait_for_gloo_threads()

    def stop(self) -> None:
        """Record the end of the step."""
        super().stop()
        with record_function(f"{TURN}end"):
            pass


class _Frame(NamedTuple):
    """The name of an operation, and the operation that called it."""

    name: str
    outer: _Frame | None

    def __str__(self) -> str:
        names: list[str] = []
        frame: _Frame | None = self
        while frame is not None:
            names.append(frame.name)
            frame = frame.outer
        return " < ".join(names)


Event = tuple[Any, _Frame | None]


def events_of(seen: profile) -> list[Event]:
    """Return all events of a profile in order, each with its enclosing operations."""
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    roots = seen.profiler.kineto_results.experimental_event_tree()
    return sorted(_flat(roots), key=lambda event: event[0].start_time_ns)


def _flat(roots: Sequence[Any]) -> Iterator[Event]:
    left: list[Event] = [(node, None) for node in reversed(roots)]
    while left:
        node, outer = left.pop()
        yield node, outer
        if node.typed[0] != torch_private.EventType.Allocation:
            outer = _Frame(node.name, outer)
        left += [(child, outer) for child in reversed(node.children)]


def pieces_of(
    events: Sequence[Event], device: str = "cpu", known: Mapping[int, AllocatedPiece] | None = None
) -> list[AllocatedPiece]:
    """Return all allocations on a type of device with their ends, except those labelled as host
    memory.

    `known` are allocations from before the profile, by address.

    The profiler sees only frees in its own thread. If a thread of gloo is the last to release a
    collective's tensor, the free is missed: the address is used again, or gloo's own allocation
    never ends. Such an allocation is assumed to end with its collective.
    """
    ends = sorted(node.end_time_ns for node, _ in events if node.name.startswith(COLLECTIVES))

    def end_unseen(piece: AllocatedPiece, latest: int | None) -> None:
        index = bisect.bisect_left(ends, piece.start)
        times = [*ends[index : index + 1], *([] if latest is None else [latest])]
        piece.end = min(times, default=None)

    live = dict(known or {})
    pieces = list(live.values())
    for node, maker in events:
        if node.typed[0] == torch_private.EventType.Allocation:
            if node.typed[1].device.type != device:
                continue
            address, size = node.typed[1].ptr, node.typed[1].alloc_size
            before = live.pop(address, None)
            if size < 0 and before is not None:
                before.end = node.start_time_ns
            elif before is not None:
                end_unseen(before, node.start_time_ns)
            if size > 0:
                made_in = str(maker or "")
                kind = "buffers" if "c10d::" in made_in else REST  # gloo's own copies
                live[address] = AllocatedPiece(size, node.start_time_ns, None, kind, made_in)
                pieces.append(live[address])
        elif node.name.startswith("label "):
            _, kind, address = node.name.split()
            if int(address) in live:
                live[int(address)].kind = kind
    for piece in live.values():
        if piece.kind == "buffers":
            end_unseen(piece, None)
    return [piece for piece in pieces if piece.kind != HOST]


def alive(pieces: Sequence[AllocatedPiece], time: int) -> list[AllocatedPiece]:
    """Return the allocations that exist at `time`, in ns."""
    return [p for p in pieces if p.start <= time and (p.end is None or p.end > time)]


def moments_of(pieces: Sequence[AllocatedPiece], begins: Sequence[int]) -> list[MeasuredMoment]:
    """Return the bytes per category at the beginning of each turn, and at each turn's peak.

    `begins` are the start times of the turns and, last, the end of the step, in ns. Uncategorized
    memory counts as activations.
    """

    def now() -> dict[str, int]:
        return {
            "activations" if kind == REST else kind: by_kind[kind]
            for kind in by_kind
            if by_kind[kind]
        }

    changes = [(piece.start, piece.size, piece.kind) for piece in pieces]
    changes += [(piece.end, -piece.size, piece.kind) for piece in pieces if piece.end is not None]
    changes.sort()
    by_kind: Counter[str] = Counter()
    moments, index = [], 0
    for turn, (begin, end) in enumerate(pairwise(begins)):
        while index < len(changes) and changes[index][0] <= begin:
            by_kind[changes[index][2]] += changes[index][1]
            index += 1
        moments.append(MeasuredMoment(turn, 0.0, now()))
        peak, total = moments[-1], by_kind.total()
        highest = total
        while index < len(changes) and changes[index][0] <= end:
            time, size, kind = changes[index]
            by_kind[kind] += size
            total += size
            index += 1
            if total > highest:
                highest = total
                peak = MeasuredMoment(turn, (time - begin) / (end - begin), now())
        if peak is not moments[-1]:
            moments.append(peak)
    return [*moments, MeasuredMoment(len(begins) - 1, 0.0, now())]


@contextmanager
def _silent() -> Iterator[None]:
    """Silence stderr, including what C++ writes to it."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


class MemoryProfile:
    """A context that profiles a rank's memory by category during one step."""

    def __init__(
        self, parallel: Parallel, shards: Shards, optimizer: torch.optim.Optimizer
    ) -> None:
        """Prepare to profile a step of this model, with its optimizer and the optimizer's
        shards.
        """
        self._trained = parallel, shards, optimizer
        self._device = parallel.device.type
        self._known: dict[int, AllocatedPiece] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._contexts = ExitStack()

    def __enter__(self) -> MemoryProfile:
        parallel, shards, _ = self._trained
        for kind, tensor in lasting(*self._trained):
            storage = local_shard(tensor.detach()).untyped_storage()
            if storage.device.type == self._device and storage.data_ptr():
                self._known[storage.data_ptr()] = AllocatedPiece(
                    storage.nbytes(), 0, None, kind, ""
                )
        self._contexts.enter_context(labelled_in_data(label))
        self._contexts.enter_context(labelled_gradients(parallel, shards))
        # Under torchrun and Slurm the terminal would have what torch says as a profile begins and
        # ends, and once in it, of memory from before: a piece of that is freed here.
        unseen = torch.empty(1)
        with _silent():
            self._contexts.enter_context(self._profile)
            del unseen
        return self

    def __exit__(self, *_: object) -> None:
        with _silent():
            self._contexts.close()

    def moments(self) -> list[MeasuredMoment]:
        """Return the bytes per category as each turn of a `LabellingTape` began, and at its
        peak.
        """
        events = events_of(self._profile)
        begins = [event.start_time_ns for event, _ in events if event.name.startswith(TURN)]
        return moments_of(pieces_of(events, self._device, self._known), begins)
