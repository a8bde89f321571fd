"""What a rank's memory is made of, from the allocations that torch's profiler sees.

On a CPU torch keeps no statistics of memory, and what the system counts is up to twice too high.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple
from unittest import mock

from torch import Tensor
from torch._C._profiler import _EventType
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.execute.build import build, seeded
from meshwright.execute.data import replicas_of
from meshwright.execute.gradients import local_shard
from meshwright.execute.groups import open_groups
from meshwright.execute.ledger import Ledger
from meshwright.execute.masters import Weight
from meshwright.execute.optimize import Shards
from meshwright.execute.parallel import Parallel
from meshwright.execute.world import World
from meshwright.layout import broken
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.reference import make_batch
from meshwright.spec.training import OptimizerSpec
from meshwright.train.loss_scale import LossScale
from meshwright.train.optimizer import build_optimizer
from meshwright.train.update import update

STEPS: Final = 4
# How the profile names the operations in which a collective's memory is used.
COLLECTIVES: Final = ("c10d::", "_c10d_functional::", "gloo:")
ACTION: Final = "action "
HOST: Final = "host"


@dataclass
class Held:
    """Bytes of a rank: the weights that it trains, or their shards; whole weights made of these;
    gradients; optimizer state; buffers of FSDP2 and gloo for collectives; the rest: activations.
    What is offloaded does not count.
    """

    parameters: float = 0
    gathered: float = 0
    gradients: float = 0
    optimizer: float = 0
    buffers: float = 0
    rest: float = 0

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(asdict(self).values()))


@dataclass
class Piece:
    """An allocation: bytes, its time in ns, what it is, and the operations that it was made in."""

    size: int
    start: int
    end: int | None
    kind: str
    maker: str


def mark(kind: str, tensor: Tensor | None) -> None:
    """Have the profile say what a tensor's memory is; the last word counts."""
    if tensor is None:
        return
    address = local_shard(tensor.detach()).untyped_storage().data_ptr()
    if address:
        with record_function(f"mark {kind} {address}"):
            pass


@contextmanager
def marked_by_fsdp() -> Iterator[None]:
    """Mark what FSDP2 gathers, reduces and buffers, wherever it does."""
    gather, reduce = FSDPParam.init_unsharded_param, FSDPParamGroup.post_backward
    allocate = DefaultAllocMixin.allocate

    def gathered(self: FSDPParam) -> None:
        gather(self)  # type: ignore[no-untyped-call]
        for output in self.all_gather_outputs:
            mark("gathered", output)

    def mark_gradients(group: FSDPParamGroup) -> None:
        for parameter in group.fsdp_params:
            mark("gradients", parameter.unsharded_accumulated_grad)
            whole = getattr(parameter, "_unsharded_param", None)
            mark("gradients", None if whole is None else whole.grad)
            mark("gradients", parameter.sharded_param.grad)
        mark("gradients", group._partial_reduce_output)

    def reduced(self: FSDPParamGroup, *arguments: Any) -> None:
        mark_gradients(self)
        reduce(self, *arguments)
        mark_gradients(self)

    def buffered(self: DefaultAllocMixin, *arguments: Any, **more: Any) -> Tensor:
        buffer = allocate(self, *arguments, **more)
        mark("buffers", buffer)
        return buffer

    with (
        mock.patch.object(FSDPParam, "init_unsharded_param", gathered),
        mock.patch.object(FSDPParamGroup, "post_backward", reduced),
        mock.patch.object(DefaultAllocMixin, "allocate", buffered),
    ):
        yield


@dataclass
class Measured:
    """What a rank held at the peak of a step and at its start, and the pieces of the peak.

    `moment` is the action, or the phase after the last of them, in which the peak was.
    """

    peak: Held
    start: Held
    moment: str
    pieces: list[Piece] = field(repr=False)


