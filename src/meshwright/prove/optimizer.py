"""The optimizers of the reference, written from their papers."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from meshwright.parallel.data_parallel.matrices import ShardPlace
from meshwright.prove.rates import rate_of
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers.rounding import round_by_place

Tensors = Mapping[str, Tensor]


class Updates:
    """Updates master weights in place by AdamW (arXiv:1711.05101, algorithm 2), SGD with momentum,
    Muon or Lion, all with decoupled weight decay.

    Norms, attention sinks, convolutions and biases do not decay, unless a group says so. `narrow`
    rounds weights to bf16 after each update. Results jump where Lion's direction is zero, and where
    a value lies halfway between two bf16 numbers; a layout may be on either side. A sample with
    `tilt` other than 0 is on one side on purpose: it moves directions by that share of their root
    mean square, and states and updates of weights by that share of themselves.
    """

    def __init__(
        self,
        masters: dict[str, Tensor],
        spec: OptimizerSpec,
        steps: int,
        *,
        tilt: float = 0.0,
        narrow: bool = False,
        rows: Mapping[str, int] | None = None,
    ) -> None:
        """`rows` has the elements of a row of a rank's shard, where blocks in int8 depend on it."""
        self._rows = rows or {}
        self._is_narrow = narrow
        self._masters, self._spec, self._steps, self._tilt = masters, spec, steps, tilt
        self._first = {name: torch.zeros_like(master) for name, master in masters.items()}
        self._second = {name: torch.zeros_like(master) for name, master in masters.items()}
        # The name of the update of each parameter.
        self._kinds = {
            name: spec.name if spec.name != "muon" or is_hidden_matrix(name, master) else "adamw"
            for name, master in masters.items()
        }

    def state(self) -> dict[str, Tensors]:
        """Return the optimizer state, fp32 by torch's key and parameter name, converted by
        `comparable`; keys without tensors are left out.
        """
        of_momentum = {"sgd", "muon"} if self._spec.momentum else set[str]()
        states = {
            "exp_avg": (self._first, {"adamw", "lion"}),
            "exp_avg_sq": (self._second, {"adamw"}),
            "momentum_buffer": (self._first, of_momentum),
        }
        named = {
            key: {
                name: comparable(key, tensors[name]).to(torch.float32, copy=True)
                for name in self._masters
                if self._kinds[name] in kinds
            }
            for key, (tensors, kinds) in states.items()
        }
        return {key: tensors for key, tensors in named.items() if tensors}

    def step(self, gradients: Tensors, step: int) -> None:
        """Update the master weights by whole gradients; steps count from 0."""
        spec, base_rate = self._spec, rate_of(step + 1, self._steps, self._spec)
        for name, master in self._masters.items():
            gradient, kind = gradients[name], self._kinds[name]
            scale, decay = self._settings(name, master)
            rate = base_rate * scale
            before = master.clone() if self._is_narrow else master
            master.mul_(1 - rate * decay)
            if kind == "sgd":
                self._first[name] = spec.momentum * self._first[name] + gradient
                master.sub_(rate * self._first[name])
            elif kind == "muon":
                master.sub_(rate * self._orthogonal(name, gradient))
            elif kind == "lion":
                master.sub_(rate * self._sign(name, gradient))
            else:
                master.sub_(rate * self._adaptive(name, gradient, step + 1))
            if self._is_narrow:
                tilted = master + self._tilt * (master - before)
                master.copy_(self._in_bf16(tilted, name, "weight", step + 1))

    def _settings(self, name: str, weight: Tensor) -> tuple[float, float]:
        """Return a parameter's learning rate factor and its weight decay, as `docs/config.md`
        defines them.
        """
        decay = self._spec.weight_decay if _is_matrix(name, weight) else 0.0
        for group in self._spec.groups:
            if fnmatchcase(name, group.match):
                stated = group.weight_decay
                return group.lr_scale, decay if stated is None else stated
        return 1.0, decay

    def _sign(self, name: str, gradient: Tensor) -> Tensor:
        """Update Lion's momentum, and return its direction: a sign per element. arXiv:2302.06675,
        algorithm 2.
        """
        beta1, beta2 = self._spec.betas
        direction = beta1 * self._first[name] + (1 - beta1) * gradient
        self._first[name] = beta2 * self._first[name] + (1 - beta2) * gradient
        tilted = direction + self._tilt * direction.square().mean().sqrt()
        return torch.where(direction == 0, direction, tilted).sign()

    def _adaptive(self, name: str, gradient: Tensor, number: int) -> Tensor:
        """Update Adam's moments, and return the direction of update `number`, from 1."""
        beta1, beta2 = self._spec.betas
        self._first[name] = beta1 * self._first[name] + (1 - beta1) * gradient
        self._second[name] = beta2 * self._second[name] + (1 - beta2) * gradient**2
        mean = self._first[name] / (1 - beta1**number)
        size = (self._second[name] / (1 - beta2**number)).sqrt()
        if self._spec.state_dtype == "bf16":
            for key, moments in (("exp_avg", self._first), ("exp_avg_sq", self._second)):
                tilted = moments[name] * (1 + self._tilt)
                moments[name] = self._in_bf16(tilted, name, key, number)
        if self._spec.state_dtype == "int8" and _is_matrix(name, gradient):
            row = self._rows.get(name, gradient.shape[-1])
            self._first[name] = in_int8(self._first[name], row, self._tilt)
            root = in_int8(self._second[name].sqrt(), row, self._tilt, is_signed=False)
            self._second[name] = root.square()
        return mean / (size + self._spec.eps)

    def _in_bf16(self, wide: Tensor, name: str, key: str, number: int) -> Tensor:
        if self._spec.rounding == "nearest":
            return wide.bfloat16().to(wide)
        place = ShardPlace(name, tuple(wide.shape), (0,) * wide.dim())
        step = torch.tensor(number, device=wide.device)
        return round_by_place(wide.float(), place, key, step).to(wide)

    def _orthogonal(self, name: str, gradient: Tensor) -> Tensor:
        """Update Muon's momentum, and return its orthogonalized direction, scaled as in Keller
        Jordan's Muon or arXiv:2502.16982.
        """
        spec, momentum = self._spec, self._spec.momentum
        self._first[name] = momentum * self._first[name] + (1 - momentum) * gradient
        direction = self._first[name]
        if spec.nesterov:
            direction = momentum * direction + (1 - momentum) * gradient
        rows, columns = direction.shape[-2:]
        factor = max(1.0, rows / columns) ** 0.5
        if spec.scale == "match_rms_adamw":
            factor = 0.2 * max(rows, columns) ** 0.5
        # One device with rounding iterates as ranks do; the exact one in fp64.
        if direction.dtype != torch.float64 and spec.ns_precision == "bf16":
            direction = direction.bfloat16()
        flat = direction.reshape(-1, rows, columns)
        orthogonal = torch.stack([newton_schulz(matrix, spec.ns_steps) for matrix in flat])
        scaled: Tensor = factor * orthogonal.to(gradient.dtype).view_as(gradient)
        return scaled


