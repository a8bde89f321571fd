"""`watch`: records a few steps of any trainer on every rank, and compares them with one process.

It hooks the model's forward, `clip_grad_norm_` and the optimizer's step; after the last recorded
step, the hooks are removed, and rank 0 replays the steps while the others wait.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.errors import ConfigError
from meshwright.prove.trainers.alarms import ReplicaAlarms
from meshwright.prove.trainers.clipping import around_clipping, full, number_of
from meshwright.prove.trainers.gather import ModelReader, everyones
from meshwright.prove.trainers.judge import RunVerdict
from meshwright.prove.trainers.recording import (
    RecordedMicrobatch,
    RecordedStep,
    encode,
    summary_of,
    write_step,
)
from meshwright.prove.trainers.report import TrainerVerdict
from meshwright.prove.trainers.trial_of_run import RunFacts, compare_run
from meshwright.prove.trainers.twin import no_dropout
from meshwright.units import format_bytes

_SETTINGS: Final = (bool, int, float, str, type(None), tuple, list)


class TrainerWatch:
    """Records `steps` steps of a training loop into `folder`, then compares them.

    `verdict` is None until then; only rank 0 has it. `say` receives lines of text on rank 0: those
    of the verdict, too, unless `at_end` takes care of it, which every rank calls.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        *,
        steps: int = 2,
        reference: Callable[[], nn.Module] | None = None,
        say: Callable[[str], None] = print,
        at_end: Callable[[TrainerWatch], None] | None = None,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps = {steps} must be 1 or more")
        self._model, self._folder, self._steps = model, folder, steps
        self._reference, self._say, self._at_end = reference, say, at_end
        self._reader = ModelReader(model)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._step, self._done = RecordedStep(), 0
        self._clip_depth = 0
        self._compute_dtype: torch.dtype | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._has_state, self._is_open = False, True
        self._stack = contextlib.ExitStack()
        self.notes = list[str]()
        self.verdict: TrainerVerdict | None = None

    @property
    def is_on(self) -> bool:
        """Whether it still records."""
        return self._done < self._steps and self._is_open

    @property
    def root(self) -> nn.Module:
        """The model that it watches, as the loop calls it."""
        return self._model

    @property
    def is_between_steps(self) -> bool:
        """Whether a step is over: nothing is pending, or whole gradients that no optimizer takes.

        A program that computes gradients without an optimizer is compared by these.
        """
        pending = self._step.microbatches
        if not pending:
            return self._done > 0
        return all(m.gradients for m in pending) and not self._has_optimizer()

    def start(self) -> None:
        """Install the hooks, and say how much memory the recording takes."""
        size = sum(p.numel() * p.element_size() for p in self._reader.parameters().values())
        if self._rank == 0:
            self._say(
                f"meshwright records {self._steps} steps in {self._folder}: up to "
                f"{format_bytes(4 * size)} of host memory on each rank and of disk a step, and "
                f"{format_bytes(12 * size)} on rank 0 to compare"
            )
        undo = self._stack
        dropped = undo.enter_context(no_dropout(self._reader.model))
        if dropped and self._rank == 0:
            self._say(f"dropout is off while it records ({len(dropped)} modules had some)")
        model = self._model
        before = model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        after = model.register_forward_hook(self._forward_ends, prepend=True)
        begins = register_optimizer_step_pre_hook(self._step_begins)
        for handle in (before, after, begins):
            undo.callback(handle.remove)
        self._ends = register_optimizer_step_post_hook(self._step_ends)
        undo.callback(lambda: self._ends.remove())
        leaf = next((m for m in model.modules() if _is_leaf(m)), None)
        if leaf is not None:
            undo.callback(leaf.register_forward_pre_hook(self._note_dtype).remove)
        undo.enter_context(around_clipping(self._clips))
        if self._reader.is_deepspeed:
            undo.enter_context(_around_deepspeed(model, self._engine_steps))

    def stop(self) -> None:
        """Remove all hooks; without the steps that were asked for, the verdict is a refusal."""
        if self.is_on:
            self._give_up(f"the optimizer took {self._done} of {self._steps} steps")
        self._stack.close()

    def finish(self) -> None:
        """Compare the steps that were taken, fewer than were asked for; a collective."""
        if not self.is_on or not self.is_between_steps:
            self.stop()
            return
        if self._step.microbatches:
            self.notes.append("no optimizer took a step: only losses and gradients are compared")
            self._before_update(None)
            self._keep_step({})
        self._steps = self._done
        self.stop()
        self._compare()

    def drop(self) -> bool:
        """Remove all hooks if nothing trains the model, which then was only called; whether so."""
        is_trained = self._done or any(m.gradients for m in self._step.microbatches)
        if is_trained or self._has_optimizer():
            return False
        self._is_open = False
        self._stack.close()
        return True

    def _has_optimizer(self) -> bool:
        """Whether an optimizer holds parameters of the model."""
        if self._reader.is_deepspeed:
            return True
        alive = gc.get_objects()
        optimizers = [x for x in alive if issubclass(type(x), torch.optim.Optimizer)]
        return any(self._holds(optimizer) for optimizer in optimizers)

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        ids = {id(parameter) for parameter in self._model.parameters()}
        return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])

    def _give_up(self, reason: str) -> None:
        """End the recording with a refusal."""
        self._is_open = False
        if self._rank == 0:
            refused = RunVerdict((), reason, "mean", 0, 0.0)
            self._conclude(TrainerVerdict(refused, self._world, (), self._done, ()))
        if self._at_end is not None:
            self._at_end(self)

    def _conclude(self, verdict: TrainerVerdict) -> None:
        self.verdict = verdict
        self._folder.mkdir(parents=True, exist_ok=True)
        verdict.write(self._folder)
        for line in verdict.lines() if self._at_end is None else ():
            self._say(line)

    def _forward_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._records_forward():
            return
        if not self._step.weights:
            self._step.weights = self._reader.weights()
        tensors = dict[str, Tensor]()
        try:
            inputs = [encode(list(args), tensors, "args"), encode(dict(kwargs), tensors, "kwargs")]
        except ConfigError as error:
            self._give_up(str(error))
            return
        self._step.microbatches.append(RecordedMicrobatch({"tuple": inputs}, tensors))

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return copies of the outputs, which receive the gradients of the caller's code alone."""
        if not self._records_forward() or not self._step.microbatches:
            return None
        microbatch = self._step.microbatches[-1]
        leaves, form = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point():
                copied = leaf.clone()  # a view would forbid operations in place
                microbatch.values[place] = summary_of(full(leaf))

                def receive(gradient: Tensor, place: int = place) -> None:
                    microbatch.gradients[place] = gradient.detach()

                copied.register_hook(receive)  # type: ignore[no-untyped-call]
                leaves[place] = copied
        return tree_unflatten(leaves, form)

    def _records_forward(self) -> bool:
        in_backward = torch._C._current_graph_task_id() != -1
        return self.is_on and torch.is_grad_enabled() and not in_backward

    def _note_dtype(self, module: nn.Module, args: Any) -> None:
        if self._compute_dtype is None and torch.is_grad_enabled():
            device = next(module.parameters(recurse=False)).device.type
            if torch.is_autocast_enabled(device):
                self._compute_dtype = torch.get_autocast_dtype(device)
            else:
                self._compute_dtype = next(module.parameters(recurse=False)).dtype

    def _clips(self, clip: Callable[[], Any], max_norm: float) -> Any:
        """Record the gradients before clipping, and the norm that it returns."""
        is_ours = self.is_on and self._step.microbatches and not self._reader.is_deepspeed
        if not is_ours or self._clip_depth:
            return clip()
        if self._step.gradients is None:
            self._step.gradients = self._reader.gradients()
        self._clip_depth += 1
        try:
            norm = clip()
        finally:
            self._clip_depth -= 1
        self._step.norm, self._step.max_norm = number_of(norm), float(max_norm)
        return norm

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer) and not self._reader.is_deepspeed:
            self._ends.remove()  # what others do to the weights after the step is part of it
            self._ends = register_optimizer_step_post_hook(self._step_ends)
            self._before_update(optimizer)

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer) and not self._reader.is_deepspeed:
            self._after_update()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.is_on and bool(self._step.microbatches) and self._holds(optimizer)

    def _before_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._step.gradients is None:
            self._step.gradients = self._reader.gradients()
        if self._reader.is_deepspeed and not any(
            gradient is not None for gradient in self._step.gradients.values()
        ):
            self._give_up("DeepSpeed shows no gradients of this configuration")
        if optimizer is not None:
            if self._optimizer is None:
                self._optimizer = optimizer
                self._has_state = any(
                    value is not None
                    for state in optimizer.state.values()
                    for value in state.values()
                )
            self._step.groups = self._groups(optimizer)

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in self._reader.parameters().items()}
        return [
            {
                "names": [names[id(p)] for p in group["params"] if id(p) in names],
                "settings": {
                    key: _setting(value)
                    for key, value in group.items()
                    if key not in ("params", "fused", "foreach", "capturable", "initial_lr")
                    and isinstance(_setting(value), _SETTINGS)
                },
            }
            for group in optimizer.param_groups
        ]

    def _after_update(self) -> None:
        """Write the step, and compare after the last one."""
        self._keep_step(self._reader.weights())
        if not self.is_on:
            self.stop()
            self._compare()

    def _keep_step(self, after: dict[str, Tensor]) -> None:
        """Write the step, and begin the next one with the weights `after` it."""
        done, self._step = self._step, RecordedStep()
        done.after = after
        self._done += 1
        done.microbatches = [m for m in done.microbatches if m.gradients]
        self._step.weights = done.after
        write_step(self._folder, self._done, done, self._reader.sharded_over(), self._rank)

    def _engine_steps(self, step: Callable[[], Any], engine: Any) -> Any:
        """Record around the step of DeepSpeed's engine, which clips and updates by itself."""
        if not (
            self.is_on and self._step.microbatches and engine.is_gradient_accumulation_boundary()
        ):
            return step()
        self._before_update(None)
        result = step()
        if not self.is_on:
            return result
        norm = engine.get_global_grad_norm()
        limit = engine.gradient_clipping()
        if norm is not None and limit:
            self._step.norm, self._step.max_norm = number_of(norm), float(limit)
        self._after_update()
        return result

    def _compare(self) -> None:
        axes = self._reader.axes()
        everyones(None)  # all files are written
        if self._rank == 0:
            kind = type(self._optimizer) if self._optimizer is not None else None
            if self._has_state or kind is None or not kind.__module__.startswith("torch.optim"):
                kind = None
            facts = RunFacts(self._folder, self._world, self._done, axes, self._compute_dtype, kind)
            verdict = compare_run(facts, self._reader.model, self._reference)
            self._conclude(replace(verdict, notes=(*self.notes, *verdict.notes)))
        everyones(None)
        if self._at_end is not None:
            self._at_end(self)


