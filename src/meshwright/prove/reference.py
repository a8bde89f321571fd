"""One device: the model computed by plain PyTorch, without any of the engine's code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from meshwright.data.sampler import IGNORE
from meshwright.execute.batch import Batch
from meshwright.execute.data import DTYPES
from meshwright.execute.documents import bounds_of
from meshwright.models import Transformer, build_model, init_model
from meshwright.models.dropout import row_keys
from meshwright.prove.case import Case
from meshwright.spec.training import OptimizerSpec

# The default settings but a rate that does not change, so that each step counts as much.
ADAM = OptimizerSpec(schedule="constant", warmup_steps=0)


@dataclass(frozen=True)
class Reference:
    """What one device computes over some SGD steps; tensors by parameter name.

    The noise is the largest difference of a tensor from the same computed in fp32, by name; it is
    measured in half precision only.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    gradient_noise: Mapping[str, float] = field(default_factory=dict)
    weight_noise: Mapping[str, float] = field(default_factory=dict)


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
    segments = bounds = None
    if case.packed:
        starts = torch.rand(rows, seq, generator=generator) < 4 / seq
        segments = starts.cumsum(1).to(torch.int32)
        bounds = bounds_of(segments)
        last = torch.ones(rows, 1, dtype=torch.bool)
        targets[torch.cat((starts[:, 1:], last), 1)] = IGNORE
    keys = None
    if case.model.dropout:
        keys = row_keys(case.train.seed, step, range(rows))
    return Batch(tokens[:, :-1].contiguous(), targets, segments, keys, bounds)


def run_reference(case: Case, batches: Sequence[Batch]) -> Reference:
    """Return what one device computes, a step for each global batch; gradients of the first."""
    found = _run(case, batches)
    if case.train.precision == "fp32":
        return found
    train = case.train.model_copy(update={"precision": "fp32"})
    exact = _run(replace(case, train=train), batches)
    return replace(
        found,
        gradient_noise=_noise(found.gradients, exact.gradients),
        weight_noise=_noise(found.weights, exact.weights),
    )


def _noise(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: (found[name] - exact[name]).abs().max().item() for name in found}


def _run(case: Case, batches: Sequence[Batch]) -> Reference:
    model = _model(case)
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    names, parameters = zip(*model.named_parameters(), strict=True)
    for step, batch in enumerate(batches):
        loss, found = _gradients(model, parameters, batch, case)
        norm = _norm(found)
        losses.append(loss)
        norms.append(norm)
        if step == 0:
            gradients = {name: g.float() for name, g in zip(names, found, strict=True)}
        _descend(parameters, found, case, norm)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Reference(tuple(losses), tuple(norms), gradients, weights)


def run_adam(case: Case, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the weights after a step of AdamW for each global batch."""
    model = _model(case)
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=ADAM.lr,
        betas=ADAM.betas,
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    for batch in batches:
        _, found = _gradients(model, parameters, batch, case)
        factor = _clip_factor(case, _norm(found))
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient * factor
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def run_outputs(case: Case, batch: Batch) -> dict[str, Tensor]:
    """Return the outputs `[batch, seq, dim]` of the embedding and of each layer, by name."""
    model = _model(case)
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, out: found.update({name: out.float()})

    for name, module in streams(model):
        module.register_forward_hook(keep(name))
    _mean_loss(model, batch, case)
    return found


def streams(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose outputs are the residual stream, in order, also of a stage."""
    for name, module in model.named_modules():
        if re.fullmatch(r"embed|layers\.\d+", name):
            yield name, module


def _model(case: Case) -> Transformer:
    model = build_model(case.model, "cpu", case.train.seq_len)
    init_model(model, case.model, case.train.seed)
    return model


def _gradients(
    model: nn.Module, parameters: Sequence[Tensor], batch: Batch, case: Case
) -> tuple[float, tuple[Tensor, ...]]:
    """Return the loss and its gradients, which were computed scaled."""
    loss = _mean_loss(model, batch, case)
    found = torch.autograd.grad(loss * case.loss_scale, parameters)
    return loss.item(), tuple(gradient / case.loss_scale for gradient in found)


def _norm(gradients: Sequence[Tensor]) -> float:
    return float(torch.stack([g.double().norm() for g in gradients]).norm())


def _clip_factor(case: Case, norm: float) -> float:
    clip_norm = case.train.clip_norm
    return min(1.0, clip_norm / norm) if clip_norm and norm else 1.0


def _mean_loss(model: nn.Module, batch: Batch, case: Case) -> Tensor:
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
    factor = _clip_factor(case, norm)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.sub_(case.lr * factor * gradient)
