"""Meshwright plans, proves, trains and explains the parallel training of language models.

The names below are imported when they are used, so that planning never pays for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.checkpoint.own import Checkpoints
    from meshwright.checkpoint.weights import load_model
    from meshwright.layout import Layout
    from meshwright.parallel.user_models.parallelize import (
        clip_grad_norm,
        make_mesh,
        parallelize,
        positions,
    )
    from meshwright.planner.plan import plan
    from meshwright.prove.trainers.attach import WatchCallback
    from meshwright.prove.trainers.watch import watch
    from meshwright.runtime.session import train
    from meshwright.spec.loading import Config, load_config

__all__ = [
    "Checkpoints",
    "Config",
    "Layout",
    "WatchCallback",
    "__version__",
    "clip_grad_norm",
    "load_config",
    "load_model",
    "make_mesh",
    "parallelize",
    "plan",
    "positions",
    "train",
    "watch",
]

_HOMES = {
    "Checkpoints": "meshwright.checkpoint.own",
    "Config": "meshwright.spec.loading",
    "load_config": "meshwright.spec.loading",
    "Layout": "meshwright.layout",
    "clip_grad_norm": "meshwright.parallel.user_models.parallelize",
    "load_model": "meshwright.checkpoint.weights",
    "make_mesh": "meshwright.parallel.user_models.parallelize",
    "parallelize": "meshwright.parallel.user_models.parallelize",
    "plan": "meshwright.planner.plan",
    "positions": "meshwright.parallel.user_models.parallelize",
    "train": "meshwright.runtime.session",
    "watch": "meshwright.prove.trainers.watch",
    "WatchCallback": "meshwright.prove.trainers.attach",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
