"""Dropout with a mask that is a function of an element's position, the same for every mesh.

A mask bit is a hash of the sequence's key, the layer, the site (which dropout of the layer), the
token's position in the sequence and the channel. However sequences, positions and layers are
distributed, each rank computes its part of the same mask, and a recomputed forward computes it
again without any generator state.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.context import Context
from meshwright.models.ops import returned

# splitmix64 (doi.org/10.1145/2660193.2660195) with the constants of Stafford's mix 13.
_MIX: Final = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
# 2^32 / golden ratio; and a finaliser of 32 bits, from github.com/skeeto/hash-prospector, issue 19.
_GOLDEN: Final = 0x9E3779B9 - 2**32
_FINAL: Final = ((16, 0x21F0AAAD), (15, 0x735A2D97))


def row_keys(seed: int, step: int, rows: range | Tensor) -> Tensor:
    """Return the dropout key of each sequence of a step, int64 `[rows]`.

    `rows` are the sequences' indices in the global batch, a range or an int64 tensor, on whose
    device the keys are made.
    """
    if isinstance(rows, range):
        rows = torch.arange(rows.start, rows.stop, rows.step, dtype=torch.int64)
    digest = hashlib.sha256(f"{seed}:dropout:{step}".encode()).digest()
    return _mixed(rows ^ int.from_bytes(digest[:8], "big", signed=True))


def layer_keys(keys: Tensor, layer: int) -> Tensor:
    """Return the sequences' dropout keys for a layer, by its number in the whole model."""
    return _mixed(keys ^ (layer + 1))


def dropout(
    x: Tensor, p: float, keys: Tensor, positions: Tensor | None, site: int, first: int = 0
) -> Tensor:
    """Return x `[batch, seq, dim]` with a share `p` set to 0, and the rest divided by `1 - p`.

    `keys` int64 `[batch]`, `positions` int64 `[seq]` or None for 0, 1, 2, ..., both on x's device.
    `site` separates masks with the same keys; the channels of x start at `first`. The backward
    computes the mask again.
    """
    out: Tensor = _Dropout.apply(x, p, keys, positions, site, first)  # type: ignore[no-untyped-call]
    return out


class Dropout(nn.Module):
    """`dropout` at one site of a layer; no effect if p is 0, in eval mode or without keys."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return `x` `[batch, seq, dim]` after dropout."""
        if self.p == 0 or context.keys is None or not self.training:
            return x
        return dropout(x, self.p, context.keys, context.places, self.site)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: float, keys: Tensor, positions: Tensor | None, site: int, first: int
    ) -> Tensor:
        ctx.save_for_backward(keys, positions)
        ctx.p, ctx.site, ctx.first = p, site, first
        return returned(_drop(x, p, keys, positions, site, first))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        keys, positions = ctx.saved_tensors
        dropped = _drop(grad, ctx.p, keys, positions, ctx.site, ctx.first)
        return dropped, None, None, None, None, None


def _drop(
    x: Tensor, p: float, keys: Tensor, positions: Tensor | None, site: int, first: int
) -> Tensor:
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    # The hash is uniform over int32, and compared as an integer: no device rounds it.
    below = min(round(p * 2**32), 2**32 - 1) - 2**31
    dropped = hashes(keys, positions, site, first, x.shape[2]) < below
    return (x * (1 / (1 - p))).masked_fill_(dropped, 0)


def hashes(keys: Tensor, positions: Tensor, site: int, first: int, dim: int) -> Tensor:
    """Return a hash of each (sequence, position, channel), int32 `[batch, seq, dim]`.

    Its upper 16 bits depend on all arguments, which are those of `dropout`.
    """
    # Nothing may multiply an `arange` here: the compiler would take the product for an index, and
    # miscompile it where it wraps around.
    rows = _mixed(keys ^ site)
    tokens = (_mixed(rows[:, None] ^ positions) >> 32).int()
    channels = torch.arange(first, first + dim, dtype=torch.int32, device=keys.device)
    # From here on each operation is a pass over all of x. Without the first product channels 64
    # apart are dropped together too often. The finaliser's last step only touches the lower half of
    # the bits, which hardly matter to a comparison, and is left out.
    mixed = (tokens[:, :, None] ^ channels).mul_(_GOLDEN)
    for shift, factor in _FINAL:
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(factor)
    return mixed


def _mixed(ints: Tensor) -> Tensor:
    """Return int64 numbers hashed so that each bit of a result depends on all input bits."""
    for shift, factor in _MIX:
        ints = (ints ^ _shifted(ints, shift)) * factor
    return ints ^ _shifted(ints, 31)


def _shifted(ints: Tensor, by: int) -> Tensor:
    """Return integers shifted right logically: zeros come in instead of the sign bit."""
    bits = 8 * ints.element_size()
    return (ints >> by).bitwise_and_((1 << (bits - by)) - 1)
