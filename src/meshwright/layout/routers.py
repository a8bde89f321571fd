"""The rule on what a config may ask of routers."""

from __future__ import annotations

from operator import attrgetter

from meshwright.layout.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import TrainSpec

# What a config may ask of routers, and the kinds of scores that it works with.
ROUTERS = {
    "router_aux_loss": ("softmax", "sigmoid"),
    "router_z_loss": ("softmax",),
    "router_bias_rate": ("sigmoid",),
    "expert_capacity": ("softmax", "sigmoid"),
    "routing": ("softmax", "sigmoid"),
    "imbalance": ("softmax", "sigmoid"),
}
_ASKED = attrgetter("router_aux_loss", "router_z_loss", "router_bias_rate", "expert_capacity")


def router_rule(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    """Return the rule on routers that a config breaks, or None."""
    if not any(_ASKED(train)) and train.routing == "learned" and train.imbalance in (None, 1):
        return None  # soon: the planner asks for thousands of layouts
    for key, scores in ROUTERS.items():
        value = getattr(train, key)
        if value in (None, 0, "learned") or (key == "imbalance" and value == 1):
            continue
        if not model.experts:
            return f"train.{key} = {value} is of models with experts, but model.experts = 0"
        if model.router_scores not in scores:
            return (
                f"train.{key} = {value} is of routers with a {scores[0]}, but "
                f"model.router_scores = {model.router_scores}"
            )
    if train.routing == "balanced" and (train.imbalance or 1) > 1:
        return (
            f'train.routing = "{train.routing}" gives every rank as many tokens, but '
            f"train.imbalance = {train.imbalance}"
        )
    if train.router_bias_rate and model.lora is not None:
        return (
            f"train.router_bias_rate = {train.router_bias_rate} changes a buffer, which adapters "
            f"do not store, but lora.rank = {model.lora.rank}"
        )
    return None
