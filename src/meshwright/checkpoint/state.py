"""A run's state at a step: named tensors and plain values, the same for every layout.

Weights and optimizer states are stored as regions of whole tensors, so any layout can read what
another one writes. Everything else is plain values: dropout, initial weights and the order of
samples are pure functions of the seed and the step, so there is no generator state to save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.tensors import Chunk, Stored
from meshwright.layout import Layout
from meshwright.parallel.apply import Parallel
from meshwright.parallel.build import region_of
from meshwright.parallel.data_parallel.gradients import GatheredParameter, local_shard
from meshwright.parallel.data_parallel.int8_states import Int8State, add_state
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.data_parallel.sharded import DTYPES
from meshwright.program.optimizer import rule_of
from meshwright.program.shards import Region, Sharding, data_rank, whole
from meshwright.spec.optimizers import State

# What the names of the files of a step begin with: parameters, and the state of the optimizer.
WEIGHTS: Final = "weights"
OPTIMIZER: Final = "optimizer"


class Trained(NamedTuple):
    """The model, the optimizer's shards and the optimizer of a run, which checkpoints save."""

    parallel: Parallel
    shards: Shards
    optimizer: torch.optim.Optimizer


class Chunks(NamedTuple):
    """What one rank writes of a step: chunks of parameters and of the optimizer's states."""

    weights: list[Chunk]
    optimizer: list[Chunk]


