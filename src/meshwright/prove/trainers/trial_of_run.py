"""From a folder of recorded steps to a verdict: loads, joins shards, replays and compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.prove.trainers.divided import divided, divided_weights, divisors
from meshwright.prove.trainers.faults import factor_of
from meshwright.prove.trainers.gather import SEQUENCE_AXES, assembled, clean_names
from meshwright.prove.trainers.judge import Convention, RunVerdict, StepFault, judge
from meshwright.prove.trainers.normalization import TargetWeights, convention_text
from meshwright.prove.trainers.observed import (
    GatheredTensor,
    MeshAxis,
    ObservedStep,
    RankCopy,
)
from meshwright.prove.trainers.recording import LoadedStep, load_step
from meshwright.prove.trainers.reduction import InputShape, case_of
from meshwright.prove.trainers.replay import (
    Precision,
    Replay,
    Replayer,
    crosses_data_ranks,
    data_rank_of,
    data_rows,
    replay_updates,
    replayed_groups,
)
from meshwright.prove.trainers.report import TrainerVerdict
from meshwright.prove.trainers.twin import make_twin
from meshwright.units import counted


class RunFacts(NamedTuple):
    """What is known of a recorded run; `optimizers` has those whose updates can be replayed.

    `is_cut` says that rows or tokens were left out, so that the loss is not a mean of all targets.
    """

    folder: Path
    world: int
    steps: int
    axes: Sequence[MeshAxis]
    compute_dtype: torch.dtype | None
    optimizers: Mapping[str, type[torch.optim.Optimizer]]
    is_cut: bool = False
    shape: InputShape = InputShape(0, 0)


def compare_run(
    facts: RunFacts, model: nn.Module, reference: Callable[[], nn.Module] | None
) -> TrainerVerdict:
    """Return the verdict on a recorded run; `model` is the run's, for its class and config."""
    notes, case = list[str](), dict[str, Any]()
    try:
        verdict = _compared(facts, model, reference, notes, case)
    except ConfigError as error:
        verdict = RunVerdict((), str(error), "mean", 0, 0.0)
    except Exception as error:  # of the model's own code; the other ranks are waiting
        reason = f"the unsharded model cannot replay the steps ({type(error).__name__}: {error})"
        verdict = RunVerdict((), f"{reason}; pass reference=", "mean", 0, 0.0)
    axes, steps = tuple(facts.axes), facts.steps
    return TrainerVerdict(verdict, facts.world, axes, steps, tuple(notes), case)


def _compared(
    facts: RunFacts,
    model: nn.Module,
    reference: Callable[[], nn.Module] | None,
    notes: list[str],
    case: dict[str, Any],
) -> RunVerdict:
    """Return the verdict; fills `notes`, and `case` with what there is to reduce."""
    steps = [load_step(facts.folder, n + 1, facts.world) for n in range(facts.steps)]
    _refuse(facts, steps)
    _refuse_gated(model)
    case.update(case_of(model, facts.shape, len(steps[0].microbatches[0])))
    case["data_rank_of"] = data_rank_of(steps[0])
    shapes = _shapes(model, steps[0], reference)
    gathered = [_whole(step, shapes, facts.axes, notes) for step in steps]
    weights = _values(gathered[0].weights)
    dtype = next(iter(weights.values())).dtype
    precision = Precision(dtype, facts.compute_dtype or dtype)
    replay = Replayer(lambda: make_twin(model, weights, reference), precision).run(gathered)
    first = replayed_groups(gathered[0], facts.optimizers)
    names = [group["names"] for group in first]
    is_same = all(
        [group["names"] for group in replayed_groups(step, facts.optimizers)] == names
        for step in gathered
    )
    if first and is_same:
        updates = replay_updates(gathered, facts.optimizers)
        pairs = zip(replay.steps, updates, strict=True)
        replay.steps = [step._replace(updates=expected) for step, expected in pairs]
    elif any(step.after for step in gathered):
        notes.append(
            "updates are compared between ranks only: the optimizer is not one of torch.optim that "
            "begins with these steps"
        )
    observed = [_observed(step) for step in gathered]
    if any(any(step.clips) and not step.norms for step in gathered):
        notes.append(
            "the norm is not compared: the run clips several times a step, or with parameters of "
            "other models"
        )
    rows = data_rows(steps[0])
    convention = _divide(observed, replay, facts, notes)
    verdict = judge(observed, replay.steps, facts.axes, replay.order, convention)
    notes += verdict.notes
    if reference is not None and verdict.faults and verdict.faults[0].quantity == "loss":
        _refuse_crossing(model, weights, steps[0])
    scale = 1.0 if verdict.convention == "sum" else 1 / len({row.data_rank for row in rows})
    weighting = replay.weighting[: len(rows)]
    mean = "rows or tokens are left out: which mean the loss is, is not examined"
    notes.append(mean if facts.is_cut else convention_text(weighting, scale))
    _note_rows(facts, steps[0], notes)
    fault = None if facts.is_cut else _wrong_divisor(weighting, scale, facts.axes)
    is_training = any(step.after for step in steps)  # else any multiple may be meant
    # Gradients of different weights show no convention, so no divisor can be told from it.
    is_apart = any(known.quantity == "weights" for known in verdict.faults)
    if fault is None or not is_training or verdict.refused is not None or is_apart:
        return verdict
    return replace(verdict, faults=(fault, *verdict.faults))


