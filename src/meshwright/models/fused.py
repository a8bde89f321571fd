"""Experts of a folder in transformers 5's in-memory format: all experts of a layer in two tensors.

`save_pretrained` separates them again, unless `save_original_format = False`. A layer's
`gate_up_proj` is `[experts, 2 x width, dim]`, gate rows before up rows, and `down_proj` `[experts,
dim, width]`.
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
    """Where one expert's matrix is in a fused tensor: rows `start` to `stop` of expert number
    `expert`.

    `stored` is the fused tensor's name, `rows` its number of rows per expert.
    """

    stored: str
    expert: int
    start: int
    stop: int
    rows: int

    def cuts(self, region: Region | None) -> tuple[int | slice, ...]:
        """Return the index into the fused tensor for a region of the matrix; None: all of it."""
        if region is None:
            return self.expert, slice(self.start, self.stop)
        (first, last), *columns = region
        rows = slice(self.start + first, self.start + last)
        return self.expert, rows, *(slice(*bounds) for bounds in columns)


def inside(tensors: Iterable[HFTensor], names: Collection[str]) -> dict[str, Inside]:
    """Return, by its usual name, where each expert's matrix is in the fused tensors of a folder.

    `names` are the tensors that the folder has. Experts that are stored on their own are left out.
    """
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
    """Return, by its usual name, the stored name of each router that is named as in memory.

    `names` are the tensors that the folder has. Routers under their usual name are left out.
    """
    stored_names = {}
    for item in tensors:
        if (part := _ROUTER.fullmatch(item.parts[0])) and item.name not in names:
            stored = f"model.layers.{part[1]}.mlp.gate.weight"
            if stored in names:
                stored_names[item.name] = stored
    return stored_names
