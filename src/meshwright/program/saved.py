"""`Op`: an operation of a layer, with the bytes of each tensor that it saves for the backward."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal[
    "embedding",
    "block",
    "mask",
    "norm",
    "product",
    "rotation",
    "attention",
    "activation",
    "routing",
    "dropout",
    "loss",
]

# The backward of a product has two of its size: one for the input, one for the weight.
PRODUCT_BACKWARD: Final = 2
# Where the weight is frozen, that for the input.
FROZEN_BACKWARD: Final = 1
# Five products against two: the scores anew, and the gradients of the weights, v, q and k.
# FlashAttention, arXiv:2205.14135, algorithm 4. Recurrences are counted alike.
ATTENTION_BACKWARD: Final = 2.5

Bytes = int | tuple[int, ...]
"""Bytes of each tensor, or of a single one."""


class Op(NamedTuple):
    """An operation of a layer; `saved` are its saved bytes without recomputation, `kept` with the
    selective policy.

    Both have a number for each tensor, or one for a single tensor; `indices` are the bytes of
    integers, which `saved` excludes. `io_bytes` are what a memory-bound forward reads and writes,
    each once; norms have `normed` instead. `backward` are the FLOPs of the backward as a multiple
    of `flops`.
    """

    name: str
    kind: Kind
    flops: float = 0.0
    saved: Bytes = 0
    kept: Bytes = 0
    indices: int = 0
    normed: int = 0
    backward: float = PRODUCT_BACKWARD
    io_bytes: int = 0


def total(sizes: Bytes) -> int:
    """Return the sum of the bytes of all tensors."""
    return sum(sizes) if isinstance(sizes, tuple) else sizes


def moved_of(sizes: Bytes, minimum: int) -> int:
    """Return the bytes of all tensors of at least `minimum` bytes each."""
    return sum(
        size for size in (sizes if isinstance(sizes, tuple) else (sizes,)) if size >= minimum
    )


def by_steps(sizes: tuple[int, int], steps: float) -> tuple[int, ...]:
    """Return the sizes of the results of a ring's steps; a fractional last step has part of the
    queries."""
    full, part = sizes * int(steps), steps % 1
    return (*full, *(round(size * part) for size in sizes)) if part else full
