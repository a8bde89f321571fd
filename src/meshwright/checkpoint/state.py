"""What a run is at a step, as tensors by name and facts, and back: the same for every layout.

Weights and the optimizer's state are kept as regions of whole tensors, so what one layout writes
any other reads. All else is plain values: dropout, initial weights and the order of samples are
pure functions of the seed and the step, so there is no generator whose state could be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.tensors import Chunk, Stored
from meshwright.execute.build import region_of
from meshwright.execute.gradients import Held
from meshwright.execute.optimize import Shards
from meshwright.execute.parallel import Parallel

# What the names of the files of a step begin with: parameters, and the state of the optimizer.
WEIGHTS: Final = "weights"
OPTIMIZER: Final = "optimizer"


class Trained(NamedTuple):
    """The parts of a run that a step changes and a checkpoint keeps."""

    parallel: Parallel
    shards: Shards
    optimizer: torch.optim.Optimizer


class Chunks(NamedTuple):
    """What one rank writes: chunks of the parameters and of the optimizer's state."""

    weights: list[Chunk]
    optimizer: list[Chunk]


@torch.no_grad()
def chunks_of(trained: Trained) -> Chunks:
    """Return this rank's share of the state; its tensors are the run's own, not copies.

    Of ranks that hold the same shard one has it, in turn, so that all write about as much.
    """
    parallel = trained.parallel
    found = Chunks([], [])
    names = list(parallel.program.shardings)
    for held, leaf in _leaves(trained):
        place, copies = _turn(held, parallel)
        if held.copies == 0 or names.index(held.name) % copies != place or leaf.numel() == 0:
            continue
        offsets = tuple(start for start, _ in region_of(held, parallel))
        found.weights.append(Chunk(held.name, offsets, leaf.detach()))
        for key, value in _tensors(trained.optimizer, leaf).items():
            found.optimizer.append(Chunk(f"{key}.{held.name}", offsets, value))
    return found


def scalars_of(trained: Trained) -> Mapping[str, float]:
    """Return what the optimizer keeps beside tensors: AdamW's number of updates."""
    for _, leaf in _leaves(trained):
        state = trained.optimizer.state.get(leaf, {})
        return {key: float(value) for key, value in state.items() if _is_scalar(value)}
    return {}


def fill_optimizer(trained: Trained, stored: Stored, scalars: Mapping[str, float]) -> None:
    """Give the optimizer the state that a step holds; the weights are filled already.

    Raises `CheckpointError` where the step lacks a part.
    """
    parallel = trained.parallel
    keys = sorted({name.split(".", 1)[0] for name in stored.names})
    for held, leaf in _leaves(trained):
        state: dict[str, Any] = {}
        for key, value in scalars.items():
            state[key] = torch.tensor(value, dtype=torch.float32, device=leaf.device)
        region = region_of(held, parallel)
        for key in keys:
            state[key] = torch.empty_like(leaf).copy_(stored.read(f"{key}.{held.name}", region))
        if state:
            trained.optimizer.state[leaf] = state


def _leaves(trained: Trained) -> Sequence[tuple[Held, torch.nn.Parameter]]:
    return list(zip(trained.shards.held, trained.shards.leaves, strict=True))


def _tensors(optimizer: torch.optim.Optimizer, leaf: torch.nn.Parameter) -> dict[str, Tensor]:
    state = optimizer.state.get(leaf, {})
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and not _is_scalar(value)
    }


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _turn(held: Held, parallel: Parallel) -> tuple[int, int]:
    """Return which of the copies of a shard this rank has, and how many there are."""
    layout, at, sharding = parallel.program.layout, parallel.groups.at, held.sharding
    cut = {"pp"}
    if sharding.tp_dim is not None:
        cut.add("tp")
    if sharding.shard_ranks > 1:
        cut |= {"dp_shard", "cp"}
    place, copies = 0, 1
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        if axis not in cut:
            degree = layout.mesh.degree(axis)
            place, copies = place * degree + at[axis], copies * degree
    return place, copies
