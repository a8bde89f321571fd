"""What a compiled block leaves out, since no graph can have it.

A gradient that waits for its time: a compiled backward returns all of its together. A router, which
notes in its backward whom tokens met, by a scale that is another in each microbatch. And experts
where the host has to know how many tokens each gets: to send them to other ranks, or to multiply
them group by group where no kernel takes all groups at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.models.blocks import Block
from meshwright.models.experts import ExpertMLP
from meshwright.program.lower import Program

# Without types in torch 2.13.
disable: Any = torch.compiler.disable


def set_apart(block: Block, program: Program, *, splits: bool) -> nn.Module:
    """Have what a graph can't have run outside of graphs; returns the module to compile.

    That is the block. Where it recomputes and something was set apart, it is its attention:
    what recomputes is compiled as a whole or not at all. `splits` as in `Deferral`, whose linear
    layers stay outside by themselves.
    """
    outside = splits
    if isinstance(block.mlp, ExpertMLP):
        outside = True
        _set_experts_apart(block.mlp, program, splits=splits)
    return block.attn if outside and program.layout.recompute != "none" else block


def _set_experts_apart(mlp: ExpertMLP, program: Program, *, splits: bool) -> None:
    apart: list[nn.Module] = [mlp.router]
    has_kernel = not program.target.on_cpu and program.train.precision == "bf16"
    if program.layout.ep > 1:
        begin = mlp.begin
        # What ends it is made anew each time.
        mlp.begin = disable(lambda *of: disable(begin(*of)))  # type: ignore[method-assign]
    elif splits or not has_kernel:
        apart.append(mlp.experts)
    for module in apart:
        module.forward = disable(module.forward)