def _divide(
    observed: Sequence[ObservedStep],
    replay: Replay,
    facts: RunFacts,
    notes: list[str],
) -> Convention | None:
    """Divide the replay by the number of targets if the run divides its gradients after the
    backward, and return the convention that follows; None if it doesn't.
    """
    if facts.is_cut or not any(step.updates for step in observed):
        return None
    by_step = divisors(observed, replay.steps, replay.weighting, facts.axes)
    if by_step is None:
        return None
    weights = iter(replay.weighting)
    pairs = list(zip(replay.steps, by_step, strict=True))
    replay.weighting = [
        divided_weights(next(weights), divisor)
        for step, divisor in pairs
        for _ in step.contributions
    ]
    replay.steps = [divided(step, divisor) for step, divisor in pairs]
    notes.append(f"the gradients are divided after the backward, by {by_step[0]:.6g} in step 1")
    return "sum"


def _wrong_divisor(
    weighting: Sequence[TargetWeights], scale: float, axes: Sequence[MeshAxis]
) -> StepFault | None:
    """Return the fault of a loss whose targets' weights add up to a product of axis sizes, or its
    inverse, in place of 1; else None.
    """
    if not weighting or not all(weights.targets for weights in weighting):
        return None
    total = sum(weights.total for weights in weighting) * scale
    microbatches = len({weights.microbatch for weights in weighting})
    names, how = factor_of(total, axes, microbatches)
    if not names or abs(total - 1) < 1e-3:
        return None
    sentence = f"the whole gradient, as a mean over the targets, {how}"
    return StepFault("loss", "scaled", sentence, 1, axes=names, ratio=total, error=abs(total - 1))


def _refuse(facts: RunFacts, steps: Sequence[LoadedStep]) -> None:
    """Raise `ConfigError` for a run that cannot be replayed reliably."""
    for axis in facts.axes:
        if axis.name in SEQUENCE_AXES and len(data_rows(steps[0])) > 0:
            raise ConfigError(
                f"the ranks of {axis.name} share out the positions of a sequence, and what each "
                "reads cannot be put together without knowing how"
            )
    counts = {len(microbatches) for step in steps for microbatches in step.microbatches}
    if 0 not in counts and any(len({len(m) for m in s.microbatches}) > 1 for s in steps):
        raise ConfigError("the ranks take different numbers of microbatches in a step")
    if 0 in counts:
        raise ConfigError(
            "not every rank calls the model and gets a gradient for its outputs (a pipeline, or "
            "a loss that is computed elsewhere): nothing can be replayed"
        )


def _refuse_gated(model: nn.Module) -> None:
    """Refuse Megatron-Core's gated MLPs under tp: their shards fit together in no plain order."""
    for module in model.modules():
        config = getattr(module, "config", None)
        is_gated = getattr(config, "gated_linear_unit", False)
        if is_gated and getattr(config, "tensor_model_parallel_size", 1) > 1:
            raise ConfigError(
                "each tp rank has a part of the gate and one of the other half in one weight "
                "(gated_linear_unit), which cannot be put together without knowing how"
            )


