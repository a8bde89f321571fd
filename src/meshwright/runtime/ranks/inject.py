"""`Injector` executes a `Fault` in its rank."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from meshwright.runtime.ranks.fault import Fault


class Injector:
    """Executes a fault, once for each of its steps; called with each phase of a recorder."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._acted: set[int] = set()

    def __call__(self, phase: str, step: int) -> None:
        """Inject the fault if this is its phase and step."""
        fault = self._fault
        if phase != fault.phase or fault.step not in (None, step) or step in self._acted:
            return
        self._acted.add(step)
        _DEEDS[fault.action](fault.argument)


def injector(text: str | None, rank: int, attempt: int) -> Injector | None:
    """Return the injector of this rank and attempt, if there is one."""
    fault = Fault.parse(text) if text else None
    if fault is None or fault.rank != rank or (attempt > 0 and not fault.always):
        return None
    return Injector(fault)


def _send(number: signal.Signals) -> Callable[[str], None]:
    return lambda argument: os.kill(os.getpid(), number)


def _segfault(argument: str) -> None:
    ctypes.string_at(0)


def _hang_with_gil(argument: str) -> None:
    """Stop as a C extension does that never returns: no other thread can run Python again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    ctypes.PyDLL(None).pause()


def _raise(argument: str) -> None:
    raise RuntimeError(argument or "a fault on purpose")


def _spoil(argument: str) -> None:
    """Make the next module return numbers that are not finite."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return None
        handle.remove()
        return out * float(argument or "nan")

    handle = nn.modules.module.register_module_forward_hook(hook)


_DEEDS: Final[Mapping[str, Callable[[str], None]]] = {
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "segfault": _segfault,
    "hang_gil": _hang_with_gil,
    "sleep": lambda argument: time.sleep(float(argument or 1)),
    "raise": _raise,
    "exit": lambda argument: os._exit(int(argument or 7)),
    "nan": _spoil,
}
