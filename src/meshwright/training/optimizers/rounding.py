"""Stochastic rounding to bf16, by a hash of an element's position and the step."""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import Tensor

from meshwright.models.dropout import hashes
from meshwright.parallel.data_parallel.matrices import ShardPlace

_LOWER: Final = 0xFFFF  # the bits of fp32 that bf16 has not


def round_by_place(wide: Tensor, place: ShardPlace, key: str, step: Tensor) -> Tensor:
    """Round a shard of an fp32 state stochastically to bf16 values, in place, and return it.

    An element between two bf16 values becomes the one away from zero with a probability of its
    distance from the other. A hash of the parameter's name, the state's `key`, the element's
    position in the whole and `step`, `[]`, decides: any layout rounds alike, and so does a resumed
    run. Values that bf16 represents do not change.
    """
    digest = hashlib.sha256(f"{place.name}:{key}".encode()).digest()
    rows = _row_numbers(wide, place)
    keys = step.long().reshape(1) ^ int.from_bytes(digest[:8], "big", signed=True)
    columns = wide.shape[-1]
    bits = hashes(keys, rows, 0, place.starts[-1], columns).view(wide.shape)
    bits.bitwise_right_shift_(16).bitwise_and_(_LOWER)
    wide.view(torch.int32).add_(bits).bitwise_and_(~_LOWER)
    return wide


def _row_numbers(shard: Tensor, place: ShardPlace) -> Tensor:
    """Return the indices in the whole of a shard's rows, int64 `[rows]`; a vector is one row."""
    numbers = torch.zeros(1, dtype=torch.int64, device=shard.device)
    sizes = zip(shard.shape[:-1], place.shape[:-1], place.starts[:-1], strict=True)
    for size, whole_size, start in sizes:
        along = torch.arange(start, start + size, device=shard.device)
        numbers = (numbers[:, None] * whole_size + along).flatten()
    return numbers
