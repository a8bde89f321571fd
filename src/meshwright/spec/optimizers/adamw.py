"""AdamW, arXiv:1711.05101."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.spec.optimizers.base import HASHED_BYTES, Optimizer, State, UpdateRule

if TYPE_CHECKING:
    from meshwright.spec.training import OptimizerSpec

# One fused pass reads gradient, moments and weight in fp32, and writes all but the gradient.
_FUSED = 28
# What widening both moments to fp32 and narrowing them again reads and writes beside it.
_WIDENED = 24


def _states(spec: OptimizerSpec) -> tuple[State, ...]:
    """Return the states of AdamW: two moments per element, and the number of updates."""
    moments = (State("exp_avg", spec.state_dtype), State("exp_avg_sq", spec.state_dtype))
    return (*moments, State("step", is_number=True))


def _is_narrow(spec: OptimizerSpec) -> bool:
    return spec.state_dtype != "fp32"


ADAMW_RULE = UpdateRule(
    "adamw",
    "Adam's moments",
    states=_states,
    moved=lambda spec: (
        _FUSED
        + _WIDENED * _is_narrow(spec)
        + 2 * HASHED_BYTES * (_is_narrow(spec) and spec.rounding == "stochastic")
    ),
    workspace=lambda spec: 8 * _is_narrow(spec),
)
ADAMW = Optimizer(
    "adamw",
    "AdamW",
    (ADAMW_RULE,),
    keys=frozenset({"betas", "eps", "state_dtype", "rounding"}),
    names={
        "deepspeed": ("Adam", "AdamW"),
        "megatron": ("adam",),
        "hf": (
            *("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
            "paged_adamw_32bit",
        ),
        "torchtitan": ("AdamW",),
        "prime_rl": ("adamw",),
    },
)
