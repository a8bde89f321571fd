"""LoRA adapters in PEFT's format, and models with adapters merged into their weights.

PEFT, github.com/huggingface/peft, writes `adapter_config.json` and `adapter_model.safetensors`,
whose tensors are named after the stored module that they adapt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.peft_files import places, to_peft
from meshwright.errors import CheckpointError
from meshwright.models import Transformer, build_model
from meshwright.models.files import open_safetensors
from meshwright.parallel.build import Source
from meshwright.program.shards import Region, whole
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parts
from meshwright.spec.peft import ADAPTER_WEIGHTS, adapter_config
from meshwright.spec.stored import ADAPTER_CONFIG

_MATRICES: Final = (".lora_a", ".lora_b")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHOWN: Final = 3


class AdapterSource:
    """The adapters of a PEFT folder, checked against `spec` on opening, read on demand.

    Raises `CheckpointError` if a tensor is missing, unexpected, of another shape or not of floating
    point, and if the file is damaged.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        path = folder / ADAPTER_WEIGHTS
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {ADAPTER_WEIGHTS}; pickles are not read")
        self._file = open_safetensors(path)
        self._places = places(spec, self._file.keys())
        shapes = {name: matrix.shape for matrix in self._places.values() for name in matrix.names}
        stored_names = set(self._file.keys())
        for verb, names in (
            ("lacks", shapes.keys() - stored_names),
            ("holds", stored_names - shapes.keys()),
        ):
            if names:
                listed = ", ".join(sorted(names)[:_SHOWN])
                hint = "" if verb == "lacks" else ", which the adapters of [lora] are without"
                raise CheckpointError(f"{path} {verb} {listed[:300]}{hint}")
        for name, shape in shapes.items():
            stored = tuple(self._file.get_slice(name).get_shape())
            if stored != shape:
                problem = f"{path}: {name} is {list(stored)}, but the model's is {list(shape)}"
                raise CheckpointError(problem)

    def __call__(self, name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        """Return a region of the LoRA matrix `name` (Meshwright's), in its stored dtype."""
        return self._places[name].read(region, self._stored)

    def _stored(self, name: str, region: Region | None) -> Tensor:
        lies: Any = self._file.get_slice(name)
        tensor: Tensor = (
            lies[:] if region is None else lies[tuple(slice(*bounds) for bounds in region)]
        )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, not of floating point")
        return tensor


def both(base: Source, adapters: Source) -> Source:
    """Return a source that reads adapters from `adapters`, and all other parameters from `base`."""

    def region_of(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        is_adapter = name.endswith(_MATRICES)
        return (adapters if is_adapter else base)(name, shape, region)

    return region_of


def merged(source: Source, spec: ModelSpec) -> Source:
    """Return a source of weights with the adapters of `spec` merged: `W + scale * B A`, fp32.

    arXiv:2106.09685, section 4.1. A model without adapters and these weights computes the same.
    """
    lora, shapes = spec.lora, {part.name: part.shape for part in parts(spec)}
    if lora is None:
        return source
    scale = lora.scale

    def region_of(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        weight, module = source(name, shape, region), name.removesuffix(".weight")
        first, second = f"{module}.lora_a", f"{module}.lora_b"
        if not name.endswith(".weight") or second not in shapes:
            return weight
        if first not in shapes:  # experts' gate and up have it together
            first = first.replace(".up.", ".gate.")
        (*experts, rows, columns), between = region, (0, lora.rank)
        a = source(first, shapes[first], (*experts, between, columns)).float()
        b = source(second, shapes[second], (*experts, rows, between)).float()
        return torch.add(weight.float(), b @ a, alpha=scale)

    return region_of


@torch.no_grad()
def merge(model: Transformer) -> Transformer:
    """Return an fp32 model on the CPU whose weights have the adapters of `model` merged in.

    Returns the model itself if it has no adapters.
    """
    spec = model.spec
    if spec.lora is None:
        return model
    parameters = dict(model.named_parameters())

    def own(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        return parameters[name][tuple(slice(start, stop) for start, stop in region)]

    source = merged(own, spec)
    plain = build_model(spec.model_copy(update={"lora": None}), device="cpu")
    for name, parameter in plain.named_parameters():
        shape = tuple(parameter.shape)
        parameter.copy_(source(name, shape, whole(shape)))
    for name, buffer in plain.named_buffers():
        buffer.copy_(model.get_buffer(name))
    plain.init_tables(torch.device("cpu"))
    return plain


def write_adapter(
    model: Transformer, folder: Path, base: str | None, dtype: torch.dtype = torch.float32
) -> None:
    """Write a model's adapters as a PEFT folder; `base` is the path of the base model in its
    config.

    Raises `CheckpointError` if the model has no adapters.
    """
    spec = model.spec
    if spec.lora is None:
        raise CheckpointError("the model has no adapters to export: it was trained whole")
    matrices = {
        name: parameter.detach().to("cpu", dtype)
        for name, parameter in model.named_parameters()
        if name.endswith(_MATRICES)
    }
    tensors = to_peft(spec, matrices)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    content = adapter_config(spec.lora, spec.blocks, base=base)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
