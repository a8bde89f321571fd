"""Conformance: compares a program with what its ranks hold, compute and send in a real step.

Checks that only read the program cannot find its errors; this one counts real collectives and
matmuls. DESIGN.md calls this the second lock against drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed.pipelining.schedules as theirs

from meshwright.comm.groups import Groups
from meshwright.comm.values import gather_values
from meshwright.comm.wire import (
    Wire,
    WorkCounter,
    expected_messages,
    message_differences,
)
from meshwright.comm.world import World
from meshwright.models import build_model, init_parameter
from meshwright.parallel.apply import Parallel
from meshwright.parallel.build import region_of, seeded
from meshwright.program.actions import Action, Kind, Table
from meshwright.program.flops import matmul_flops
from meshwright.program.lower import Program
from meshwright.program.shards import Sharding, data_rank
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import build_small, mine, program_of
from meshwright.prove.verdict import Verdict
from meshwright.training.update import gradients

# A verdict lists so many differences.
SHOWN: Final = 20

_SINGLE: Final[Mapping[str, Any]] = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
}
_MULTI: Final[Mapping[str, Any]] = {
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_zero_bubble": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}


def prove_conformance(
    case: Case, groups: Groups, world: World, parallel: Parallel | None = None
) -> tuple[Verdict, ...]:
    """Run one step, and return the verdicts on its parameters, initial weights, action table,
    collectives and matmul FLOPs.

    A collective; every rank returns the same. `parallel` is the model that runs, built here if
    None; it has no gradients afterwards.
    """
    program = program_of(case, world)
    if parallel is None:
        parallel = build_small(program, groups, world, None)
    layout = case.layout.model_dump(mode="json")

    def verdict(claim: str, total: str, differences: Sequence[str]) -> Verdict:
        everything = [
            f"rank {rank}: {text}"
            for rank, texts in enumerate(gather_values(list(differences)))
            for text in texts
        ]
        shown: Any = total if not everything else everything[:SHOWN]
        if len(everything) > SHOWN:
            shown.append(f"and {len(everything) - SHOWN} more")
        return Verdict(claim, layout, total, shown, None, not everything)

    verdicts = [
        verdict(
            "parameters",
            "names and shapes of the meta model and of every shard are the program's",
            [*_model_differences(program), *_shard_differences(program, parallel)],
        ),
        verdict(
            "first weights",
            "every shard of a new run is its part of what one device begins with",
            list(_first_differences(program, parallel)),
        ),
    ]
    if case.layout.is_pipelined and case.layout.schedule != "naive":
        misordered = list(_order_differences(program)) if world.rank == 0 else []
        verdicts.append(
            verdict("action table", "the order of torch.distributed.pipelining", misordered)
        )
    wire, work = Wire(groups), WorkCounter()
    with wire, work:
        gradients(parallel, mine(make_batch(case, 0), program, world), world, case.loss_scale)
    for param in parallel.held:
        param.parameter.grad = None
    expected = expected_messages(program, world.rank, wire)
    count = sum(gather_values(sum(expected.values())))
    sent = list(message_differences(expected, wire.messages))
    verdicts.append(verdict("collectives", f"{count} messages on {world.size} ranks", sent))
    flops = gather_values((matmul_flops(program, groups.at["pp"]), work.products))
    by_program, counted = ([pair[side] for pair in flops] for side in (0, 1))
    if program.layout.ep > 1:  # a router decides how many tokens each rank gets: all get as many
        by_program, counted = [sum(by_program)], [sum(counted)]
    passed = by_program == counted
    if case.train.expert_capacity is not None:  # the program has what full experts drop, too
        passed = all(taken <= limit for taken, limit in zip(counted, by_program, strict=True))
    verdicts.append(Verdict("matrix products", layout, by_program, counted, 0.0, passed))
    return tuple(verdicts)


def _model_differences(program: Program) -> Iterator[str]:
    """Yield the parameters by which the model on the meta device differs from the program: in name,
    shape or order.
    """
    model = build_model(program.model, "meta", program.train.seq_len)
    built = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    expected = [(name, sharding.part.shape) for name, sharding in program.shardings.items()]
    if built != expected:
        yield from _lists("meta model", dict(expected), dict(built))
        if dict(built) == dict(expected):
            yield "meta model: the parameters come in another order"


def _shard_differences(program: Program, parallel: Parallel) -> Iterator[str]:
    """Yield the shards of this rank whose name or shape differs from the program's."""
    coordinates = parallel.groups.at
    place = data_rank(program.layout, coordinates)
    expected = {
        f"stage {stage.index}, {name}": _shape(program.shardings[name], coordinates["tp"], place)
        for stage in program.held(coordinates["pp"])
        for name in program.parameters(stage)
    }
    shapes = {f"stage {h.stage}, {h.name}": tuple(h.shard.shape) for h in parallel.held}
    yield from _lists("shard", expected, shapes)


