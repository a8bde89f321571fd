"""Parity: a layout on its ranks compared with one device, over some steps of training.

Compares the gradients of the first step, each loss and gradient norm, the updates of all steps, the
optimizer state, and an evaluation at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from meshwright.execute.transport.groups import Groups
from meshwright.execute.transport.world import World
from meshwright.prove.batches import make_batch
from meshwright.prove.case import OPTIMIZERS, Case
from meshwright.prove.compare import (
    MARGIN,
    Difference,
    Expected,
    Fault,
    compare,
    everyones,
    loss_tolerance,
    norm_tolerance,
)
from meshwright.prove.locate import locate
from meshwright.prove.reference import Reference, shared_reference
from meshwright.prove.trial import StepNumbers, Trial
from meshwright.prove.verdict import Divergence, Quantity, Verdict, relative_error
from meshwright.prove.wide import gathered_norm, prove_sums, rounded_share, wide_verdicts

# A verdict names so many weights.
_SHOWN: Final = 20


def prove_parity(
    case: Case,
    groups: Groups,
    world: World,
    reference_of: Callable[[Case], Reference] | None = None,
    fault: Fault | None = None,
) -> tuple[Verdict, ...]:
    """Return the verdicts on a case's steps; a collective, every rank returns the same.

    In half precision, the same case is also proven in fp32, because rounding hides smaller faults.
    `reference_of` may cache references. Tests use `fault` to break the parallel model.
    """
    reference_of = reference_of or partial(shared_reference, world=world)
    verdicts = check(case, groups, world, reference_of(case), fault)
    if case.train.precision != "fp32":
        twin = case.in_fp32
        verdicts += tuple(
            replace(verdict, claim=f"in fp32: {verdict.claim}")
            for verdict in check(twin, groups, world, reference_of(twin), fault)
        )
    if all(verdict.passed for verdict in verdicts):
        return verdicts
    where = locate(case, groups, world, fault)
    return tuple(
        verdict if verdict.passed or where is None else replace(verdict, first_divergence=where)
        for verdict in verdicts
    )


def check(
    case: Case,
    groups: Groups,
    world: World,
    reference: Reference | None = None,
    fault: Fault | None = None,
) -> tuple[Verdict, ...]:
    """Return the verdicts without looking for the first divergence; a collective."""
    reference = reference or shared_reference(case, world)
    trial = Trial(case, groups, world, reference, fault)
    verdicts = tuple(_verdicts(case, trial, world, reference))
    if case.train.precision == "fp32":
        return verdicts
    return (*verdicts, *prove_sums(case, groups, world, fault))


def _verdicts(case: Case, trial: Trial, world: World, reference: Reference) -> Iterator[Verdict]:
    exact, rounded = reference.exact, reference.rounded
    gradients = Expected(exact.gradients, [one.gradients for one in rounded])
    worst, numbers, gathered = list[Difference](), list[StepNumbers](), list[float]()
    is_half = case.train.precision != "fp32"

    def look() -> None:
        if numbers:
            return
        worst.append(compare(trial.parallel, trial.gradient, gradients, world))
        if is_half:
            gathered.append(gathered_norm(trial.parallel, trial.gradient, world))

    for step in range(case.steps):
        numbers.append(trial.step(step, look))
    updates = Expected(exact.updates, [one.updates for one in rounded], reference.start)
    added = compare(trial.parallel, trial.added, updates, world)
    states = [
        compare(
            trial.parallel,
            trial.state(key),
            Expected(exact.state[key], [one.state[key] for one in rounded]),
            world,
        )
        for key in exact.state
    ]
    share = rounded_share(trial.parallel, case, world) if is_half else 0.0
    evaluation = trial.evaluation()
    batch = make_batch(case, 0)
    bound = loss_tolerance(case.train, case.model, batch, exact.losses[0])
    if is_half:
        # Roundings are not all independent: targets share those of weights, and a token may go to
        # another expert.
        bound = max(bound, MARGIN * reference.first_noise)
    losses, norms = [one.loss for one in numbers], [one.norm for one in numbers]
    yield _numbers(case, "loss", exact.losses[:1], losses[:1], bound)
    bound += MARGIN * reference.drift  # the noise of weights that were updated
    if case.steps > 1:
        yield _numbers(case, "losses after updates", exact.losses[1:], losses[1:], bound)
    yield _tensors(case, "gradients", worst[0], "gradient")
    bound_of_norm = norm_tolerance(reference.noises)
    yield _numbers(case, "gradient norm", exact.norms, norms, bound_of_norm)
    steps = f"{case.steps} {OPTIMIZERS[case.optimizer.name]} steps"
    yield _tensors(case, f"updates of {steps}", added, "update")
    if states:  # SGD without momentum has none
        state = max(states, key=lambda one: one.share)
        yield _tensors(case, f"optimizer state after {steps}", state, "optimizer state")
    yield _numbers(case, "evaluation", [exact.evaluation], [evaluation], bound)
    if case.train.router_bias_rate and not is_half:  # rounding moves tokens to other experts
        every = [
            x for some in everyones(trial.miscorrected(exact.corrections), world) for x in some
        ]
        first = min(every, key=lambda one: one.rank, default=Difference(0.0, 1.0, "", 0, 0))
        yield _tensors(case, "corrections of routers, bit for bit", first, "router correction")
    if case.model.lora is not None:
        thawed = [name for names in everyones(trial.thawed(), world) for name in names]
        layout = case.layout.model_dump(mode="json")
        yield Verdict("frozen weights, bit for bit", layout, [], thawed[:_SHOWN], None, not thawed)
    if is_half:
        yield from wide_verdicts(case, (norms[0], gathered[0]), share)


def _numbers(
    case: Case, claim: str, expected: Sequence[float], observed: Sequence[float], bound: float
) -> Verdict:
    """Return the verdict on a number of each step."""
    passed = all(relative_error(*pair) <= bound for pair in zip(observed, expected, strict=True))
    layout = case.layout.model_dump(mode="json")
    return Verdict(claim, layout, list(expected), list(observed), bound, passed)


def _tensors(case: Case, claim: str, worst: Difference, quantity: Quantity) -> Verdict:
    """Return the verdict on all tensors of the model, by the worst of them."""
    passed, where = worst.share <= 1, None
    if not passed:
        where = Divergence(worst.tensor, worst.rank, worst.stage, None, worst.error, quantity)
    layout = case.layout.model_dump(mode="json")
    return Verdict(claim, layout, 0.0, worst.error, worst.bound, passed, where)
