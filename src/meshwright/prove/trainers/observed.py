"""What is compared: whole tensors of a run, by rank, and the parts that one process computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

from meshwright.prove.expected import Expected


class MeshAxis(NamedTuple):
    """A dimension of a run's device mesh: its name, and the groups of ranks along it."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks in a group."""
        return len(self.groups[0])


class RankCopy(NamedTuple):
    """A whole tensor as some ranks have it, bit for bit; None where they have none."""

    ranks: tuple[int, ...]
    value: Tensor | None


class GatheredTensor(NamedTuple):
    """A tensor of a run: gathered over the axes that shard it, one copy for each distinct value."""

    copies: tuple[RankCopy, ...]
    sharded_over: tuple[str, ...] = ()

    def by_rank(self) -> dict[int, Tensor | None]:
        """Return each rank's whole tensor."""
        return {rank: copy.value for copy in self.copies for rank in copy.ranks}


class ObservedStep(NamedTuple):
    """A step of a run: what each rank had before, between and after it.

    `gradients` are those before clipping, `norms` what each rank clipped by (empty if the run does
    not clip), `updates` the weights after the step minus those before. `losses` has one number
    for each `Contribution`, in the same order. `normed` are the parameters that the norm counts,
    None if all. If `is_touched`, the updates include what the program does to the weights after
    the optimizer's step.
    """

    weights: Mapping[str, GatheredTensor]
    gradients: Mapping[str, GatheredTensor]
    updates: Mapping[str, GatheredTensor]
    norms: Mapping[int, float]
    losses: Sequence[float] = ()
    normed: frozenset[str] | None = None
    is_touched: bool = False


class Contribution(NamedTuple):
    """The exact gradients of one microbatch of one data rank, as the run weighs its loss."""

    data_rank: int
    microbatch: int
    gradients: Mapping[str, Tensor]
    targets: int = 0


class ReplayedStep(NamedTuple):
    """The same step in one process.

    `rounded` are samples of the sum of all contributions with the run's rounding. `updates` is
    None if they cannot be replayed. `losses` are (exact, tolerance), relative to the exact one.
    """

    contributions: Sequence[Contribution]
    rounded: Sequence[Mapping[str, Tensor]]
    updates: Expected | None = None
    losses: Sequence[tuple[float, float]] = ()

    def summed(self, name: str, weights: Sequence[float] | None = None) -> Tensor:
        """Return the weighted sum of all contributions to a gradient."""
        parts = [part.gradients[name].double() for part in self.contributions]
        if weights is None:
            weights = [1.0] * len(parts)
        total = parts[0] * weights[0]
        for weight, part in zip(weights[1:], parts[1:], strict=True):
            total += weight * part
        return total


def joined(axes: Sequence[MeshAxis]) -> MeshAxis:
    """Return the axis of all ranks that some axes connect."""
    groups = [set(group) for group in axes[0].groups]
    for axis in axes[1:]:
        for ranks in axis.groups:
            touching = [group for group in groups if group & set(ranks)]
            groups = [group for group in groups if group not in touching]
            groups.append(set(ranks).union(*touching))
    ordered = sorted(tuple(sorted(group)) for group in groups)
    return MeshAxis(" x ".join(axis.name for axis in axes), tuple(ordered))


def axes_and_products(axes: Iterable[MeshAxis]) -> list[MeshAxis]:
    """Return the axes of more than one rank, then those of two, then of three of them together."""
    single = [axis for axis in axes if axis.size > 1]
    combined = list(single)
    for count in range(2, min(len(single), 3) + 1):
        combined += [joined(subset) for subset in combinations(single, count)]
    distinct = {axis.groups: axis for axis in reversed(combined)}
    return [axis for axis in combined if distinct[axis.groups] is axis]
