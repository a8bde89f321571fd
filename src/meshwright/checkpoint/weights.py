"""Saving a model's weights as a step folder, and loading any model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.commit import commit, prune, steps, verify
from meshwright.errors import CheckpointError
from meshwright.execute.gather import on_rank_0
from meshwright.execute.parallel import Parallel
from meshwright.models import Transformer, build_model
from meshwright.models.hf import load_hf
from meshwright.spec.loading import Config
from meshwright.spec.model import ModelSpec

WEIGHTS, SPEC = "model.safetensors", "model.json"


def save_weights(
    parallel: Parallel, config: Config, step: int, root: Path, facts: Mapping[str, Any]
) -> Path:
    """Commit the full weights of a step under `root`; a collective, only rank 0 touches the disk.

    `facts` go into the manifest. Older steps beyond `checkpoint.keep` are removed after the new one
    has been verified.
    """
    tensors = dict(on_rank_0(parallel, lambda held: held.parameter))
    if not tensors:
        return root

    def files(folder: Path) -> None:
        save_file(tensors, folder / WEIGHTS)
        text = config.model.model_dump_json(indent=1, exclude={"init_from"})
        (folder / SPEC).write_text(text + "\n", encoding="utf-8")

    path = commit(root, step, files, {"tokenizer": config.data.tokenizer, **facts})
    prune(root, config.checkpoint.keep)
    return path


def load_model(folder: str | Path) -> Transformer:
    """Return the model of a run folder, a step folder or a Hugging Face folder, in fp32.

    `model(input_ids)` gives logits `[batch, seq, vocab]`. Every file is verified before it is
    read. Raises `CheckpointError` naming what is missing or corrupt.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    step = find_step(path)
    if step is not None:
        return _load_step(step)
    if (path / "config.json").is_file():
        return load_hf(path, dtype=torch.float32)
    raise CheckpointError(
        f"{path} is neither a run with a checkpoint, nor a step folder, nor a Hugging Face folder "
        "(no checkpoints/, manifest.json or config.json in it)"
    )


def find_step(path: Path) -> Path | None:
    """Return the step folder that `path` is or holds the newest of, if any."""
    if (path / SPEC).is_file():
        return path
    found = steps(path / "checkpoints") or steps(path)
    return found[-1] if found else None


def _load_step(folder: Path) -> Transformer:
    verify(folder)
    spec = ModelSpec(**json.loads((folder / SPEC).read_text(encoding="utf-8")))
    tensors = load_file(folder / WEIGHTS)
    model = build_model(spec, device="meta")
    model.to_empty(device="cpu")
    model.init_tables(torch.device("cpu"))
    model.load_state_dict(tensors, assign=True)
    return model
