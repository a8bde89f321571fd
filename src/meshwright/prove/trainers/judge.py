"""Compares the steps of a run with the same steps in one process, and names what is wrong.

The order is that of a step's computation: the weights that it starts from, the losses, the
gradients in the order of the backward, the norm, the update. A later quantity is compared with what
follows from the earlier ones, so that one fault is named once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.prove.expected import LEAST, MARGIN, Expected
from meshwright.prove.trainers.faults import NamedFault, Namer
from meshwright.prove.trainers.observed import (
    GatheredTensor,
    MeshAxis,
    ObservedStep,
    ReplayedStep,
    axes_and_products,
)
from meshwright.prove.trainers.own_clip import own_clip

StepQuantity = Literal["weights", "loss", "gradient", "norm", "update"]
Convention = Literal["mean", "sum"]
# Losses of different microbatches that agree to so many digits: nothing trains.
_FLAT: Final = 1e-7
# Replays with and without rounding may differ by this share of the gradient.
_REPEATABLE: Final = 0.3
# A norm is named by a hypothesis that it meets this closely.
_NORM_NEAR: Final = 1e-3


@dataclass(frozen=True)
class StepFault:
    """One fault of a run: the quantity, the tensors and ranks that are wrong, and a sentence about
    the mistake.

    `tensors` are in the order of computation, so the fault is most likely in the first. `follows`
    counts tensors upstream that are wrong because of it. `error` and `tolerance` are relative to
    the tensor's norm.
    """

    quantity: StepQuantity
    kind: str
    sentence: str
    step: int
    tensors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    ratio: float | None = None
    error: float = math.inf
    tolerance: float = 0.0
    follows: int = 0

    def __str__(self) -> str:
        return f"step {self.step}: {self.sentence}"

    @property
    def likeness(self) -> tuple[object, ...]:
        """A key that the same fault has in another step."""
        ratio = None if self.ratio is None or not self.axes else round(self.ratio, 2)
        return self.quantity, self.kind, self.axes, ratio


@dataclass(frozen=True)
class RunVerdict:
    """The result of comparing a run: its faults, or why nothing can be compared (`refused`), or
    neither.

    `convention` says whether gradients are the mean or the sum of the data ranks' gradients.
    `compared` counts tensors and numbers; `worst` is the largest error of those that agree, as a
    share of its tolerance. `notes` say what was not compared.
    """

    faults: tuple[StepFault, ...]
    refused: str | None
    convention: Convention
    compared: int
    worst: float
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the run could be compared and everything agrees."""
        return not self.faults and self.refused is None

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as a JSON-ready object."""
        return {
            "passed": self.passed,
            "refused": self.refused,
            "convention": self.convention,
            "compared": self.compared,
            "worst_share_of_tolerance": self.worst,
            "notes": list(self.notes),
            "faults": [
                {key: _finite(value) for key, value in vars(fault).items()} for fault in self.faults
            ],
        }


class _Error(NamedTuple):
    """A tensor's error and tolerance, both relative to its norm."""

    tensor: str
    error: float
    bound: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.bound


def judge(
    observed: Sequence[ObservedStep],
    replayed: Sequence[ReplayedStep],
    axes: Sequence[MeshAxis],
    order: Sequence[str],
    convention: Convention | None = None,
) -> RunVerdict:
    """Compare a run's steps with their replays, and return the verdict.

    `order` lists the parameters in the order in which the forward uses them. Without a
    `convention`, takes the one that most gradients of the first step follow.
    """
    dead = _dead(observed, replayed)
    if dead is not None:
        return RunVerdict((), dead, convention or "mean", 0, 0.0)
    convention = convention or _convention(observed[0], replayed[0])
    clip = own_clip(observed, replayed, _scales(replayed[0])[convention])
    notes = [clip.text] if clip is not None else []
    observed = observed if clip is None else clip.undone(observed)
    faults, errors, compared = list[StepFault](), [0.0], 0
    previous: Mapping[str, GatheredTensor] = {}
    for number, (seen, exact) in enumerate(zip(observed, replayed, strict=True), 1):
        one_step = _StepJudge(number, seen, exact, axes, order, convention, previous)
        previous = seen.gradients
        for fault in one_step.faults():
            if faults and fault.quantity == "weights":
                continue  # it follows from what the steps before did
            if fault.likeness not in {known.likeness for known in faults}:
                faults.append(fault)
        errors += one_step.shares
        compared += len(one_step.shares)
        notes += [note for note in one_step.notes if note not in notes]
    worst = max(share for share in errors if share <= 1)
    return RunVerdict(tuple(faults), None, convention, compared, worst, tuple(notes))


