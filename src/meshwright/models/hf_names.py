"""Maps tensors of a Hugging Face folder to Meshwright's parameters, both ways.

The names are those of the table of the model's family. GPT-NeoX stores query, key and value of each
head together: `[heads, 3, head_dim, dim]` flattened to `[3 x dim, dim]`, with a bias alike. Experts
are stored one by one, or all of a layer in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from meshwright.program.shards import Region
from meshwright.spec.families import FAMILIES
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import Part, buffers, parts

_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class HFTensor:
    """One stored tensor: its name and shape, and which parameters (`parts`) it contains.

    `rows` are the rows of each parameter. Several parameters are concatenated along the rows, or
    interleaved by head if `heads` is set, to the number of heads. If `expert` is set, the tensor is
    that expert's slice of a parameter `[experts, ...]`.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    heads: int | None
    expert: int | None = None

    def taken(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Return this tensor's parameters from `state`, unsharded parameters by Meshwright's names.

        For a tensor of one expert, they are that expert's slices.
        """
        parameters = [state[name] for name in self.parts]
        return (
            parameters
            if self.expert is None
            else [parameter[self.expert] for parameter in parameters]
        )

    def split(self, stored: Tensor) -> tuple[Tensor, ...]:
        """Split a stored tensor into its parameters, in the order of `parts`, each contiguous."""
        if self.heads is None:
            return tuple(part.contiguous() for part in torch.split(stored, list(self.rows)))
        by_head = stored.reshape(self.heads, -1, *stored.shape[1:])
        of_head = [rows // self.heads for rows in self.rows]
        parts = torch.split(by_head, of_head, 1)
        return tuple(part.flatten(0, 1).contiguous() for part in parts)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the contiguous stored tensor of the parameters `ours`, in the order of `parts`."""
        if self.heads is None:
            if self.expert is not None:  # not memory of all experts: files hold each by itself
                return ours[0].clone()
            return torch.cat(list(ours)) if len(ours) > 1 else ours[0].contiguous()
        by_head = [part.reshape(self.heads, -1, *part.shape[1:]) for part in ours]
        return torch.cat(by_head, dim=1).flatten(0, 1).contiguous()

    def read_rows(
        self, name: str, start: int, stop: int, read: Callable[[int, int], Tensor]
    ) -> Tensor:
        """Return rows `start` to `stop` of the parameter `name`.

        `read(first, last)` returns rows of the stored tensor. If parameters are interleaved by
        head, all rows of the affected heads are read.
        """
        index = self.parts.index(name)
        if self.heads is None:
            before = sum(self.rows[:index])
            return read(before + start, before + stop)
        of_head = [rows // self.heads for rows in self.rows]
        head_rows, all_rows = of_head[index], sum(of_head)
        first, last = start // head_rows, -(-stop // head_rows)
        heads = last - first
        touched = replace(self, heads=heads, rows=tuple(heads * rows for rows in of_head))
        rows = touched.split(read(first * all_rows, last * all_rows))[index]
        return rows[start - first * head_rows : stop - first * head_rows]


@dataclass(frozen=True)
class AllExperts(HFTensor):
    """A stored tensor of all experts of a layer, with one or more of their parameters."""

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of each parameter in it."""
        raise NotImplementedError

    def stored_region(self, name: str, region: Region) -> Region:
        """Return the region of the stored tensor that has one of a parameter."""
        raise NotImplementedError

    def of_region(self, name: str, stored: Tensor) -> Tensor:
        """Return the region of a parameter out of that of the stored tensor."""
        return self.split(stored)[self.parts.index(name)]


@dataclass(frozen=True)
class StackedExperts(AllExperts):
    """A stored tensor `[experts, out, in]`: of each expert, its parameters' rows in their order."""

    def split(self, stored: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of a stored tensor, each contiguous."""
        return tuple(part.contiguous() for part in stored.chunk(len(self.parts), 1))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the stored tensor of these parameters, contiguous."""
        return torch.cat(list(ours), 1)

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of each parameter in it."""
        count, out, *inner = self.shape
        return count, out // len(self.parts), *inner

    def stored_region(self, name: str, region: Region) -> Region:
        """Return the region of the stored tensor that has one of a parameter."""
        experts, (start, stop), *inner = region
        before = self.parts.index(name) * self.parameter_shape[1]
        return experts, (before + start, before + stop), *inner

    def of_region(self, name: str, stored: Tensor) -> Tensor:
        """Return the region of a parameter out of that of the stored tensor: all of it."""
        return stored


@dataclass(frozen=True)
class ExpertsInTurn(AllExperts):
    """A stored tensor of all experts: `[experts, in, out]`, of biases `[experts, out]`.

    If it contains several parameters (gate and up), their outputs alternate.
    """

    def split(self, stored: Tensor) -> tuple[Tensor, ...]:
        """Split a stored tensor into its parameters, each `[experts, out, in]` and contiguous."""
        ours = stored.transpose(1, -1)
        return tuple(
            ours[:, index :: len(self.parts)].contiguous() for index in range(len(self.parts))
        )

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the contiguous stored tensor of the parameters `ours`, in the order of `parts`."""
        return torch.stack(list(ours), 2).flatten(1, 2).transpose(1, -1).contiguous()

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of each parameter in the stored tensor."""
        count, *inner, out = self.shape
        return count, out // len(self.parts), *inner

    def stored_region(self, name: str, region: Region) -> Region:
        """Return the region of the stored tensor that has one of a parameter."""
        experts, (start, stop), *inner = region
        count = len(self.parts)
        return experts, *inner, (start * count, stop * count)


def hf_name(family: str, name: str, expert: int = 0) -> str:
    """Return the Hugging Face name of the tensor that contains a parameter, or an expert's part of
    it.
    """
    modules, match = FAMILIES[family].modules, _LAYER.fullmatch(name)
    layer, inner = (None, name) if match is None else match.groups()
    if inner in modules:
        return modules[inner].format(layer, expert)
    module, kind = inner.rsplit(".", 1)
    return f"{modules[module].format(layer, expert)}.{kind}"


def hf_tensors(spec: ModelSpec) -> tuple[HFTensor, ...]:
    """Return the tensors of a model's Hugging Face folder: parameters in order, then buffers."""
    contents: dict[str, list[tuple[Part, int | None]]] = {}
    family = FAMILIES[spec.family]
    for part in (*parts(spec), *buffers(spec)):
        if part.is_adapter:  # these are not in a model's own folder
            continue
        is_cut = part.is_of_experts and not family.fused_experts
        for expert in range(part.shape[0]) if is_cut else (None,):
            name = hf_name(spec.family, part.name, expert or 0)
            contents.setdefault(name, []).append((part, expert))
    return tuple(
        _of_all_experts(name, [part for part, _ in ours], family.fused_experts)
        if family.fused_experts and ours[0][0].is_of_experts
        else _stored(name, [part for part, _ in ours], ours[0][1], _heads(spec, ours[0][0]))
        for name, ours in contents.items()
    )


def _heads(spec: ModelSpec, part: Part) -> int | None:
    """Return the number of heads by which a parameter is interleaved with others, or None."""
    match = _LAYER.fullmatch(part.name)
    module = "" if match is None else match[2].rpartition(".")[0]
    count = FAMILIES[spec.family].by_head.get(module)
    return None if count is None else int(getattr(spec, count))


def _of_all_experts(
    name: str, ours: Sequence[Part], order: Literal["in turn", "stacked"]
) -> AllExperts:
    count, out, *inner = ours[0].shape
    names, rows = tuple(part.name for part in ours), tuple(part.shape[0] for part in ours)
    if order == "stacked":
        return StackedExperts(name, (count, out * len(ours), *inner), names, rows, None)
    return ExpertsInTurn(name, (count, *inner, out * len(ours)), names, rows, None)


def _stored(name: str, ours: Sequence[Part], expert: int | None, heads: int | None) -> HFTensor:
    shapes = [part.shape if expert is None else part.shape[1:] for part in ours]
    return HFTensor(
        name,
        (sum(shape[0] for shape in shapes), *shapes[0][1:]),
        tuple(part.name for part in ours),
        tuple(shape[0] for shape in shapes),
        heads if len(ours) > 1 else None,
        expert,
    )


def to_hf(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert unsharded parameters, by Meshwright's names, to Hugging Face tensors."""
    return {item.name: item.join(item.taken(state)) for item in hf_tensors(spec)}


def from_hf(spec: ModelSpec, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of a Hugging Face folder to parameters by Meshwright's names."""
    return dict(each_from_hf(hf_tensors(spec), stored.__getitem__))


def each_from_hf(
    tensors: Iterable[HFTensor], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter) by Meshwright's names; `read` returns a stored tensor by its own
    name.
    """
    experts: dict[str, list[Tensor]] = {}
    for item in tensors:
        pairs = zip(item.parts, item.split(read(item.name)), strict=True)
        if item.expert is None:
            yield from pairs
            continue
        for name, tensor in pairs:
            experts.setdefault(name, []).append(tensor)
    for name in list(experts):
        yield name, torch.stack(experts.pop(name))


def head_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names under which the output head may be stored, first the one that is written."""
    return FAMILIES[spec.family].heads


def is_parameter(family: str, name: str) -> bool:
    """Whether a stored tensor is a parameter, rather than a stored table such as rotary
    frequencies.
    """
    return FAMILIES[family].buffers.fullmatch(name) is None
