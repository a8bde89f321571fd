"""Names the fault of a wrong gradient: the simple mistake that gives exactly these values.

A hypothesis is a weighted sum of the reference's contributions (by microbatch and data rank), or of
the ranks' copies. It names the fault if it leaves only rounding. A ratio of norms alone would
mislead: a partial gradient has any ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.prove.trainers.observed import (
    Contribution,
    GatheredTensor,
    MeshAxis,
    ReplayedStep,
    axes_and_products,
)

FaultKind = Literal[
    "no gradient",
    "not finite",
    "missing sum",
    "missing average",
    "scaled",
    "summed again",
    "microbatch lost",
    "data rank lost",
    "local token count",
    "not cleared",
    "replicas differ",
    "wrong",
]
# A hypothesis leaves at most this share of the tensor, or so many times the tensor's tolerance.
_LEFT: Final = 1e-4
_SLACK: Final = 4.0
# A ratio within this of a product of axes is that product.
_NEAR: Final = 2e-3


@dataclass(frozen=True)
class NamedFault:
    """What is wrong with one tensor.

    `how` completes the sentence "the gradient of X ...". `axes` are the mesh axes on which the
    mistake is, `ratio` a factor that remains, and `ranks` those whose copy is wrong.
    """

    kind: FaultKind
    how: str
    ranks: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    ratio: float | None = None

    @property
    def is_explained(self) -> bool:
        """Whether a simple mistake gives these values, up to rounding."""
        return self.kind not in ("wrong", "replicas differ")

    @property
    def likeness(self) -> tuple[object, ...]:
        """A key that faults with one cause share."""
        ratio = None if self.ratio is None else round(self.ratio, 2)
        return self.kind, self.axes, ratio


class _Hypothesis(NamedTuple):
    """A possible mistake: its kind, the weight of each contribution in the gradient, and the end of
    its sentence.

    `is_scaled`: any factor is part of the mistake.
    """

    kind: FaultKind
    weights: tuple[float, ...]
    how: str
    axes: tuple[str, ...] = ()
    is_scaled: bool = False


@dataclass(frozen=True)
class Namer:
    """Names the faults of one step's gradients.

    `scale` times the contributions' sum is the right gradient. `previous` has the gradients of the
    step before.
    """

    axes: Sequence[MeshAxis]
    replayed: ReplayedStep
    scale: float
    previous: Mapping[str, GatheredTensor] = field(default_factory=dict)

    def name(self, tensor: str, gathered: GatheredTensor, bound: float) -> NamedFault:
        """Return the fault of a gradient that differs from the reference; `bound` is its tolerance,
        relative to its norm.
        """
        by_rank = gathered.by_rank()
        absent = [rank for rank, value in by_rank.items() if value is None]
        if absent:
            return NamedFault("no gradient", "is missing", tuple(absent))
        values = {rank: value.double() for rank, value in by_rank.items() if value is not None}
        infinite = [rank for rank, value in values.items() if not value.isfinite().all()]
        if infinite:
            return NamedFault("not finite", "is not finite", tuple(infinite))
        exact = self.replayed.summed(tensor) * self.scale
        left = max(_LEFT, _SLACK * bound)
        wrong = tuple(r for r, v in values.items() if _distance(v, exact) > bound)
        if any(value.shape != exact.shape for value in values.values()):
            return NamedFault("wrong", f"has another shape than {tuple(exact.shape)}", wrong)
        if _spread(values) > 2 * bound:
            return self._of_unequal(tensor, gathered, values, exact, wrong, left)
        return self._of_equal(tensor, values[wrong[0]], wrong, left)

    def _of_unequal(
        self,
        tensor: str,
        gathered: GatheredTensor,
        values: Mapping[int, Tensor],
        exact: Tensor,
        wrong: tuple[int, ...],
        left: float,
    ) -> NamedFault:
        """Name the fault of copies that should be equal and are not: by their sum over a mesh axis,
        or rank by rank.

        Where every copy is a multiple of the right gradient, none is a partial sum, although their
        sum is a multiple, too. A gradient of one number is always a multiple, so it may be either.
        """
        fits = {rank: _fitted(value, exact) for rank, value in values.items()}
        are_multiples = all(residual <= left for _, residual in fits.values())
        if are_multiples and self._are_own_counts([ratio for ratio, _ in fits.values()]):
            how = "is divided by each data rank's own number of targets, not by that of all"
            return NamedFault("local token count", how, wrong)
        unsharded = [axis for axis in self.axes if axis.name not in gathered.sharded_over]
        is_partial = exact.numel() == 1 or not are_multiples
        for axis in axes_and_products(unsharded) if is_partial else ():
            fault = _sum_over(axis, values, exact, left)
            if fault is not None:
                return fault
        right = [rank for rank in values if rank not in wrong]
        by_rank = f"differs between ranks {_listed(sorted(values))}"
        if right:
            by_rank += f": right on {_listed(right)}, wrong on {_listed(wrong)}"
        named = [self._of_equal(tensor, values[rank], (rank,), left) for rank in wrong]
        if len({fault.likeness for fault in named}) == 1 and named[0].is_explained:
            first = named[0]
            how = f"{first.how} on ranks {_listed(wrong)} alone" if right else first.how
            return NamedFault(first.kind, how, wrong, first.axes, first.ratio)
        explained = [f"on rank {f.ranks[0]} {f.how}" for f in named if f.is_explained]
        how = "; ".join([by_rank, *explained[:4]])
        return NamedFault("replicas differ", how, wrong)

    def _of_equal(
        self, tensor: str, value: Tensor, ranks: tuple[int, ...], left: float
    ) -> NamedFault:
        """Name the fault of one value: the first hypothesis that fits it up to rounding.

        `left` is the largest residual of a fit, relative to the value's norm.
        """
        for guess in self._hypotheses():
            pattern = self.replayed.summed(tensor, guess.weights) * self.scale
            ratio, residual = _fitted(value, pattern)
            if residual > left:
                continue
            if guess.is_scaled:
                axes, how = factor_of(ratio, self.axes, self._microbatches)
                return NamedFault("scaled", how, ranks, axes, ratio)
            if abs(ratio - 1) <= max(_NEAR, left):
                return NamedFault(guess.kind, guess.how, ranks, guess.axes)
            axes, how = factor_of(ratio, self.axes, self._microbatches)
            return NamedFault(guess.kind, f"{guess.how}, and {how}", ranks, guess.axes, ratio)
        exact = self.replayed.summed(tensor) * self.scale
        if self._has_previous(tensor, ranks[0], value - exact, left * value.norm().item()):
            how = "has that of the step before in it: it was not cleared"
            return NamedFault("not cleared", how, ranks)
        ratio, residual = _fitted(value, exact)
        if residual < 1:
            how = f"is {ratio:.4g} times the reference and a rest of {residual:.2g} of its size"
        else:
            how = "has nothing of the reference"
        return NamedFault("wrong", how, ranks)

    def _are_own_counts(self, ratios: Sequence[float]) -> bool:
        """Whether the ranks' ratios to the right gradient are those of all targets, or of a data
        rank's share of them, to the data ranks' numbers of targets.
        """
        counts = dict[int, int]()
        for part in self.replayed.contributions:
            counts[part.data_rank] = counts.get(part.data_rank, 0) + part.targets
        if not all(counts.values()) or len(set(counts.values())) == 1:
            return False
        total = sum(counts.values())
        for share in (total, total / len(counts)):
            wanted = {share / count for count in counts.values()}
            near = [{w for w in wanted if abs(ratio / w - 1) <= _NEAR} for ratio in ratios]
            if all(near) and len(set().union(*near)) == len(wanted):
                return True
        return False

    def _has_previous(self, tensor: str, rank: int, excess: Tensor, left: float) -> bool:
        """Whether `excess`, the value minus the right gradient, is a positive multiple of the
        previous step's gradient.

        A multiple, because that gradient was clipped.
        """
        gathered = self.previous.get(tensor)
        before = None if gathered is None else gathered.by_rank().get(rank)
        if before is None or before.shape != excess.shape or not before.isfinite().all():
            return False
        ratio, residual = _fitted(excess, before.double())
        return ratio > 0 and residual * excess.norm().item() <= left

    @property
    def _microbatches(self) -> int:
        return len({part.microbatch for part in self.replayed.contributions})

    def _hypotheses(self) -> Iterator[_Hypothesis]:
        """Yield the hypotheses about the contributions, simplest first."""
        parts = self.replayed.contributions
        places = sorted({part.microbatch for part in parts})
        data_ranks = sorted({part.data_rank for part in parts})
        yield _Hypothesis("scaled", (1.0,) * len(parts), "", is_scaled=True)
        if len(places) > 1:
            yield from self._summed_again(places)
            for place in places:
                weights = tuple(float(part.microbatch != place) for part in parts)
                yield _Hypothesis("microbatch lost", weights, f"lacks microbatch {place}")
            for place in places[:: len(places) - 1] if len(places) > 2 else ():
                weights = tuple(float(part.microbatch == place) for part in parts)
                how = f"is that of microbatch {place} alone"
                yield _Hypothesis("microbatch lost", weights, how)
        if len(data_ranks) > 1:
            for rank in data_ranks:
                weights = tuple(float(part.data_rank != rank) for part in parts)
                yield _Hypothesis("data rank lost", weights, f"lacks the rows of data rank {rank}")
            for rank in data_ranks if len(data_ranks) > 2 else ():
                weights = tuple(float(part.data_rank == rank) for part in parts)
                how = f"is that of data rank {rank}'s rows alone"
                yield _Hypothesis("data rank lost", weights, how)
        yield from self._local_counts()

    def _summed_again(self, places: Sequence[int]) -> Iterator[_Hypothesis]:
        """Yield hypotheses in which every microbatch sums or averages the accumulated gradient over
        a mesh axis again.
        """
        last = places[-1]
        for axis in axes_and_products(self.axes):
            for factor, verb in ((axis.size, "summed"), (1 / axis.size, "averaged")):
                powers = {place: factor ** (last - place) for place in places}
                weights = tuple(powers[part.microbatch] for part in self.replayed.contributions)
                terms = " + ".join(_term(powers[place], place) for place in places)
                how = f"is {verb} over {axis.name} again at each microbatch: {terms}"
                yield _Hypothesis("summed again", weights, how, (axis.name,))

    def _local_counts(self) -> Iterator[_Hypothesis]:
        """Yield hypotheses in which the loss is divided by a local number of targets in place of
        the global one.
        """
        parts = self.replayed.contributions
        if not all(part.targets for part in parts):
            return
        total = sum(part.targets for part in parts)
        keys: dict[str, Callable[[Contribution], object]] = {
            "each microbatch of each data rank": lambda p: (p.microbatch, p.data_rank),
            "each data rank": lambda p: p.data_rank,
            "each microbatch": lambda p: p.microbatch,
        }
        for unit, key in keys.items():
            counts = dict.fromkeys(map(key, parts), 0)
            for part in parts:
                counts[key(part)] += part.targets
            if len(set(counts.values())) == 1:
                continue
            weights = tuple(total / len(counts) / counts[key(part)] for part in parts)
            how = f"is a mean over the targets of {unit}, not over those of the global batch"
            yield _Hypothesis("local token count", weights, how)


def _sum_over(
    axis: MeshAxis, values: Mapping[int, Tensor], exact: Tensor, left: float
) -> NamedFault | None:
    """Return the fault "a sum (or an average) over this axis is missing", if the copies' sum over
    the axis is a multiple of the reference; else None.
    """
    ratios = []
    for group in axis.groups:
        copies = [values[rank] for rank in group if rank in values]
        if len(copies) != len(group):
            return None
        ratio, residual = _fitted(sum(copies[1:], copies[0]), exact)
        if residual > left or abs(ratio) < left:
            return None
        ratios.append(ratio)
    near = max(_NEAR, left)
    if max(ratios) - min(ratios) > near * max(ratios):
        return None
    ranks, ratio = tuple(sorted(values)), ratios[0]
    if abs(ratio - 1) <= near:
        how = f"is each rank's part alone: a sum over {axis.name} is missing"
        return NamedFault("missing sum", how, ranks, (axis.name,))
    if abs(ratio / axis.size - 1) <= near:
        how = f"is each rank's own: an average over {axis.name} is missing"
        return NamedFault("missing average", how, ranks, (axis.name,))
    how = f"is each rank's part alone: a sum over {axis.name} is missing, {ratio:.4g} times too"
    return NamedFault("missing sum", f"{how} large", ranks, (axis.name,), ratio)


def factor_of(
    ratio: float, axes: Sequence[MeshAxis], microbatches: int
) -> tuple[tuple[str, ...], str]:
    """Return the axes whose size, or product of sizes, explains a ratio or its inverse, and the end
    of a sentence about it.

    No axes if none fits.
    """
    sizes = {axis.name: axis.size for axis in axes_and_products(axes)}
    if microbatches > 1:
        sizes["the number of microbatches"] = microbatches
        products = {f"{name} x microbatches": k * microbatches for name, k in sizes.items()}
        products.pop("the number of microbatches x microbatches")
        sizes |= products
    for inverse in (False, True):
        wanted = 1 / ratio if inverse and ratio else ratio
        names = tuple(name for name, k in sizes.items() if abs(wanted / k - 1) <= _NEAR)
        if names:
            amount = f"{wanted:.4g} times too {'small' if inverse else 'large'}"
            return names, f"is {amount}, the size of {' or of '.join(names)}"
    return (), f"is {ratio:.4g} times the reference"


def _fitted(value: Tensor, pattern: Tensor) -> tuple[float, float]:
    """Return the least-squares multiple of `pattern`, and the norm of what it leaves, relative to
    the value's norm.
    """
    size, square = value.norm().item(), pattern.square().sum().item()
    if not size or not square:
        return 0.0, 1.0
    ratio = (value * pattern).sum().item() / square
    return ratio, (value - ratio * pattern).norm().item() / size


def _distance(value: Tensor, exact: Tensor) -> float:
    if value.shape != exact.shape:
        return float("inf")
    return float((value - exact).norm() / exact.norm().clamp(min=1e-300))


def _spread(values: Mapping[int, Tensor]) -> float:
    """Return the largest distance of a copy from the first one, relative to the largest copy's
    norm.
    """
    first, *copies = values.values()
    size = max(value.norm().item() for value in values.values())
    far = max((torch.dist(value, first).item() for value in copies), default=0.0)
    return float(far / max(size, 1e-300))


def _term(power: float, place: int) -> str:
    return f"g{place}" if power == 1 else f"{power:.4g} g{place}"


def _listed(ranks: Sequence[int]) -> str:
    """Return ranks as "0, 1, 2"; of more than eight, the first two and the last."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
