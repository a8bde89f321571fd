"""`dry_run`: one optimizer step of one rank by the training code on fake tensors, and its costs.

Patches of FSDP2 and of Meshwright's exchanges tell the memory tracker what data-parallel memory is
for.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshwright.comm import groups as rooms
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import Groups, open_groups
from meshwright.comm.wire import Wire, WireMessage, WorkCounter, expected_messages
from meshwright.comm.world import World
from meshwright.models import Transformer
from meshwright.parallel import loss as head_loss
from meshwright.parallel.apply import Parallel
from meshwright.parallel.batch import Batch, Feed
from meshwright.parallel.build import describe, materialise
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.memory_labels import labelled_in_data
from meshwright.parallel.tensor_parallel.deferred import Deferral
from meshwright.program.actions import Action
from meshwright.program.lower import Program
from meshwright.program.shards import Region
from meshwright.simulate.fake import CPU, fake_tensors, fake_world
from meshwright.simulate.memory_tracker import HOST, START, Breach, MemoryTracker, Phase
from meshwright.torch_private import FakeTensor, replaced
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update


@dataclass(frozen=True)
class DryRun:
    """The result of one rank's dry run: memory by phase, messages and FLOPs of a step.

    `breach` is the first moment above the memory limit, None if there is none. `messages` were
    observed, `expected` are those of the program. `products` (matmuls), `attention` and the
    optimizer's `update` are FLOPs, `stage_flops` the first two by stage. `seconds` is how long the
    dry run took.
    """

    rank: int
    pp_rank: int
    stages: tuple[int, ...]
    phases: tuple[Phase, ...]
    breach: Breach | None
    messages: Counter[WireMessage]
    expected: Counter[WireMessage]
    products: float
    attention: float
    update: float
    stage_flops: dict[int, int]
    seconds: float

    @property
    def worst(self) -> Phase:
        """The phase with the most memory."""
        return max(self.phases, key=lambda phase: phase.total)


class Begun(NamedTuple):
    """A send, receive or collective at the moment when a rank begins it.

    `label` and `ranks` are those of its process group; `peer` is the other global rank of a send or
    receive, -1 for collectives.
    """

    kind: str
    label: str
    ranks: tuple[int, ...]
    bytes: int
    peer: int
    microbatch: int


class Observer(Protocol):
    """The interface of an object that is called back during the dry-run step."""

    def began(self, message: Begun) -> None:
        """Called when a message begins."""

    def begins_step(self) -> None:
        """Called when the step begins."""

    def ends_step(self) -> None:
        """Called when all work of the step has been enqueued on the device."""

    def arrived(self, *entries: int) -> None:
        """Called when the rank waits for messages, given by their entries in the flight
        recorder."""


class _Phases(FlightRecorder):
    """A flight recorder that also reports each phase to the memory tracker, and messages to an
    observer."""

    def __init__(self, memory: MemoryTracker) -> None:
        super().__init__()
        self.memory = memory
        self.gradients_of: Parallel | None = None
        self.work = WorkCounter()
        self.flops = Counter[int]()  # by stage
        self._stage, self._before = -1, 0.0
        self.observer: Observer | None = None  # of the step

    def begins_step(self) -> None:
        """Tell the observer that the step begins."""
        if self.observer is not None:
            self.observer.begins_step()

    def ends_step(self) -> None:
        """Tell the observer that all work of the step has been enqueued."""
        if self.observer is not None:
            self.observer.ends_step()

    def begin(
        self, kind: str, group: int, size: int, peer: int = -1, *, waits: bool = False
    ) -> int:
        """Record that a message begins, and return its entry."""
        if self.observer is not None:
            members = self._groups[group]
            self.observer.began(
                Begun(kind, members.label, members.ranks, size, peer, self._place[2])
            )
        return super().begin(kind, group, size, peer, waits=waits)

    def end(self, *entries: int) -> None:
        """Record that messages or waits have ended, given by their entries."""
        super().end(*entries)
        if self.observer is not None:
            self.observer.arrived(*entries)

    def phase(self, name: str) -> None:
        """Record the beginning of a phase."""
        self._turn(name, -1)
        self.work.in_update = name == "update"
        super().phase(name)

    def action(self, kind: str, stage: int, microbatch: int) -> None:
        """Record the beginning of an action of the pipeline's table."""
        self._turn(str(Action(kind, stage, microbatch)), stage)  # type: ignore[arg-type]
        super().action(kind, stage, microbatch)

    def _turn(self, phase: str, stage: int) -> None:
        done = self.work.products + self.work.attention
        if done > self._before:
            self.flops[self._stage] += int(done - self._before)
        self._stage, self._before = stage, done
        for param in self.gradients_of.held if self.gradients_of is not None else ():
            self.memory.label(self.gradient_kind, param.parameter.grad)
        self.memory.begin(phase)

    @property
    def gradient_kind(self) -> str:
        """The memory category of sharded gradients: host memory if parameters are offloaded."""
        assert self.gradients_of is not None
        layout = self.gradients_of.program.layout
        return HOST if layout.offload == "params" else "gradients"


