"""The data of a comparison: a run's whole tensors by rank, and the same step replayed in one
process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

from meshwright.prove.expected import Expected


class MeshAxis(NamedTuple):
    """An axis of a run's device mesh: its name, and the groups of global ranks along it, all of one
    size.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks in a group."""
        return len(self.groups[0])


class RankCopy(NamedTuple):
    """A whole tensor, and the ranks that have it with exactly these bits; `value` is None for ranks
    without it.
    """

    ranks: tuple[int, ...]
    value: Tensor | None


class GatheredTensor(NamedTuple):
    """A whole tensor of a run, with a copy for each distinct value on the ranks; `sharded_over`
    names the mesh axes that shard it.
    """

    copies: tuple[RankCopy, ...]
    sharded_over: tuple[str, ...] = ()

    def by_rank(self) -> dict[int, Tensor | None]:
        """Return the whole tensor of each rank, by rank."""
        return {rank: copy.value for copy in self.copies for rank in copy.ranks}


class ObservedStep(NamedTuple):
    """What all ranks of a run had in one training step; tensors by parameter name.

    `weights` are those before the step, `gradients` those before clipping, `updates` the weights
    after the step minus those before. `norms` has the norm by which each rank clipped; empty
    without clipping. `losses` has one number per `Contribution` of the replay, in its order.
    `normed` are the parameters that the norm counts, None for all. `is_touched`: the updates
    include what the program did to the weights after the optimizer's step.
    """

    weights: Mapping[str, GatheredTensor]
    gradients: Mapping[str, GatheredTensor]
    updates: Mapping[str, GatheredTensor]
    norms: Mapping[int, float]
    losses: Sequence[float] = ()
    normed: frozenset[str] | None = None
    is_touched: bool = False


class Contribution(NamedTuple):
    """The exact gradients of one microbatch of one data rank, weighted as the run weights its loss;
    `targets` is its number of targets, 0 if unknown.
    """

    data_rank: int
    microbatch: int
    gradients: Mapping[str, Tensor]
    targets: int = 0


class ReplayedStep(NamedTuple):
    """A training step replayed in one process.

    `contributions` are exact. `rounded` has several samples of their sum, each computed with the
    run's rounding. `updates` is None if they cannot be replayed. `losses` are pairs (exact loss,
    relative tolerance).
    """

    contributions: Sequence[Contribution]
    rounded: Sequence[Mapping[str, Tensor]]
    updates: Expected | None = None
    losses: Sequence[tuple[float, float]] = ()

    def summed(self, name: str, weights: Sequence[float] | None = None) -> Tensor:
        """Return the sum of all contributions to a parameter's gradient in fp64, with these weights
        or all with 1.
        """
        parts = [part.gradients[name].double() for part in self.contributions]
        if weights is None:
            weights = [1.0] * len(parts)
        total = parts[0] * weights[0]
        for weight, part in zip(weights[1:], parts[1:], strict=True):
            total += weight * part
        return total


def joined(axes: Sequence[MeshAxis]) -> MeshAxis:
    """Return the axis whose groups are the ranks that these axes connect, such as `dp x tp`."""
    groups = [set(group) for group in axes[0].groups]
    for axis in axes[1:]:
        for ranks in axis.groups:
            touching = [group for group in groups if group & set(ranks)]
            groups = [group for group in groups if group not in touching]
            groups.append(set(ranks).union(*touching))
    ordered = sorted(tuple(sorted(group)) for group in groups)
    return MeshAxis(" x ".join(axis.name for axis in axes), tuple(ordered))


def axes_and_products(axes: Iterable[MeshAxis]) -> list[MeshAxis]:
    """Return the axes with more than one rank, then the products of two and of three of them;
    without duplicates.
    """
    single = [axis for axis in axes if axis.size > 1]
    combined = list(single)
    for count in range(2, min(len(single), 3) + 1):
        combined += [joined(subset) for subset in combinations(single, count)]
    distinct = {axis.groups: axis for axis in reversed(combined)}
    return [axis for axis in combined if distinct[axis.groups] is axis]
