"""The results of the reference model's routers, and the router losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.spec.model import ModelSpec
from meshwright.spec.training import TrainSpec


class Routed(NamedTuple):
    """The result of a router: its scores, and the mask of each token's selected experts, both
    `[batch, seq, experts]`.

    `name` is the module with the experts; `is_data` `[batch, seq]` is false for padding.
    """

    name: str
    scores: Tensor
    picked: Tensor
    is_data: Tensor


def router_losses(
    spec: ModelSpec, train: TrainSpec, scores: Tensor, is_data: Tensor | None = None
) -> Tensor:
    """Return the weighted load-balancing loss and z-loss of a router, summed over sequences,
    without padding.

    scores fp32 or fp64 `[batch, seq, experts]`, is_data bool `[batch, seq]`. Load balancing:
    arXiv:2412.19437, equations 17 to 20, also for softmax scores. z-loss: arXiv:2202.08906,
    equation 5.
    """
    if is_data is not None:
        rows = [row[mask][None] for row, mask in zip(scores, is_data, strict=True)]
        return torch.stack([router_losses(spec, train, row) for row in rows]).sum()
    seq = scores.shape[1]
    probabilities = scores.softmax(-1)
    if spec.router_scores == "sigmoid":
        probabilities = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
    met = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(spec.top_k).indices, 1.0)
    often = met.sum(1) * (spec.experts / (spec.top_k * seq))
    even = (often.detach() * probabilities.mean(1)).sum()
    small = scores.logsumexp(-1).square().mean(1).sum()
    return train.router_aux_loss * even + train.router_z_loss * small
