"""Builds the optimizer with its parameter groups, and steps it with loss scale and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.data_parallel.matrices import WholeMatrices
from meshwright.program.optimizer import Settings, rule_of, settings_of
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import Part
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizers import BUILDERS, ParameterGroup


def build_optimizer(
    parameters: Sequence[nn.Parameter],
    parts: Sequence[Part],
    spec: OptimizerSpec,
    matrices: WholeMatrices | None = None,
) -> torch.optim.Optimizer:
    """Return the config's optimizer over parameters, or shards of them, that `parts` describes.

    Weight decay is decoupled (arXiv:1711.05101). `matrices` gathers whole matrices of shards; None:
    parameters are whole. Raises `ValueError` for shards of matrices that the optimizer needs whole.
    """
    pairs = list(zip(parameters, parts, strict=True))
    if matrices is None:
        _check_whole(pairs, spec)
    groups = []
    for rule in OPTIMIZERS[spec.name].rules:
        by_settings: dict[Settings, list[nn.Parameter]] = {}
        for parameter, part in pairs:
            if rule_of(spec, part) is rule:
                by_settings.setdefault(settings_of(spec, part), []).append(parameter)
        groups += [ParameterGroup(rule, *entry) for entry in by_settings.items()]
    # A pipeline rank may have nothing to train: adapters on experts, and only dense layers.
    if not groups:
        rule = OPTIMIZERS[spec.name].rules[0]
        groups = [ParameterGroup(rule, Settings(1.0, spec.weight_decay), [])]
    optimizer = BUILDERS[spec.name](groups, spec, matrices or WholeMatrices())
    set_learning_rate(optimizer, spec.lr)
    return optimizer


def _check_whole(pairs: Sequence[tuple[nn.Parameter, Part]], spec: OptimizerSpec) -> None:
    for parameter, part in pairs:
        if rule_of(spec, part).needs_matrix and tuple(parameter.shape) != part.shape:
            raise ValueError(
                f"optimizer.name = {spec.name} needs the whole of {part.name}, {part.shape}, but "
                f"has a shard of it, {tuple(parameter.shape)}: give `Shards.matrices`"
            )


def step_scaled(
    optimizer: torch.optim.Optimizer, norm: Tensor, loss_scale: float, clip_norm: float
) -> None:
    """Step the optimizer with gradients unscaled and clipped to `clip_norm` (0: no clipping).

    `norm` fp64 `[]` is that of the unscaled gradients; if it is not finite, nothing changes. Both
    facts are passed on as `torch.amp.GradScaler` does, in tensors, so the host does not wait.
    """
    if parameters := optimizer.param_groups[0]["params"]:
        norm = norm.to(parameters[0].device)  # the host's, where shards are there
    divisor = torch.full_like(norm, loss_scale)
    if clip_norm > 0:
        divisor *= (norm / clip_norm).clamp(min=1)
    scaled: Any = optimizer
    scaled.grad_scale, scaled.found_inf = divisor.float(), (~torch.isfinite(norm)).float()
    optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each group's learning rate to `lr` times the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
