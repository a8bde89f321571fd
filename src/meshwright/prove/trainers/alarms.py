"""Alarms without a reference: what must hold in any step of any trainer.

Copies that should be equal have the same sum with fixed weights. So ranks exchange a few numbers
for each parameter, in one collective for each checked step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from meshwright.prove.trainers.gather import ModelReader, everyones

# Copies whose sums differ by more than this share of their size differ by more than rounding.
_APART: Final = {torch.float32: 1e-4, torch.float64: 1e-8}
_APART_IN_HALF: Final = 3e-2


class _Print(NamedTuple):
    """A gradient's place in its mesh, its norm, and its sum with fixed weights."""

    place: tuple[Any, ...]
    norm: float
    sum: float
    tolerance: float


class ReplicaAlarms:
    """Checks the gradients of every `every`-th step before its update.

    `alarms` has what was said, on every rank: gradients that should be equal and differ, parameters
    that no rank has a gradient of, gradients that are all zero or not finite.
    """

    def __init__(
        self, model: nn.Module, *, every: int = 1, say: Callable[[str], None] = print
    ) -> None:
        self._reader, self._every, self._say = ModelReader(model), every, say
        self._steps = 0
        self._handle: RemovableHandle | None = None
        self.alarms = list[str]()

    def start(self) -> None:
        """Check before each update from now on."""
        self._handle = register_optimizer_step_pre_hook(self._check)

    def stop(self) -> None:
        """Check no more."""
        if self._handle is not None:
            self._handle.remove()

    @torch.no_grad()
    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if (self._steps - 1) % self._every:
            return
        parameters = self._reader.parameters()
        prints = {name: _print_of(p.grad) for name, p in parameters.items()}
        for alarm in found_alarms(everyones(prints)):
            if alarm not in self.alarms:
                self.alarms.append(alarm)
                if not dist.is_initialized() or dist.get_rank() == 0:
                    self._say(f"step {self._steps}: {alarm}")


def found_alarms(by_rank: list[Mapping[str, _Print | None]]) -> list[str]:
    """Return what is wrong with the gradients of all ranks."""
    names = list(dict.fromkeys(name for prints in by_rank for name in prints))
    absent, apart, infinite = list[str](), list[str](), list[str]()
    total = 0.0
    for name in names:
        prints = [prints.get(name) for prints in by_rank]
        there = [found for found in prints if found is not None]
        if not there:
            absent.append(name)
            continue
        total += sum(found.norm for found in there)
        if not all(found.norm < float("inf") for found in there):
            infinite.append(name)
        elif any(_differ(a, b) for a, b in pairwise(there)):
            apart.append(name)
    alarms = []
    if names and len(absent) == len(names):
        return ["no parameter has a gradient"]
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


def _differ(a: _Print, b: _Print) -> bool:
    size = max(a.norm, b.norm)
    return a.place == b.place and abs(a.sum - b.sum) > max(a.tolerance, b.tolerance) * size


def _print_of(gradient: Tensor | None) -> _Print | None:
    """Return a local gradient's numbers; the place is that of its shard on the sharding axes."""
    if gradient is None:
        return None
    place: tuple[Any, ...] = ()
    if isinstance(gradient, DTensor):
        where: Sequence[int] = gradient.device_mesh.get_coordinate() or ()
        pairs = zip(where, gradient.placements, strict=True)
        place = tuple(at for at, placement in pairs if not placement.is_replicate())
        gradient = gradient._local_tensor
    flat = gradient.detach().flatten()
    numbers = torch.linspace(1.0, 2.0, max(flat.numel(), 1), device=flat.device)[: flat.numel()]
    norm, total = torch.stack([flat.float().norm(), flat.float() @ numbers]).tolist()
    return _Print(
        (*place, tuple(gradient.shape)), norm, total, _APART.get(gradient.dtype, _APART_IN_HALF)
    )


def _shown(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
