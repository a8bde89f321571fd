"""The routers of a rank's stages: their losses and corrections, and token counts by expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.groups import Groups, Link
from meshwright.models import Transformer
from meshwright.models.experts import ExpertMLP
from meshwright.models.routers import Router, SigmoidRouter
from meshwright.program.lower import Program
from meshwright.program.pieces import pieces_of, shared_over

Routers = dict[int, Router]


def routers(model: Transformer) -> Routers:
    """Return the routers of a model or a stage, by layer number."""
    return {
        int(name): block.mlp.router
        for name, block in zip(model.layers, model.blocks, strict=True)
        if isinstance(block.mlp, ExpertMLP)
    }


def balance_routers(model: Transformer, program: Program, groups: Groups) -> None:
    """Configure a stage's routers as training requires."""
    train, layout = program.train, program.layout
    shared = [getattr(groups, axis) for axis in shared_over(layout)]
    for router in routers(model).values():
        balance = router.balance
        balance.aux, balance.z = train.router_aux_loss, train.router_z_loss
        balance.rate = train.router_bias_rate
        balance.capacity = train.expert_capacity
        balance.is_forced = train.routing == "balanced"
        balance.ranks, balance.summed = layout.cp * layout.folds, partial(_summed, shared)
        balance.pieces = pieces_of(layout, groups.cp.rank, groups.tp.rank)


def prepare_routers(
    by_layer: Routers, program: Program, groups: Groups, scale: float, device: torch.device
) -> None:
    """Prepare a batch's backward: `scale` is 1 / its sequences, times the loss scale.

    Unless the layout folds, all tp ranks see the same tokens: only one of them adds these gradients
    and reports counts.
    """
    experts = program.model.experts
    counts = groups.tp.rank == 0 or program.layout.folds > 1
    for router in by_layer.values():
        balance = router.balance
        if balance.rate:
            balance.lately = torch.zeros(experts, dtype=torch.int64, device=device)
        balance.scale = scale if counts else 0.0
        if counts and balance.met is None:
            balance.met = torch.zeros(experts, dtype=torch.int64, device=device)
            balance.losses = torch.zeros(2, dtype=torch.float32, device=device)
            if balance.capacity is not None:
                balance.dropped = torch.zeros((), dtype=torch.int64, device=device)


def sum_counts(by_layer: Routers, program: Program, groups: Groups) -> None:
    """Sum a step's token counts over the ranks with different tokens; a collective."""
    counts = [
        router.balance.lately for router in by_layer.values() if router.balance.lately is not None
    ]
    links = [groups.tp] if program.layout.folds > 1 else []
    links += [groups.data] if groups.data.size > 1 else []
    if links and counts:
        together = _summed(links, torch.stack(counts))
        for count, total in zip(counts, together, strict=True):
            count.copy_(total)


def correct_routers(by_layer: Routers, norm: Tensor) -> None:
    """Update the routers' corrections after a step, unless its gradient is not finite."""
    for router in by_layer.values():
        if router.balance.rate and isinstance(router, SigmoidRouter):
            router.correct(torch.isfinite(norm).to(router.correction))


def take_counts(
    by_layer: Routers, layers: Mapping[int, int], experts: int, device: torch.device
) -> Tensor:
    """Return this rank's token counts and losses since the last call, in fp64 on its device.

    `layers` are the indices of the model's layers with experts. The last two numbers are the
    losses; before them are counts `[layers, experts]` and dropped pairs `[layers]`, in order. All
    are sums over ranks' shares. The host does not wait.
    """
    size = len(layers) * (experts + 1) + 2
    numbers = torch.zeros(size, dtype=torch.float64, device=device)
    for layer, router in by_layer.items():
        balance = router.balance
        if balance.met is None or balance.losses is None:
            continue
        start = layers[layer] * experts
        numbers[start : start + experts] = balance.met
        numbers[-2:] += balance.losses
        balance.met.zero_()
        balance.losses.zero_()
        if balance.dropped is not None:
            numbers[len(layers) * experts + layers[layer]] = balance.dropped
            balance.dropped.zero_()
    return numbers


def _summed(links: Sequence[Link], counts: Tensor) -> Tensor:
    """Return the sum of counts over the ranks of some links, one after the other."""
    for link in links:
        dist.all_reduce(counts, group=link.required)
    return counts
