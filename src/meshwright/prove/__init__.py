"""Proves that a layout computes what one device does, and what its program says.

The package can be called: `mw.prove(config)` is `mw.prove_layout(config)`.
"""

import sys
from types import ModuleType
from typing import Any

import meshwright


class _Callable(ModuleType):
    """A package with the name of a command: calling it does what the command does."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """See `meshwright.prove_layout`."""
        return meshwright.prove_layout(*arguments, **settings)


sys.modules[__name__].__class__ = _Callable
