"""Reading and writing Hugging Face folders: `config.json` and safetensors, never a pickle."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import CheckpointError, ConfigError, nearest
from meshwright.models import fused, mxfp4
from meshwright.models.files import open_safetensors
from meshwright.models.hf_names import (
    AllExperts,
    HFTensor,
    each_from_hf,
    head_names,
    hf_tensors,
    is_parameter,
)
from meshwright.models.transformer import Transformer, build_model
from meshwright.program.shards import Region, whole
from meshwright.spec.families import FAMILIES
from meshwright.spec.hf import hf_config, spec_from_hf
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import kept_in_fp32
from meshwright.spec.stored import read_object

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
# Characters of a name that messages show.
_SHOWN: Final = 100
# What joins the stream and the next token in a layer that predicts the token after it.
_AHEAD: Final = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> Transformer:
    """Return the model of a Hugging Face folder on the CPU, in `dtype` or as it is stored.

    What must stay in fp32 is in fp32, whatever `dtype` and the files have.

    Raises `CheckpointError` for a missing folder or file, a missing, unexpected or misshaped
    tensor, pickled weights and a corrupt file; `ConfigError` for an unsupported architecture.
    """
    path = Path(folder)
    spec = read_spec(path)
    source = HFWeights(path, spec)
    model = build_model(spec)
    state: dict[str, Tensor] = {}
    kept = kept_in_fp32(spec)
    for name, part in each_from_hf(source.tensors, source.read):
        # A copy: safetensors maps the file, which may be replaced while the model lives.
        wanted = part.dtype if dtype is None else dtype
        if name in kept:
            wanted = torch.promote_types(wanted, torch.float32)
        state[name] = part.to(wanted, copy=True)
    model.load_state_dict(state, strict=True, assign=True)
    return model


def hf_source(folder: str | Path, spec: ModelSpec) -> HFWeights:
    """Return the parameters of a folder as a function of name, shape and region, for `fill`.

    Raises as `load_hf`, before the first tensor is read, also where they do not fit `spec`.
    """
    return HFWeights(Path(folder), spec)


def read_spec(folder: Path) -> ModelSpec:
    """Return the architecture of a Hugging Face folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: {path} is missing")
    try:
        return spec_from_hf(_read_json(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class HFWeights:
    """The stored tensors of a folder, checked against `spec` when opened and read when asked."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.tensors = hf_tensors(spec)
        self._items_of: dict[str, list[HFTensor]] = {}
        for item in self.tensors:
            for name in item.parts:
                self._items_of.setdefault(name, []).append(item)
        self._alias: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            opened = open_safetensors(path)
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in self._files:
                    raise CheckpointError(f"{path} holds {name}, which another shard holds too")
                self._files[name] = opened
        self._packed = self._find_packed()
        self._inside = fused.inside(self.tensors, self._files)
        if self._inside:
            self._alias |= fused.routers(self.tensors, self._files)
        self._check(folder, spec)

    def __call__(self, name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        """Return a region of a parameter by our name, as it is stored; nothing else is read."""
        items = self._items_of[name]
        item = items[0]
        if isinstance(item, AllExperts):
            return self._of_all_experts(item, name, shape, region)
        found = [item.rows[item.parts.index(name)], *item.shape[1:]]
        if item.expert is not None:
            found = [len(items), *found]
        if found != list(shape):
            raise CheckpointError(f"{name} is {found}, but {list(shape)} was asked")
        (start, stop), rest = region[0], region[1:]
        if item.expert is not None:
            some = items[start:stop] or items[:1]
            return torch.stack([self.read(one.name, rest) for one in some])[: stop - start]
        if start == stop:
            return self.read(item.name, region)
        return item.read_rows(
            name, start, stop, lambda first, last: self.read(item.name, ((first, last), *rest))
        )

    def _of_all_experts(
        self, item: AllExperts, name: str, shape: tuple[int, ...], region: Region
    ) -> Tensor:
        if shape != item.parameter_shape:
            raise CheckpointError(f"{name} is {list(item.parameter_shape)}, not {list(shape)}")
        stored = self.read(item.name, item.stored_region(region))
        return item.split(stored)[item.parts.index(name)]

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return one stored tensor, or a region of it."""
        if name in self._packed:
            return self._unpacked(self._packed[name], region)
        place = self._inside.get(name)
        stored = self._alias.get(name, name) if place is None else place.stored
        lies: Any = self._files[stored].get_slice(stored)
        cuts: Any = ... if region is None else tuple(slice(*one) for one in region)
        if place is not None:
            cuts = place.cuts(region)
        tensor: Tensor = lies[cuts]
        if tensor.dtype not in _DTYPES:
            legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise CheckpointError(f"{stored} is {tensor.dtype}; supported are {legal}")
        return tensor

    def _unpacked(self, item: HFTensor, region: Region | None) -> Tensor:
        """Return a region of what is stored in MXFP4, `[experts, out, in]`, as if it were not."""
        experts, (first, last), outs = whole(item.shape) if region is None else region
        blocks = first // mxfp4.BLOCK, -(-last // mxfp4.BLOCK)
        cuts = tuple(slice(*one) for one in (experts, outs, blocks))
        packed, scales = (
            self._files[name].get_slice(name)[cuts]
            for name in (item.name + mxfp4.BLOCKS, item.name + mxfp4.SCALES)
        )
        before = blocks[0] * mxfp4.BLOCK
        found = mxfp4.dequantised(packed, scales)[..., first - before : last - before]
        return found.transpose(1, 2)

    def _find_packed(self) -> dict[str, HFTensor]:
        """Return what is stored in MXFP4, by the names that it would have else."""
        return {
            item.name: item
            for item in self.tensors
            if isinstance(item, AllExperts)
            and item.name not in self._files
            and {item.name + mxfp4.BLOCKS, item.name + mxfp4.SCALES} <= self._files.keys()
        }

    def _check(self, folder: Path, spec: ModelSpec) -> None:
        """Hold names and shapes against the spec, before anything is read."""
        packed = {one + end for one in self._packed for end in (mxfp4.BLOCKS, mxfp4.SCALES)}
        found = {name for name in self._files if is_parameter(spec.family, name)}
        found -= self._ahead(folder, spec, found)
        found = (found - packed) | self._packed.keys()
        found -= {place.stored for place in self._inside.values()} | set(self._alias.values())
        found |= self._inside.keys() | self._alias.keys()
        names = head_names(spec)
        if not spec.tie_embeddings and names[0] not in found and names[-1] in found:
            self._alias[names[0]] = names[-1]
            found = (found - {names[-1]}) | {names[0]}
        wanted = {item.name for item in self.tensors}
        embed = self.tensors[0].name
        heads = [name for name in names if name in found]
        if spec.tie_embeddings and embed not in found and len(heads) == 1:
            self._alias[embed] = heads[0]  # one tensor under the name of its other use
            found = (found - set(heads)) | {embed}
        missing, unexpected = wanted - found, found - wanted
        if spec.tie_embeddings:
            unexpected -= self._tied_heads(unexpected & set(names))
        if missing:
            near = [name for one in sorted(missing)[:1] for name in nearest(one, unexpected)]
            hint = f" (the file has {near[0]})" if near else ""
            raise CheckpointError(f"{folder} lacks {_list(missing)}{hint}")
        if unexpected:
            raise CheckpointError(
                f"{folder} holds {_list(unexpected)}, which a {spec.family} model with "
                f"{spec.n_layers} layers of its config does not have"
            )
        for item in self.tensors:
            self._check_shape(item)

    def _ahead(self, folder: Path, spec: ModelSpec, names: set[str]) -> set[str]:
        """Return the tensors of layers that predict further tokens, which the model is without."""
        if not FAMILIES[spec.family].predicts_ahead:
            return set()
        layers = {found[1] for name in names if (found := _AHEAD.fullmatch(name))}
        layers = {layer for layer in layers if int(layer) >= spec.n_layers}
        if layers:
            which = ", ".join(sorted(layers, key=int))
            warnings.warn(
                f"{folder}: layer {which} predicts tokens after the next one (multi-token "
                "prediction) and is left out: the model has the others only",
                stacklevel=2,
            )
        inside = tuple(f"model.layers.{layer}." for layer in layers)
        return {name for name in names if name.startswith(inside)}

    def _check_shape(self, item: HFTensor) -> None:
        if item.name in self._packed:
            self._check_packed(item)
            return
        place, wanted = self._inside.get(item.name), item.shape
        stored = self._alias.get(item.name, item.name)
        if place is not None:
            stored, count = place.stored, len(self._items_of[item.parts[0]])
            wanted = (count, place.rows, *item.shape[1:])
        shape = tuple(self._files[stored].get_slice(stored).get_shape())
        if shape != wanted:
            raise CheckpointError(
                f"{stored} is stored as {list(shape)}, but the config gives {list(wanted)}"
            )

    def _check_packed(self, item: HFTensor) -> None:
        experts, inner, outer = item.shape
        blocks = [experts, outer, inner // mxfp4.BLOCK]
        for end, wanted in ((mxfp4.BLOCKS, [*blocks, mxfp4.BLOCK // 2]), (mxfp4.SCALES, blocks)):
            lies = self._files[item.name + end].get_slice(item.name + end)
            if inner % mxfp4.BLOCK or lies.get_shape() != wanted or lies.get_dtype() != "U8":
                raise CheckpointError(
                    f"{item.name}{end} is stored as {lies.get_shape()} of {lies.get_dtype()}, but "
                    f"the config gives {wanted} of U8, in blocks of {mxfp4.BLOCK}"
                )

    def _tied_heads(self, heads: Iterable[str]) -> set[str]:
        """Return the stored heads of a tied model that equal the embedding, as they must."""
        embed = self.tensors[0].name
        equal: set[str] = set()
        for name in heads if embed in self._files else ():
            if not torch.equal(self.read(name), self.read(embed)):
                raise CheckpointError(
                    f"tie_word_embeddings is true, but {name} differs from {embed}; which of the "
                    "two the model was trained with is unclear"
                )
            equal.add(name)
        return equal


def save_hf(
    model: Transformer,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> None:
    """Write a whole model as a Hugging Face folder, bit for bit; arguments as for `write_hf`."""
    tokens = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    write_hf(model.spec, model.state_dict(), folder, max_shard_bytes=max_shard_bytes, **tokens)  # type: ignore[arg-type]


def write_hf(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    folder: str | Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> None:
    """Write whole parameters, by our names, as a Hugging Face folder that transformers loads.

    More than `max_shard_bytes` go into several files with an index. `config.json` comes last, so
    an interrupted export cannot be mistaken for a whole one. Raises `CheckpointError` where the
    folder holds a model already or a parameter is missing, `ConfigError` as `hf_config`.
    """
    path = Path(folder)
    tensors = hf_tensors(spec)
    missing = {name for item in tensors for name in item.parts} - state.keys()
    if missing:
        raise CheckpointError(f"the model to export lacks {_list(missing)}: is it one stage only?")
    dtype = str(state[tensors[0].parts[0]].dtype).removeprefix("torch.")
    config = hf_config(spec, dtype=dtype, bos_token_id=bos_token_id, eos_token_id=eos_token_id)
    present = sorted(
        p.name for p in path.glob("*") if p.suffix == ".safetensors" or p.name == CONFIG
    )
    if present:
        raise CheckpointError(f"{path} already holds {present[0]}; choose an empty folder")
    path.mkdir(parents=True, exist_ok=True)

    shards = _shards(tensors, state, max_shard_bytes)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        content = {item.name: item.join(item.taken(state)).cpu() for item in shard}
        partial = path / f"{name}.partial"
        save_file(content, partial, metadata={"format": "pt"})
        os.replace(partial, path / name)
        where |= dict.fromkeys(content, name)
    if len(shards) > 1:
        total = sum(_bytes(item, state) for item in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        _write_json(path / INDEX, index)
    _write_json(path / CONFIG, config)


def _bytes(item: HFTensor, state: Mapping[str, Tensor]) -> int:
    return sum(one.nbytes for one in item.taken(state))


def _shards(
    tensors: Sequence[HFTensor], state: Mapping[str, Tensor], limit: int
) -> list[list[HFTensor]]:
    """Cut the tensors, in their order, into runs of at most `limit` bytes, or of one tensor."""
    shards: list[list[HFTensor]] = [[]]
    size = 0
    for item in tensors:
        more = _bytes(item, state)
        if shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += more
    return shards


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; an index may only name files inside it."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
        if pickles:
            raise CheckpointError(
                f"{pickles[0]} is a pickle, which could run any code when read. Convert it where "
                "you trust it: AutoModelForCausalLM.from_pretrained(folder)"
                ".save_pretrained(other_folder) of transformers writes safetensors"
            )
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    path = folder / INDEX
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    names = list({str(name): name for name in weight_map.values()}.values())
    there = {one.name for one in folder.iterdir() if one.is_file()}
    for name in names:
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} names the file {name!r}, which is not one of the folder")
        if name not in there:  # asked of the folder: the system has no answer for any name
            raise CheckpointError(f"{folder / name[:_SHOWN]}, which {INDEX} names, is missing")
    return [folder / name for name in names]


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
