"""Experts of a folder in transformers 5's in-memory format: a layer's experts in two tensors.

`save_pretrained` separates them again, unless `save_original_format = False`. A layer's
`gate_up_proj` is `[experts, 2 x width, dim]`, gates above ups, and `down_proj`
`[experts, dim, width]`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from meshwright.models.hf_names import HFTensor
from meshwright.program.shards import Region

_PART: Final = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate|up|down)\.weight")
_ROUTER: Final = re.compile(r"layers\.(\d+)\.mlp\.router\.weight")


class Inside(NamedTuple):
    """The place of one expert's matrix: rows `start` to `stop` of that `expert` of a stored tensor.

    `rows` is the number of the stored tensor's rows per expert.
    """

    stored: str
    expert: int
    start: int
    stop: int
    rows: int

    def cuts(self, region: Region | None) -> tuple[int | slice, ...]:
        """Return the index into the stored tensor of a region of the matrix, or of all of it."""
        if region is None:
            return self.expert, slice(self.start, self.stop)
        (first, last), *columns = region
        rows = slice(self.start + first, self.start + last)
        return self.expert, rows, *(slice(*bounds) for bounds in columns)


def inside(tensors: Iterable[HFTensor], names: Collection[str]) -> dict[str, Inside]:
    """Return where each expert is that a folder has in fused tensors, by its usual name."""
    by_name: dict[str, Inside] = {}
    for item in tensors:
        part = _PART.fullmatch(item.parts[0])
        if part is None or item.expert is None or item.name in names:
            continue
        layer, which = part.groups()
        stored = f"model.layers.{layer}.mlp.experts."
        stored += "down_proj" if which == "down" else "gate_up_proj"
        if stored in names:
            rows = item.shape[0]
            start, total = rows * (which == "up"), rows * (1 if which == "down" else 2)
            by_name[item.name] = Inside(stored, item.expert, start, start + rows, total)
    return by_name


def routers(tensors: Iterable[HFTensor], names: Collection[str]) -> dict[str, str]:
    """Return the stored name of each router that is named as in memory, by its usual name."""
    stored_names = {}
    for item in tensors:
        if (part := _ROUTER.fullmatch(item.parts[0])) and item.name not in names:
            stored = f"model.layers.{part[1]}.mlp.gate.weight"
            if stored in names:
                stored_names[item.name] = stored
    return stored_names