def _dead(observed: Sequence[ObservedStep], replayed: Sequence[ReplayedStep]) -> str | None:
    """Return why a comparison would show nothing, such as zero gradients everywhere; None if it
    would.
    """
    if not observed or not replayed[0].contributions:
        return "nothing was recorded"
    first = replayed[0]
    names = first.contributions[0].gradients
    size = math.sqrt(sum(first.summed(name).square().sum().item() for name in names))
    noise = [
        math.sqrt(sum(_off(rounded[name], first.summed(name)) ** 2 for name in names))
        for rounded in first.rounded
    ]
    if 0 < _REPEATABLE * size < max(noise, default=0.0):
        return (
            "two replays of the same rows differ by "
            f"{max(noise) / size:.1g} of the gradient: the model draws random numbers (dropout?) "
            "or decides by a hair, so nothing can be compared"
        )
    if size == 0:
        return "all gradients are zero in one process, too: a dead model agrees with anything"
    losses = [exact for step in replayed for exact, _ in step.losses]
    if len(losses) > 1 and max(losses) - min(losses) <= _FLAT * abs(max(losses)):
        return f"the loss is {losses[0]:.7g} in every microbatch: nothing depends on the data"
    return None


def _convention(observed: ObservedStep, replayed: ReplayedStep) -> Convention:
    """Return whether most gradients are the mean or the sum of the data ranks' contributions."""
    votes: dict[Convention, int] = {"mean": 0, "sum": 0}
    scales = _scales(replayed)
    for name, gathered in observed.gradients.items():
        if name not in replayed.contributions[0].gradients:
            continue
        total = replayed.summed(name)
        for copy in gathered.copies[:1]:
            if copy.value is None or copy.value.shape != total.shape:
                continue
            for convention, scale in scales.items():
                near = _off(copy.value, total * scale) <= 1e-2 * scale * total.norm().item()
                votes[convention] += near
    return "sum" if votes["sum"] > votes["mean"] else "mean"


def _scales(replayed: ReplayedStep) -> dict[Convention, float]:
    data_ranks = {part.data_rank for part in replayed.contributions}
    return {"mean": 1 / len(data_ranks), "sum": 1.0}


