"""What the optimizer keeps of each parameter, as the program says it."""

from __future__ import annotations

from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizers import OPTIMIZERS, UpdateRule
from meshwright.spec.parts import Part, parts
from meshwright.spec.training import OptimizerSpec

_FP32 = 4


def rule_of(spec: OptimizerSpec, part: Part) -> UpdateRule:
    """Return how a config's optimizer updates a parameter."""
    return OPTIMIZERS[spec.name].rule_of(part)


def needs_matrices(spec: OptimizerSpec) -> bool:
    """Whether a config's optimizer updates some parameters by whole matrices."""
    return any(rule.needs_matrix for rule in OPTIMIZERS[spec.name].rules)


def saved_bytes(model: ModelSpec, spec: OptimizerSpec) -> int:
    """Return the bytes of a saved step: all weights in fp32, and the states of those trained.

    What is kept once for each parameter goes into the manifest.
    """
    weights = sum(part.numel for part in parts(model)) * _FP32
    states = (
        part.numel * rule_of(spec, part).element_bytes(spec)
        for part in parts(model)
        if part.trained
    )
    return weights + sum(states)
