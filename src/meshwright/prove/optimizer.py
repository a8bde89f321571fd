"""The reference's optimizers, as in their papers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.prove.rates import rate_of
from meshwright.spec.training import OptimizerSpec

Tensors = Mapping[str, Tensor]


class Updates:
    """AdamW (arXiv:1711.05101, algorithm 2), or SGD with momentum and the same decay.

    Norms, sinks and biases do not decay, also those of experts.
    """

    def __init__(self, masters: dict[str, Tensor], spec: OptimizerSpec, steps: int) -> None:
        self._masters, self._spec, self._steps = masters, spec, steps
        self._first = {name: torch.zeros_like(one) for name, one in masters.items()}
        self._second = {name: torch.zeros_like(one) for name, one in masters.items()}

    def state(self) -> dict[str, Tensors]:
        """Return its state, by the names of torch's optimizers, as `comparable` returns it."""
        found = {"exp_avg": self._first, "exp_avg_sq": self._second}
        if self._spec.name == "sgd":  # without momentum, it has no state
            found = {"momentum_buffer": self._first} if self._spec.momentum else {}
        return {
            key: {
                name: comparable(key, one).to(torch.float32, copy=True) for name, one in of.items()
            }
            for key, of in found.items()
        }

    def step(self, gradients: Tensors, step: int) -> None:
        """Update the master weights; steps count from 0."""
        spec, rate = self._spec, rate_of(step + 1, self._steps, self._spec)
        for name, master in self._masters.items():
            gradient = gradients[name]
            if master.dim() > 1 and not name.endswith(".bias"):
                master.mul_(1 - rate * spec.weight_decay)
            if spec.name == "sgd":
                self._first[name] = spec.momentum * self._first[name] + gradient
                master.sub_(rate * self._first[name])
                continue
            one, two = spec.betas
            self._first[name] = one * self._first[name] + (1 - one) * gradient
            self._second[name] = two * self._second[name] + (1 - two) * gradient**2
            mean = self._first[name] / (1 - one ** (step + 1))
            size = (self._second[name] / (1 - two ** (step + 1))).sqrt()
            master.sub_(rate * mean / (size + spec.eps))


def comparable(key: str, state: Tensor) -> Tensor:
    """Return optimizer state on the scale of a gradient: the root of means of squares.

    Tolerances are factors of a gradient's noise. If a gradient is nothing but noise, the squares of
    two samples differ by the square of such a factor.
    """
    return state.sqrt() if key == "exp_avg_sq" else state
