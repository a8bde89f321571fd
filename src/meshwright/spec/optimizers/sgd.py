"""Stochastic gradient descent with or without momentum, and with decoupled weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.spec.optimizers.base import Optimizer, State, UpdateRule, counted_if_rounded

if TYPE_CHECKING:
    from meshwright.spec.training import OptimizerSpec

_MOMENTUM = (State("momentum_buffer"),)
# Passes over fp32 tensors that read or write one: dividing gradients by the loss scale and
# clearing those of a skipped step take 2 each, the decay 2, the update 3.
_PASSES = 9
# Scaling the momentum 2, and adding the gradient 3.
_MOMENTUM_PASSES = 5


def _states(spec: OptimizerSpec) -> tuple[State, ...]:
    return (*(_MOMENTUM if spec.momentum else ()), *counted_if_rounded(spec))


def _moved(spec: OptimizerSpec) -> int:
    return 4 * (_PASSES + _MOMENTUM_PASSES * (spec.momentum > 0))


SGD = Optimizer(
    "sgd",
    "SGD",
    (
        UpdateRule(
            "sgd",
            "SGD's momentum",
            states=_states,
            moved=_moved,
        ),
    ),
    keys=frozenset({"momentum", "rounding"}),
    names={"deepspeed": ("SGD",), "megatron": ("sgd",), "hf": ("sgd",), "prime_rl": ("sgd",)},
)
