"""Alarms without a reference: what must hold in any step of any trainer.

Copies that should be equal have the same sum with fixed weights. So ranks exchange two numbers for
each parameter, in one collective for each checked step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.prove.trainers.clipping import around_clipping, number_of
from meshwright.prove.trainers.gather import ModelReader, everyones

# Copies whose sums differ by more than this share of their size differ by more than rounding.
_APART: Final = {torch.float32: 1e-4, torch.float64: 1e-8}
_APART_IN_HALF: Final = 3e-2
_ABSENT: Final = -1.0  # the norm of a gradient that is not there


class GradientPrint(NamedTuple):
    """A local gradient's place in its mesh, its norm, and its sum with fixed weights."""

    place: tuple[int, ...]
    norm: float
    sum: float
    tolerance: float


class ReplicaAlarms:
    """Checks the gradients of every `interval`-th step before its update.

    `alarms` has what was said, on every rank: gradients that should be equal and differ, parameters
    that no rank has a gradient of, gradients that are all zero or not finite, ranks that clip by
    different norms. Each is said once.
    """

    def __init__(
        self, model: nn.Module, *, interval: int = 1, say: Callable[[str], None] = print
    ) -> None:
        self._reader, self._every, self._say = ModelReader(model), interval, say
        self._steps = 0
        self._parameters = list[nn.Parameter]()
        self._known = list[list[tuple[str, tuple[int, ...], float]]]()
        self._norm, self._norms = _ABSENT, list[float]()
        self._stack = contextlib.ExitStack()
        self.alarms = list[str]()

    def start(self) -> None:
        """Check before each update from now on; a collective."""
        parameters = self._reader.parameters()
        self._parameters = list(parameters.values())
        known = []
        for name, parameter in parameters.items():
            place = _place(parameter)
            if self._reader.is_unlabelled_shard(parameter):  # no rank has a copy that is known
                place = (*place, dist.get_rank())
            known.append((name, place, _tolerance(parameter)))
        self._known = everyones(known)
        self._stack.callback(register_optimizer_step_pre_hook(self._check).remove)
        self._stack.enter_context(around_clipping(self._clips))

    def stop(self) -> None:
        """Check no more."""
        self._stack.close()

    finish = stop

    def _clips(
        self, clip: Callable[[], Any], max_norm: float, parameters: Sequence[Tensor] | None
    ) -> Any:
        norm = clip()
        self._norm = number_of(norm)
        return norm

    @torch.no_grad()
    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if (self._steps - 1) % self._every:
            return
        alarms = found_alarms(self._exchanged())
        if max(self._norms) - min(self._norms) > 1e-4 * abs(max(self._norms)):
            alarms.append("the ranks clip by different norms")
        for alarm in alarms:
            if alarm not in self.alarms:
                self.alarms.append(alarm)
                if not dist.is_initialized() or dist.get_rank() == 0:
                    self._say(f"step {self._steps}: {alarm}")

    def _exchanged(self) -> list[dict[str, GradientPrint | None]]:
        """Return all ranks' numbers, by rank and name; a collective."""
        device = self._parameters[0].device
        rows = max(map(len, self._known)) + 1
        local = torch.full((rows, 2), _ABSENT, device=device)
        local[-1, 0], self._norm = self._norm, _ABSENT
        for row, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                local[row] = _numbers(parameter.grad)
        numbers = [local]
        if dist.is_initialized() and dist.get_world_size() > 1:
            numbers = [torch.empty_like(local) for _ in self._known]
            dist.all_gather(numbers, local)
        by_rank, self._norms = [], []
        for known, values in zip(self._known, torch.stack(numbers).tolist(), strict=True):
            prints = dict[str, GradientPrint | None]()
            for (name, place, tolerance), (norm, total) in zip(known, values, strict=False):
                is_there = norm != _ABSENT
                prints[name] = GradientPrint(place, norm, total, tolerance) if is_there else None
            self._norms.append(values[-1][0])
            by_rank.append(prints)
        return by_rank


def found_alarms(by_rank: Sequence[Mapping[str, GradientPrint | None]]) -> list[str]:
    """Return what is wrong with the gradients of all ranks."""
    names = list(dict.fromkeys(name for prints in by_rank for name in prints))
    absent, apart, infinite, total = list[str](), list[str](), list[str](), 0.0
    for name in names:
        prints = [prints.get(name) for prints in by_rank]
        present = [gradient for gradient in prints if gradient is not None]
        total += sum(gradient.norm for gradient in present)
        if not present:
            absent.append(name)
        elif not all(gradient.norm < float("inf") for gradient in present):
            infinite.append(name)
        elif any(_differ(a, b) for a, b in pairwise(sorted(present))):
            apart.append(name)
    if names and len(absent) == len(names):
        return ["no parameter has a gradient"]
    alarms = []
    if infinite:
        alarms.append(f"the gradient of {_shown(infinite)} is not finite")
    if apart:
        alarms.append(
            f"the gradient of {_shown(apart)} differs between ranks that should hold the same: a "
            "sum or an average over ranks is missing"
        )
    if absent:
        alarms.append(f"{_shown(absent)} has no gradient on any rank")
    if total == 0:
        alarms.append("all gradients are zero: nothing trains")
    return alarms


def _differ(a: GradientPrint, b: GradientPrint) -> bool:
    size = max(a.norm, b.norm)
    return a.place == b.place and abs(a.sum - b.sum) > max(a.tolerance, b.tolerance) * size


def _place(parameter: Tensor) -> tuple[int, ...]:
    """Return a rank's coordinates on the axes that shard a parameter, and the local sizes.

    Plain tensors of one size are copies.
    """
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape)
    where: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    pairs = zip(where, parameter.placements, strict=True)
    shards = [place for place, placement in pairs if not placement.is_replicate()]
    return (*shards, *parameter._local_tensor.shape)


def _tolerance(parameter: Tensor) -> float:
    return _APART.get(parameter.dtype, _APART_IN_HALF)


def _numbers(gradient: Tensor) -> Tensor:
    """Return a local gradient's norm, and its sum with weights from 1 to 2 over the root of n."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    flat = local.detach().flatten().float()
    count = max(flat.numel(), 1)
    weights = torch.linspace(1.0, 2.0, count, device=flat.device)[: flat.numel()]
    return torch.stack([flat.norm(), flat @ weights / count**0.5])


def _shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
