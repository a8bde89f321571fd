"""`Checkpoints`: saves and loads the steps of a user's own training loop, for any layout.

The shards of a model that `mw.parallelize` has distributed are written as regions of whole tensors
and committed like a run's step, so that another layout can read the regions that it needs.
"""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.commit import clean, is_there, step_name
from meshwright.checkpoint.restore import Good, newest_good, stored_of
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import (
    OPTIMIZER,
    WEIGHTS,
    Leaf,
    chunks,
    fill_state,
    is_turn,
)
from meshwright.checkpoint.tensors import Stored
from meshwright.comm.world import World, exchange
from meshwright.errors import CheckpointError, ConfigError
from meshwright.layout import Layout
from meshwright.parallel.data_parallel.sharded import reshard
from meshwright.program.shards import Sharding, data_rank, whole
from meshwright.spec.parts import Part
from meshwright.store import Place, place

_OWN: Final = "own"  # what of a manifest is ours


class Loaded(NamedTuple):
    """A loaded step: its number, the `state` that was saved with it, and its folder."""

    step: int
    state: dict[str, Any]
    folder: Place


class Checkpoints:
    """The saved steps of a user's loop: a model that `parallelize` returned, and its optimizer.

    Every rank creates one, after `parallelize` and the optimizer, and makes the same calls of its
    methods, which are collectives. Only one loop may write into a folder, which all ranks must be
    able to access; it may be a URL of an object store. The newest `keep` steps stay.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        *,
        keep: int = 2,
    ) -> None:
        """Remove remains of interrupted saves; raises for an optimizer of another model."""
        self._root, self._layout = place(folder), layout
        self._model, self._optimizer = model, optimizer
        device = next(model.parameters()).device
        nothing = dist.HashStore()  # type: ignore[attr-defined]  # nothing here talks through it
        self._world = World(dist.get_rank(), dist.get_world_size(), device, nothing)
        if self._world.size != layout.world:
            raise ConfigError(
                f"the layout is of {layout.world} ranks, and {self._world.size} have met"
            )
        if keep < 1:
            raise ConfigError(f"keep = {keep} must be 1 or more")
        self._leaves()
        self._saver = Saver(self._root, self._world, keep, lambda saved: None)
        self._saver.run = exchange(secrets.token_hex(8), self._saver.group)[0]
        if self._world.rank == 0 and isinstance(self._root, Path):  # a store at the first save
            clean(self._root)

    def save(self, step: int, state: Mapping[str, Any] | None = None) -> Place:
        """Save weights, optimizer and `state` as a step, and return its folder.

        `state` must be JSON-serializable: the data's position, a scheduler's `state_dict()`. Tuples
        come back as lists, and keys as strings. Raises `CheckpointError` on every rank if the step
        already exists, if another loop has written steps that this one has not loaded, or if one
        rank could not write; the steps before it stay.
        """
        leaves = self._leaves()
        path = self._root / step_name(step)
        if any(exchange("taken" if is_there(path) else "", self._saver.group)):
            raise CheckpointError(
                f"{path} is there already, and a step is never written again: load() the newest "
                "before the loop, or choose another folder"
            )
        own_facts = {
            "state": _as_json("state", dict(state or {})),
            "optimizer": {
                leaf.name: dict(_kept(leaf, self._optimizer.state.get(leaf.tensor, {})))
                for leaf in leaves
            },
            "groups": [_plain(group) for group in self._optimizer.param_groups],
        }
        facts = {"layout": self._layout.label, "world": self._world.size, _OWN: own_facts}
        self._saver.save(step, chunks(leaves, self._optimizer), facts, {})
        return path

    def load(self) -> Loaded | None:
        """Load the newest complete step into model and optimizer; None if there is none.

        A newer step that is corrupt is set aside with a warning. Raises `CheckpointError` if no
        step is intact, or if the step is of another model or optimizer; then nothing has changed.
        """
        good = newest_good(self._root, self._world, self._warn, self._saver.group)
        if good is None:
            return None
        own_facts = good.manifest.get(_OWN)
        if own_facts is None:
            raise CheckpointError(f"{good.folder} is a step of `meshwright train`, not of a loop")
        self._fill(good, own_facts)
        self._saver.run = str(good.manifest.get("run", "")) or self._saver.run
        return Loaded(int(good.manifest["step"]), own_facts["state"], good.folder)

    def _warn(self, problem: str) -> None:
        if self._world.rank == 0:
            warnings.warn(f"{problem}; it is set aside", stacklevel=3)

    @torch.no_grad()
    def _fill(self, good: Good, own_facts: Mapping[str, Any]) -> None:
        leaves, groups = self._leaves(), self._optimizer.param_groups
        stored = stored_of(good.folder, WEIGHTS)
        _refuse_other(leaves, stored, good.folder)
        if len(own_facts["groups"]) != len(groups):
            raise CheckpointError(
                f"{good.folder} has {len(own_facts['groups'])} groups of parameters, the optimizer "
                f"{len(groups)}"
            )
        for leaf in leaves:
            leaf.shard.copy_(stored.read(leaf.name, leaf.region))
        optimizer_states = stored_of(good.folder, OPTIMIZER)
        device_of = {
            parameter: parameter.device if _counts_on_device(group) else torch.device("cpu")
            for group in groups
            for parameter in group["params"]
        }
        self._optimizer.state.clear()
        for leaf in leaves:
            if leaf.tensor in device_of:
                leaf_state = own_facts["optimizer"].get(leaf.name, {})
                fill_state(
                    leaf, self._optimizer, optimizer_states, leaf_state, device_of[leaf.tensor]
                )
        for group, settings in zip(groups, own_facts["groups"], strict=True):
            _take(group, settings)

    def _leaves(self) -> list[Leaf]:
        """Return this rank's shards of parameters and buffers.

        Raises `ConfigError` if the optimizer has other parameters.
        """
        reshard(self._model)  # a forward without backward may have left whole weights
        leaves = list(_parameters(self._model, self._layout))
        known = {leaf.tensor for leaf in leaves}
        for group in self._optimizer.param_groups:
            if not known.issuperset(group["params"]):
                raise ConfigError(
                    "the optimizer has parameters that the model does not: make it of "
                    "model.parameters() after parallelize, which replaces them"
                )
        return leaves + list(_buffers(self._model, is_mine=self._world.rank == 0))


def _parameters(model: nn.Module, layout: Layout) -> Iterator[Leaf]:
    coordinates = layout.mesh.coordinates(dist.get_rank())
    for number, (name, parameter) in enumerate(model.named_parameters()):
        sharding = _sharding(name, parameter, layout)
        region = sharding.region(coordinates["tp"], data_rank(layout, coordinates))
        leaf = Leaf(name, parameter, region, is_turn(number, layout, coordinates, sharding))
        if tuple(leaf.shard.shape) != tuple(stop - start for start, stop in region):
            raise ConfigError(
                f"{name} is cut into {list(leaf.shard.shape)} here, where {layout.label} has "
                f"{region}: give the layout that the model was parallelised by"
            )
        yield leaf


def _sharding(name: str, parameter: Tensor, layout: Layout) -> Sharding:
    """Return how `parallelize` has sharded a parameter over the mesh."""
    tp_dim, is_sharded = None, False
    if isinstance(parameter, DTensor):
        axes = parameter.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(axes, parameter.placements, strict=True):
            if placement.is_replicate():
                continue
            if axis == "tp":
                tp_dim = getattr(placement, "dim")  # noqa: B009 - Shard's, or its strided kind's
            else:
                is_sharded = True
    part = Part(name, tuple(parameter.shape), ())
    return Sharding(part, layout.tp, tp_dim, layout.shard_ranks if is_sharded else 1, False)


def _buffers(model: nn.Module, *, is_mine: bool) -> Iterator[Leaf]:
    """Yield a model's persistent buffers, which are assumed to be equal on all ranks."""
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                name = f"{prefix}.{key}" if prefix else key
                yield Leaf(name, buffer, whole(buffer.shape), is_mine)


