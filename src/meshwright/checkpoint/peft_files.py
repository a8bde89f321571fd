"""Which tensors of PEFT's files contain a model's LoRA matrices.

A linear layer's are named after its stored module. Those of experts are stored one by one or in one
tensor: A `[experts x rank, in]`, B `[out, rank x experts]` with the expert as the last index, as
PEFT has them for parameters of transformers 5. There, gate and up of the experts are one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from meshwright.models.hf_names import hf_name
from meshwright.program.shards import Region
from meshwright.spec.families import FAMILIES
from meshwright.spec.lora import DOWN, JOINED, JOINT
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import Part, parts
from meshwright.spec.peft import in_one_module

_PREFIX: Final = "base_model.model."
_MATRICES: Final = {"lora_a": "lora_A", "lora_b": "lora_B"}
_EXPERTS: Final = "model.layers.{}.mlp.experts"


class StoredAdapter(NamedTuple):
    """Where one of Meshwright's LoRA matrices is stored: its tensors' names, and the shape of each.

    Experts have one tensor each, or if `together` one for all, of whose outputs the matrix has
    `rows`.
    """

    part: Part
    names: tuple[str, ...]
    shape: tuple[int, ...]
    together: bool = False
    rows: slice = slice(None)

    def inside(self, stored: Tensor) -> Tensor:
        """Return the view of a stored tensor that is the matrix, or one expert's."""
        if not self.together:
            return stored
        experts = self.part.shape[0]
        if self.part.name.endswith("lora_a"):
            return stored.view(experts, -1, stored.shape[-1])
        return stored.view(len(stored), -1, experts).permute(2, 0, 1)[:, self.rows]

    def read(self, region: Region, stored: Callable[[str, Region | None], Tensor]) -> Tensor:
        """Return a region of the matrix.

        `stored(name, region)` reads a region of a stored tensor; None: all of it.
        """
        if self.together:
            joint = self.inside(stored(self.names[0], None))
            return joint[tuple(slice(*along) for along in region)].contiguous()
        if not self.part.is_of_experts:
            return stored(self.names[0], region)
        (first, last), *inner = region
        matrices = [stored(name, tuple(inner)) for name in self.names[first:last]]
        if not matrices:
            return torch.empty(0, *(stop - start for start, stop in inner))
        return torch.stack(matrices)


def places(spec: ModelSpec, stored: Collection[str] | None = None) -> dict[str, StoredAdapter]:
    """Return, by Meshwright's names, where each LoRA matrix of a model is stored.

    With the names of a file in `stored`, experts are as in that file; None: as they are written.
    """
    together = in_one_module(spec.adapted, spec.blocks)
    if stored is not None and not together and DOWN in spec.adapted:
        alone = re.compile(_module("*", (DOWN,), DOWN, "lora_a").replace("*", r"\d+"))
        together = (DOWN,) if any(map(alone.fullmatch, stored)) else ()
    adapters = (part for part in parts(spec) if part.is_adapter)
    return {part.name: _place(spec, part, together) for part in adapters}


def _place(spec: ModelSpec, part: Part, together: Sequence[str]) -> StoredAdapter:
    module, matrix = part.name.rsplit(".", 1)
    _, layer, inner = module.split(".", 2)
    if not part.is_of_experts:
        return StoredAdapter(part, (peft_name(spec.family, part.name),), part.shape)
    joint = JOINT if inner in JOINED else DOWN
    if joint not in together:
        names = (peft_name(spec.family, part.name, expert) for expert in range(spec.experts))
        return StoredAdapter(part, tuple(names), part.shape[1:])
    name = _module(layer, together, joint, matrix)
    experts, first, second = part.shape
    if matrix == "lora_a":
        return StoredAdapter(part, (name,), (experts * first, second), True)
    if joint == DOWN:
        return StoredAdapter(part, (name,), (first, second * experts), True)
    index = JOINED.index(inner)
    rows = slice(index * first, (index + 1) * first)
    if FAMILIES[spec.family].fused_experts:
        rows = slice(index, None, 2)
    return StoredAdapter(part, (name,), (2 * first, second * experts), True, rows)


def _module(layer: str, together: Sequence[str], which: str, matrix: str) -> str:
    """Return the stored name of a matrix of all experts; PEFT wraps the first of two twice."""
    inner = ".base_layer" if len(together) > 1 and which == together[0] else ""
    return f"{_PREFIX}{_EXPERTS.format(layer)}{inner}.{_MATRICES[matrix]}.weight"


def peft_name(family: str, name: str, expert: int = 0) -> str:
    """Return PEFT's name for a LoRA matrix, or for that of one expert where stored one by one."""
    module, matrix = name.rsplit(".", 1)
    stored = hf_name(family, f"{module}.weight", expert).removesuffix(".weight")
    return f"{_PREFIX}{stored}.{_MATRICES[matrix]}.weight"


def to_peft(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert LoRA matrices by Meshwright's names to the tensors of a PEFT adapter file."""
    tensors: dict[str, Tensor] = {}
    for name, stored_adapter in places(spec).items():
        matrix = state[name]
        for index, stored in enumerate(stored_adapter.names):
            target = tensors.setdefault(stored, matrix.new_empty(stored_adapter.shape))
            is_per_expert = stored_adapter.part.is_of_experts and not stored_adapter.together
            stored_adapter.inside(target).copy_(matrix[index] if is_per_expert else matrix)
    return tensors
