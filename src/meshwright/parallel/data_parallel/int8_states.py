"""Moments in 8 bits: codes of a table of numbers, and a scale for each block of a row.

Block-wise dynamic quantization, Dettmers et al. 2022, arXiv:2110.02861, sections 2.1 and 2.2. Here
each block lies in one row, both ends of the table are exact, and a second moment is kept as its
root, whose range is half as many decades.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.spec.optimizers import SQUARES, State, block_width, numbers_of

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A block of zeros is divided by this.
_TINY: Final = torch.finfo(torch.float32).tiny
# The bits of fp32 apart from the sign, the bits of its lower half, and as many numbers.
_UNSIGNED: Final = 2**31 - 1
_LOWER: Final = 2**16 - 1
_HALF: Final = 16


class Int8State:
    """A state in int8, with the methods of a tensor that an update in fp32 uses.

    `codes` uint8 `[..., row]`, `scales` fp32 `[..., blocks of a row]`, `table` the numbers of the
    codes, fp32 `[255 or 256]`.
    """

    def __init__(self, key: str, codes: Tensor, scales: Tensor, table: Tensor) -> None:
        self._key, self._codes, self._scales, self._table = key, codes, scales, table

    @classmethod
    def of(cls, key: str, codes: Tensor, scales: Tensor) -> Int8State:
        """Return a state of the `key` in the optimizer."""
        return cls(key, codes, scales, torch.tensor(numbers_of(key), device=codes.device))

    def split(self, rows: int) -> Iterator[Int8State]:
        """Yield pieces of so many rows, which share the memory."""
        pieces = zip(torch.split(self._codes, rows), torch.split(self._scales, rows), strict=True)
        for codes, scales in pieces:
            yield Int8State(self._key, codes, scales, self._table)

    def float(self) -> Tensor:
        """Return the state in fp32."""
        wide = self._table.index_select(0, self._codes.reshape(-1).int())
        self._by_block(wide).mul_(self._scales.reshape(-1, 1))
        if self._key in SQUARES:
            wide.square_()
        return wide.view(self._codes.shape)

    def copy_(self, wide: Tensor) -> None:
        """Round a state in fp32 to the nearest codes. Overwrites it."""
        flat = wide.contiguous().view(-1)
        if self._key in SQUARES:
            flat.sqrt_()
        blocks = self._by_block(flat)
        largest = self._scales.view(-1)
        torch.amax(blocks, -1, out=largest)
        if self._key not in SQUARES:
            torch.maximum(largest, blocks.amin(-1).neg_(), out=largest)
        blocks.div_(largest[:, None].clamp(min=_TINY))
        self._codes.view(-1).copy_(_nearest(flat, self._key))

    def _by_block(self, flat: Tensor) -> Tensor:
        width = self._codes.shape[-1] // max(self._scales.shape[-1], 1)
        return flat.view(-1, max(width, 1))


def _nearest(shares: Tensor, key: str) -> Tensor:
    """Return the codes of the numbers that are nearest to fp32 `shares` `[n]` of -1 to 1, int32;
    overwrites them.

    Of two that are as near, the lower one. The same as a search among the middles between numbers,
    which takes ten times as long on a CPU, by passes over the bits.
    """
    bits = shares.view(torch.int32)
    if key not in SQUARES:
        # In the order of what they stand for: the bits of negative numbers descend.
        bits.bitwise_xor_((bits >> 31).bitwise_and_(_UNSIGNED))
    upper = (bits >> _HALF).add_(1 << (_HALF - 1))
    sums = torch.from_numpy(_sums_of(key)).to(shares.device).index_select(0, upper)
    return sums.add_(bits.bitwise_and_(_LOWER)).bitwise_right_shift_(_HALF)


@cache
def _sums_of(key: str) -> NDArray[np.int32]:
    """Return for each upper half of ordered bits what to add to the lower half, `[2^16]`: the upper
    half of the sum is the code.

    Numbers with the same upper half lie on both sides of one middle between two codes at most, as
    there are 128 of them in each binade. Those above it have a lower half of which the sum carries.
    """
    numbers = np.array(numbers_of(key), np.float32)
    middles = (numbers[1:] + numbers[:-1]) / np.float32(2)
    bits = middles.view(np.int32)
    ordered = (bits ^ ((bits >> 31) & _UNSIGNED)).astype(np.int64)
    first = np.arange(-(1 << 15), 1 << 15, dtype=np.int64) << _HALF
    codes = np.searchsorted(ordered, first)
    following = np.append(ordered, first[-1] + _LOWER)[codes]
    added = (codes << _HALF) + _LOWER - np.minimum(following - first, _LOWER)
    return np.asarray(added, np.int32)


def add_state(tensors: dict[str, Tensor], state: State, like: Tensor) -> None:
    """Add zeros for a state that the optimizer keeps of a tensor."""
    if state.dtype != "int8":
        tensors[state.key] = torch.zeros_like(like, dtype=_DTYPES[state.dtype])
        return
    *outer, row = like.shape
    tensors[state.key] = torch.zeros_like(like, dtype=torch.uint8)
    shape = [*outer, row // block_width(row)]
    tensors[state.scale_key] = torch.zeros(shape, device=like.device)


def part_of(tensors: Mapping[str, Tensor], state: State) -> Tensor | Int8State:
    """Return what an update changes of a state that the optimizer keeps."""
    tensor = tensors[state.key]
    return (
        Int8State.of(state.key, tensor, tensors[state.scale_key])
        if state.dtype == "int8"
        else tensor
    )


def values_of(state: Mapping[str, Tensor], key: str) -> Tensor | None:
    """Return what an optimizer keeps by a key, in fp32 if it is in int8; None if nothing."""
    scales = state.get(State(key).scale_key)
    return state.get(key) if scales is None else Int8State.of(key, state[key], scales).float()
