"""What a device does: products, attention, memory, the optimizer, as constants of a calibration.

All ranks of a machine measure at the same time, since they share its memory and its clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.bench.timing import seconds_of
from meshwright.data.sampler import IGNORE
from meshwright.execute.data import DTYPES
from meshwright.execute.groups import Link
from meshwright.execute.loss import soften
from meshwright.models.attention import attend
from meshwright.models.blocks import Block
from meshwright.models.rope import Rope
from meshwright.predict.kernels import PASSES
from meshwright.predict.work import Product, layout_work
from meshwright.program.operations import ATTENTION_BACKWARD
from meshwright.spec.model import ModelSpec
from meshwright.spec.resolve import model_spec

# Tokens, inner and outer dims of products as small and large layers have them.
_SHAPES: Final = (
    Product(256, 256, 256),
    Product(512, 256, 1024),
    Product(1024, 256, 256),
    Product(512, 512, 512),
    Product(512, 512, 1408),
    Product(1024, 1024, 1024),
    Product(1024, 768, 2048),
    Product(2048, 1024, 2816),
)
_ATTENTION: Final = ((4, 256, 32), (8, 512, 64), (8, 1024, 64), (8, 2048, 64))
_COPIED: Final = 2**26  # bytes, beyond any cache
_ELEMENTS: Final = 2**22
_BLOCKS: Final = ((256, 256), (256, 1024), (512, 512), (512, 1024))  # dims and lengths
_HEAD_DIM: Final = 64
_DEPTH: Final = 6  # blocks that are timed together


def products(device: torch.device, precision: str, budget_s: float) -> list[tuple[Product, float]]:
    """Return the seconds of a pass of a product by its shape: a third of forward and backward."""
    dtype = DTYPES[precision]
    found = []
    for shape in _SHAPES:
        x = torch.randn(shape.rows, shape.inner, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(
            shape.outer, shape.inner, dtype=dtype, device=device, requires_grad=True
        )
        grad = torch.randn(shape.rows, shape.outer, dtype=dtype, device=device)

        def work(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> None:
            torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

        found.append((shape, seconds_of(work, budget_s / len(_SHAPES), device) / PASSES))
    return found


def saturation(found: Sequence[tuple[Product, float]]) -> tuple[float, float]:
    """Return the peak rate in FLOP/s and the dim at which a side of a product reaches half of it.

    The form of `predict.kernels`: each side d lowers the rate by `d / (d + half)`. For each half of
    a grid the peak follows; the smallest squared error of the logarithms wins.
    """
    best = (math.inf, 0.0, 0.0)
    for half in (0.0, *(2.0 ** (step / 4) for step in range(33))):
        logs = []
        for shape, seconds in found:
            share = math.prod(side / (side + half) for side in shape.sides)
            logs.append(math.log(shape.flops / seconds / share))
        mean = sum(logs) / len(logs)
        error = sum((value - mean) ** 2 for value in logs)
        best = min(best, (error, math.exp(mean), half))
    return best[1], best[2]


def attention(device: torch.device, precision: str, budget_s: float) -> float:
    """Return the rate of causal attention in FLOP/s, forward and backward, half a square counted.

    The mean over lengths and heads as small and large models have them.
    """
    rates = []
    for heads, length, head_dim in _ATTENTION:
        flops = 2.0 * heads * length**2 * head_dim * (1 + ATTENTION_BACKWARD)
        share = budget_s / len(_ATTENTION)
        rates.append(flops / _attention_seconds(device, precision, share, heads, length, head_dim))
    return math.exp(sum(map(math.log, rates)) / len(rates))


def _attention_seconds(
    device: torch.device, precision: str, budget_s: float, heads: int, length: int, head_dim: int
) -> float:
    """Return the seconds of causal attention over one sequence, forward and backward."""
    shape = (1, heads, length, head_dim)
    q, k, v = (
        torch.randn(shape, dtype=DTYPES[precision], device=device, requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn(shape, dtype=DTYPES[precision], device=device)

    def work() -> None:
        out = attend(q, k, v, None)
        torch.autograd.grad(out, (q, k, v), grad)

    return seconds_of(work, budget_s, device)


def copy_rate(device: torch.device, budget_s: float) -> float:
    """Return the bytes/s that a copy beyond the caches reads and writes."""
    source = torch.ones(_COPIED // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / seconds_of(lambda: target.copy_(source), budget_s, device)


def optimizer_rate(device: torch.device, budget_s: float, moved: int) -> float:
    """Return the bytes/s of a fused AdamW step that moves so many bytes an element."""
    leaf = torch.nn.Parameter(torch.randn(_ELEMENTS, device=device))
    leaf.grad = torch.randn_like(leaf)
    adam = torch.optim.AdamW([leaf], fused=True)
    return moved * _ELEMENTS / seconds_of(adam.step, budget_s, device)


def _model(dim: int, heads: int) -> ModelSpec:
    return model_spec(dim=dim, n_layers=1, n_heads=heads, n_kv_heads=heads, ffn_dim=2 * dim)


def _stack_seconds(
    device: torch.device, precision: str, budget_s: float, spec: ModelSpec, length: int
) -> float:
    """Return the seconds of a block's forward and backward.

    In a stack so deep that caches have forgotten a block when its backward comes.
    """
    rope = Rope(spec, length)
    rope.reach(length, device)
    blocks = [Block(spec, rope, str(n)).to(device, DTYPES[precision]) for n in range(_DEPTH)]
    stack = nn.Sequential(*blocks)
    shape = (1, length, spec.dim)
    x = torch.randn(shape, device=device, dtype=DTYPES[precision], requires_grad=True)

    def work() -> None:
        stack.zero_grad()
        stack(x).backward(x)

    return seconds_of(work, budget_s, device) / _DEPTH


def block_overhead(device: torch.device, budget_s: float) -> float:
    """Return the seconds of a block that is so small that it computes nothing to speak of."""
    return _stack_seconds(device, "fp32", budget_s, _model(16, 2), 8)


def seconds_per_byte(
    device: torch.device,
    precision: str,
    budget_s: float,
    rates: tuple[float, float],
    overhead: float,
) -> float:
    """Return the seconds for each byte that a block moves beside products and attention.

    What is left of blocks of several sizes after their products, attention and overhead, over the
    bytes that `predict.work` counts; `rates` are those of `saturation`. Attention is measured in
    each block's own size: with a mean rate, that it is slower in short rows hid all of the rest.
    """
    peak, half = rates
    left = moved = 0.0
    share = budget_s / len(_BLOCKS) / 2
    for dim, length in _BLOCKS:
        heads = dim // _HEAD_DIM
        spec = _model(dim, heads)
        left += _stack_seconds(device, precision, share, spec, length) - overhead
        left -= _attention_seconds(device, precision, share, heads, length, _HEAD_DIM)
        found = layout_work(spec, length, precision, 1, False, 1, "ring", 1, "none").layer
        for shape in found.products:
            share = math.prod(side / (side + half) for side in shape.sides)
            left -= PASSES * shape.flops / (peak * share)
        moved += PASSES * (found.moved + found.norm_moved)
    return max(left, 0.0) / moved


def loss_rate(device: torch.device, precision: str, budget_s: float) -> float:
    """Return the bytes/s of cross-entropy, forward and backward, as `predict.work` counts them."""
    tokens, vocab = 256, 8192
    logits = torch.randn(tokens, vocab, dtype=DTYPES[precision], device=device)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    alone, one = Link(None, (0,), 0), torch.ones((), device=device)

    def work() -> None:
        # In fp32 it overwrites what it is given: that the numbers change makes no difference.
        soften(logits, targets, IGNORE, alone).gradient(one, logits.dtype)

    moved = PASSES * tokens * vocab * (logits.element_size() + 8)
    return moved / seconds_of(work, budget_s, device)
