"""Matrices in fp8 with a scale per block, as DeepSeek-V3, Kimi K2 and MiniMax-M2 are published.

arXiv:2412.19437, section 3.3.2: blocks of 128 x 128 numbers (E4M3), each with an fp32 scale that
multiplies it. The scales of `X.weight` are stored as `X.weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.program.shards import Region, whole
from meshwright.spec.hf import FP8_BLOCK

# What follows the name of a tensor.
SCALES: Final = "_scale_inv"
_STORED: Final = "F8_E4M3"


def scales_of(files: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the stored tensors that hold the block scales of an fp8 matrix.

    `files` maps the name of each stored tensor to its opened file. Raises `CheckpointError` where
    the shape of the scales is not one scale per block.
    """
    names = set()
    for name, opened in files.items():
        matrix = name.removesuffix(SCALES)
        if matrix == name or not _is_fp8(files, matrix):
            continue
        shape = opened.get_slice(name).get_shape()
        expected = [-(-size // FP8_BLOCK) for size in files[matrix].get_slice(matrix).get_shape()]
        if shape != expected:
            raise CheckpointError(
                f"{name} is stored as {shape}, but {matrix} has {expected} blocks of "
                f"{FP8_BLOCK} x {FP8_BLOCK}"
            )
        names.add(name)
    return frozenset(names)


def read(
    files: Mapping[str, Any], scales: Collection[str], name: str, region: Region | None
) -> Tensor | None:
    """Return a region of a stored fp8 matrix as bf16, or None if `name` is not in fp8 with scales.

    A `region` of None is the whole matrix; only the region is read. DeepSeek's own conversion
    rounds to bf16, too.
    """
    if name + SCALES not in scales:
        return None
    view = files[name].get_slice(name)
    (first, last), (left, right) = whole(tuple(view.get_shape())) if region is None else region
    values: Tensor = view[first:last, left:right]
    top, start = first // FP8_BLOCK, left // FP8_BLOCK
    by_block: Tensor = files[name + SCALES].get_slice(name + SCALES)[
        top : -(-last // FP8_BLOCK), start : -(-right // FP8_BLOCK)
    ]
    factors = by_block.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    above, before = first - top * FP8_BLOCK, left - start * FP8_BLOCK
    rows, columns = values.shape
    factors = factors[above : above + rows, before : before + columns]
    return values.float().mul_(factors).to(torch.bfloat16)


def _is_fp8(files: Mapping[str, Any], name: str) -> bool:
    if name not in files:
        return False
    view = files[name].get_slice(name)
    return view.get_dtype() == _STORED and len(view.get_shape()) == 2