class Leaf(NamedTuple):
    """This rank's shard of a tensor to save: its name, the tensor, and its region of the whole.

    `tensor` is the key of the optimizer's state. `is_mine`: of the ranks with this shard, this one
    writes it. The last `padding` rows of a shard are zero, and are not stored.
    """

    name: str
    tensor: Tensor
    region: Region
    is_mine: bool
    padding: int = 0

    @property
    def shard(self) -> Tensor:
        """This rank's shard without padding, as a plain tensor that shares the memory."""
        return self.stored(self.tensor.detach())

    def stored(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard, without padding, of a tensor that is sharded like this one."""
        shard = local_shard(tensor)
        return shard[: len(shard) - self.padding] if self.padding else shard


# What the optimizer keeps of a parameter, by key: a number, or None for a tensor of its shape.
Kept = Mapping[str, float | None]


def chunks_of(trained: Trained) -> Chunks:
    """Return the chunks of a run's state that this rank writes, without copying them.

    Of ranks that have the same shard, one writes it, in turn, so that all write about as much.
    """
    unchanged = [*_frozen(trained.parallel), *_buffers(trained.parallel)]
    return chunks([*_leaves(trained), *unchanged], trained.optimizer)


@torch.no_grad()
def chunks(leaves: Sequence[Leaf], optimizer: torch.optim.Optimizer) -> Chunks:
    """Return the chunks that this rank writes of some tensors and of their optimizer states."""
    rank_chunks = Chunks([], [])
    for leaf in leaves:
        if not leaf.is_mine or leaf.shard.numel() == 0:
            continue
        offsets = tuple(start for start, _ in leaf.region)
        row = leaf.shard.shape[-1] if offsets else 1
        rank_chunks.weights.append(Chunk(leaf.name, offsets, leaf.shard))
        for key, value in optimizer.state.get(leaf.tensor, {}).items():
            if isinstance(value, Tensor) and not _is_scalar(value):
                shard = leaf.stored(value)
                # Scales of a state in int8 have their own columns: one for each block of a row.
                column = (start * shard.shape[-1] // row for start in offsets[-1:])
                place = (*offsets[:-1], *column)
                rank_chunks.optimizer.append(Chunk(f"{key}.{leaf.name}", place, shard))
    return rank_chunks


def scalars_of(trained: Trained) -> Mapping[str, float]:
    """Return the optimizer's scalar states by key, such as AdamW's number of updates."""
    for leaf in trained.shards.leaves:
        state = trained.optimizer.state.get(leaf, {})
        scalars = {key: float(value) for key, value in state.items() if _is_scalar(value)}
        if scalars:
            return scalars
    return {}


def fill_optimizer(trained: Trained, stored: Stored, scalars: Mapping[str, float]) -> None:
    """Load the optimizer's states in place from a saved step, after its weights.

    `scalars` are the states that are numbers, by their names in the step's manifest. Raises
    `CheckpointError` if the step lacks a tensor.
    """
    if not stored.names and not scalars:  # the optimizer that was saved kept nothing
        return
    spec, parts = trained.parallel.program.optimizer, trained.shards.parts
    leaves = [
        (leaf, rule_of(spec, part).states(spec))
        for leaf, part in zip(_leaves(trained), parts, strict=True)
    ]
    stored.read_ahead(
        (f"{state.key}.{leaf.name}", leaf.region)
        for leaf, states in leaves
        for state in states
        if not state.is_number
    )
    for leaf, states in leaves:
        numbers: Kept = {
            state.key: _number_of(state, scalars) for state in states if state.is_number
        }
        fill_state(leaf, trained.optimizer, stored, numbers, leaf.tensor.device)
        for state in states:
            if not state.is_number:
                restored = trained.optimizer.state[leaf.tensor]
                add_state(restored, state, leaf.tensor.detach())
                _fill(leaf, restored, state, stored)


def _fill(leaf: Leaf, restored: Mapping[str, Tensor], state: State, stored: Stored) -> None:
    """Restore a state, which a run may have saved in another dtype or in other blocks."""
    region, into = leaf.region, leaf.stored(restored[state.key])
    saved = stored.read(f"{state.key}.{leaf.name}", region)
    if (name := f"{state.scale_key}.{leaf.name}") in stored.names and saved.numel():
        width = stored.shape(f"{state.key}.{leaf.name}")[-1] // stored.shape(name)[-1]
        *rows, (start, stop) = region
        # Of other blocks, the ends of rows may lie within one.
        blocks = start // width, -(-stop // width)
        scales = stored.read(name, (*rows, blocks))
        own_scales = restored.get(state.scale_key)
        if own_scales is not None and own_scales.shape[-1] * width == stop - start:
            into.copy_(saved)
            leaf.stored(own_scales).copy_(scales)
            return
        columns = torch.arange(start, stop) // width - blocks[0]
        saved = Int8State.of(state.key, saved, scales.index_select(-1, columns)).float()
    if state.dtype == "int8":
        own_scales = leaf.stored(restored[state.scale_key])
        Int8State.of(state.key, into, own_scales).copy_(saved.to(into.device, torch.float32))
    else:
        into.copy_(saved)


def _number_of(state: State, scalars: Mapping[str, float]) -> float:
    """Return what a saved step keeps once for each parameter."""
    if state.if_absent is None:
        return scalars[state.key]
    return scalars.get(state.key, state.if_absent)


def fill_state(
    leaf: Leaf,
    optimizer: torch.optim.Optimizer,
    stored: Stored,
    states: Kept,
    scalars_on: torch.device,
) -> None:
    """Restore the optimizer's state of one parameter; scalars go to the device `scalars_on`."""
    state: dict[str, Any] = {}
    for key, value in states.items():
        if value is not None:
            state[key] = torch.tensor(value, dtype=torch.float32, device=scalars_on)
            continue
        saved = stored.read(f"{key}.{leaf.name}", leaf.region)
        state[key] = torch.zeros_like(leaf.tensor, dtype=saved.dtype, requires_grad=False)
        leaf.stored(state[key]).copy_(saved)
    if state:
        optimizer.state[leaf.tensor] = state


def _leaves(trained: Trained) -> list[Leaf]:
    pairs = zip(trained.shards.held, trained.shards.leaves, strict=True)
    return [_leaf(trained.parallel, parameter, tensor) for parameter, tensor in pairs]


def _frozen(parallel: Parallel) -> list[Leaf]:
    """Return the frozen parameters, which each step stores so that it is complete by itself."""
    dtype = DTYPES[parallel.program.train.precision]
    frozen = [parameter for parameter in parallel.held if not parameter.sharding.part.trained]
    leaves = [_leaf(parallel, parameter, parameter.shard) for parameter in frozen]
    # Not in four bits: any layout is to read it, and makes the same four bits of it again.
    return [
        leaf._replace(tensor=parameter.weights(dtype)) if leaf.is_mine else leaf
        for leaf, parameter in zip(leaves, frozen, strict=True)
    ]


def _leaf(parallel: Parallel, parameter: GatheredParameter, tensor: Tensor) -> Leaf:
    layout, coordinates = parallel.program.layout, parallel.groups.at
    number = list(parallel.program.shardings).index(parameter.name)
    is_mine = parameter.copies > 0 and is_turn(number, layout, coordinates, parameter.sharding)
    region = region_of(parameter, parallel)
    padding = len(parameter.shard) - (region[0][1] - region[0][0])
    return Leaf(parameter.name, tensor, region, is_mine, padding)


def _buffers(parallel: Parallel) -> list[Leaf]:
    """Return the buffers of all stages, which the first rank of each stage writes."""
    coordinates = parallel.groups.at
    is_mine = all(coordinates[axis] == 0 for axis in coordinates if axis != "pp")
    return [
        Leaf(name, buffer, whole(buffer.shape), is_mine)
        for module in parallel.modules.values()
        for name, buffer in module.named_buffers()
    ]


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def is_turn(
    number: int, layout: Layout, coordinates: Mapping[str, int], sharding: Sharding
) -> bool:
    """Whether this rank is the one that writes a shard, among the ranks that have the same shard.

    `number` is the parameter's index in the model, `coordinates` the rank's in the mesh.
    """
    cut = {"pp"}
    if sharding.tp_dim is not None:
        cut.add("tp")
    copy_index, copies = 0, 1
    if sharding.ep > 1:  # its copies are every few of the ranks that have the same otherwise
        cut |= {"dp_shard" if layout.zero else "dp_replicate", "cp"}
        if sharding.folds > 1:
            cut.add("tp")
        if not layout.zero:
            copies = layout.expert_replica_ranks
            copy_index = data_rank(layout, coordinates) // sharding.expert_data
    elif sharding.shard_ranks > 1:
        cut |= {"dp_shard", "cp"}
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        if axis not in cut:
            degree = layout.mesh.degree(axis)
            copy_index, copies = copy_index * degree + coordinates[axis], copies * degree
    return number % copies == copy_index
