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
    """Configure a stage's routers: auxiliary losses, capacity, correction, shared sequences."""
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
    """Set the loss scale and the counters of routers before a batch's backward.

    `scale` is the loss scale divided by the global number of sequences. Unless the layout folds,
    all tp ranks see the same tokens: only one of them adds these gradients and counts.
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
    """All-reduce a step's token counts per expert over the ranks with different tokens."""
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
    """Update the routers' corrections after a step, unless its gradient `norm` is not finite."""
    for router in by_layer.values():
        if router.balance.rate and isinstance(router, SigmoidRouter):
            router.correct(torch.isfinite(norm).to(router.correction))


def take_counts(
    by_layer: Routers, layers: Mapping[int, int], experts: int, device: torch.device
) -> Tensor:
    """Return this rank's token counts and router losses since the last call, and reset them.

    `layers` maps the number of each layer with experts to its index. The result is fp64 on the
    device: counts `[layers, experts]`, dropped pairs `[layers]`, then the two losses, flattened.
    The host does not wait.
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
    """All-reduce counts in place over several links, one after the other."""
    for link in links:
        dist.all_reduce(counts, group=link.required)
    return counts