def _refuse_crossing(model: nn.Module, weights: Mapping[str, Tensor], step: LoadedStep) -> None:
    """Refuse a model whose forward communicates between ranks that read different inputs: its loss
    is that of no rank's rows alone. A model that cannot be copied is not examined.
    """
    try:
        is_crossing = crosses_data_ranks(make_twin(model, weights), step)
    except Exception:
        return
    if is_crossing:
        raise ConfigError(
            "the losses differ from those of one process, and the model's forward communicates "
            "between ranks that read different inputs: if they share out the positions of a "
            "sequence, what each reads cannot be put together without knowing how"
        )


def _shapes(
    model: nn.Module, step: LoadedStep, reference: Callable[[], nn.Module] | None
) -> dict[str, torch.Size]:
    """Return the whole shape of each parameter: from the unsharded model if it can be built,
    otherwise from the recorded weights.
    """
    values = _values(step.weights)
    if reference is not None:
        return {name: p.shape for name, p in clean_names(reference()).items()}
    try:
        twin = make_twin(model, values)
    except (ConfigError, RuntimeError):
        return {name: value.shape for name, value in values.items()}
    return {name: p.shape for name, p in clean_names(twin).items()}


def _whole(
    step: LoadedStep,
    shapes: Mapping[str, torch.Size],
    axes: Sequence[MeshAxis],
    notes: list[str],
) -> LoadedStep:
    """Return a step with whole tensors in place of plain shards; `notes` receives what is left
    out."""
    kinds = dict[str, dict[str, GatheredTensor]]()
    for kind in ("weights", "gradients", "after"):
        kinds[kind] = {}
        for name, gathered in getattr(step, kind).items():
            shape = shapes.get(name)
            tensor = gathered if shape is None else assembled(gathered, shape, axes)
            if tensor is None:
                note = f"not compared: {name}, whose shards fit together in no sure way"
                notes += [note] if note not in notes else []
                if kind == "weights":
                    raise ConfigError(f"{note}; pass reference= and a layout with one such axis")
                continue
            kinds[kind][name] = tensor
    return LoadedStep(
        step.microbatches, kinds["weights"], kinds["gradients"], kinds["after"], step.clips,
        step.groups, step.is_touched,
    )  # fmt: skip


def _observed(step: LoadedStep) -> ObservedStep:
    updates = dict[str, GatheredTensor]()
    for name, after in step.after.items():
        before = step.weights[name].by_rank()
        copies = []
        for copy in after.copies:
            start = before[copy.ranks[0]]
            if copy.value is not None and start is not None:
                copies.append(RankCopy(copy.ranks, copy.value.double() - start.double()))
        updates[name] = GatheredTensor(tuple(copies), after.sharded_over)
    losses = [next(iter(row.record.values.values())) for row in data_rows(step)]
    counted_names = [clip.names for clips in step.clips for clip in clips]
    normed = set[str]().union(*(names or () for names in counted_names))
    return ObservedStep(
        step.weights, step.gradients, updates, step.norms, losses,
        None if None in counted_names or not normed else frozenset(normed), step.is_touched,
    )  # fmt: skip


def _values(tensors: Mapping[str, GatheredTensor]) -> dict[str, Tensor]:
    values = {name: gathered.copies[0].value for name, gathered in tensors.items()}
    return {name: value for name, value in values.items() if value is not None}


def _note_rows(facts: RunFacts, step: LoadedStep, notes: list[str]) -> None:
    """Append a note on how many ranks read different sequences; all data-parallel ranks should."""
    data_ranks = len({row.data_rank for row in data_rows(step)})
    places = len(data_rows(step)) // data_ranks
    notes.append(
        f"the {facts.world} ranks read the rows of {counted(data_ranks, 'data rank')}, "
        f"{places} microbatches a step"
    )
    data_axes = {"dp", "shard", "replicate", "fsdp", "dp_shard", "dp_replicate"}
    known = {axis.name for axis in facts.axes} - {"all ranks"}
    if data_ranks < facts.world and known and known <= data_axes:
        notes.append("ranks of data parallelism read the same rows: the sampler is not distributed")
