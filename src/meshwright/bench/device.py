"""Measures a device: matmuls, attention, memory and the optimizer, as calibration constants.

All ranks of a machine measure at the same time, because they share its memory and its clock rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.bench.timing import seconds_in_turns, seconds_of
from meshwright.comm.groups import Link
from meshwright.cost.kernels import PASSES
from meshwright.cost.work import Product
from meshwright.data.sampler import IGNORE
from meshwright.parallel.data_parallel.sharded import DTYPES
from meshwright.parallel.loss import soften


class BenchSizes(NamedTuple):
    """The sizes to measure on a kind of device.

    `shapes` are matmuls of small and large layers; `copied` bytes exceed any cache; AdamW updates
    `elements` elements; the loss is of `tokens` rows of `vocab` logits.
    """

    shapes: tuple[Product, ...]
    copied: int
    elements: int
    tokens: int
    vocab: int


# On a GPU smaller ones would take less time than it takes to launch them, and stay in its cache.
# What the host takes for a product varies by so much.
_BY_HOST: Final = 1.5
SIZES: Final[Mapping[str, BenchSizes]] = {
    "cpu": BenchSizes(
        (
            Product(256, 256, 256),
            Product(512, 256, 1024),
            Product(1024, 256, 256),
            Product(512, 512, 512),
            Product(512, 512, 1408),
            Product(1024, 1024, 1024),
            Product(1024, 768, 2048),
            Product(2048, 1024, 2816),
        ),
        copied=2**26,
        elements=2**22,
        tokens=256,
        vocab=8192,
    ),
    "cuda": BenchSizes(
        (
            Product(256, 256, 256),
            Product(2048, 2048, 2048),
            Product(4096, 1024, 4096),
            Product(4096, 4096, 4096),
            Product(8192, 2048, 8192),
            Product(8192, 4096, 4096),
            Product(8192, 4096, 14336),
            Product(8192, 8192, 8192),
            Product(16384, 2048, 2048),
        ),
        copied=2**30,
        elements=2**28,
        tokens=2048,
        vocab=128256,
    ),
}


def products(
    device: torch.device, precision: str, budget_s: float, shapes: Sequence[Product]
) -> list[tuple[Product, float]]:
    """Return the seconds of each matmul: a third of the time of its forward and backward."""
    dtype, works = DTYPES[precision], []
    for shape in shapes:
        x = torch.randn(shape.rows, shape.inner, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(
            shape.outer, shape.inner, dtype=dtype, device=device, requires_grad=True
        )
        grad = torch.randn(shape.rows, shape.outer, dtype=dtype, device=device)

        def work(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> None:
            torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

        works.append(work)
    medians = seconds_in_turns(works, budget_s, device)
    return [(shape, seconds / PASSES) for shape, seconds in zip(shapes, medians, strict=True)]


def by_device(timed: Sequence[tuple[Product, float]]) -> list[tuple[Product, float]]:
    """Return the matmuls whose time is that of the device, not that of the host's launches.

    The fastest one, which must be too small to fill the device, is taken as the host's time.
    """
    fastest = min(seconds for _, seconds in timed)
    slower = [(shape, seconds) for shape, seconds in timed if seconds > _BY_HOST * fastest]
    return slower or list(timed)


def saturation(timed: Sequence[tuple[Product, float]]) -> tuple[float, float]:
    """Return the peak rate in FLOP/s, and the dim `half` at which a matmul reaches half of it.

    As in `cost.kernels`, each side d lowers the rate by `d / (d + half)`. For each `half` of a grid
    the best peak is computed; the one with the least squared error of logarithms is returned.
    """
    best = (math.inf, 0.0, 0.0)
    for half in (0.0, *(2.0 ** (step / 4) for step in range(33))):
        logs = []
        for shape, seconds in timed:
            share = math.prod(side / (side + half) for side in shape.sides)
            logs.append(math.log(shape.flops / seconds / share))
        mean = sum(logs) / len(logs)
        error = sum((value - mean) ** 2 for value in logs)
        best = min(best, (error, math.exp(mean), half))
    return best[1], best[2]


def copy_rate(device: torch.device, budget_s: float) -> float:
    """Return the bytes/s read and written by a copy that exceeds the caches."""
    copied = SIZES[device.type].copied
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    return 2 * copied / seconds_of(lambda: target.copy_(source), budget_s, device)


def optimizer_rate(device: torch.device, budget_s: float, moved: int) -> float:
    """Return the bytes/s of a fused AdamW step, counting `moved` bytes per element."""
    elements = SIZES[device.type].elements
    leaf = torch.nn.Parameter(torch.randn(elements, device=device))
    leaf.grad = torch.randn_like(leaf)
    adam = torch.optim.AdamW([leaf], fused=True)
    return moved * elements / seconds_of(adam.step, budget_s, device)


def loss_rate(device: torch.device, precision: str, budget_s: float) -> float:
    """Return the bytes/s of cross-entropy, forward and backward, counted as in `cost.work`."""
    tokens, vocab = SIZES[device.type].tokens, SIZES[device.type].vocab
    logits = torch.randn(tokens, vocab, dtype=DTYPES[precision], device=device)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    alone, loss_gradient = Link(None, (0,), 0), torch.ones((), device=device)

    def work() -> None:
        # In fp32 it overwrites what it is given: that the numbers change makes no difference.
        soften(logits, targets, IGNORE, alone).gradient(loss_gradient, logits.dtype)

    moved = PASSES * tokens * vocab * (logits.element_size() + 8)
    return moved / seconds_of(work, budget_s, device)
