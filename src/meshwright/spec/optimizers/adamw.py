"""AdamW, arXiv:1711.05101; its moments in 8 bits, arXiv:2110.02861."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from meshwright.spec.optimizers.base import (
    HASHED_BYTES,
    Optimizer,
    State,
    StateDtype,
    UpdateRule,
)

if TYPE_CHECKING:
    from meshwright.spec.parts import Part
    from meshwright.spec.training import OptimizerSpec

# One fused pass reads gradient, moments and weight in fp32, and writes all but the gradient.
_FUSED: Final = 28
# What an update reads and writes beside it, and the copies that it makes, in bytes per element. In
# bf16: both moments widened and narrowed. In int8, for each moment: codes to indices 5, looked up
# 8, scaled 8; the block's largest 4, scaled 8; upper halves of bits 16, looked up 8, lower halves
# 8, added 12, shifted 8, to codes 5; of the first, the block's smallest 4 and bits in order 28; of
# the second, squares and roots 16. The copies are both moments; indices and what they look up are
# of one at a time.
_MOVED: Final[dict[StateDtype, int]] = {"fp32": 0, "bf16": 24, "int8": 228}
_WORKSPACE: Final[dict[StateDtype, int]] = {"fp32": 0, "bf16": 8, "int8": 8}
_INDEX_BYTES: Final = 8


def _rule(dtype_of: Callable[[OptimizerSpec], StateDtype]) -> UpdateRule:
    """Return AdamW's rule for parameters whose moments have a dtype."""

    def states(spec: OptimizerSpec) -> tuple[State, ...]:
        dtype = dtype_of(spec)
        return (State("exp_avg", dtype), State("exp_avg_sq", dtype), State("step", is_number=True))

    def moved(spec: OptimizerSpec) -> int:
        dtype = dtype_of(spec)
        is_hashed = dtype == "bf16" and spec.rounding == "stochastic"
        return _FUSED + _MOVED[dtype] + 2 * HASHED_BYTES * is_hashed

    return UpdateRule(
        "adamw",
        "Adam's moments",
        states=states,
        moved=moved,
        workspace=lambda spec: _WORKSPACE[dtype_of(spec)],
        rounding=lambda spec: _INDEX_BYTES * (dtype_of(spec) == "int8"),
    )


def _dtype_of_vectors(spec: OptimizerSpec) -> StateDtype:
    # Few elements, of which each norm's or bias's counts, and ZeRO cuts their only row.
    return "fp32" if spec.state_dtype == "int8" else spec.state_dtype


def _rule_number(part: Part) -> int:
    return 0 if part.is_matrix else 1


ADAMW_RULE = _rule(lambda spec: spec.state_dtype)
ADAMW = Optimizer(
    "adamw",
    "AdamW",
    (ADAMW_RULE, _rule(_dtype_of_vectors)),
    rule_number=_rule_number,
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