def _shape(sharding: Sharding, tp_rank: int, place: int) -> tuple[int, ...]:
    """Return the shape in which a rank stores its shard; NF4 stores packed bytes."""
    if sharding.part.is_nf4:
        return sharding.stored_shape
    return sharding.shape(tp_rank, place)


def _first_differences(program: Program, parallel: Parallel) -> Iterator[str]:
    """Yield this rank's parameters whose initial values in a new run are not the right part of one
    device's.
    """
    spec, seed = program.model, program.train.seed
    source = seeded(spec, seed)
    for param in parallel.held:
        shape, region = param.sharding.part.real_shape, region_of(param, parallel)
        initial = init_parameter(param.name, shape, spec, seed)
        expected = initial[tuple(slice(*along) for along in region)]
        if not torch.equal(source(param.name, shape, region), expected):
            yield f"stage {param.stage}, {param.name}: not its part of what one device begins with"


def _lists(
    label: str, expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name in dict.fromkeys((*expected, *actual)):
        if expected.get(name) != actual.get(name):
            yield f"{label} {name}: {actual.get(name)} where the program has {expected.get(name)}"


def _order_differences(program: Program) -> Iterator[str]:
    """Yield, per pipeline rank, the first action at which our table differs from torch's
    schedule.
    """
    layout = program.layout
    order = torch_order(layout.schedule, layout.pp, layout.virtual_stages, program.microbatches)
    for rank, (ours, other) in enumerate(zip(program.compute_tables, order, strict=True)):
        if ours == other:
            continue
        pairs = enumerate(zip(ours, other, strict=False))
        place = next((place for place, (a, b) in pairs if a != b), min(len(ours), len(other)))
        our_action, torch_action = (
            " ".join(map(str, table[place : place + 1])) for table in (ours, other)
        )
        yield (
            f"pipeline rank {rank}, position {place}: the program has {our_action or 'nothing'}, "
            f"torch {torch_action or 'nothing'}"
        )


def torch_order(
    schedule: str, pp: int, virtual_stages: int, microbatches: int
) -> tuple[Table, ...]:
    """Return the computing actions of each pipeline rank in the order of
    torch.distributed.pipelining.

    gpipe and 1f1b run on stages that only record their calls, since the orders that torch prints
    for them are not those that it runs, and that of 1f1b is wrong. The other schedules contain
    their order. Raises `KeyError` for "naive", which torch lacks.
    """
    if schedule in _SINGLE:
        stages = [_noting_stage(stage, pp) for stage in range(pp)]
        for stage in stages:
            _quiet(_SINGLE[schedule])(stage, microbatches)._step_microbatches()
        return tuple(tuple(stage.noted) for stage in stages)
    rank_stages = [_noting_stage(0, pp, virtual_stages)] * virtual_stages
    pipeline = _quiet(_MULTI[schedule])(rank_stages, microbatches)
    return tuple(tuple(_flat(pipeline.pipeline_order[rank])) for rank in range(pp))


def _quiet(schedule: Any) -> Any:
    """Return a subclass of a torch schedule that skips the setup which needs real stages."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...

    skipped = ("_initialize_stage", "_prepare_schedule_with_comms")
    return type(schedule.__name__, (schedule,), dict.fromkeys(skipped, nothing))


def _flat(actions: Sequence[Any]) -> Iterator[Action]:
    """Convert torch's actions to ours, without idle steps; overlapped actions become separate
    ones.
    """
    for action in actions:
        if action is not None and action.sub_actions:
            yield from _flat(action.sub_actions)
        elif action is not None:
            kind: Kind = action.computation_type.value
            yield Action(kind, action.stage_index, action.microbatch_index)


def _noting_stage(stage: int, pp: int, virtual_stages: int = 1) -> SimpleNamespace:
    """Return a stage for torch's schedules that computes and sends nothing, and records its actions
    in `noted`.
    """
    noted: list[Action] = []

    def note(kind: Kind) -> Any:
        return lambda index, *args, **kwargs: noted.append(Action(kind, stage, index))

    def no_transfers(index: int) -> list[Any]:
        return []

    return SimpleNamespace(
        noted=noted,
        stage_index=stage,
        num_stages=pp * virtual_stages,
        group_size=pp,
        group_rank=0,
        is_first=stage == 0,
        is_last=stage == pp - 1,
        submod=None,
        has_backward=True,
        get_fwd_recv_ops=no_transfers,
        get_fwd_send_ops=no_transfers,
        get_bwd_recv_ops=no_transfers,
        get_bwd_send_ops=no_transfers,
        forward_one_chunk=note("F"),
        backward_one_chunk=note("B"),
        perform_reduce_grad=lambda scale: None,
    )
