"""Finds the newest valid step and restores a run from it, whatever layout wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.commit import (
    anew,
    digest_of,
    files_of,
    read_manifest,
    set_aside,
    steps,
    verify,
)
from meshwright.checkpoint.state import OPTIMIZER, WEIGHTS, Trained, fill_optimizer
from meshwright.checkpoint.tensors import Stored
from meshwright.comm.world import World, exchange
from meshwright.errors import CheckpointError
from meshwright.program.shards import Region
from meshwright.store import Place, StoreError


class Good(NamedTuple):
    """A verified step folder, and its manifest."""

    folder: Place
    manifest: dict[str, Any]


def newest_good(
    root: Place,
    world: World,
    on_bad: Callable[[str], None],
    group: dist.ProcessGroup | None = None,
) -> Good | None:
    """Return the newest step that passes its verification, or None if there is no step.

    The ranks share the reading, and communicate over a gloo `group`, by default the world's. A
    newer step that fails is set aside, so that it can be saved again, and `on_bad` receives the
    reason with the name of the file. None if there is no step. Raises `CheckpointError` if every
    step fails, and leaves them unchanged; also if ranks see different steps, or a store does not
    answer.
    """
    failed_steps: list[tuple[Place, str]] = []
    if group is None and world.size > 1:
        group = dist.group.WORLD
    for name in reversed(exchange(_names(root), group)[0].split()):
        folder, manifest = root / name, dict[str, Any]()
        try:
            manifest = verify(folder, lambda index: index % world.size == world.rank)
            answer = f"={digest_of([json.dumps(manifest, sort_keys=True)])}"
        except StoreError as error:  # which says nothing of the step
            answer = f"?{error}"
        except (CheckpointError, OSError) as error:
            answer = f"!{error}"
        everyone = exchange(answer, group)
        for rank, text in enumerate(everyone):
            if text.startswith("?"):
                raise CheckpointError(f"rank {rank}: {text[1:]}")
        problem = next((text[1:] for text in everyone if text.startswith("!")), None)
        if problem is not None:
            failed_steps.append((folder, problem))
            continue
        if len(set(everyone)) > 1:
            raise CheckpointError(f"{folder} is not the same step on all ranks")
        for worse, reason in failed_steps:
            if world.rank == 0:
                set_aside(worse)
            on_bad(reason)
        return Good(folder, manifest)
    if failed_steps:
        reasons = "; ".join(reason for _, reason in failed_steps)
        raise CheckpointError(
            f"no step in {root} is whole, and none was changed: {reasons}. {anew(root)}"
        )
    return None


def _names(root: Place) -> str:
    return "\n".join(path.name for path in steps(root))


def stored_of(folder: Place, kind: str) -> Stored:
    """Open the files of a kind (`WEIGHTS`, `OPTIMIZER`) of a step folder."""
    manifest = read_manifest(folder)
    names = [name for name in manifest["files"] if name.startswith(f"{kind}-")]
    return Stored(files_of(folder, manifest) / name for name in names)


class StoredSource:
    """A source of weights for `build` that reads the requested regions from a step folder."""

    def __init__(self, folder: Place) -> None:
        self._stored, self._folder = stored_of(folder, WEIGHTS), folder

    def __call__(self, name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        """Return a region of a parameter; raise `CheckpointError` if its whole shape is not
        `shape`.
        """
        self.check(name, shape)
        return self._stored.read(name, region)

    def read_ahead(self, requests: Iterable[tuple[str, Region]]) -> None:
        """Begin to read regions of parameters, which will be asked for in this order."""
        self._stored.read_ahead(requests)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `CheckpointError` if a parameter is missing or has another shape."""
        stored_shape = self._stored.shape(name)
        if stored_shape != tuple(shape):
            raise CheckpointError(
                f"{self._folder} holds {name} as {list(stored_shape)}, the model has {list(shape)}"
            )


def restore(trained: Trained, good: Good, *, same_optimizer: bool = True) -> None:
    """Restore the optimizer's state from a verified step, whose weights are already loaded.

    If not `same_optimizer`, the step is of another optimizer, and this one starts without state.
    """
    if same_optimizer:
        stored = stored_of(good.folder, OPTIMIZER)
        fill_optimizer(trained, stored, good.manifest["scalars"])
