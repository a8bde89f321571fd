"""Parity: a layout on its ranks against one device, from the same weights and tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from meshwright.execute.build import seeded
from meshwright.execute.gather import on_stages
from meshwright.execute.gradients import scale_gradients
from meshwright.execute.groups import Groups
from meshwright.execute.optimize import Shards
from meshwright.execute.parallel import Parallel
from meshwright.execute.world import World
from meshwright.program.lower import lower
from meshwright.program.shards import whole
from meshwright.prove.case import Case
from meshwright.prove.compare import (
    TOLERANCES,
    Difference,
    Fault,
    build_small,
    compare,
    everyones,
    expect,
    mine,
    rounding,
)
from meshwright.prove.locate import locate
from meshwright.prove.reference import ADAM, Reference, make_batch, run_adam, run_reference
from meshwright.prove.verdict import Divergence, Quantity, Verdict, relative_error
from meshwright.train.loss_scale import LossScale
from meshwright.train.optimizer import build_optimizer
from meshwright.train.update import gradients, update

# Relative, of each step. Single numbers that many terms go into: their roundings cancel.
LOSS_TOLERANCES: Final = {"fp32": 1e-6, "bf16": 2.0**-12, "fp16": 2.0**-15, "fp8": 2.0**-10}
NORM_TOLERANCES: Final = {"fp32": 2.0**-21, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-6}
# Distance of the whole update over its length.
ADAM_TOLERANCES: Final = {"fp32": 1e-3, "bf16": 2.0**-3, "fp16": 2.0**-4, "fp8": 2.0**-1}


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
    program, precision = lower(case.model, case.train, case.layout), rounding(case.train)
    parallel = build_small(program, groups, world, fault)
    losses, norms, worst = [], [], Difference(0.0, "", 0, 0)
    for step, batch in enumerate(batches):
        found = gradients(parallel, mine(batch, program, world), world, case.loss_scale)
        losses.append(world.sum_on_host([found.loss.item()])[0])
        norms.append(found.norm.item())
        if step == 0:
            expected = expect(reference.gradients, reference.gradient_noise, precision)
            scale_gradients(parallel.held, 1 / case.loss_scale)
            worst = compare(parallel, lambda held: held.parameter.grad, expected, world)
            scale_gradients(parallel.held, case.loss_scale)
        _descend(parallel, case, norms[-1])
    expected = expect(reference.weights, reference.weight_noise, precision)
    weights = compare(parallel, lambda held: held.parameter, expected, world)
    bound = TOLERANCES[precision]
    claim = f"weights after {case.steps} SGD steps"
    verdicts = (
        _numbers(case, "loss", reference.losses, losses, LOSS_TOLERANCES[precision]),
        _tensors(case, "gradients", worst, bound, "gradient"),
        _numbers(case, "gradient norm", reference.norms, norms, NORM_TOLERANCES[precision]),
        _tensors(case, claim, weights, bound, "weight"),
    )
    if all(verdict.passed for verdict in verdicts):
        return verdicts
    where = locate(case, groups, world, fault)
    return tuple(
        verdict if verdict.passed or where is None else replace(verdict, first_divergence=where)
        for verdict in verdicts
    )


def _numbers(
    case: Case, claim: str, expected: Sequence[float], observed: Sequence[float], bound: float
) -> Verdict:
    """Return the verdict on a number of each step."""
    passed = all(relative_error(*pair) <= bound for pair in zip(observed, expected, strict=True))
    layout = case.layout.model_dump(mode="json")
    return Verdict(claim, layout, list(expected), list(observed), bound, passed)


def _tensors(
    case: Case, claim: str, worst: Difference, bound: float, quantity: Quantity
) -> Verdict:
    """Return the verdict on all tensors of the model, by the worst of them."""
    passed = worst.error <= bound
    where = None
    if not passed:
        where = Divergence(worst.tensor, worst.rank, worst.stage, None, worst.error, quantity)
    layout = case.layout.model_dump(mode="json")
    return Verdict(claim, layout, 0.0, worst.error, bound, passed, where)


@torch.no_grad()
def _descend(parallel: Parallel, case: Case, norm: float) -> None:
    """Take one step of plain gradient descent, clipped by the global norm, and drop gradients."""
    clip_norm = case.train.clip_norm
    factor = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
    for held in parallel.held:
        if held.gradient is not None:
            held.shard.sub_(case.lr * factor / case.loss_scale * held.gradient)
        held.parameter.grad = None


def prove_adam(
    case: Case,
    groups: Groups,
    world: World,
    reference: Mapping[str, Tensor] | None = None,
    fault: Fault | None = None,
) -> Verdict:
    """Return the verdict on the weights after some steps of AdamW, as `train` takes them.

    The update of the whole model is compared, as one vector: AdamW divides each gradient by its
    size, so single elements near zero get a step of either sign. A collective.
    """
    batches = [make_batch(case, step) for step in range(case.adam_steps)]
    if reference is None:
        reference = run_adam(case, batches)
    program = lower(case.model, case.train, case.layout)
    parallel = build_small(program, groups, world, fault)
    shards = Shards(parallel.held, on_host=case.layout.offload == "optimizer")
    optimizer = build_optimizer(shards.leaves, ADAM)
    scale = LossScale(case.loss_scale)
    for batch in batches:
        rows = mine(batch, program, world)
        update(parallel, rows, world, shards, optimizer, scale, case.train.clip_norm)
    error = _update_error(parallel, reference, world)
    bound = ADAM_TOLERANCES[rounding(case.train)]
    claim, layout = (
        f"weights after {case.adam_steps} AdamW steps",
        case.layout.model_dump(mode="json"),
    )
    return Verdict(claim, layout, 0.0, error, bound, error <= bound)


def _update_error(parallel: Parallel, expected: Mapping[str, Tensor], world: World) -> float:
    """Return the L2 distance of the update from the expected one, relative to the latter."""
    source = seeded(parallel.program.model, parallel.program.train.seed)
    squares: dict[str, tuple[float, float]] = {}
    for held, full in on_stages(parallel, lambda held: held.parameter):
        assert full is not None
        wanted = expected[held.name]
        start = source(held.name, wanted.shape, whole(wanted.shape))
        off = (full.cpu() - wanted).double().square().sum().item()
        squares[held.name] = (off, (wanted - start).double().square().sum().item())
    everywhere: dict[str, tuple[float, float]] = {}
    for found in everyones(squares, world):
        for name, (off, size) in found.items():
            everywhere[name] = max(everywhere.get(name, (0.0, size)), (off, size))
    off = sum(pair[0] for pair in everywhere.values())
    error = math.sqrt(off / sum(pair[1] for pair in everywhere.values()))
    return error if error == error else math.inf
