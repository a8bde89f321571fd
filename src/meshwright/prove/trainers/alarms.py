"""Checks of any training step without a reference: copies of a gradient are equal, and all
gradients exist and are finite.

Equal copies have equal sums under fixed random signs. So ranks exchange two numbers per parameter,
in one collective per checked step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshwright.comm.values import gather_values
from meshwright.prove.trainers.clipping import around_clipping, number_of
from meshwright.prove.trainers.gather import ModelReader
from meshwright.torch_private import foreach_norm

# Copies whose sums differ by more than this share of their norm differ by more than rounding.
_APART: Final = 1e-4
_APART_IN_HALF: Final = 3e-2
_ABSENT: Final = -1.0  # the norm of a gradient that is not there
_SIGNS: Final = 4096  # a gradient is read in rows of so many elements


class ReplicaAlarms:
    """Checks the gradients of every `interval`-th step before its optimizer update.

    `alarms` has what was said, on every rank: gradients that should be equal and differ, parameters
    that no rank has a gradient of, gradients that are all zero or not finite, ranks that clip by
    different norms. Each is said once. At the step of an optimizer, the parameters that it holds on
    some rank are checked, so other models and flat buffers are not; `checked` counts the steps.
    """

    def __init__(
        self, model: nn.Module, *, interval: int = 1, say: Callable[[str], None] = print
    ) -> None:
        self._reader, self._every, self._say = ModelReader(model), interval, say
        self.checked = 0
        self._stepping: torch.optim.Optimizer | None = None  # others may step inside of it
        self._names_of = WeakKeyDictionary[torch.optim.Optimizer, frozenset[str]]()
        self._steps = WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._names, self._parameters = list[str](), list[nn.Parameter]()
        self._copies: CopyGroups | None = None
        self._signs: Tensor | None = None
        self._norm, self._is_clipping = _ABSENT, False
        self._stack = contextlib.ExitStack()
        self.alarms = list[str]()

    def start(self) -> None:
        """Install the hooks: from now on, gradients are checked before the update. A collective."""
        parameters = self._reader.parameters()
        self._names, self._parameters = list(parameters), list(parameters.values())
        known = []
        for name, parameter in parameters.items():
            place = _place(parameter)
            if self._reader.is_unlabelled_shard(parameter):  # no rank has a copy that is known
                place = (*place, dist.get_rank())
            known.append((name, place, _tolerance(parameter)))
        self._copies = CopyGroups(gather_values(known))
        self._signs = random_signs(_SIGNS).to(self._parameters[0].device)
        self._stack.callback(register_optimizer_step_pre_hook(self._step_begins).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._step_ends).remove)
        self._stack.enter_context(around_clipping(self._clips))

    def stop(self) -> None:
        """Remove the hooks."""
        self._stack.close()

    def finish(self) -> None:
        """Check no more, and say so if no step was checked."""
        self.stop()
        if not self.checked and (not dist.is_initialized() or dist.get_rank() == 0):
            self._say(
                "no step was checked: no torch.optim.Optimizer that holds parameters of the model "
                "took one (DeepSpeed's ZeRO and Megatron-Core's distributed optimizer hold buffers)"
            )

    def _clips(
        self, clip: Callable[[], Any], max_norm: float, parameters: Sequence[Tensor] | None
    ) -> Any:
        if self._is_clipping:  # torch's function calls another one that clips
            return clip()
        self._is_clipping = True
        try:
            norm = clip()
        finally:
            self._is_clipping = False
        ids = {id(parameter) for parameter in self._parameters}
        if parameters is None or any(id(parameter) in ids for parameter in parameters):
            self._norm = number_of(norm)
        return norm

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is not None:
            return
        self._stepping = optimizer
        if optimizer not in self._names_of:
            self._names_of[optimizer] = self._names_on_any_rank(optimizer)
        names = self._names_of[optimizer]
        if not names:
            return
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if (step - 1) % self._every == 0:
            self.checked += 1
            self._check(names, step)

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is optimizer:
            self._stepping = None

    def _names_on_any_rank(self, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """Return the parameters of the model that an optimizer holds; a collective.

        Of all ranks, since each may update a share of the parameters.
        """
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        pairs = zip(self._names, self._parameters, strict=True)
        local = [name for name, parameter in pairs if id(parameter) in ids]
        return frozenset(name for names in gather_values(local) for name in names)

    @torch.no_grad()
    def _check(self, names: frozenset[str], step: int) -> None:
        assert self._copies is not None
        numbers = self._exchanged(self._copies.rows, names)
        alarms = self._copies.alarms(numbers[:, :-1], names)
        norms = numbers[:, -1, 0].tolist()
        if max(norms) - min(norms) > 1e-4 * abs(max(norms)):
            alarms.append("the ranks clip by different norms")
        for alarm in alarms:
            if alarm not in self.alarms:
                self.alarms.append(alarm)
                if not dist.is_initialized() or dist.get_rank() == 0:
                    self._say(f"step {step}: {alarm}")

    def _exchanged(self, rows: int, names: frozenset[str]) -> Tensor:
        """Return all ranks' numbers [rank, parameter, (norm, sum)], clip norms last; collective.

        Of parameters with other names, they are those of absent gradients.
        """
        assert self._signs is not None
        local = torch.full((rows + 1, 2), _ABSENT, device=self._signs.device)
        local[-1, 0], self._norm = self._norm, _ABSENT
        pairs = enumerate(zip(self._names, self._parameters, strict=True))
        present = [row for row, (name, p) in pairs if name in names and p.grad is not None]
        gradients = [_local(self._parameters[row].grad) for row in present]
        if gradients:
            norms = foreach_norm(gradients, 2, torch.float32)
            sums = [signed_sum(gradient, self._signs) for gradient in gradients]
            local[present] = torch.stack([torch.stack(norms), torch.stack(sums)], 1)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return local[None].cpu()
        numbers = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(numbers, local)
        return torch.stack(numbers).cpu()


class CopyGroups:
    """Groups the gradients of all ranks that must be copies of one another, and checks them.

    `known` has (name, place, tolerance) per parameter and rank; copies have the same name and
    place.
    """

    def __init__(self, known: Sequence[Sequence[tuple[str, tuple[int, ...], float]]]) -> None:
        self.rows = max(map(len, known))
        groups = dict[tuple[str, tuple[int, ...]], int]()
        names, tolerances = dict[str, int](), list[float]()
        name_of = list[int]()
        places = torch.zeros(len(known), self.rows, dtype=torch.long)
        is_known = torch.zeros(len(known), self.rows, dtype=torch.bool)
        for rank, rows in enumerate(known):
            for row, (name, place, tolerance) in enumerate(rows):
                group = groups.setdefault((name, place), len(groups))
                if group == len(tolerances):
                    tolerances.append(tolerance)
                    name_of.append(names.setdefault(name, len(names)))
                places[rank, row], is_known[rank, row] = group, True
        self._names, self._name_of = list(names), torch.tensor(name_of, dtype=torch.long)
        self._tolerances = torch.tensor(tolerances, dtype=torch.float64)
        self._places, self._is_known = places, is_known

    def alarms(self, numbers: Tensor, names: Collection[str] | None = None) -> list[str]:
        """Return what is wrong with the numbers [rank, parameter, (norm, sum)] of a step.

        Parameters whose name is not in `names` may be without a gradient.
        """
        is_there = self._is_known & (numbers[..., 0] != _ABSENT)
        groups = self._places[is_there]
        norms, sums = numbers[is_there].double().unbind(-1)
        count = len(self._tolerances)
        if count and not len(groups):
            return ["no parameter has a gradient"]

        def most(values: Tensor) -> Tensor:
            lowest = torch.full((count,), -torch.inf, dtype=torch.float64)
            return lowest.scatter_reduce(0, groups, values, "amax")

        is_infinite = most((~norms.isfinite() | ~sums.isfinite()).double()) > 0
        spread = most(sums) + most(-sums)  # NaN of infinities is not larger than anything
        is_apart = ~is_infinite & (spread > self._tolerances * most(norms))
        has_gradient = most(torch.ones_like(norms)) > 0
        alarms = []
        if is_infinite.any():
            alarms.append(f"the gradient of {self._named(is_infinite)} is not finite")
        if is_apart.any():
            alarms.append(
                f"the gradient of {self._named(is_apart)} differs between ranks that should hold "
                "the same: a sum or an average over ranks is missing"
            )
        names_with = torch.zeros(len(self._names)).index_add(0, self._name_of, has_gradient.float())
        pairs = zip(self._names, names_with, strict=True)
        absent = [name for name, n in pairs if not n and (names is None or name in names)]
        if absent:
            alarms.append(f"{_shown(absent)} has no gradient on any rank")
        if not norms.any():
            alarms.append("all gradients are zero: nothing trains")
        return alarms

    def _named(self, are_meant: Tensor) -> str:
        places = dict.fromkeys(self._name_of[are_meant].tolist())
        return _shown([self._names[place] for place in places])


def random_signs(count: int) -> Tensor:
    """Return `count` random 1s and -1s in fp32, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (count,), generator=generator).float() * 2 - 1


