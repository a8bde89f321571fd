"""Parity: compares some training steps of a layout on its ranks with the same steps on one device.

Compares the gradients of the first step, each loss and gradient norm, the updates of all steps, the
optimizer state, and an evaluation at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from torch import Tensor

from meshwright.comm.groups import Groups
from meshwright.comm.values import gather_values
from meshwright.comm.world import World
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import (
    Compared,
    Difference,
    Fault,
    compare,
    first_of,
    loss_tolerance,
    norm_tolerance,
)
from meshwright.prove.expected import MARGIN, SPACINGS, Expected
from meshwright.prove.locate import locate
from meshwright.prove.reference import Reference, shared_reference
from meshwright.prove.trial import StepNumbers, Trial
from meshwright.prove.verdict import Divergence, Quantity, Verdict, relative_error
from meshwright.prove.wide import gathered_norm, prove_sums, rounded_shares, wide_verdicts
from meshwright.spec.optimizers import OPTIMIZERS

# A verdict names so many weights.
_SHOWN: Final = 20


def prove_parity(
    case: Case,
    groups: Groups,
    world: World,
    reference_of: Callable[[Case], Reference] | None = None,
    fault: Fault | None = None,
) -> tuple[Verdict, ...]:
    """Compare a case's steps with one device, and return a verdict for each quantity; a collective,
    every rank returns the same.

    In half precision, the same case is also proven in fp32, because rounding hides smaller faults.
    If a verdict fails, `locate` finds where the two first differ. `reference_of` may return cached
    references. Tests use `fault` to break the parallel model.
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
    """Return the verdicts of `prove_parity` in the case's precision alone, without locating the
    first divergence; a collective.
    """
    reference = reference or shared_reference(case, world)
    trial = Trial(case, groups, world, reference, fault)
    verdicts = tuple(_verdicts(case, trial, world, reference))
    if case.train.precision == "fp32":
        return verdicts
    return (*verdicts, *prove_sums(case, groups, world, fault))


def _verdicts(case: Case, trial: Trial, world: World, reference: Reference) -> Iterator[Verdict]:
    exact, rounded = reference.exact, reference.rounded
    gradients = Expected(exact.gradients, [sample.gradients for sample in rounded])
    of_gradients, numbers, gathered = list[Compared](), list[StepNumbers](), list[float]()
    # Gradients come to be in the order of the backward, updates in that of the parameters.
    names = [*trial.parallel.program.shardings]
    is_half = case.train.precision != "fp32"

    def look() -> None:
        if numbers:
            return
        of_gradients.append(compare(trial.parallel, trial.gradient, gradients, world, names[::-1]))
        if is_half:
            gathered.append(gathered_norm(trial.parallel, trial.gradient, world))

    for step in range(case.steps):
        numbers.append(trial.step(step, look))
    spacing = SPACINGS[case.train.weight_dtype]
    updates = Expected(
        exact.updates, [sample.updates for sample in rounded], reference.start, spacing
    )
    added = compare(trial.parallel, trial.added, updates, world, names)
    state = _optimizer_state(trial, reference, names, world)
    shares = rounded_shares(trial.parallel, case, world) if is_half else (0.0, 0.0)
    evaluation = trial.evaluation()
    batch = make_batch(case, 0)
    bound = loss_tolerance(case.train, case.model, batch, exact.losses[0])
    if is_half:
        # Roundings are not all independent: targets share those of weights, and a token may go to
        # another expert.
        bound = max(bound, MARGIN * reference.first_noise)
    losses, norms = [entry.loss for entry in numbers], [entry.norm for entry in numbers]
    yield _numbers(case, "loss", exact.losses[:1], losses[:1], bound)
    bound += MARGIN * reference.drift  # the noise of weights that were updated
    if case.steps > 1:
        yield _numbers(case, "losses after updates", exact.losses[1:], losses[1:], bound)
    yield _tensors(case, "gradients", of_gradients[0], "gradient")
    bound_of_norm = norm_tolerance(reference.noises)
    yield _numbers(case, "gradient norm", exact.norms, norms, bound_of_norm)
    steps = f"{case.steps} {OPTIMIZERS[case.optimizer.name].label} steps"
    yield _tensors(case, f"updates of {steps}", added, "update")
    if state is not None:
        yield _tensors(case, f"optimizer state after {steps}", state, "optimizer state")
    yield _numbers(case, "evaluation", [exact.evaluation], [evaluation], bound)
    yield from _bitwise(case, trial, world, exact.corrections)
    if is_half:
        yield from wide_verdicts(case, (norms[0], gathered[0]), shares)


def _bitwise(
    case: Case, trial: Trial, world: World, corrections: Mapping[str, Tensor]
) -> Iterator[Verdict]:
    """Yield the verdicts on tensors that must have the same bits in every layout: router
    corrections in fp32, and frozen weights.
    """
    is_half = case.train.precision != "fp32"
    if case.train.router_bias_rate and not is_half:  # rounding moves tokens to other experts
        first = first_of(trial.miscorrected(corrections), [*corrections], world)
        compared = Compared(first or Difference(0.0, 1.0, "", 0, 0), first)
        yield _tensors(case, "corrections of routers, bit for bit", compared, "router correction")
    if case.model.lora is not None:
        thawed = [name for names in gather_values(trial.thawed()) for name in names]
        layout = case.layout.model_dump(mode="json")
        yield Verdict("frozen weights, bit for bit", layout, [], thawed[:_SHOWN], None, not thawed)


def _optimizer_state(
    trial: Trial, reference: Reference, names: Sequence[str], world: World
) -> Compared | None:
    """Compare the optimizer state of all parameters, over all keys of the state; a collective.

    Returns None for an optimizer without state, such as SGD without momentum.
    """
    exact, rounded = reference.exact, reference.rounded
    dtype = reference.optimizer.state_dtype
    kinds = []
    for key, state in exact.state.items():
        samples = [sample.state[key] for sample in rounded]
        # In fewer bits, a number may be rounded to the other side of those of all samples.
        jumps = None if dtype == "fp32" else state
        expected = Expected(state, samples, jumps, SPACINGS[dtype])
        kinds.append(compare(trial.parallel, trial.state(key), expected, world, names))
    if not kinds:
        return None
    worst = max((kind.worst for kind in kinds), key=lambda difference: difference.share)
    return Compared(worst, next((kind.first for kind in kinds if kind.first), None))


def _numbers(
    case: Case, claim: str, expected: Sequence[float], observed: Sequence[float], bound: float
) -> Verdict:
    """Return the verdict on a series of numbers, one per step; each must be within the relative
    tolerance `bound`.
    """
    passed = all(relative_error(*pair) <= bound for pair in zip(observed, expected, strict=True))
    layout = case.layout.model_dump(mode="json")
    return Verdict(claim, layout, list(expected), list(observed), bound, passed)


def _tensors(case: Case, claim: str, compared: Compared, quantity: Quantity) -> Verdict:
    """Return the verdict on a comparison of tensors: the error is that of the worst, and the
    divergence names the first wrong one.
    """
    worst, first, where = compared.worst, compared.first, None
    if first is not None:
        where = Divergence(first.tensor, first.rank, first.stage, None, first.error, quantity)
    layout = case.layout.model_dump(mode="json")
    return Verdict(claim, layout, 0.0, worst.error, worst.bound, first is None, where)
