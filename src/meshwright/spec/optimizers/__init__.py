"""The supported optimizers by name, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshwright.spec.optimizers.adamw import ADAMW
from meshwright.spec.optimizers.base import (
    SQUARES,
    Optimizer,
    State,
    StateDtype,
    UpdateRule,
    block_width,
    numbers_of,
    rows_of_piece,
)
from meshwright.spec.optimizers.lion import LION
from meshwright.spec.optimizers.muon import DTYPE_BYTES, MUON
from meshwright.spec.optimizers.sgd import SGD

OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    optimizer.name: optimizer for optimizer in (ADAMW, LION, MUON, SGD)
}

__all__ = [
    "DTYPE_BYTES",
    "OPTIMIZERS",
    "SQUARES",
    "Optimizer",
    "State",
    "StateDtype",
    "UpdateRule",
    "block_width",
    "numbers_of",
    "rows_of_piece",
]
