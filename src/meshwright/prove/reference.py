"""One device: the model computed by plain PyTorch, without any of the engine's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from meshwright.data.sampler import IGNORE
from meshwright.execute.batch import Batch
from meshwright.execute.data import DTYPES
from meshwright.models import build_model, init_model
from meshwright.models.dropout import row_keys
from meshwright.prove.case import Case


@dataclass(frozen=True)
class Reference:
    """What one device computes over some SGD steps; tensors by parameter name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def make_batch(case: Case, step: int) -> Batch:
    """Return the global batch of a step: random tokens, rows with very uneven numbers of targets.

    Where the case is packed, rows hold several documents of random lengths.
    """
    generator = torch.Generator().manual_seed(1000 * case.train.seed + step)
    rows, seq, vocab = case.train.batch, case.train.seq_len, case.model.vocab_size
    tokens = torch.randint(0, vocab, (rows, seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(rows):  # a mean of means would be wrong
        targets[row, : row * seq // (2 * rows)] = IGNORE
    segments = None
    if case.packed:
        starts = torch.rand(rows, seq, generator=generator) < 4 / seq
        segments = starts.cumsum(1).to(torch.int32)
        last = torch.ones(rows, 1, dtype=torch.bool)
        targets[torch.cat((starts[:, 1:], last), 1)] = IGNORE
    keys = None
    if case.model.dropout:
        keys = row_keys(case.train.seed, step, range(rows))
    return Batch(tokens[:, :-1].contiguous(), targets, segments, keys)


def run_reference(case: Case, batches: Sequence[Batch]) -> Reference:
    """Return what one device computes, a step for each global batch; gradients of the first."""
    model = build_model(case.model, "cpu", case.train.seq_len)
    init_model(model, case.model, case.train.seed)
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        loss = _mean_loss(model, batch, case)
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(loss * case.loss_scale, parameters)
        found = tuple(gradient / case.loss_scale for gradient in found)
        norm = torch.stack([g.double().norm() for g in found]).norm()
        losses.append(loss.item())
        norms.append(norm.item())
        if step == 0:
            gradients = {name: g.float() for name, g in zip(names, found, strict=True)}
        _descend(parameters, found, case, norm.item())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Reference(tuple(losses), tuple(norms), gradients, weights)


def _mean_loss(model: torch.nn.Module, batch: Batch, case: Case) -> Tensor:
    """Return the mean cross-entropy, with products in the precision of the case."""
    dtype = DTYPES[case.train.precision]
    cast = {name: p.to(dtype) for name, p in model.named_parameters()}
    logits = functional_call(
        model, cast, (batch.inputs,), {"segments": batch.segments, "keys": batch.keys}
    )
    return F.cross_entropy(
        logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORE
    )


@torch.no_grad()
def _descend(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], case: Case, norm: float
) -> None:
    """Take one step of plain gradient descent, clipped by the global norm."""
    clip_norm = case.train.clip_norm
    factor = min(1.0, clip_norm / norm) if clip_norm else 1.0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.sub_(case.lr * factor * gradient)
