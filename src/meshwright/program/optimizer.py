"""The states and the update rule that the optimizer has for each parameter."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.groups import group_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizers import OPTIMIZERS, UpdateRule
from meshwright.spec.parts import Part, parts
from meshwright.spec.training import OptimizerSpec

_FP32 = 4


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


def saved_bytes(model: ModelSpec, spec: OptimizerSpec) -> int:
    """Return the bytes of a saved checkpoint: all weights in fp32, and the optimizer states of the
    trained ones.

    Numbers kept once per parameter are in the manifest and not counted.
    """
    weights = sum(part.numel for part in parts(model)) * _FP32
    states = (
        part.numel * rule_of(spec, part).element_bytes(spec)
        for part in parts(model)
        if part.trained
    )
    return weights + sum(states)