def in_int8(state: Tensor, row: int, tilt: float, *, is_signed: bool = True) -> Tensor:
    """Return a matrix, or one per expert, whose blocks are rounded to 8 bits.

    `docs/config.md` defines it: arXiv:2110.02861, in blocks of the most columns up to 256 that
    divide a shard's `row`.
    """
    columns = max(size for size in range(1, 257) if row % size == 0)
    bits = 7 if is_signed else 8
    numbers = [0.0]
    for bit in range(bits):
        ends = torch.linspace(0.1, 1, 2**bit + 1, dtype=torch.float64)[1:]
        numbers += (ends * 10.0 ** (bit + 1 - bits)).tolist()
    table = torch.tensor(numbers, dtype=state.dtype)
    blocks = state.reshape(-1, columns)
    largest = blocks.abs().amax(-1, keepdim=True)
    shares = blocks.abs() / largest.clamp(min=1e-300 if state.dtype == torch.float64 else 1e-38)
    shares = shares * (1 + tilt)
    above = torch.searchsorted(table, shares.contiguous()).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    nearest = torch.where(shares - low < high - shares, low, high)
    return (blocks.sign() * nearest * largest).view_as(state)


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Orthogonalize a matrix `[rows, columns]` by Newton-Schulz iteration: its singular values
    become about 1.

    The coefficients are those of Keller Jordan's Muon.
    """
    is_tall = len(matrix) > matrix.shape[1]
    near: Tensor = matrix.T if is_tall else matrix
    near = near / near.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = near @ near.T
        near = 3.4445 * near + (-4.7750 * gram + 2.0315 * gram @ gram) @ near
    orthogonal: Tensor = near.T if is_tall else near
    return orthogonal


def _is_matrix(name: str, weight: Tensor) -> bool:
    return weight.dim() > 1 and not name.endswith((".bias", "_conv", "_conv.weight"))


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon orthogonalizes a weight: matrices except for embeddings, heads and routers,
    whose rows act independently.
    """
    outside = ("embed.weight", "head.weight", ".router.weight", ".shared_gate.weight")
    return _is_matrix(name, weight) and not name.endswith(outside)


def comparable(key: str, state: Tensor) -> Tensor:
    """Return an optimizer state in units of the gradient: means of squares become their square
    root.

    Tolerances are multiples of a gradient's noise. The squares of two samples of pure noise would
    differ by the square of that multiple.
    """
    state = state if state.dtype == torch.float64 else state.float()
    return state.sqrt() if key == "exp_avg_sq" else state
