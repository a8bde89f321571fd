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
from pathlib import Path
from types import ModuleType
from typing import Any

# As in the package, which is only imported if torch is.
ORDER = "MESHWRIGHT_WATCH"
REACHED = "process-"


class _AfterTorch(importlib.abc.MetaPathFinder):
    """An import hook that attaches the watcher as soon as torch has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _attach()

            loader.exec_module = exec_module
        return spec


def _attach() -> None:
    from meshwright.prove.trainers.attach import attach

    order = json.loads(os.environ[ORDER])
    Path(order["folder"], f"{REACHED}{os.getpid()}").touch()
    attach(Path(order["folder"]), steps=order["steps"], at_end=_end)


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
    sys.meta_path.insert(0, _AfterTorch())
