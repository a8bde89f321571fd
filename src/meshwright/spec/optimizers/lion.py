"""Lion: updates by the sign of a momentum. arXiv:2302.06675, algorithm 2."""

from __future__ import annotations

from meshwright.spec.optimizers.base import Optimizer, State, UpdateRule, counted_if_rounded

_STATES = (State("exp_avg"),)
# Passes over fp32 tensors that read or write one: dividing gradients by the loss scale, clearing
# those of a skipped step, the sign and the decay take 2 each, the direction, the update and the
# momentum 3 each.
_PASSES = 17

LION = Optimizer(
    "lion",
    "Lion",
    (
        UpdateRule(
            "lion",
            "Lion's momentum",
            states=lambda spec: (*_STATES, *counted_if_rounded(spec)),
            moved=lambda spec: 4 * _PASSES,
            workspace=lambda spec: 4,
        ),
    ),
    keys=frozenset({"betas", "rounding"}),
    defaults={"betas": (0.9, 0.99)},
    names={"deepspeed": ("Lion",), "hf": ("lion_32bit", "paged_lion_32bit")},
)
