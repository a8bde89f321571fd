"""The routers of a rank's stages: what training asks of them, and which experts tokens met."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.execute.groups import Groups, Link
from meshwright.models import Transformer
from meshwright.models.balance import Balance
from meshwright.models.experts import ExpertMLP
from meshwright.program.lower import Program

Balances = dict[int, Balance]


def balances(model: Transformer) -> Balances:
    """Return what is asked of the routers of a model or a stage, by the number of their layer."""
    return {
        int(name): block.mlp.router.balance
        for name, block in zip(model.layers, model.blocks, strict=True)
        if isinstance(block.mlp, ExpertMLP)
    }


def balance_routers(model: Transformer, program: Program, groups: Groups) -> None:
    """Have a stage's routers do what training asks of them."""
    train = program.train
    for one in balances(model).values():
        one.aux, one.z = train.router_aux_loss, train.router_z_loss
        one.is_forced = train.routing == "balanced"
        if groups.cp.size > 1:
            one.ranks, one.summed = groups.cp.size, partial(_summed, groups.cp)


def prepare_routers(
    found: Balances, groups: Groups, scale: float, device: torch.device, experts: int
) -> None:
    """Prepare the backward of a batch: `scale` is one over its sequences, times the loss scale.

    All ranks of tp see the same tokens: one of them adds the gradients and counts.
    """
    counts = groups.tp.rank == 0
    for one in found.values():
        one.scale = scale if counts else 0.0
        if counts and one.met is None:
            one.met = torch.zeros(experts, dtype=torch.int64, device=device)
            one.losses = torch.zeros(2, dtype=torch.float32, device=device)


def take_counts(found: Balances, layers: Mapping[int, int], experts: int) -> list[float]:
    """Return this rank's tokens by layer and expert and its losses since the last call; waits.

    `layers` are the places of the model's layers with experts. The last two numbers are the
    losses, the others `[layers, experts]` in order. All are sums over ranks' shares.
    """
    numbers = [0.0] * (len(layers) * experts + 2)
    for layer, one in found.items():
        if one.met is None or one.losses is None:
            continue
        at = layers[layer] * experts
        numbers[at : at + experts] = map(float, one.met.tolist())
        for which, loss in enumerate(one.losses.tolist()):
            numbers[-2 + which] += loss
        one.met.zero_()
        one.losses.zero_()
    return numbers


def _summed(link: Link, counts: Tensor) -> Tensor:
    """Return the sum of counts over the ranks of a link."""
    dist.all_reduce(counts, group=link.required)
    return counts
