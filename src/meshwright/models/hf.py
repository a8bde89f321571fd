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
from meshwright.models import fp8_blocks, fused, images, mxfp4
from meshwright.models.files import open_safetensors
from meshwright.models.hf_names import (
    AllExperts,
    ExpertsInTurn,
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
from meshwright.spec.hf_text import has_images
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
# Where they are stored apart from the model's layers.
_APART: Final = "mtp."
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> Transformer:
    """Return the model of a Hugging Face folder on the CPU, in `dtype`, or in the stored dtype if
    None.

    Tensors that must be in fp32 are in fp32, whatever `dtype` and the files say.

    Raises `CheckpointError` for a missing folder or file, a missing, unexpected or misshaped
    tensor, pickled weights and a corrupt file; `ConfigError` for an unsupported architecture.
    """
    path = Path(folder)
    spec = read_spec(path)
    source = HFWeights(path, spec)
    model = build_model(spec)
    state: dict[str, Tensor] = {}
    fp32_names = kept_in_fp32(spec)
    for name, part in each_from_hf(source.tensors, source.read):
        # A copy: safetensors maps the file, which may be replaced while the model lives.
        target = part.dtype if dtype is None else dtype
        if name in fp32_names:
            target = torch.promote_types(target, torch.float32)
        state[name] = part.to(target, copy=True)
    model.load_state_dict(state, strict=True, assign=True)
    return model


def hf_source(folder: str | Path, spec: ModelSpec) -> HFWeights:
    """Return a function of (name, shape, region) that reads the parameters of a folder.

    Raises as `load_hf`, before the first tensor is read, also where the files do not match `spec`.
    """
    return HFWeights(Path(folder), spec)


def read_spec(folder: Path) -> ModelSpec:
    """Return the model's architecture from the `config.json` of a Hugging Face folder."""
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
    """The stored tensors of a Hugging Face folder, checked against `spec` on opening, read on
    demand.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.tensors = hf_tensors(spec)
        self._items_of: dict[str, list[HFTensor]] = {}
        for item in self.tensors:
            for name in item.parts:
                self._items_of.setdefault(name, []).append(item)
        self._alias: dict[str, str] = {}
        self._files = _opened(folder)
        self._scales = fp8_blocks.scales_of(self._files)
        self._packed = self._find_packed()
        self._inside = fused.inside(self.tensors, self._files)
        if self._inside:
            self._alias |= fused.routers(self.tensors, self._files)
        self._check(folder, spec)

    def __call__(self, name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        """Return a region of the parameter `name` (Meshwright's) in its stored dtype; reads only
        it.
        """
        items = self._items_of[name]
        item = items[0]
        if isinstance(item, AllExperts):
            return self._of_all_experts(item, name, shape, region)
        full_shape = [item.rows[item.parts.index(name)], *item.shape[1:]]
        if item.expert is not None:
            full_shape = [len(items), *full_shape]
        if full_shape != list(shape):
            raise CheckpointError(f"{name} is {full_shape}, but {list(shape)} was asked")
        (start, stop), columns = region[0], region[1:]
        if item.expert is not None:
            chosen = items[start:stop] or items[:1]
            return torch.stack([self.read(stored.name, columns) for stored in chosen])[
                : stop - start
            ]
        if start == stop:
            return self.read(item.name, region)
        return item.read_rows(
            name, start, stop, lambda first, last: self.read(item.name, ((first, last), *columns))
        )

    def _of_all_experts(
        self, item: AllExperts, name: str, shape: tuple[int, ...], region: Region
    ) -> Tensor:
        if shape != item.parameter_shape:
            raise CheckpointError(f"{name} is {list(item.parameter_shape)}, not {list(shape)}")
        stored = self.read(item.name, item.stored_region(name, region))
        return item.of_region(name, stored)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return one stored tensor by its Hugging Face name, or a region of it; None: all of it."""
        if name in self._packed:
            return self._unpacked(self._packed[name], region)
        inside = self._inside.get(name)
        stored = self._alias.get(name, name) if inside is None else inside.stored
        scaled = fp8_blocks.read(self._files, self._scales, stored, region)
        if scaled is not None:
            return scaled
        view: Any = self._files[stored].get_slice(stored)
        cuts: Any = ... if region is None else tuple(slice(*bounds) for bounds in region)
        if inside is not None:
            cuts = inside.cuts(region)
        tensor: Tensor = view[cuts]
        if tensor.dtype not in _DTYPES:
            legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise CheckpointError(f"{stored} is {tensor.dtype}; supported are {legal}")
        return tensor

    def _unpacked(self, item: HFTensor, region: Region | None) -> Tensor:
        """Return a dequantised region of an MXFP4 tensor, whose shape is `[experts, in, out]`."""
        experts, (first, last), outs = whole(item.shape) if region is None else region
        blocks = first // mxfp4.BLOCK, -(-last // mxfp4.BLOCK)
        cuts = tuple(slice(*bounds) for bounds in (experts, outs, blocks))
        packed, scales = (
            self._files[name].get_slice(name)[cuts]
            for name in (item.name + mxfp4.BLOCKS, item.name + mxfp4.SCALES)
        )
        before = blocks[0] * mxfp4.BLOCK
        values = mxfp4.dequantised(packed, scales)[..., first - before : last - before]
        return values.transpose(1, 2)

    def _find_packed(self) -> dict[str, HFTensor]:
        """Return the tensors that are stored in MXFP4, by their unpacked names."""
        return {
            item.name: item
            for item in self.tensors
            if isinstance(item, ExpertsInTurn)
            and item.name not in self._files
            and {item.name + mxfp4.BLOCKS, item.name + mxfp4.SCALES} <= self._files.keys()
        }

    def _check(self, folder: Path, spec: ModelSpec) -> None:
        """Raise `CheckpointError` where names or shapes differ from the spec's; reads no tensor."""
        packed = {name + end for name in self._packed for end in (mxfp4.BLOCKS, mxfp4.SCALES)}
        present = {name for name in self._files if is_parameter(spec.family, name)}
        present -= self._scales
        present -= self._ahead(folder, spec, present)
        present = (present - packed) | self._packed.keys()
        present -= {inside.stored for inside in self._inside.values()} | set(self._alias.values())
        present |= self._inside.keys() | self._alias.keys()
        names = head_names(spec)
        if not spec.tie_embeddings and names[0] not in present and names[-1] in present:
            self._alias[names[0]] = names[-1]
            present = (present - {names[-1]}) | {names[0]}
        expected = {item.name for item in self.tensors}
        embed = self.tensors[0].name
        heads = [name for name in names if name in present]
        if spec.tie_embeddings and embed not in present and len(heads) == 1:
            self._alias[embed] = heads[0]  # one tensor under the name of its other use
            present = (present - set(heads)) | {embed}
        missing, unexpected = expected - present, present - expected
        if spec.tie_embeddings:
            unexpected -= self._tied_heads(unexpected & set(names))
        if missing:
            near = [name for absent in sorted(missing)[:1] for name in nearest(absent, unexpected)]
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
        """Return the stored tensors of multi-token-prediction layers, which the model lacks; warns
        of them.
        """
        if not FAMILIES[spec.family].predicts_ahead:
            return set()
        layers = {match[1] for name in names if (match := _AHEAD.fullmatch(name))}
        layers = {layer for layer in layers if int(layer) >= spec.n_layers}
        inside = tuple(f"model.layers.{layer}." for layer in sorted(layers, key=int))
        ahead = {name for name in names if name.startswith((*inside, _APART))}
        if ahead:
            which = f"layer {', '.join(sorted(layers, key=int))}" if layers else f"{_APART}*"
            warnings.warn(
                f"{folder}: {which} predicts tokens after the next one (multi-token "
                "prediction) and is left out: the model has the others only",
                stacklevel=2,
            )
        return ahead

    def _check_shape(self, item: HFTensor) -> None:
        if item.name in self._packed:
            self._check_packed(item)
            return
        inside, expected = self._inside.get(item.name), item.shape
        stored = self._alias.get(item.name, item.name)
        if inside is not None:
            stored, count = inside.stored, len(self._items_of[item.parts[0]])
            expected = (count, inside.rows, *item.shape[1:])
        shape = tuple(self._files[stored].get_slice(stored).get_shape())
        if shape != expected:
            raise CheckpointError(
                f"{stored} is stored as {list(shape)}, but the config gives {list(expected)}"
            )

    def _check_packed(self, item: HFTensor) -> None:
        experts, inner, outer = item.shape
        blocks = [experts, outer, inner // mxfp4.BLOCK]
        for end, expected in ((mxfp4.BLOCKS, [*blocks, mxfp4.BLOCK // 2]), (mxfp4.SCALES, blocks)):
            view = self._files[item.name + end].get_slice(item.name + end)
            if inner % mxfp4.BLOCK or view.get_shape() != expected or view.get_dtype() != "U8":
                raise CheckpointError(
                    f"{item.name}{end} is stored as {view.get_shape()} of {view.get_dtype()}, but "
                    f"the config gives {expected} of U8, in blocks of {mxfp4.BLOCK}"
                )

    def _tied_heads(self, heads: Iterable[str]) -> set[str]:
        """Return the names among `heads` whose tensors equal the embedding, as a tied model
        requires.

        Raises `CheckpointError` where one differs from the embedding.
        """
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
    """Write unsharded parameters, by Meshwright's names, as a folder that transformers loads.

    More than `max_shard_bytes` go into several files with an index. `config.json` comes last, so an
    interrupted export cannot be mistaken for a whole one. Raises `CheckpointError` where the folder
    holds a model already or a parameter is missing, `ConfigError` as `hf_config`.
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
    return sum(tensor.nbytes for tensor in item.taken(state))


def _shards(
    tensors: Sequence[HFTensor], state: Mapping[str, Tensor], limit: int
) -> list[list[HFTensor]]:
    """Split the tensors, in order, into files of at most `limit` bytes, or of one larger tensor."""
    shards: list[list[HFTensor]] = [[]]
    shard_bytes = 0
    for item in tensors:
        item_bytes = _bytes(item, state)
        if shards[-1] and shard_bytes + item_bytes > limit:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(item)
        shard_bytes += item_bytes
    return shards


def _opened(folder: Path) -> dict[str, Any]:
    """Return the opened file of each tensor of a folder, by its name in a text-only model."""
    is_multimodal = (folder / CONFIG).is_file() and has_images(_read_json(folder / CONFIG))
    files: dict[str, Any] = {}
    left_out = 0
    for path in _weight_files(folder):
        opened = open_safetensors(path)
        for stored in opened.keys():  # noqa: SIM118 - not a dict
            name = images.text_name(stored) if is_multimodal else stored
            if name is None:
                left_out += 1
                continue
            if name in files:
                raise CheckpointError(f"{path} holds {stored}, which another shard holds too")
            files[name] = opened if name == stored else images.Renamed(opened, stored)
    if left_out:
        warnings.warn(
            f"{folder}: {left_out} tensors that read images are left out: the model is the text "
            "model alone, and is exported as one",
            stacklevel=2,
        )
    return files


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises `CheckpointError` for pickles, and for an index that names a file outside the folder.
    """
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
    file_names = {entry.name for entry in folder.iterdir() if entry.is_file()}
    for name in names:
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} names the file {name!r}, which is not one of the folder")
        if name not in file_names:  # asked of the folder: the system has no answer for any name
            raise CheckpointError(f"{folder / name[:_SHOWN]}, which {INDEX} names, is missing")
    return [folder / name for name in names]


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    omitted = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + omitted


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
