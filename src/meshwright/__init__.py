"""Meshwright plans, proves, trains and explains the parallel training of language models.

The names below are imported when they are used, so that planning never pays for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.checkpoint.weights import load_model
    from meshwright.launch.session import train
    from meshwright.spec.loading import Config, load_config

__all__ = ["Config", "__version__", "load_config", "load_model", "train"]

_HOMES = {
    "Config": "meshwright.spec.loading",
    "load_config": "meshwright.spec.loading",
    "load_model": "meshwright.checkpoint.weights",
    "train": "meshwright.launch.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
