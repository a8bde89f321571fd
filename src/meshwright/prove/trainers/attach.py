"""Finds the model of a program that nobody has changed: the first that a training forward calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.prove.trainers.watch import TrainerWatch


def attach(
    folder: Path,
    *,
    steps: int = 2,
    reference: Callable[[], nn.Module] | None = None,
    say: Callable[[str], None] = print,
    at_end: Callable[[TrainerWatch], None] | None = None,
) -> Callable[[], None]:
    """Watch the first model that is called to be trained; return what undoes it.

    `at_end` is called on every rank after the comparison, in place of printing the verdict.
    """
    original = nn.Module.__call__
    begun = list[TrainerWatch]()

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_trained(module):
            nn.Module.__call__ = original  # type: ignore[method-assign]
            watched = TrainerWatch(
                module, folder, steps=steps, reference=reference, say=say, at_end=at_end
            )
            begun.append(watched)
            watched.start()
        return original(module, *args, **kwargs)

    def undo() -> None:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        for watched in begun:
            watched.stop()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    return undo


def _is_trained(module: nn.Module) -> bool:
    """Whether a call of a module is a step's forward: outside of backward, with gradients."""
    in_backward = torch._C._current_graph_task_id() != -1
    is_on = module.training and torch.is_grad_enabled() and not in_backward
    return is_on and any(parameter.requires_grad for parameter in module.parameters())


class WatchCallback:
    """A callback for the `Trainer` of transformers, and for TRL's: proves its first steps.

    Give it to the trainer's `callbacks`. The arguments are those of `watch`; `verdict` is None
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
        self._undo: Callable[[], None] = lambda: None
        self.verdict: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look for the model that the trainer calls."""
        self._undo = attach(
            self._folder,
            steps=self._steps,
            reference=self._reference,
            say=self._say,
            at_end=self._keep,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks of a run that took fewer steps."""
        self._undo()

    def _keep(self, watched: TrainerWatch) -> None:
        self.verdict = watched.verdict
        for line in () if self.verdict is None else self.verdict.lines():
            self._say(line)

    def __getattr__(self, name: str) -> Any:
        """Do nothing at the trainer's other events."""
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)
