"""Reads whole tensors of a step folder without torch: for the small models of certificates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from meshwright.errors import CheckpointError
from meshwright.parsing import foreign, parse_json

Arrays = Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]
# A tensor has at most so many times the elements of its chunks: an offset may say anything.
_SPARSE: Final = 64


def read_whole(folder: Path, kind: str) -> Arrays:
    """Return the tensors of a step's files of a kind, "weights" or "optimizer", as fp64.

    Each file's header has the positions of its chunks: `DCP_SHARDING_INFO`, see
    `checkpoint.tensors`. Elements that no chunk covers are NaN. Raises `CheckpointError` for
    damaged files.
    """
    chunks: dict[str, list[tuple[list[int], Any]]] = {}
    for path in sorted(folder.glob(f"{kind}-*.safetensors")):
        with foreign(str(path), CheckpointError), _opened(path) as opened:
            positions = parse_json(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118 - not a dict
                chunk = opened.get_tensor(name)
                chunks.setdefault(name, []).append((positions[name]["saved_offsets"], chunk))
    with foreign(f"{folder}/{kind}-*.safetensors", CheckpointError):
        return {name: _joined(tensor_chunks) for name, tensor_chunks in chunks.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error


def _joined(chunks: list[tuple[list[int], Any]]) -> Any:
    ends = [
        [offset + length for offset, length in zip(start, chunk.shape, strict=True)]
        for start, chunk in chunks
    ]
    shape = [max(along) for along in zip(*ends, strict=True)]
    if math.prod(shape) > _SPARSE * sum(chunk.size for _, chunk in chunks):
        raise ValueError(f"chunks that leave most of {shape} open")
    joined = np.full(shape, np.nan)
    with np.errstate(invalid="ignore"):  # damaged numbers are compared, not told of one by one
        for (start, chunk), end in zip(chunks, ends, strict=True):
            joined[tuple(slice(a, b) for a, b in zip(start, end, strict=True))] = chunk
    return joined


def distance(observed: Arrays, expected: Arrays) -> tuple[float, str]:
    """Return the largest error of a tensor, relative to its size, and its name.

    Infinite if a tensor is missing or has a NaN. The size of a tensor counts as at least 1e-5 of
    the largest one's, because a vanishing tensor has only rounding noise.
    """
    norms = {name: float(np.linalg.norm(tensor)) for name, tensor in expected.items()}
    floor = 1e-5 * max(norms.values(), default=0.0)
    worst = (0.0, "")
    for name in dict.fromkeys((*expected, *observed)):
        off = float("inf")
        if name in expected and name in observed and observed[name].shape == expected[name].shape:
            off = float(np.linalg.norm(observed[name] - expected[name]))
            off = off / max(norms[name], floor, 1e-300) if off == off else float("inf")
        if off >= worst[0]:
            worst = (off, name)
    return worst


def minus(after: Arrays, before: Arrays) -> Arrays:
    """Return the change of each tensor: NaN if it didn't exist, or had another shape."""
    return {name: tensor - _like(tensor, before.get(name)) for name, tensor in after.items()}


def _like(tensor: Any, candidate: Any) -> Any:
    is_like = candidate is not None and candidate.shape == tensor.shape
    return candidate if is_like else np.full(tensor.shape, np.nan)


def above_noise(change: Arrays, state: Arrays, noise: float) -> Arrays:
    """Return updates, but 0 where the gradient is noise, which AdamW turns into full steps.

    `state` is the optimizer's; gradients are noise below `noise` times the root mean square of all.
    """
    second = {name: state[f"exp_avg_sq.{name}"] for name in change if f"exp_avg_sq.{name}" in state}
    if not second:
        return change
    count = sum(moment.size for moment in second.values())
    threshold = noise**2 * sum(float(moment.sum()) for moment in second.values()) / count
    return {
        name: update * (_like(update, second.get(name)) > threshold) if name in second else update
        for name, update in change.items()
    }