@contextlib.contextmanager
def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    folder: str | Path = "meshwright-watch",
    steps: int = 2,
    reference: Callable[[], nn.Module] | None = None,
    check: Literal["reference", "replicas"] = "reference",
    say: Callable[[str], None] = print,
) -> Iterator[Any]:
    """Compare the next steps of a training loop with one process, whatever trainer computes them.

        with mw.watch(model) as watched:
            train(model, optimizer)
        watched.verdict  # on rank 0

    Every rank enters it, with the model that the loop calls (wrapped or sharded), before the first
    step. `steps` steps are recorded in `folder`, which all ranks share; then rank 0 replays them on
    the unsharded model, which `reference()` returns (default: made of the model's class), and the
    hooks are gone. With `check="replicas"`, nothing is recorded: each step is checked for
    replicas that differ, parameters without a gradient, and norms that differ between ranks. Raises
    `ConfigError` for a number of steps below 1.
    """
    if check == "replicas":
        watched: Any = ReplicaAlarms(model, say=say)
    else:
        watched = TrainerWatch(model, Path(folder), steps=steps, reference=reference, say=say)
    watched.start()
    try:
        yield watched
    except BaseException:
        watched.stop()
        raise
    watched.finish()


@contextlib.contextmanager
def _around_deepspeed(
    engine: Any, around: Callable[[Callable[[], Any], Any], Any]
) -> Iterator[None]:
    """Call `around(step, engine)` in place of `engine.step()`."""
    original = engine.step
    engine.step = lambda *args, **kwargs: around(lambda: original(*args, **kwargs), engine)
    try:
        yield
    finally:
        del engine.step


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None and bool(module._parameters)


def _setting(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
