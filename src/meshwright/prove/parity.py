"""Parity: a layout on its ranks against one device, from the same weights and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.sampler import IGNORE
from meshwright.execute.batch import Batch
from meshwright.execute.build import build, cut, seeded
from meshwright.execute.gather import on_stages
from meshwright.execute.gradients import Held, scale_gradients
from meshwright.execute.groups import Groups
from meshwright.execute.parallel import Parallel
from meshwright.execute.world import World
from meshwright.program.lower import Program, lower
from meshwright.program.shards import shard_rank
from meshwright.prove.case import Case
from meshwright.prove.reference import Reference, make_batch, run_reference
from meshwright.prove.verdict import Divergence, Verdict
from meshwright.train.update import gradients

# Largest difference over largest value, per tensor. fp32: sums in another order. bf16 and fp16 keep
# 8 and 11 bits, and one rounding more or less in the stream moves every gradient by about that.
TOLERANCES = {"fp32": 2e-6, "bf16": 2.0**-5, "fp16": 2.0**-8}
LOSS_TOLERANCES = {"fp32": 1e-6, "bf16": 2.0**-8, "fp16": 2.0**-11}

# Breaks something in a parallel model on purpose: only tests have one
Fault = Callable[[Parallel], None]


class Difference(NamedTuple):
    """How far the worst tensor is off, and where."""

    error: float
    tensor: str
    rank: int
    stage: int


def prove_parity(
    case: Case,
    groups: Groups,
    world: World,
    reference: Reference | None = None,
    fault: Fault | None = None,
) -> tuple[Verdict, ...]:
    """Return the verdicts on loss, gradients, gradient norm and weights after SGD steps.

    A collective; every rank returns the same. `reference` saves computing it again.
    """
    batches = [make_batch(case, step) for step in range(case.steps)]
    if reference is None:
        reference = run_reference(case, batches)
    program = lower(case.model, case.train, case.layout)
    parallel = _build(program, groups, world, fault)
    losses, norms, worst = [], [], Difference(0.0, "", 0, 0)
    for step, batch in enumerate(batches):
        found = gradients(parallel, mine(batch, program, world), world, case.loss_scale)
        losses.append(world.sum_on_host([found.loss.item()])[0])
        norms.append(found.norm)
        if step == 0:
            scale_gradients(parallel.held, 1 / case.loss_scale)
            worst = compare(parallel, lambda held: held.parameter.grad, reference.gradients, world)
            scale_gradients(parallel.held, case.loss_scale)
        _descend(parallel, case, found.norm)
    weights = compare(parallel, lambda held: held.parameter, reference.weights, world)
    layout = case.layout.model_dump(mode="json")
    bound, loss_bound = TOLERANCES[case.train.precision], LOSS_TOLERANCES[case.train.precision]

    def verdict(
        claim: str, expected: object, observed: object, error: float, tol: float
    ) -> Verdict:
        passed = error <= tol  # false for NaN
        return Verdict(claim, layout, expected, observed, tol, passed)

    loss_error = max(_relative(a, b) for a, b in zip(losses, reference.losses, strict=True))
    norm_error = max(_relative(a, b) for a, b in zip(norms, reference.norms, strict=True))
    verdicts = [
        verdict("loss", list(reference.losses), losses, loss_error, loss_bound),
        verdict("gradients", 0.0, worst.error, worst.error, bound),
        verdict("gradient norm", list(reference.norms), norms, norm_error, bound),
        verdict(f"weights after {case.steps} SGD steps", 0.0, weights.error, weights.error, bound),
    ]
    if not all(v.passed for v in verdicts):
        where = locate(case, groups, world, fault)
        verdicts = [
            v if v.passed else Verdict(**{**vars(v), "first_divergence": where}) for v in verdicts
        ]
    return tuple(verdicts)


def _build(program: Program, groups: Groups, world: World, fault: Fault | None) -> Parallel:
    parallel = build(program, groups, world.device, seeded(program.model, program.train.seed))
    if fault is not None:
        fault(parallel)
    return parallel


def mine(batch: Batch, program: Program, world: World) -> Batch:
    """Return the rows of the global batch that this rank computes."""
    layout = program.layout
    size, place = program.train.batch // layout.dp, layout.mesh.data_rank(world.rank)
    rows = batch.rows(slice(place * size, (place + 1) * size))
    return Batch(*(None if t is None else t.to(world.device) for t in rows))  # type: ignore[arg-type]


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12)


def compare(
    parallel: Parallel,
    tensor_of: Callable[[Held], Tensor | None],
    expected: dict[str, Tensor],
    world: World,
) -> Difference:
    """Return the worst tensor of all stages, gathered whole; the same on every rank."""
    worst = Difference(-1.0, "", world.rank, 0)
    floor = _floor(expected)
    for held, whole in on_stages(parallel, tensor_of):
        error = _error(whole, expected[held.name], floor)
        if not error <= worst.error:  # also NaN
            worst = Difference(error, held.name, world.rank, held.stage)
    return max(_everyones(worst, world), key=lambda d: (d.error != d.error, d.error))


def _error(found: Tensor | None, expected: Tensor, floor: float) -> float:
    """Return the largest difference over the largest expected value."""
    if found is None:
        return float("inf")
    difference = (found.to("cpu", torch.float32) - expected).abs().max().item()
    return difference / max(expected.abs().max().item(), floor)


def _floor(expected: dict[str, Tensor]) -> float:
    """Return the value below which a whole tensor is rounding noise: 1e-5 of the largest value.

    Some gradients vanish in exact arithmetic, as that of a key's bias where no dim is rotated: a
    constant added to all scores of a softmax.
    """
    return 1e-5 * max(tensor.abs().max().item() for tensor in expected.values())


def _everyones(mine: Difference, world: World) -> list[Difference]:
    found: list[Difference | None] = [None] * world.size
    if world.size == 1:
        return [mine]
    dist.all_gather_object(found, mine)
    return [one for one in found if one is not None]


@torch.no_grad()
def _descend(parallel: Parallel, case: Case, norm: float) -> None:
    """Take one step of plain gradient descent, clipped by the global norm, and drop gradients."""
    clip_norm = case.train.clip_norm
    factor = min(1.0, clip_norm / norm) if clip_norm else 1.0
    for held in parallel.held:
        if held.gradient is not None:
            held.shard.sub_(case.lr * factor / case.loss_scale * held.gradient)
        held.parameter.grad = None


def locate(case: Case, groups: Groups, world: World, fault: Fault | None) -> Divergence | None:
    """Return where the gradients of the first step part: microbatch, tensor, stage and rank.

    The microbatches are tried one at a time, with the targets of the others ignored; if each alone
    agrees, the whole step is taken and no microbatch is named. Among the tensors it is the first
    whose gradient comes to be: the last of the model's order. Ranks are told by their own shards.
    """
    batch = make_batch(case, 0)
    program = lower(case.model, case.train, case.layout)
    for only in (*range(program.microbatches), None):
        alone = batch if only is None else _only(batch, program, only)
        reference = run_reference(case, [alone])
        parallel = _build(program, groups, world, fault)
        gradients(parallel, mine(alone, program, world), world, case.loss_scale)
        scale_gradients(parallel.held, 1 / case.loss_scale)
        found = _first(parallel, reference, world, TOLERANCES[case.train.precision])
        if found is not None:
            return Divergence(found.tensor, found.rank, found.stage, only, found.error)
    return None


def _only(batch: Batch, program: Program, microbatch: int) -> Batch:
    """Return the batch with the targets of one microbatch of every data rank."""
    size = program.layout.microbatch
    per_rank = program.train.batch // program.layout.dp
    index = torch.arange(len(batch.targets)) % per_rank // size
    targets = batch.targets.clone()
    targets[index != microbatch] = IGNORE
    return batch._replace(targets=targets)


def _first(
    parallel: Parallel, reference: Reference, world: World, bound: float
) -> Difference | None:
    """Return the first tensor, in the order of the backward, and rank whose shard is wrong."""
    program, at = parallel.program, parallel.groups.at
    order = {name: place for place, name in enumerate(reversed(program.shardings))}
    floor = _floor(reference.gradients)
    wrong = []
    for held in parallel.held:
        expected = reference.gradients[held.name]
        part = cut(expected, held.sharding, at["tp"], shard_rank(program.layout, at))
        top = max(expected.abs().max().item(), floor)
        gradient = held.gradient
        if gradient is None:
            error = float("inf") if part.numel() else 0.0
        else:
            difference = (gradient.to("cpu", torch.float32) - part).abs()
            error = difference.max().item() / top if difference.numel() else 0.0
        if not error <= bound:
            wrong.append(Difference(error, held.name, world.rank, held.stage))
    mine = min(wrong, key=lambda d: order[d.tensor], default=Difference(0.0, "", world.rank, 0))
    found = [d for d in _everyones(mine, world) if d.tensor]
    return min(found, key=lambda d: (order[d.tensor], d.rank), default=None)


def verdicts_table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as lines of text, one each."""
    return "\n".join(
        f"{'ok  ' if v.passed else 'FAIL'} {v.claim}: {v.observed} (tolerance {v.tolerance})"
        for v in verdicts
    )