def dry_run(
    program: Program,
    rank: int,
    *,
    limit: float = math.inf,
    device: torch.device = CPU,
    watched: Callable[[_Phases], AbstractContextManager[object]] = nullcontext,
) -> DryRun:
    """Run one training step as one rank of a world without the others, on fake tensors.

    The step is not the first one: optimizer states exist. `limit` is the bytes that tensors may
    take. `watched` returns, for the recorder, a context in which the step runs.
    """
    started, memory = time.perf_counter(), MemoryTracker()
    recorder = _Phases(memory)
    world_of = fake_world(rank, program.layout.world, recorder, device)
    with world_of as world, labelled_in_data(memory.label):
        groups, deferral, modules = _described(program, world)
        with fake_tensors(), memory, watched(recorder), _loss_as_compiled():
            parallel = materialise(program, groups, world.device, _blank, modules, deferral)
            batch = Feed(device).bring(_batch(program))
            # A forward, after which FSDP2 has its final shards, as between any two steps.
            parallel.evaluate([batch.rows(slice(0, program.layout.microbatch))])
            shards = Shards(parallel.trained, on_host=program.layout.offload == "optimizer")
            torch_optimizer = _with_states(shards, parallel)
            _mark_states(memory, parallel, shards, torch_optimizer)
            recorder.gradients_of = parallel
            memory.begin(START)
            recorder.begins_step()
            with Wire(groups) as wire, recorder.work as work:
                update(
                    parallel,
                    batch,
                    world,
                    shards,
                    torch_optimizer,
                    LossScale.of(program.train),
                    program.train.clip_norm,
                )
            recorder.ends_step()
            memory.begin("end")
        expected = expected_messages(program, rank, wire, updates=True)
    return DryRun(
        rank,
        groups.at["pp"],
        tuple(stage.index for stage in program.held(groups.at["pp"])),
        _step(memory),
        memory.breach(START, limit),
        wire.messages,
        expected,
        work.products,
        work.attention,
        work.update,
        dict(recorder.flops),
        time.perf_counter() - started,
    )


def _described(program: Program, world: World) -> tuple[Groups, Deferral, dict[int, Transformer]]:
    """Return the process groups, the deferred gradients, and the modules of each stage without
    weights.

    On a device other than a CPU, groups are warmed up on fake tensors, and with FSDP2 modules are
    built of fake tensors.
    """
    with replaced(rooms, "warm", _on_fakes):
        groups, deferral = open_groups(program.layout, world), Deferral()
    by_fsdp = program.target.uses_fsdp2(program.layout)
    with fake_tensors() if world.device != CPU and by_fsdp else nullcontext():
        modules = describe(program, groups, deferral)
    for model in modules.values():
        _leave_fakes(model)
    return groups, deferral, modules


def _leave_fakes(model: nn.Module) -> None:
    """Replace fake parameters that FSDP2 did not shard by meta ones, as torch cannot materialize
    fake ones."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, FakeTensor):
                bare = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                setattr(module, name, nn.Parameter(bare, requires_grad=parameter.requires_grad))


def _on_fakes(run: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls `run` with fake tensors."""

    def ran(*arguments: object) -> None:
        with fake_tensors():
            run(*arguments)

    return ran


def _blank(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
    """Return zeros without memory for a rank's shard of a weight."""
    return torch.zeros(()).expand([stop - start for start, stop in region])


def _loss_as_compiled() -> AbstractContextManager[None]:
    return replaced(head_loss, "_fused", lambda _: lambda: _fused_loss)


def _fused_loss(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return what the compiled loss allocates: a sum in fp32 and a gradient like the logits.

    Fake tensors run no compiled code: uncompiled, it would allocate several fp32 copies.
    """
    return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits)


def _batch(program: Program) -> Batch:
    """Return a batch of zeros with the sequences of one data-parallel rank."""
    rows, seq_len = program.microbatches * program.layout.microbatch, program.train.seq_len
    inputs, targets = (torch.zeros(rows, seq_len, dtype=torch.int64) for _ in range(2))
    keys = torch.zeros(rows, dtype=torch.int64) if program.model.drops else None
    if not program.target.packed:
        return Batch(inputs, targets, None, keys)
    # Of one document each: what is sent and held does not depend on how many there are.
    bounds = torch.full((rows, 2), seq_len, dtype=torch.int32)
    bounds[:, 0] = 0
    return Batch(inputs, targets, torch.zeros_like(inputs, dtype=torch.int32), keys, bounds)


def _with_states(shards: Shards, parallel: Parallel) -> torch.optim.Optimizer:
    """Return an optimizer that has the states of a completed step."""
    layout = parallel.program.layout
    matrices = shards.matrices(parallel.groups, parallel.device, layout)
    spec = parallel.program.optimizer
    optimizer = build_optimizer(shards.leaves, shards.parts, spec, matrices)
    for leaf in shards.leaves:
        leaf.grad = torch.empty_like(leaf)
    optimizer.step()
    shards.clear()
    return optimizer


def _mark_states(
    memory: MemoryTracker, parallel: Parallel, shards: Shards, optimizer: torch.optim.Optimizer
) -> None:
    layout = parallel.program.layout
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, Tensor):
                memory.label(HOST if layout.states_on_host else "optimizer", tensor)
    for leaf in shards.leaves if shards.on_host else ():
        memory.label(HOST, leaf)
    for param in parallel.held:
        memory.label(HOST if layout.offload == "params" else "weights", param.shard)


def _step(memory: MemoryTracker) -> tuple[Phase, ...]:
    """Return the tracker's phases from the beginning to the end of the step."""
    phases = memory.phases()
    start = next(index for index, phase in enumerate(phases) if phase.name == START)
    return phases[start:-1]