def _kept(leaf: Leaf, state: Mapping[str, Any]) -> Iterable[tuple[str, float | None]]:
    """Yield (key, number, or None for a tensor) of a parameter's optimizer state.

    Raises `ConfigError` for tensors of another shape than the parameter's.
    """
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == leaf.tensor.shape:
            yield key, None
        elif isinstance(value, Tensor | int | float) and torch.as_tensor(value).dim() == 0:
            yield key, float(value)
        elif value is not None:
            form = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"the optimizer keeps {key} of {leaf.name} as {form}: only numbers and tensors of "
                f"the parameter's shape {list(leaf.tensor.shape)} can be read by other layouts"
            )


def _refuse_other(leaves: Iterable[Leaf], stored: Stored, folder: Place) -> None:
    """Raise if a step is of another model."""
    shapes = {leaf.name: tuple(stop for _, stop in whole(leaf.tensor.shape)) for leaf in leaves}
    missing, unexpected = (
        sorted(set(shapes) - set(stored.names)),
        sorted(set(stored.names) - set(shapes)),
    )
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} is of another model: it lacks {missing[:3]} and {len(missing[3:])} more, "
            f"and has {unexpected[:3]} and {len(unexpected[3:])} more that the model lacks"
        )
    for name, shape in shapes.items():
        if stored.shape(name) != shape:
            raise CheckpointError(
                f"{folder} holds {name} as {list(stored.shape(name))}, the model has {list(shape)}"
            )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's parameter group, without parameters, as JSON values."""
    settings = {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params"
    }
    return _as_json("the settings of the optimizer", settings)


def _take(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Restore the settings of a parameter group from a step."""
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether a torch optimizer keeps its step count on the parameters' device."""
    return bool(group.get("capturable") or group.get("fused"))


def _as_json(subject: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` as JSON would restore it; raise `ConfigError` if it is not serializable."""
    try:
        return dict(json.loads(json.dumps(value)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{subject} must be of numbers, texts, lists and dicts: {error}"
        ) from error
