"""Loads the model from any supported folder, and writes folders with weights only."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.adapters import AdapterSource, both, merged
from meshwright.checkpoint.commit import begin, seal, step_name, verify
from meshwright.checkpoint.restore import StoredSource
from meshwright.checkpoint.state import WEIGHTS
from meshwright.checkpoint.tensors import Chunk, write_chunks
from meshwright.errors import CheckpointError
from meshwright.models import Transformer, build_model
from meshwright.models.hf import hf_source, load_hf
from meshwright.parallel.build import Source
from meshwright.parsing import foreign
from meshwright.program.shards import whole
from meshwright.spec import hub
from meshwright.spec.lora import LoraSection
from meshwright.spec.model import OF_PADDING, ModelSpec, unpadded
from meshwright.spec.peft import read_adapter_config
from meshwright.spec.stored import SPEC, base_of_adapter, find_step, stored_spec
from meshwright.store import Place


def write_weights(
    root: Place,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    step: int = 0,
    run: str = "",
) -> Place:
    """Commit whole weights, by our names, as a step under `root` and return its path.

    `run` is the id of the run that trained them, or "". Raises `CheckpointError` if the step
    already exists or for a disk error.
    """
    with contextlib.suppress(OSError):  # `begin` tells
        root.mkdir(parents=True, exist_ok=True)
    folder = begin(root, step, run)
    if folder is None:
        raise CheckpointError(f"{root / step_name(step)} is there already; choose another folder")
    chunks = [
        Chunk(name, (0,) * tensor.dim(), tensor.detach().to("cpu", torch.float32))
        for name, tensor in state.items()
    ]
    name = f"{WEIGHTS}-00000.safetensors"
    files = {name: write_chunks(folder / name, chunks)}
    (folder / SPEC).write_text(spec_text(spec), encoding="utf-8")
    return seal(folder, step, files, {**facts, "run": run} if run else facts)


def spec_text(spec: ModelSpec) -> str:
    """Return the architecture as the JSON text of `model.json`."""
    return spec.model_dump_json(indent=1, exclude={"init_from", "planned", OF_PADDING}) + "\n"


def load_model(folder: str | Path) -> Transformer:
    """Return the model of a run, a step, a Hugging Face or PEFT folder or a Hub id, in fp32.

    Adapters of a PEFT folder are merged into the base model that it names. `model(input_ids)`
    returns logits `[batch, seq, vocab]`. The files of a step are verified before they are read.
    Raises `CheckpointError` naming what is missing or corrupt.
    """
    path = hub.folder_with_weights(folder)
    step = find_step(path)
    if step is not None:
        return _load_step(step)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    if (base := base_of_adapter(path, hub.folder_with_weights)) is not None:
        return _load_adapters(path, base)
    if (path / "config.json").is_file():
        return load_hf(path, dtype=torch.float32)
    raise CheckpointError(
        f"{path} is neither a run with a checkpoint, nor a step folder, nor a Hugging Face folder, "
        "nor one of adapters (no checkpoints/, manifest.json, config.json or adapter_config.json "
        "in it)"
    )


def weights_from(folder: Path, spec: ModelSpec) -> Any:
    """Return the source, for `build`, of the initial weights in the folder `model.init_from`.

    It is a Hugging Face folder, or a run or step folder, which is verified first. Adapters that a
    run has trained are merged into the weights.
    """
    step = find_step(folder)
    if step is None:
        return hf_source(folder, unpadded(spec))
    verify(step)
    return merged(StoredSource(step), stored_spec(step)[0])


def _load_adapters(folder: Path, base: Path) -> Transformer:
    """Return a base model with a PEFT folder's adapters merged into its weights."""
    plain = stored_spec(base)[0].model_copy(update={"lora": None})
    lora = LoraSection(**read_adapter_config(folder)).adapters
    spec = plain.model_copy(update={"lora": lora})
    adapters = AdapterSource(folder, spec)
    return _filled(plain, merged(both(weights_from(base, plain), adapters), spec))


def _load_step(folder: Path) -> Transformer:
    verify(folder)
    spec, path = stored_spec(folder)
    source = StoredSource(folder)
    with foreign(str(path), CheckpointError):  # sizes that no tensor has
        model = build_model(spec, device="meta")
    for name, tensor in model.state_dict().items():  # before memory is taken for it
        source.check(name, tuple(tensor.shape))
    return _filled(spec, source)


def _filled(spec: ModelSpec, source: Source) -> Transformer:
    """Return a model on the CPU with the weights of a source."""
    model = build_model(spec, device="meta")
    model.to_empty(device="cpu")
    model.init_tables(torch.device("cpu"))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            shape = tuple(tensor.shape)
            # A copy: the file is mapped, and may be pruned while the model lives.
            tensor.copy_(source(name, shape, whole(shape)))
    return model
