"""`watch`: records a few steps of any trainer on every rank, and compares them with one process.

It hooks the model's forward, `clip_grad_norm_` and the optimizer's step. A step ends when the next
one's forward begins, since some programs change the weights after the optimizer's step: they gather
or normalize them. After the last step, it removes the hooks, and rank 0 replays the steps while the
others wait.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
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

from meshwright.comm.values import gather_values
from meshwright.errors import ConfigError
from meshwright.prove.trainers.alarms import ReplicaAlarms
from meshwright.prove.trainers.clipping import around_clipping, full, number_of
from meshwright.prove.trainers.gather import (
    ModelReader,
    digest,
    have_changed,
)
from meshwright.prove.trainers.judge import RunVerdict, StepFault
from meshwright.prove.trainers.recording import (
    Clip,
    RecordedMicrobatch,
    RecordedStep,
    encode,
    summary_of,
    write_step,
)
from meshwright.prove.trainers.reduction import InputCut, InputShape, Reduction, input_shape
from meshwright.prove.trainers.report import TrainerVerdict
from meshwright.prove.trainers.trial_of_run import RunFacts, compare_run
from meshwright.prove.trainers.twin import no_dropout
from meshwright.torch_private import current_graph_task_id, tree_flatten, tree_unflatten
from meshwright.units import format_bytes

_SETTINGS: Final = (bool, int, float, str, type(None), tuple, list)


class TrainerWatch:
    """Records `steps` steps of a training loop into `folder`, then compares them with a replay in
    one process.

    `verdict` is None until then; only rank 0 has it. `say` receives lines of text on rank 0: those
    of the verdict, too, unless `at_end` takes care of it, which every rank calls. A `reduction`
    leaves out rows and tokens of each microbatch.
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
        reduction: Reduction | None = None,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps = {steps} must be 1 or more")
        self._model, self._folder, self._steps = model, folder, steps
        self._reference, self._say, self._at_end = reference, say, at_end
        self._reduction = reduction or Reduction()
        self._cut = InputCut(self._reduction)
        self._shape: InputShape | None = None
        self._reader = ModelReader(model)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._step, self._done = RecordedStep(), 0
        self._clip_depth = 0
        self._compute_dtype: torch.dtype | None = None
        self._stepping: torch.optim.Optimizer | None = None  # others may step inside of it
        self._is_updated, self._is_scaled, self._is_part = False, False, False
        self._start_prints: dict[int, tuple[float, float]] = {}
        self._end_prints: dict[int, tuple[float, float]] = {}
        self._optimizers = dict[str, type[torch.optim.Optimizer] | None]()
        self._is_open = True
        self._stack = contextlib.ExitStack()
        self.notes = list[str]()
        self.verdict: TrainerVerdict | None = None

    @property
    def is_on(self) -> bool:
        """Whether it is still recording."""
        return self._done < self._steps and self._is_open

    @property
    def root(self) -> nn.Module:
        """The watched model, as the training loop calls it."""
        return self._model

    @property
    def is_between_steps(self) -> bool:
        """Whether no step is half recorded.

        True also after a complete backward if no optimizer holds the model's parameters: such a
        program is compared by its gradients.
        """
        pending = self._step.microbatches
        if self._is_updated:
            return True
        if not pending:
            return self._done > 0
        return all(m.gradients for m in pending) and not self._has_optimizer()

    def start(self) -> None:
        """Install the hooks, turn dropout off, and print how much memory the recording takes."""
        size = self._reader.whole_bytes()
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
        before = model.register_forward_pre_hook(
            self._forward_begins, with_kwargs=True, prepend=True
        )
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
        undo.enter_context(_around_scaler(self._scaler_steps))
        if self._reader.is_deepspeed:
            undo.enter_context(_around_deepspeed(model, self._engine_steps))

    def stop(self) -> None:
        """Remove all hooks; the verdict is a refusal if steps are missing."""
        if self.is_on:
            self._give_up(f"the optimizer took {self._done} of {self._steps} steps")
        self._is_open = False
        self._stack.close()

    def finish(self) -> None:
        """End the recording now, and compare the steps recorded so far, also if they are fewer than
        `steps`; a collective.
        """
        if self.is_on and self._is_updated:
            self._end_step()
            if not self.is_on:
                return
        if self.is_on and self._step.microbatches and self._changed_unseen():
            return
        if not self.is_on or not self.is_between_steps:
            self.stop()
            return
        if self._step.microbatches:
            self.notes.append("no optimizer took a step: only losses and gradients are compared")
            self._before_update(None)
            self._keep_step({})
        self._steps = self._done
        self._finish_recording()

    def drop(self) -> bool:
        """Remove all hooks if nothing trains the model; return whether that was so."""
        is_trained = self._done or any(m.gradients for m in self._step.microbatches)
        if is_trained or self._has_optimizer():
            return False
        self._is_open = False
        self._stack.close()
        return True

    def _has_optimizer(self) -> bool:
        """Whether any live optimizer holds parameters of the model."""
        if self._reader.is_deepspeed:
            return True
        alive = gc.get_objects()
        optimizers = [x for x in alive if issubclass(type(x), torch.optim.Optimizer)]
        return any(self._holds(optimizer) for optimizer in optimizers)

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        ids = {id(parameter) for parameter in self._model.parameters()}
        return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])

    def _give_up(self, reason: str) -> None:
        """End the recording with a refusal for this reason."""
        self._end_with(RunVerdict((), reason, "mean", 0, 0.0))

    def _end_with(self, verdict: RunVerdict) -> None:
        self._is_open = False
        self._stack.close()
        if self._rank == 0:
            notes = tuple(self.notes)
            self._conclude(TrainerVerdict(verdict, self._world, (), self._done, notes))
        if self._at_end is not None:
            self._at_end(self)

    def _conclude(self, verdict: TrainerVerdict) -> None:
        self.verdict = verdict
        self._folder.mkdir(parents=True, exist_ok=True)
        verdict.write(self._folder)
        for line in verdict.lines() if self._at_end is None else ():
            self._say(line)

    def _forward_begins(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._records_forward():
            return None
        if self._is_updated and self._stepping is None:
            self._end_step()
            if not self.is_on:
                return None
        if not self._step.microbatches:
            self._start_prints = self._reader.prints()
        elif self._changed_unseen():
            return None
        if not self._step.weights:
            self._step.weights = self._reader.weights()
        if self._reduction.cuts:
            args, kwargs = self._cut.inputs((args, kwargs))
        if self._shape is None:
            self._shape = input_shape((args, kwargs))
        leaves = tree_flatten((args, kwargs))[0]
        self._is_part |= any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        tensors = dict[str, Tensor]()
        try:
            inputs = [encode(list(args), tensors, "args"), encode(dict(kwargs), tensors, "kwargs")]
        except ConfigError as error:
            self._give_up(str(error))
            return None
        self._step.microbatches.append(RecordedMicrobatch({"tuple": inputs}, tensors))
        return args, kwargs

    def _changed_unseen(self) -> bool:
        """End the recording with a refusal if the weights changed within a step, without the step
        of a known optimizer; return whether they did.
        """
        is_changed = not self._is_updated and have_changed(
            self._start_prints, self._reader.prints()
        )
        if is_changed:
            self._give_up(
                "the weights change without a step of a torch.optim.Optimizer that holds them (it "
                "holds flat buffers, as Megatron-Core's distributed optimizer, or the script "
                "updates by hand), so the gradients of that update are not seen"
            )
        return is_changed

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Record the outputs of a forward, and return copies of them.

        The copies receive the gradients of the caller's code alone, which a hook records.
        """
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
                leaves[place] = self._cut.output(copied)
        if not self._done and len(self._step.microbatches) == 1 and self._rank == 0:
            outputs = [leaves[place] for place in microbatch.values]
            size = sum(
                x.numel() * x.element_size() for x in (*microbatch.tensors.values(), *outputs)
            )
            self._say(
                f"each microbatch adds {format_bytes(size)}: its inputs, and the gradients of its "
                "outputs"
            )
        return tree_unflatten(leaves, form)

    def _records_forward(self) -> bool:
        in_backward = current_graph_task_id() != -1
        return self.is_on and torch.is_grad_enabled() and not in_backward

    def _note_dtype(self, module: nn.Module, args: Any) -> None:
        if self._compute_dtype is None and torch.is_grad_enabled():
            device = next(module.parameters(recurse=False)).device.type
            if torch.is_autocast_enabled(device):
                self._compute_dtype = torch.get_autocast_dtype(device)
            else:
                self._compute_dtype = next(module.parameters(recurse=False)).dtype

    def _clips(
        self, clip: Callable[[], Any], max_norm: float, parameters: Sequence[Tensor] | None
    ) -> Any:
        """Record the gradients, call `clip`, and record the norm that it returns."""
        is_ours = self.is_on and self._step.microbatches and not self._reader.is_deepspeed
        names = None if parameters is None else self._names_of(parameters)
        if not is_ours or self._clip_depth or self._is_updated or (parameters and not names):
            return clip()
        if self._step.gradients is None:
            self._step.gradients = self._reader.gradients()
        self._clip_depth += 1
        try:
            norm = clip()
        finally:
            self._clip_depth -= 1
        recorded = Clip(number_of(norm), float(max_norm), names)
        if names is not None:
            frozen = sum(not p.requires_grad for p in parameters or ())
            recorded.others = len(parameters or ()) - len(names) - frozen
            with_gradient = (n for n, g in self._step.gradients.items() if g is not None)
            recorded.names = None if set(names) >= set(with_gradient) else names
        is_same = names is None and self._step.clips and self._step.clips[-1].names is None
        if not is_same:  # a norm that is given is applied to one mesh's parameters after another
            self._step.clips.append(recorded)
        return norm

    def _names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        ids = {id(parameter) for parameter in parameters}
        return [name for name, p in self._reader.parameters().items() if id(p) in ids]

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Record the gradients before an optimizer's step; a closure is wrapped, so that they are
        recorded after its first backward.

        Ignores an optimizer that steps inside of another one, as in `ZeroRedundancyOptimizer`.
        """
        is_ours = self.is_on and not self._reader.is_deepspeed and self._holds(optimizer)
        if not is_ours or self._stepping is not None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None and not self._step.microbatches:
            return None
        self._stepping = optimizer
        self._ends.remove()  # what others do to the weights after the step is part of it
        self._ends = register_optimizer_step_post_hook(self._step_ends)
        if closure is None:
            self._before_update(optimizer)
            return None
        if self._is_updated:
            self._end_step()
        evaluations = list[int]()

        def evaluate() -> Any:
            value = closure()
            evaluations.append(1)
            if len(evaluations) == 1 and self.is_on:
                self._before_update(optimizer)
            elif self.is_on:
                name = type(optimizer).__name__
                self._give_up(f"{name} computes the loss several times a step, at other weights")
            return value

        return (args[0], evaluate, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        if self.is_on and self._step.microbatches:
            self._is_updated = True
            self._end_prints = self._reader.prints()
            if not self._is_scaled:
                self._refuse_parts()

    def _refuse_parts(self) -> None:
        """End the recording with a refusal if the ranks hold different parts of one model, such as
        pipeline stages; a collective.

        It runs after the optimizer's step, because ranks of a pipeline begin their forwards one
        after another.
        """
        if self._done:
            return
        names = [f"{name} {digest(tensor)}" for name, tensor in sorted(self._step.weights.items())]
        everyone = gather_values((self._is_part, names))
        parts = [rank for rank, (is_part, _) in enumerate(everyone) if is_part]
        if parts and any(names != everyone[0][1] for _, names in everyone):
            self._give_up(
                f"the model of rank {parts[0]} receives inputs that need gradients, and the ranks "
                "hold other weights: these are parts of one model (a pipeline's stages), and no "
                "rank sees whole rows"
            )

    def _scaler_steps(self, step: Callable[[], Any], scaler: Any, optimizer: Any) -> Any:
        """Call `GradScaler.step`, and discard the record of a step that it skips; a collective.

        If only some ranks skip it, that is a fault, and ends the recording.
        """
        is_ours = self.is_on and self._step.microbatches and self._holds(optimizer)
        if not is_ours or self._is_updated or not scaler.is_enabled():
            return step()
        self._step.loss_scale, self._is_scaled = float(scaler.get_scale()), True
        result = step()
        self._is_scaled = False
        takes = gather_values(self._is_updated)
        if all(takes):
            self._refuse_parts()
            return result
        if any(takes):
            shown = [rank for rank, is_taken in enumerate(takes) if not is_taken]
            sentence = (
                f"the gradient scaler skips the update on ranks {shown}, and the others take it: "
                "each has looked for infinities in its own gradients alone"
            )
            fault = StepFault(
                "update", "replicas differ", sentence, self._done + 1, ranks=tuple(shown)
            )
            self._end_with(RunVerdict((fault,), None, "mean", 0, 0.0))
            return result
        self._step = RecordedStep(weights=self._step.weights)
        text = "a step that the gradient scaler skipped is not compared"
        self.notes += [text] if text not in self.notes else []
        return result

    def _before_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._step.gradients is None:
            self._step.gradients = self._reader.gradients()
            scale = getattr(optimizer, "grad_scale", None)
            if scale is not None:  # a fused optimizer divides by it in its step
                by_name = self._step.gradients.items()
                self._step.gradients = {n: None if g is None else g / scale for n, g in by_name}
        if self._reader.is_deepspeed and not any(
            gradient is not None for gradient in self._step.gradients.values()
        ):
            self._give_up("DeepSpeed shows no gradients of this configuration")
        if optimizer is not None:
            self._step.groups += self._groups(optimizer)

    def _replayable(self, optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
        """Return the optimizer's class if it is from torch.optim and has no state yet, so that its
        updates can be replayed; else None.
        """
        values = [value for state in optimizer.state.values() for value in state.values()]
        has_state = any(value is not None for value in values)
        is_torchs = type(optimizer).__module__.startswith("torch.optim")
        return type(optimizer) if is_torchs and not has_state else None

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if not self._done:
            known = self._optimizers.get(kind, type(optimizer))
            self._optimizers[kind] = None if known is None else self._replayable(optimizer)
        names = {id(p): name for name, p in self._reader.parameters().items()}
        return [
            {
                "kind": kind,
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

    def _end_step(self) -> None:
        """Write the record of a step after its update; after the last step, compare."""
        self._is_updated = False
        self._step.is_touched = have_changed(self._end_prints, self._reader.prints())
        self._keep_step(self._reader.weights())
        if not self.is_on:
            self._finish_recording()

    def _finish_recording(self) -> None:
        self._is_open = False
        self._stack.close()
        self._compare()

    def _keep_step(self, after: dict[str, Tensor]) -> None:
        """Write the record of the step with the weights `after` it, and begin the next record."""
        done, self._step = self._step, RecordedStep()
        done.after = after
        self._done += 1
        done.microbatches = [m for m in done.microbatches if m.gradients]
        done.groups = [group for group in done.groups if group["names"]]
        self._step.weights = done.after
        write_step(self._folder, self._done, done, self._reader.sharded_over(), self._rank)

    def _engine_steps(self, step: Callable[[], Any], engine: Any) -> Any:
        """Record before and after the step of DeepSpeed's engine, which clips and updates by
        itself.
        """
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
            self._step.clips.append(Clip(number_of(norm), float(limit)))
        self._end_prints = {}
        self._end_step()
        return result

    def _compare(self) -> None:
        axes = self._reader.axes()
        gather_values(None)  # all files are written
        if self._rank == 0:
            kinds = {name: kind for name, kind in self._optimizers.items() if kind is not None}
            facts = RunFacts(
                *(self._folder, self._world, self._done, axes, self._compute_dtype, kinds),
                self._reduction.cuts,
                self._shape or InputShape(0, 0),
            )
            verdict = compare_run(facts, self._reader.model, self._reference)
            self._conclude(replace(verdict, notes=(*self.notes, *verdict.notes)))
        gather_values(None)
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
    step. `steps` steps are recorded in `folder`, which all ranks share. Rank 0 then replays them on
    the unsharded model that `reference()` returns (default: built from the model's class), and the
    hooks are removed. With `check="replicas"`, nothing is recorded: each step is checked for
    replicas that differ, parameters without a gradient, and norms that differ between ranks. Raises
    `ConfigError` if `steps` is below 1.
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
def _around_scaler(around: Callable[[Callable[[], Any], Any, Any], Any]) -> Iterator[None]:
    """Inside the `with` block, replace `GradScaler.step` by `around(step, scaler, optimizer)`."""
    original = torch.amp.GradScaler.step

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return around(lambda: original(scaler, optimizer, *args, **kwargs), scaler, optimizer)

    setattr(torch.amp.GradScaler, "step", step)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.amp.GradScaler, "step", original)  # noqa: B010


@contextlib.contextmanager
def _around_deepspeed(
    engine: Any, around: Callable[[Callable[[], Any], Any], Any]
) -> Iterator[None]:
    """Inside the `with` block, replace `engine.step()` by `around(step, engine)`."""
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
