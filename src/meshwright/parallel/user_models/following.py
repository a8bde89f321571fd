"""A base class for modes that intercept torch operators while a user's model computes."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class Following(TorchFunctionMode):
    """A torch function mode that is active during the outermost forward of registered modules.

    A module that is recomputed in the backward counts as outermost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def follow(self, module: nn.Module) -> None:
        """Activate this mode during every forward of `module`, by replacing its `forward`."""
        forward = module.forward

        @functools.wraps(forward)
        def followed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return forward(*args, **kwargs)
            self._depth += 1
            self.begin()
            try:
                with self:
                    out = forward(*args, **kwargs)
            finally:
                self._depth -= 1
            if self.is_done(module) and module.__dict__["forward"] is followed:
                module.forward = forward
            return out

        module.forward = followed

    def begin(self) -> None:
        """Called when an outermost forward begins."""

    def is_done(self, module: nn.Module) -> bool:
        """Whether the forward of `module` has shown that this mode is not needed there any more."""
        return False
