"""AdamW, arXiv:1711.05101."""

from __future__ import annotations

from meshwright.spec.optimizers.base import Optimizer, State, UpdateRule

# Two averages of each element, and the number of updates.
_STATES = (State("exp_avg"), State("exp_avg_sq"), State("step", is_number=True))

ADAMW_RULE = UpdateRule(
    "adamw",
    "Adam's moments",
    states=lambda spec: _STATES,
    # One fused pass reads gradient, moments and weight in fp32, and writes all but the gradient.
    moved=lambda spec: 28,
)
ADAMW = Optimizer(
    "adamw",
    "AdamW",
    (ADAMW_RULE,),
    keys=frozenset({"betas", "eps"}),
    names={
        "deepspeed": ("Adam", "AdamW"),
        "megatron": ("adam",),
        "hf": ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
        "torchtitan": ("AdamW",),
        "prime_rl": ("adamw",),
    },
)