def signed_sum(gradient: Tensor, signs: Tensor) -> Tensor:
    """Return the sum of all elements of a gradient, each times a fixed sign: for gradients that
    differ by d, it differs by about |d|.

    An element's sign is the product of the sign of its column and that of its row, with rows of
    `len(signs)` elements: so one pass suffices, and no tensor of signs as large as the gradient is
    needed.
    """
    flat = gradient.flatten()
    rows = flat.numel() // len(signs)
    tail = flat[rows * len(signs) :].float()
    total = tail @ signs[: len(tail)]
    if rows:
        sums = flat[: rows * len(signs)].view(rows, -1).float() @ signs
        total = total + signed_sum(sums, signs)
    return total


def _place(parameter: Tensor) -> tuple[int, ...]:
    """Return this rank's coordinates on the axes that shard a parameter, and the local shape;
    copies have equal ones.

    Plain tensors of equal shape count as copies.
    """
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape)
    where: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    pairs = zip(where, parameter.placements, strict=True)
    shards = [place for place, placement in pairs if not placement.is_replicate()]
    return (*shards, *parameter._local_tensor.shape)


def _tolerance(parameter: Tensor) -> float:
    return _APART if parameter.dtype in (torch.float32, torch.float64) else _APART_IN_HALF


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    return local.detach()


def _shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
