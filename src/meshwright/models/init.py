"""Initial weights, each from a seed of its own: independent of mesh, order and device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.models.transformer import Transformer
from meshwright.spec.model import ModelSpec

_RESIDUAL_OUTPUTS = (".attn.o.weight", ".down.weight")


def parameter_seed(seed: int, name: str) -> int:
    """Return the 63-bit generator seed of one parameter: SHA-256 of the run's seed and the name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def weight_std(name: str, spec: ModelSpec) -> float:
    """Return the standard deviation of a matrix.

    `init_std`, and for the two projections into the residual stream `init_std / sqrt(2 n_layers)`:
    GPT-2, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    if name.endswith(_RESIDUAL_OUTPUTS):
        return spec.init_std / math.sqrt(2 * spec.n_layers)
    return spec.init_std


def norm_adds_one(name: str, spec: ModelSpec) -> bool:
    """Whether a parameter is the weight of a norm that multiplies by 1 + weight."""
    return spec.norm_plus_one and name.endswith("norm.weight")


def init_parameter(name: str, shape: Sequence[int], spec: ModelSpec, seed: int) -> Tensor:
    """Return the initial values of one whole parameter, fp32 on the CPU.

    Matrices are normal with `weight_std`, norms multiply by 1, biases are 0. It is always drawn in
    full by the CPU's generator, so that every device and every sharding starts alike.
    """
    if name.endswith(".bias") or (len(shape) == 1 and norm_adds_one(name, spec)):
        return torch.zeros(*shape, device="cpu")
    if len(shape) == 1:
        return torch.ones(*shape, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(parameter_seed(seed, name))
    values = torch.empty(*shape, dtype=torch.float32, device="cpu")
    return values.normal_(0.0, weight_std(name, spec), generator=generator)


@torch.no_grad()
def init_model(model: Transformer, spec: ModelSpec, seed: int) -> Transformer:
    """Initialise all parameters of a model or a stage in place, and its tables; returns it."""
    for name, parameter in model.named_parameters():
        parameter.copy_(init_parameter(name, parameter.shape, spec, seed))
    model.init_tables(next(model.parameters()).device)
    return model
