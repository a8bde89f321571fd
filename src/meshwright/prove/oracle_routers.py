"""What the reference model's routers return, and their losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.spec.model import ModelSpec
from meshwright.spec.training import TrainSpec


class Routed(NamedTuple):
    """A router's result: its scores, and each token's experts, `[batch, seq, experts]`.

    `name` is that of its mixture; `is_data` `[batch, seq]` is false for padding.
    """

    name: str
    scores: Tensor
    picked: Tensor
    is_data: Tensor


def router_losses(
    spec: ModelSpec, train: TrainSpec, scores: Tensor, is_data: Tensor | None = None
) -> Tensor:
    """Return the weighted losses of a layer's router, summed over sequences without their padding.

    scores fp32 or fp64 `[batch, seq, experts]`, is_data bool `[batch, seq]`. arXiv:2412.19437,
    equations 17 to 20, also with softmax; arXiv:2202.08906, equation 5.
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