class _StepJudge:
    """Compares one step; `previous` has the gradients of the step before."""

    def __init__(
        self,
        number: int,
        observed: ObservedStep,
        replayed: ReplayedStep,
        axes: Sequence[MeshAxis],
        order: Sequence[str],
        convention: Convention,
        previous: Mapping[str, GatheredTensor],
    ) -> None:
        self._number, self._observed, self._replayed = number, observed, replayed
        self._previous, self.notes = previous, list[str]()
        self._axes, self._scale = axes, _scales(replayed)[convention]
        names = replayed.contributions[0].gradients
        self._order = [name for name in order if name in names]
        self._order += [name for name in names if name not in order]
        self._exact = {name: replayed.summed(name) * self._scale for name in names}
        rounded = [{n: t * self._scale for n, t in sample.items()} for sample in replayed.rounded]
        self._expected = Expected(self._exact, rounded)
        self.shares = list[float]()

    def faults(self) -> Iterator[StepFault]:
        """Yield the step's faults in the order of computation; stops after the first quantity with
        faults, unless it is the norm.
        """
        for compare in (self._weights, self._losses, self._gradients, self._norms, self._updates):
            step_faults = list(compare())
            yield from step_faults
            if step_faults and compare != self._norms:
                return

    def _weights(self) -> Iterator[StepFault]:
        yield from self._replicas("weights", self._observed.weights, 0.0)

    def _replicas(
        self, quantity: StepQuantity, tensors: Mapping[str, GatheredTensor], bound: float
    ) -> Iterator[StepFault]:
        """Yield one fault with all tensors whose copies on different ranks differ by more than
        rounding.
        """
        apart, ranks, largest = list[str](), set[int](), 0.0
        for name, gathered in tensors.items():
            values = [copy.value for copy in gathered.copies if copy.value is not None]
            size = max((value.double().norm().item() for value in values), default=0.0)
            off = max((_off(value, values[0]) for value in values[1:]), default=0.0)
            limit = max(bound, LEAST * torch.finfo(values[0].dtype).eps / 2) if values else 0.0
            if not off <= limit * size:
                apart.append(name)
                ranks |= {copy.ranks[0] for copy in gathered.copies}
                largest = max(largest, off / max(size, 1e-300))
        if apart:
            when = "before" if quantity == "weights" else "after"
            sentence = (
                f"the weights of {_named(apart)} differ between the ranks {_ranks(ranks)} that "
                f"should hold the same, {when} the update"
            )
            kind = "replicas differ"
            yield self._fault(quantity, kind, sentence, apart, ranks=ranks, error=largest)

    def _losses(self) -> Iterator[StepFault]:
        pairs = zip(self._observed.losses, self._replayed.losses, strict=False)
        for part, (loss, (exact, bound)) in zip(self._replayed.contributions, pairs, strict=False):
            error = abs(loss - exact) / max(abs(exact), 1e-12)
            if not self._compared(error, bound):
                ratio = loss / exact if exact else None
                sentence = (
                    f"the loss of data rank {part.data_rank}, microbatch {part.microbatch} is "
                    f"{loss:.7g}, in one process {exact:.7g}"
                )
                yield self._fault(
                    "loss", "wrong loss", sentence, (), ratio=ratio, error=error, bound=bound
                )
                return

    def _gradients(self) -> Iterator[StepFault]:
        """Yield the faults of wrong gradients, from the last layer to the first."""
        errors = dict[str, _Error]()
        for name in self._order[::-1]:
            if name in self._observed.gradients:
                errors[name] = self._error(name, self._observed.gradients[name])
        wrong = {name: error for name, error in errors.items() if error.is_wrong}
        if not wrong:
            return
        namer = Namer(self._axes, self._replayed, self._scale, self._previous)
        named = {
            name: namer.name(name, self._observed.gradients[name], error.bound)
            for name, error in wrong.items()
        }
        yield from self._grouped(named, errors)

    def _error(self, name: str, gathered: GatheredTensor) -> _Error:
        """Return the error of the gradient copy that exceeds its tolerance most."""
        pairs = [self._expected.difference(name, copy.value) for copy in gathered.copies]
        error, bound = max(pairs, key=lambda pair: pair[0] / pair[1])
        self._compared(error, bound)
        return _Error(name, error, bound)

    def _grouped(
        self, named: Mapping[str, NamedFault], errors: Mapping[str, _Error]
    ) -> Iterator[StepFault]:
        """Yield one fault per cause, from the faults of single tensors in the order of the backward
        (`named`).

        A tensor that no hypothesis explains follows from the first explained fault downstream of
        it, if there is one; otherwise it is a fault of its own.
        """
        groups = dict[object, list[str]]()
        loose, follows = list[str](), dict[object, int]()
        last: object = None
        for name, fault in named.items():
            if fault.is_explained:
                groups.setdefault(fault.likeness, []).append(name)
                last = fault.likeness if last is None else last
            elif last is not None:
                follows[last] = follows.get(last, 0) + 1
            else:
                loose.append(name)
        if loose:
            yield self._unexplained(loose, named, errors)
        for likeness, names in groups.items():
            fault, first = named[names[0]], errors[names[0]]
            count = follows.get(likeness, 0)
            sentence = f"the gradient of {_named(names)} {fault.how}"
            if count:
                sentence += f"; {count} more upstream follow from it"
            yield self._fault(
                "gradient", fault.kind, sentence, names, fault.ranks, fault.axes,
                ratio=fault.ratio, error=first.error, bound=first.bound, follows=count,
            )  # fmt: skip

    def _unexplained(
        self, names: Sequence[str], named: Mapping[str, NamedFault], errors: Mapping[str, _Error]
    ) -> StepFault:
        """Return one fault for the gradients that no simple mistake explains: it says where in the
        model they begin.
        """
        first = names[0]
        fault, error = named[first], errors[first]
        backward = list(errors)
        upstream = backward[backward.index(first) :]
        wrong = sum(name in named for name in upstream)
        sentence = f"the gradient of {first} {fault.how}"
        kind: str = fault.kind
        if len(names) > 1 and wrong >= 0.8 * len(upstream) and len(upstream) < len(backward):
            kind = "wrong upstream"
            sentence = (
                f"the gradients upstream of {_module(first)} are wrong, {wrong} of {len(upstream)} "
                f"parameters, and right after it; first {first}, which {fault.how}"
            )
        elif len(names) > 1:
            sentence += f"; {len(names) - 1} more are wrong: {_named(names[1:])}"
        return self._fault(
            "gradient", kind, sentence, names, fault.ranks, fault.axes, error=error.error,
            bound=error.bound,
        )  # fmt: skip

    def _norms(self) -> Iterator[StepFault]:
        """Yield the fault of a clipping norm that is wrong, or that differs between ranks."""
        if not self._observed.norms:
            return
        normed = self._observed.normed
        squares = {
            name: exact.square().sum().item()
            for name, exact in self._exact.items()
            if normed is None or name in normed
        }
        exact = math.sqrt(sum(squares.values()))
        noise = max(
            (math.sqrt(sum(_off(r[n], self._exact[n]) ** 2 for n in squares)) for r in
             self._expected.rounded), default=0.0,
        )  # fmt: skip
        bound = MARGIN * noise / exact + LEAST * 2.0**-24
        norms = self._observed.norms
        error = max(abs(norm / exact - 1) for norm in norms.values())
        if self._compared(error, bound):
            return
        wrong = [rank for rank, norm in norms.items() if not abs(norm / exact - 1) <= bound]
        if max(norms.values()) - min(norms.values()) > bound * exact:
            shown = ", ".join(f"{norms[rank]:.6g} on rank {rank}" for rank in sorted(norms)[:4])
            sentence = f"the ranks clip by different norms: {shown}; the whole norm is {exact:.6g}"
            kind, axes, ratio = "clips differ", tuple[str, ...](), None
        else:
            norm = norms[wrong[0]]
            kind, ratio = "wrong norm", norm / exact
            axes, how = self._miscounted(norm, squares)
            sentence = (
                f"the gradients are right, but the run clips by {norm:.6g} where their norm is "
                f"{exact:.6g}: {how}"
            )
        yield self._fault(
            "norm", kind, sentence, (), wrong, axes, ratio=ratio, error=error, bound=bound
        )

    def _miscounted(self, norm: float, squares: Mapping[str, float]) -> tuple[tuple[str, ...], str]:
        """Return how often a wrong norm counts some class of parameters, as a sentence's end, and
        the axis whose size that is.
        """
        total = sum(squares.values())
        sizes = {axis.name: axis.size for axis in axes_and_products(self._axes)}
        for label, names in self._classes().items():
            part = sum(squares.get(name, 0.0) for name in names)
            if not part:
                continue
            count = (norm**2 - total) / part + 1
            for axis, size in sizes.items():
                for factor, shown in ((size, f"{size} times"), (1 / size, f"1/{size} times")):
                    if abs(count - factor) <= _NORM_NEAR * max(total / part, 1) * factor:
                        return (axis,), f"it counts {label} {shown}, the size of {axis}"
            if abs(count) <= _NORM_NEAR * total / part:
                return (), f"it leaves out {label}"
        return (), f"it is {norm / math.sqrt(total):.4g} times too large"

    def _classes(self) -> dict[str, list[str]]:
        """Return classes of parameters that a norm may miscount, by label: all, by the axes that
        shard them, experts, and each parameter alone.
        """
        classes = dict[str, list[str]]()
        names = [name for name in self._exact if name in self._observed.gradients]
        classes["all parameters"] = names
        for name in names:
            over = self._observed.gradients[name].sharded_over
            label = f"parameters sharded over {' and '.join(over)}" if over else "whole parameters"
            classes.setdefault(label, []).append(name)
            if "expert" in name:
                classes.setdefault("experts", []).append(name)
        for name in names:
            classes[name] = [name]
        return classes

    def _updates(self) -> Iterator[StepFault]:
        differing = list(self._replicas("update", self._observed.updates, 1e-6))
        yield from differing
        expected = self._replayed.updates
        if differing or expected is None:
            return
        wrong, ratios = list[str](), list[float]()
        worst = _Error("", 0.0, 1.0)
        for name in self._order:
            if name not in self._observed.updates or name not in expected.exact:
                continue
            value = self._observed.updates[name].copies[0].value
            error, bound = expected.difference(name, value)
            if not self._compared(error, bound):
                wrong.append(name)
                worst = max(worst, _Error(name, error, bound), key=lambda e: e.error / e.bound)
                square = expected.exact[name].square().sum().item()
                if value is not None and square:
                    ratios.append((value.double() * expected.exact[name]).sum().item() / square)
        if not wrong:
            return
        if self._observed.is_touched:
            self.notes.append(
                f"the update of {_named(wrong)} is not compared: the program changes the weights "
                "after the optimizer's step"
            )
            return
        sentence = f"the gradients are right, but the update of {_named(wrong)} is not"
        ratio = None
        if ratios and max(ratios) - min(ratios) < 1e-3 * abs(max(ratios)):
            ratio = ratios[0]
            sentence += f": {ratio:.4g} times the optimizer's"
        yield self._fault(
            "update", "wrong update", sentence, wrong, ratio=ratio, error=worst.error,
            bound=worst.bound,
        )  # fmt: skip

    def _compared(self, error: float, bound: float) -> bool:
        """Record an error as a share of its tolerance, and return whether it is tolerated."""
        self.shares.append(error / bound)
        return error <= bound

    def _fault(
        self,
        quantity: StepQuantity,
        kind: str,
        sentence: str,
        tensors: Sequence[str],
        ranks: Sequence[int] | set[int] = (),
        axes: tuple[str, ...] = (),
        *,
        ratio: float | None = None,
        error: float = math.inf,
        bound: float = 0.0,
        follows: int = 0,
    ) -> StepFault:
        return StepFault(
            quantity, kind, sentence, self._number, tuple(tensors), tuple(sorted(ranks)), axes,
            ratio, error, bound, follows,
        )  # fmt: skip


def _off(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm())


def _named(names: Sequence[str]) -> str:
    """Return the first two names and the number of the others, as text."""
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def _ranks(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8]))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
