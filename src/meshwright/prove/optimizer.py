"""The reference's optimizers, as in their papers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.prove.rates import rate_of
from meshwright.spec.training import OptimizerSpec

Tensors = Mapping[str, Tensor]


class Updates:
    """AdamW (arXiv:1711.05101, algorithm 2), SGD with momentum, or Muon; all with AdamW's decay.

    Norms, sinks and biases do not decay, also those of experts.
    """

    def __init__(self, masters: dict[str, Tensor], spec: OptimizerSpec, steps: int) -> None:
        self._masters, self._spec, self._steps = masters, spec, steps
        self._first = {name: torch.zeros_like(master) for name, master in masters.items()}
        self._second = {name: torch.zeros_like(master) for name, master in masters.items()}
        # Those that AdamW does not update.
        self._with_momentum = {
            name
            for name, master in masters.items()
            if spec.name == "sgd" or (spec.name == "muon" and is_hidden_matrix(name, master))
        }

    def state(self) -> dict[str, Tensors]:
        """Return its state, by the names of torch's optimizers, as `comparable` returns it."""
        adaptive = self._masters.keys() - self._with_momentum
        kinds = {
            "exp_avg": (self._first, adaptive),
            "exp_avg_sq": (self._second, adaptive),
            "momentum_buffer": (self._first, self._with_momentum if self._spec.momentum else ()),
        }
        return {
            key: {
                name: comparable(key, tensors[name]).to(torch.float32, copy=True)
                for name in self._masters
                if name in names
            }
            for key, (tensors, names) in kinds.items()
            if names
        }

    def step(self, gradients: Tensors, step: int) -> None:
        """Update the master weights; steps count from 0."""
        spec, rate = self._spec, rate_of(step + 1, self._steps, self._spec)
        for name, master in self._masters.items():
            gradient = gradients[name]
            if _is_matrix(name, master):
                master.mul_(1 - rate * spec.weight_decay)
            if spec.name == "sgd":
                self._first[name] = spec.momentum * self._first[name] + gradient
                master.sub_(rate * self._first[name])
            elif name in self._with_momentum:
                master.sub_(rate * self._orthogonal(name, gradient))
            else:
                master.sub_(rate * self._adaptive(name, gradient, step + 1))

    def _adaptive(self, name: str, gradient: Tensor, number: int) -> Tensor:
        """Return AdamW's direction in its update of a number, from 1."""
        beta1, beta2 = self._spec.betas
        self._first[name] = beta1 * self._first[name] + (1 - beta1) * gradient
        self._second[name] = beta2 * self._second[name] + (1 - beta2) * gradient**2
        mean = self._first[name] / (1 - beta1**number)
        size = (self._second[name] / (1 - beta2**number)).sqrt()
        return mean / (size + self._spec.eps)

    def _orthogonal(self, name: str, gradient: Tensor) -> Tensor:
        """Return Muon's direction: Keller Jordan's, with the factors of arXiv:2502.16982."""
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


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Return a matrix with its singular values near 1, by the quintic of Keller Jordan's Muon."""
    is_tall = len(matrix) > matrix.shape[1]
    near: Tensor = matrix.T if is_tall else matrix
    near = near / near.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = near @ near.T
        near = 3.4445 * near + (-4.7750 * gram + 2.0315 * gram @ gram) @ near
    orthogonal: Tensor = near.T if is_tall else near
    return orthogonal


def _is_matrix(name: str, weight: Tensor) -> bool:
    return weight.dim() > 1 and not name.endswith(".bias")


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon orthogonalizes a weight: no embedding, head or router, whose rows act alone."""
    outside = ("embed.weight", "head.weight", ".router.weight", ".shared_gate.weight")
    return _is_matrix(name, weight) and not name.endswith(outside)


def comparable(key: str, state: Tensor) -> Tensor:
    """Return optimizer state on the scale of a gradient: the root of means of squares.

    Tolerances are factors of a gradient's noise. If a gradient is nothing but noise, the squares of
    two samples differ by the square of such a factor.
    """
    return state.sqrt() if key == "exp_avg_sq" else state
