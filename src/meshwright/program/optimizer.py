"""The states and the update rule that the optimizer has for each parameter."""

from __future__ import annotations

from typing import Final, NamedTuple

from meshwright.spec.groups import group_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizers import DTYPE_BYTES, OPTIMIZERS, UpdateRule
from meshwright.spec.optimizers.base import HASH_WORKSPACE, HASHED_BYTES
from meshwright.spec.parts import Part, parts
from meshwright.spec.training import OptimizerSpec, TrainSpec

_WIDE: Final = DTYPE_BYTES["fp32"]


def rule_of(spec: OptimizerSpec, part: Part) -> UpdateRule:
    """Return the rule by which a config's optimizer updates a parameter."""
    return OPTIMIZERS[spec.name].rule_of(part)


class Settings(NamedTuple):
    """The factor of the learning rate of a parameter, and its weight decay."""

    lr_scale: float
    weight_decay: float


def settings_of(spec: OptimizerSpec, part: Part) -> Settings:
    """Return a parameter's learning-rate factor and weight decay, from the first config group that
    it matches.

    Without a decay of the group, matrices have that of the config; biases, norms and sinks have
    none. Biases of experts are not matrices but a vector per expert.
    """
    group = group_of(spec.groups, part.name)
    decay = spec.weight_decay if part.is_matrix else 0.0
    if group is None:
        return Settings(1.0, decay)
    return Settings(group.lr_scale, decay if group.weight_decay is None else group.weight_decay)


def needs_matrices(spec: OptimizerSpec) -> bool:
    """Whether a config's optimizer updates some parameters as whole matrices, such as Muon."""
    return any(rule.needs_matrix for rule in OPTIMIZERS[spec.name].rules)


def moved_bytes(rule: UpdateRule, spec: OptimizerSpec, train: TrainSpec) -> int:
    """Return the bytes that an update reads and writes for each element of a shard.

    Weights and gradients in bf16 are widened to fp32 for it, and the weights narrowed again.
    """
    widened = (train.weight_dtype != "fp32") * 2 + (train.gradient_dtype != "fp32")
    hashed = (train.weight_dtype != "fp32") * (spec.rounding == "stochastic")
    cast = DTYPE_BYTES["bf16"] + _WIDE
    return rule.moved(spec) + cast * widened + HASHED_BYTES * hashed


def workspace_bytes(rule: UpdateRule, spec: OptimizerSpec, train: TrainSpec) -> int:
    """Return the temporary bytes of an update per element of a piece."""
    # An update of matrices is done with the gradient before it widens weights.
    has_wide_gradient = train.gradient_dtype != "fp32" and not rule.needs_matrix
    weight_copy = _WIDE * (train.weight_dtype != "fp32")
    # A gradient's copy is freed before the updated copies are rounded.
    hash_bytes = HASH_WORKSPACE * (spec.rounding == "stochastic")
    added = max(_WIDE * has_wide_gradient, hash_bytes, rule.rounding(spec))
    return rule.workspace(spec) + weight_copy + added


def saved_bytes(model: ModelSpec, train: TrainSpec, spec: OptimizerSpec) -> int:
    """Return the bytes of a saved step: all weights, and the states of those trained.

    Weights are in fp32, unless they have no masters. What is kept once for each parameter goes into
    the manifest. Scales of states in int8 are those of whole rows.
    """
    weights = sum(part.numel for part in parts(model)) * DTYPE_BYTES[train.weight_dtype]
    states = (
        rule.state_bytes(spec, part.numel, part.shape[-1]) - rule.number_bytes(spec)
        for part in parts(model)
        if part.trained and (rule := rule_of(spec, part))
    )
    return weights + sum(states)
