"""Finds the models that an unchanged program trains, by watching which modules it calls with
gradients on.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm.values import gather_values
from meshwright.prove.trainers.reduction import Reduction
from meshwright.prove.trainers.watch import TrainerWatch
from meshwright.torch_private import current_graph_task_id
from meshwright.units import counted


def attach(
    folder: Path,
    *,
    steps: int = 2,
    reference: Callable[[], nn.Module] | None = None,
    say: Callable[[str], None] = print,
    at_end: Callable[[TrainerWatch], None],
    reduction: Reduction | None = None,
) -> Callable[[], None]:
    """Watch the models that a program trains, and return a function that ends the watch early.

    A model is compared after `steps` steps, or before the program trains another model, destroys
    its process group or exits. If it agrees, the next model is watched. After the last comparison,
    every rank calls `at_end`.
    """
    finder = _ModelFinder(folder, steps, reference, say, at_end, reduction)
    finder.start()
    return finder.finish


class _ModelFinder:
    """Replaces `nn.Module.__call__` to find the models that a program trains, until one is
    compared.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        reference: Callable[[], nn.Module] | None,
        say: Callable[[str], None],
        at_end: Callable[[TrainerWatch], None],
        reduction: Reduction | None,
    ) -> None:
        self._folder, self._steps, self._reference = folder, steps, reference
        self._reduction = reduction
        self._say, self._at_end = say, at_end
        self._watched: TrainerWatch | None = None
        self._is_inside, self._moves_on, self._agreed = False, False, 0
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Replace `nn.Module.__call__` and `destroy_process_group`, and register for the program's
        exit.
        """
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not _is_trained(module):
                return original(module, *args, **kwargs)
            self._is_inside = True
            try:
                self._meet(module)
                return original(module, *args, **kwargs)
            finally:
                self._is_inside = False

        destroy = dist.destroy_process_group

        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            self.finish()
            return destroy(*args, **kwargs)

        self._put(nn.Module, "__call__", call)
        self._put(dist, "destroy_process_group", destroy_process_group)
        atexit.register(self._exit)
        self._stack.callback(atexit.unregister, self._exit)

    def finish(self) -> None:
        """Restore the replaced functions, and compare the steps recorded so far."""
        self._stack.close()
        if self._watched is not None and self._watched.is_on:
            self._watched.finish()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _exit(self) -> None:
        if not hasattr(sys, "last_value"):  # no exception ends the program
            self.finish()

    def _meet(self, module: nn.Module) -> None:
        """Begin to watch a model that is called, unless another one is still being watched."""
        if self._watched is not None and not self._is_over(self._watched, module):
            return
        self._watched = TrainerWatch(
            module,
            self._folder,
            steps=self._steps,
            reference=self._reference,
            say=self._say,
            at_end=self._compared,
            reduction=self._reduction,
        )
        if self._agreed:
            text = f"before it, the program trained {counted(self._agreed, 'model')} that agreed"
            self._watched.notes.append(text)
        self._watched.start()

    def _is_over(self, before: TrainerWatch, module: nn.Module) -> bool:
        """Whether the watch of another model ends because `module` is called; if so, compares that
        model first, unless nothing trained it.
        """
        if before.root is module or not before.is_on:
            return False
        if before.drop():
            return True
        if not before.is_between_steps:
            return False
        self._moves_on = True
        before.finish()
        self._moves_on = False
        return self._watched is None

    def _compared(self, watched: TrainerWatch) -> None:
        """After the comparison of a model: if it agreed and the program trains another one, go on
        with that; else call `at_end`.
        """
        if self._moves_on:
            is_right = gather_values(watched.verdict is not None and watched.verdict.passed)[0]
            if is_right:
                self._watched, self._agreed = None, self._agreed + 1
                return
        self._stack.close()
        self._at_end(watched)


def _is_trained(module: nn.Module) -> bool:
    """Whether a call of a module is a step's forward: outside of backward, with gradients."""
    in_backward = current_graph_task_id() != -1
    is_on = torch.is_grad_enabled() and not in_backward
    return is_on and any(parameter.requires_grad for parameter in module.parameters())


class WatchCallback:
    """A callback for the `Trainer` of transformers and of TRL that compares its first steps with
    one process.

    Pass it in the trainer's `callbacks`. The arguments are those of `watch`. `verdict` is None
    until the steps are compared, and on other ranks than 0.
    """

    def __init__(
        self,
        folder: str | Path = "meshwright-watch",
        *,
        steps: int = 2,
        reference: Callable[[], nn.Module] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._folder, self._steps = Path(folder), steps
        self._reference, self._say = reference, say
        self._finish: Callable[[], None] = lambda: None
        self.verdict: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to look for the model that the trainer calls."""
        self._finish = attach(
            self._folder,
            steps=self._steps,
            reference=self._reference,
            say=self._say,
            at_end=self._keep,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the recorded steps, if the run took fewer than `steps`."""
        self._finish()

    def _keep(self, watched: TrainerWatch) -> None:
        self.verdict = watched.verdict
        for line in () if self.verdict is None else self.verdict.lines():
            self._say(line)

    def __getattr__(self, name: str) -> Any:
        """Return a function that does nothing, for the trainer's other events."""
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)
