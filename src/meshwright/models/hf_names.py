"""Which tensor of a Hugging Face folder holds which of our parameters, both ways.

The names are those of a family's table. GPT-NeoX stores query, key and value of each head together:
`[heads, 3, head_dim, dim]` flattened to `[3 x dim, dim]`, with a bias alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from meshwright.spec.families import FAMILIES
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import Part, parts

_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class HFTensor:
    """One stored tensor: its name and shape, and the parameters in it with the rows of each.

    Several are interleaved by head, where `heads` has their number, or lie one below the other.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    heads: int | None

    def split(self, stored: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of a stored tensor, each contiguous."""
        if self.heads is None:
            return tuple(part.contiguous() for part in torch.split(stored, list(self.rows)))
        by_head = stored.reshape(self.heads, len(self.parts), -1, *stored.shape[1:])
        return tuple(part.flatten(0, 1).contiguous() for part in by_head.unbind(1))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the stored tensor of these parameters, contiguous."""
        if self.heads is None:
            return torch.cat(list(ours)) if len(ours) > 1 else ours[0].contiguous()
        by_head = [part.reshape(self.heads, -1, *part.shape[1:]) for part in ours]
        return torch.stack(by_head, dim=1).flatten(0, 2).contiguous()

    def read_rows(
        self, name: str, start: int, stop: int, read: Callable[[int, int], Tensor]
    ) -> Tensor:
        """Return rows of a parameter out of stored rows, which `read` returns from one to another.

        Of rows that lie head by head it reads the heads that are touched.
        """
        at = self.parts.index(name)
        if self.heads is None:
            before = sum(self.rows[:at])
            return read(before + start, before + stop)
        size, count = self.rows[at] // self.heads, len(self.parts)
        first, last = start // size, -(-stop // size)
        some = replace(self, heads=last - first)
        own = some.split(read(first * count * size, last * count * size))[at]
        return own[start - first * size : stop - first * size]


def hf_name(family: str, name: str) -> str:
    """Return the name of the stored tensor that holds one of our parameters."""
    (module, kind), modules = name.rsplit(".", 1), FAMILIES[family].modules
    found = _LAYER.fullmatch(module)
    if found is None:
        return f"{modules[module]}.{kind}"
    layer, inner = found.groups()
    return f"{modules[inner].format(layer)}.{kind}"


def hf_tensors(spec: ModelSpec) -> tuple[HFTensor, ...]:
    """Return the tensors of a stored model, in the order of our parameters."""
    held: dict[str, list[Part]] = {}
    for part in parts(spec):
        held.setdefault(hf_name(spec.family, part.name), []).append(part)
    by_head = FAMILIES[spec.family].fused == "by head"
    return tuple(
        HFTensor(
            name,
            (sum(part.shape[0] for part in ours), *ours[0].shape[1:]),
            tuple(part.name for part in ours),
            tuple(part.shape[0] for part in ours),
            spec.n_heads if by_head and len(ours) > 1 else None,
        )
        for name, ours in held.items()
    )


def to_hf(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole parameters, by our names, as the tensors of a Hugging Face folder."""
    return {item.name: item.join([state[name] for name in item.parts]) for item in hf_tensors(spec)}


def from_hf(spec: ModelSpec, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder as parameters by our names."""
    found: dict[str, Tensor] = {}
    for item in hf_tensors(spec):
        found.update(zip(item.parts, item.split(stored[item.name]), strict=True))
    return found


def head_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names under which the head is stored, the one that is written first."""
    return FAMILIES[spec.family].heads


def is_parameter(family: str, name: str) -> bool:
    """Whether a stored tensor is a parameter, rather than a table kept beside them."""
    return FAMILIES[family].buffers.fullmatch(name) is None
