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
    from meshwright.planner.plan import Plan, plan
    from meshwright.prove.trainers.attach import WatchCallback
    from meshwright.prove.trainers.watch import watch
    from meshwright.runtime.proofs.proof import Proof, prove_layout
    from meshwright.runtime.run import Run, open_run
    from meshwright.runtime.session import train
    from meshwright.spec.loading import Config, load_config

__all__ = [
    "Checkpoints",
    "Config",
    "Layout",
    "Plan",
    "Proof",
    "Run",
    "WatchCallback",
    "__version__",
    "clip_grad_norm",
    "load_config",
    "load_model",
    "make_mesh",
    "open_run",
    "parallelize",
    "plan",
    "positions",
    "prove",
    "prove_layout",
    "train",
    "watch",
]

_HOMES = {
    "Checkpoints": "meshwright.checkpoint.own",
    "Config": "meshwright.spec.loading",
    "load_config": "meshwright.spec.loading",
    "Layout": "meshwright.layout",
    "Plan": "meshwright.planner.plan",
    "Proof": "meshwright.runtime.proofs.proof",
    "Run": "meshwright.runtime.run",
    "clip_grad_norm": "meshwright.parallel.user_models.parallelize",
    "load_model": "meshwright.checkpoint.weights",
    "make_mesh": "meshwright.parallel.user_models.parallelize",
    "open_run": "meshwright.runtime.run",
    "parallelize": "meshwright.parallel.user_models.parallelize",
    "plan": "meshwright.planner.plan",
    "positions": "meshwright.parallel.user_models.parallelize",
    "prove_layout": "meshwright.runtime.proofs.proof",
    "train": "meshwright.runtime.session",
    "watch": "meshwright.prove.trainers.watch",
    "WatchCallback": "meshwright.prove.trainers.attach",
}
# Commands that are not functions here, since they are a run's.
_INSTEAD = {
    "report": "run.report(), of the run that mw.train or mw.open_run returns",
    "eval": "run.evaluate(), of the run that mw.train or mw.open_run returns",
    "evaluate": "run.evaluate(), of the run that mw.train or mw.open_run returns",
    "generate": "run.generate(prompt), of the run that mw.train or mw.open_run returns",
    "export_hf": "run.export_hf(out), of the run that mw.train or mw.open_run returns",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "prove":  # the package of that name, which can be called
        return importlib.import_module("meshwright.prove")
    hint = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return list(__all__)