def measure(world: World, case: Case) -> Measured:
    """Return the memory of this rank in one step of training after the first; a collective."""
    model, train, layout = case.model, case.train, case.layout
    broken_rule = broken(model, train, layout)
    assert broken_rule is None, broken_rule
    groups, program = open_groups(layout, world), lower(model, train, layout)
    batch = mine(make_batch(case, 0), program, world)
    states = "optimizer" if layout.offload == "none" else HOST
    on_host = layout.offload == "params"
    with (
        marked_by_fsdp(),
        marked_by_action(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        parallel = build(program, groups, world.device, seeded(model, 0))
        shards = Shards(parallel.held, on_host=layout.offload == "optimizer")
        optimizer = build_optimizer(shards.leaves, OptimizerSpec())
        take = shards.take

        def take_marked() -> None:
            take()
            for held in parallel.held:
                mark(HOST if on_host else "gradients", held.parameter.grad)

        with mock.patch.object(shards, "take", take_marked):
            for step in range(STEPS):
                with record_function("measured" if step else "first"):
                    update(parallel, batch, world, shards, optimizer, LossScale.of(train), 1.0)
                for held in parallel.held:
                    mark(HOST if on_host else "parameters", held.parameter)
                for weight in _copies(parallel):
                    mark("gathered", weight.used)
                if shards.on_host:
                    for leaf in shards.leaves:
                        mark(HOST, leaf)
                for state in optimizer.state.values():
                    for tensor in state.values():
                        mark(states, tensor)
    return sorted(_peaks(seen), key=lambda found: found.peak.total)[(STEPS - 1) // 2]


def _copies(parallel: Parallel) -> Iterator[Weight]:
    """Yield the weights of which products use a copy."""
    for module in parallel.modules.values():
        replicas = replicas_of(module)
        for weight in [] if replicas is None else replicas.weights.values():
            if weight.is_copy:
                yield weight


@contextmanager
def marked_by_action() -> Iterator[None]:
    """Have the profile say when each action of the table, and each phase after it, begins."""
    action, phase = Ledger.action, Ledger.phase

    def begin(self: Ledger, kind: str, stage: int, microbatch: int) -> None:
        with record_function(f"{ACTION}{kind} {stage} {microbatch}"):
            action(self, kind, stage, microbatch)

    def enter(self: Ledger, name: str) -> None:
        with record_function(f"{ACTION}{name}"):
            phase(self, name)

    with mock.patch.object(Ledger, "action", begin), mock.patch.object(Ledger, "phase", enter):
        yield


class _Frame(NamedTuple):
    """An operation, and the one that it is in."""

    name: str
    outer: _Frame | None

    def __str__(self) -> str:
        names: list[str] = []
        at: _Frame | None = self
        while at is not None:
            names.append(at.name)
            at = at.outer
        return " < ".join(names)


def _events(
    nodes: Sequence[Any], outer: _Frame | None = None
) -> Iterator[tuple[Any, _Frame | None]]:
    """Yield all events of a profile, and the operations that each is in."""
    for node in nodes:
        yield node, outer
        is_allocation = node.typed[0] == _EventType.Allocation
        yield from _events(node.children, outer if is_allocation else _Frame(node.name, outer))


def _peaks(seen: profile) -> Iterator[Measured]:
    """Yield what each of the measured steps held at its peak."""
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    roots = seen.profiler.kineto_results.experimental_event_tree()
    events = sorted(_events(roots), key=lambda event: event[0].start_time_ns)
    pieces = _pieces(events)
    pieces = [piece for piece in pieces if piece.kind != HOST]
    changes = [(piece.start, piece.size) for piece in pieces]
    changes += [(piece.end, -piece.size) for piece in pieces if piece.end is not None]
    changes.sort()
    moments = [(e.start_time_ns, e.name) for e, _ in events if e.name.startswith(ACTION)]
    for node, _ in events:
        if node.name != "measured":
            continue
        total = peak = 0
        at = node.start_time_ns
        for time, size in changes:
            total += size
            if node.start_time_ns < time < node.end_time_ns and total > peak:
                peak, at = total, time
        alive = _alive(pieces, at)
        before = [name for time, name in moments if node.start_time_ns < time <= at]
        moment = before[-1].removeprefix(ACTION) if before else ""
        yield Measured(_sum(alive), _sum(_alive(pieces, node.start_time_ns)), moment, alive)


def _pieces(events: Sequence[tuple[Any, _Frame | None]]) -> list[Piece]:
    """Return all allocations of a profile with their ends.

    The profiler sees what its own thread frees. Where a thread of gloo is the last to let go of a
    collective's tensor, the free is missed: its address is given again, or what gloo made never
    ends. Such a piece is taken to end with the collective that it was in.
    """
    ends = sorted(node.end_time_ns for node, _ in events if node.name.startswith(COLLECTIVES))

    def end_unseen(piece: Piece, latest: int | None) -> None:
        place = bisect.bisect_left(ends, piece.start)
        times = [*ends[place : place + 1], *([] if latest is None else [latest])]
        piece.end = min(times, default=None)

    live: dict[int, Piece] = {}
    pieces: list[Piece] = []
    for node, maker in events:
        if node.typed[0] == _EventType.Allocation:
            address, size = node.typed[1].ptr, node.typed[1].alloc_size
            before = live.pop(address, None)
            if size < 0 and before is not None:
                before.end = node.start_time_ns
            elif before is not None:
                end_unseen(before, node.start_time_ns)
            if size > 0:
                made_in = str(maker or "")
                kind = "buffers" if "c10d::" in made_in else "rest"  # gloo's own copies
                live[address] = Piece(size, node.start_time_ns, None, kind, made_in)
                pieces.append(live[address])
        elif node.name.startswith("mark "):
            _, kind, address = node.name.split()
            if int(address) in live:
                live[int(address)].kind = kind
    for piece in live.values():
        if piece.kind == "buffers":
            end_unseen(piece, None)
    return pieces


def _alive(pieces: Sequence[Piece], at: int) -> list[Piece]:
    return [p for p in pieces if p.start <= at and (p.end is None or p.end > at)]


def _sum(pieces: Sequence[Piece]) -> Held:
    sums = Counter[str]()
    for piece in pieces:
        sums[piece.kind] += piece.size
    return Held(**sums)
