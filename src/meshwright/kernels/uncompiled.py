"""What stays outside of a compiled block, because no graph can contain it.

Deferred gradients: a compiled backward returns all of its gradients together. Routers: their
backward counts tokens, with a scale that changes in each microbatch. Experts, if the host has to
know how many tokens each receives: to send them to other ranks, or to multiply them group by group
where no kernel multiplies all groups at once. Recurrences over cp, whose written backwards gather
from other ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.models.blocks import Block, Recurrence
from meshwright.models.experts import ExpertMLP
from meshwright.models.grouped import ALIGNED
from meshwright.program.lower import Program

# Without types in torch 2.13.
disable: Any = torch.compiler.disable


def leave_uncompiled(block: Block, program: Program, *, splits: bool) -> nn.Module:
    """Exclude code that a graph can't contain from compilation, and return the module to compile.

    That is the block. If it recomputes and something was excluded, it is only its attention,
    because a recomputed region is compiled as a whole or not at all. `splits` is as in `Deferral`,
    whose linear layers exclude themselves.
    """
    outside = splits
    if isinstance(block.attn, Recurrence) and program.layout.cp > 1:
        outside = True
        block.attn.convolve = disable(block.attn.convolve)
        block.attn.recur = disable(block.attn.recur)
    if isinstance(block.mlp, ExpertMLP):
        outside = True
        _leave_experts_uncompiled(block.mlp, program, splits=splits)
    return block.attn if outside and program.layout.recompute != "none" else block


def _leave_experts_uncompiled(mlp: ExpertMLP, program: Program, *, splits: bool) -> None:
    apart: list[nn.Module] = [mlp.router]
    has_kernel = program.target.traits.has_grouped_matmul and program.train.precision == "bf16"
    lora = program.model.lora
    has_kernel &= lora is None or not mlp.experts.adapters or lora.rank % ALIGNED == 0
    if program.layout.ep > 1:
        begin = mlp.begin
        # What ends it is made anew each time.
        mlp.begin = disable(lambda *arguments: disable(begin(*arguments)))  # type: ignore[method-assign]
    elif splits or not has_kernel:
        apart.append(mlp.experts)
    for module in apart:
        module.forward = disable(module.forward)
