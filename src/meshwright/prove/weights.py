"""Initial weights that make faults visible, which usual initial weights hide.

In a new model, biases are zero and norms one, so a rank that never received them looks right. With
its small matrices, attention is uniform and all logits are nearly equal, so half of the backward
vanishes in rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.models.init import norm_adds_one, parameter_seed
from meshwright.parallel.build import Source, cut
from meshwright.program.shards import Region
from meshwright.spec.model import ModelSpec, unpadded
from meshwright.spec.parts import buffers, parts

# Approximate standard deviation of attention scores: some keys count ten times as much as others.
_SCORES = 1.5
# Of a router's scores: some experts count several times as much as others.
_ROUTES = 2.0
# Of the embedding. If it is also the head, the logits' is eight times this at 64 dims.
_EMBED_STD = 0.25


def telling_weight(name: str, shape: Sequence[int], spec: ModelSpec, seed: int) -> Tensor:
    """Return the whole initial value of one parameter, fp32 on the CPU, from a generator seeded by
    its name.

    Most matrices preserve the size of their input; those of queries and keys enlarge it, and those
    that write to the residual stream halve it. An adapter adds half the size of its input, whatever
    its scale is. No bias is zero, and no norm multiplies by one.
    """
    generator = torch.Generator(device="cpu").manual_seed(parameter_seed(seed, f"{name}:telling"))
    values = torch.empty(*shape, dtype=torch.float32, device="cpu")
    values.normal_(0.0, 1.0, generator=generator)
    if name.endswith((".bias", ".correction")):
        return values.mul_(0.2)
    if name.endswith(".sinks"):  # as much as some keys together
        return values.add_(2)
    if len(shape) == 1:
        return values.mul_(0.2).exp_().sub_(1 if norm_adds_one(name, spec) else 0)
    return values.mul_(_std(name, shape, spec))


def _std(name: str, shape: Sequence[int], spec: ModelSpec) -> float:
    if name == "embed.weight":
        return _EMBED_STD
    keeping = 1 / math.sqrt(shape[-1])
    if name.endswith((".attn.q.weight", ".attn.k.weight", ".attn.q_b.weight", ".attn.kv_b.weight")):
        return math.sqrt(_SCORES) * keeping
    if name.endswith(".lora_b") and spec.lora is not None:
        return 0.5 * keeping / spec.lora.scale
    if name.endswith(".router.weight"):
        return _ROUTES * keeping
    return 0.5 * keeping if name.endswith((".attn.o.weight", ".down.weight")) else keeping


def logits_std(spec: ModelSpec) -> float:
    """Return the approximate standard deviation of the model's logits with these weights."""
    return _EMBED_STD * math.sqrt(spec.dim) if spec.tie_embeddings else 1.0


def telling(spec: ModelSpec, seed: int) -> Source:
    """Return a function that returns any region of these weights, as `parallel.build` takes it."""

    def region_of(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        return cut(telling_weight(name, shape, spec, seed), region)

    return region_of


def whole_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Return all parameters, whole, by name in the model's order; without padding of the
    vocabulary.
    """
    weight_parts = parts(unpadded(spec))
    return {part.name: telling_weight(part.name, part.shape, spec, seed) for part in weight_parts}


def whole_buffers(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Return the model's buffers (such as router corrections), whole, by name."""
    return {
        buffer.name: telling_weight(buffer.name, buffer.shape, spec, seed)
        for buffer in buffers(spec)
    }
