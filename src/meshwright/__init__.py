"""Meshwright plans, proves, trains and explains the parallel training of language models.

The names below are imported when they are used, so that planning never pays for torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import meshwright.train as _train_room
from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.checkpoint.own import Checkpoints
    from meshwright.checkpoint.weights import load_model
    from meshwright.execute.parallelize import clip_grad_norm, make_mesh, parallelize, positions
    from meshwright.layout import Layout
    from meshwright.search.plan import plan
    from meshwright.spec.loading import Config, load_config

__all__ = [
    "Checkpoints",
    "Config",
    "Layout",
    "__version__",
    "clip_grad_norm",
    "load_config",
    "load_model",
    "make_mesh",
    "parallelize",
    "plan",
    "positions",
    "train",
]

_HOMES = {
    "Checkpoints": "meshwright.checkpoint.own",
    "Config": "meshwright.spec.loading",
    "load_config": "meshwright.spec.loading",
    "Layout": "meshwright.layout",
    "clip_grad_norm": "meshwright.execute.parallelize",
    "load_model": "meshwright.checkpoint.weights",
    "make_mesh": "meshwright.execute.parallelize",
    "parallelize": "meshwright.execute.parallelize",
    "plan": "meshwright.search.plan",
    "positions": "meshwright.execute.parallelize",
}


class _TrainRoom(ModuleType):
    """The room `meshwright.train`, which is also the function `mw.train(config)`.

    Importing anything in the room makes it an attribute of the package, so the two have to be one.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train a config: `meshwright.launch.session.train`."""
        return importlib.import_module("meshwright.launch.session").train(*args, **kwargs)


_train_room.__class__ = _TrainRoom
train = _train_room


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
