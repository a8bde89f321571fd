"""Runs in every Python process that `meshwright prove -- COMMAND` starts.

Nothing happens before the program imports torch; then the first model that it trains is watched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# As in the package, which is only imported if torch is.
ORDER = "MESHWRIGHT_WATCH"
REACHED = "process-"


class _After(importlib.abc.MetaPathFinder):
    """An import hook that calls a function with a module as soon as it has been imported."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._call(module)

            loader.exec_module = exec_module
        return spec


def _attach(torch: ModuleType) -> None:
    from meshwright.prove.trainers.attach import attach
    from meshwright.prove.trainers.reduction import Reduction

    order = json.loads(os.environ[ORDER])
    reduction = Reduction(**order.get("reduction", {}))
    Path(order["folder"], f"{REACHED}{os.getpid()}").touch()
    attach(Path(order["folder"]), steps=order["steps"], at_end=_end, reduction=reduction)
    reduction.reduce_lists()
    if reduction.sizes:
        sys.meta_path.insert(0, _After("transformers.modeling_utils", reduction.reduce_configs))


def _end(watched: Any) -> None:
    """Exit the process, since the steps to compare have been recorded."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run_next() -> None:
    """Run the environment's own `sitecustomize`, which this file hides, if there is one."""
    folder = Path(__file__).parent.resolve()
    search_path = [path for path in sys.path if Path(path or ".").resolve() != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", search_path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_run_next()
if ORDER in os.environ:
    sys.meta_path.insert(0, _After("torch", _attach))
