"""Replays recorded steps in one process, on the unsharded model, from the run's own weights.

Each microbatch of each data rank is computed once, and its outputs receive the gradients that the
run's outputs received. So the reference has the run's loss, whatever it is, and each contribution
to a gradient is known separately. One replay is in fp64; others have the run's rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.prove.expected import MARGIN, Expected
from meshwright.prove.trainers.gather import clean_names
from meshwright.prove.trainers.normalization import TargetWeights, target_weights
from meshwright.prove.trainers.observed import Contribution, GatheredTensor, ReplayedStep
from meshwright.prove.trainers.recording import (
    LoadedStep,
    RecordedMicrobatch,
    decode,
    summary_of,
)
from meshwright.prove.trainers.twin import fill
from meshwright.torch_private import (
    TorchDispatchMode,
    global_optimizer_post_hooks,
    tree_flatten,
    tree_map,
)

# Samples with the run's rounding: of the weights, and of weights that are perturbed by a rounding.
_SAMPLES: Final = 3
# A perturbed sample changes one weight of so many.
_PERTURBED: Final = 16
# A loss may differ by so many roundings of fp32, however small the measured noise is.
_LEAST_OF_LOSS: Final = 16


class Precision(NamedTuple):
    """The dtype of a run's weights, and the dtype in which it computes."""

    weights: torch.dtype
    compute: torch.dtype


class DataRow(NamedTuple):
    """A microbatch of a data rank, with the record of the first rank that computed it."""

    data_rank: int
    microbatch: int
    record: RecordedMicrobatch


@dataclass
class Replay:
    """The replay of all steps: `order` lists the parameters as the forward first uses them,
    `weighting` the targets' weights by microbatch.
    """

    steps: list[ReplayedStep]
    order: list[str]
    weighting: list[TargetWeights]


def data_rows(step: LoadedStep) -> list[DataRow]:
    """Return the microbatches of a step without the copies of model-parallel ranks."""
    by_rank = data_rank_of(step)
    return [
        DataRow(data_rank, place, microbatch)
        for data_rank in range(max(by_rank, default=-1) + 1)
        for place, microbatch in enumerate(step.microbatches[by_rank.index(data_rank)])
    ]


def data_rank_of(step: LoadedStep) -> list[int]:
    """Return each rank's data rank: ranks with the same inputs in every microbatch share one."""
    keys = [tuple(record.key for record in records) for records in step.microbatches]
    distinct = list(dict.fromkeys(keys))
    return [distinct.index(key) for key in keys]


class Replayer:
    """Replays the steps of a run on unsharded models, which `make` builds."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        precision: Precision,
    ) -> None:
        self._make, self._precision = make, precision
        self._order = list[str]()
        self._weighting = list[TargetWeights]()

    def run(self, steps: Sequence[LoadedStep]) -> Replay:
        """Replay the steps in fp64, and several times with rounding; raises `ConfigError` if the
        unsharded model cannot compute them.
        """
        exact = list(self._sample(steps, None))
        rounded = [list(self._sample(steps, seed)) for seed in range(_SAMPLES)]
        replayed = []
        for number in range(len(steps)):
            samples = [sample[number] for sample in rounded]
            replayed.append(
                ReplayedStep(
                    exact[number].contributions,
                    [rounded_step.total for rounded_step in samples],
                    None,
                    _losses(
                        exact[number].losses, [rounded_step.losses for rounded_step in samples]
                    ),
                )
            )
        return Replay(replayed, self._order, self._weighting)

    def _sample(self, steps: Sequence[LoadedStep], seed: int | None) -> Iterator[_SampleStep]:
        """Replay the steps once and yield their results: in fp64 if `seed` is None, otherwise with
        the run's rounding.

        Seeds other than 0 change some weights by one rounding.
        """
        twin = self._make()
        is_exact = seed is None
        generator = torch.Generator().manual_seed(seed or 0)
        for step in steps:
            start = _first_copies(step.weights)
            if seed:
                start = {n: _perturbed(w, generator) for n, w in start.items()}
            dtype = torch.float64 if is_exact else self._precision.weights
            fill(twin, start, dtype)
            if not self._order:
                self._watch_order(twin)
            rows = data_rows(step)
            parts, losses = [], list[float]()
            for row in rows:
                gradients, values = self._contribution(twin, row, is_exact)
                targets = self._weighting[-1].targets if is_exact else 0
                parts.append(Contribution(row.data_rank, row.microbatch, gradients, targets))
                losses.append(next(iter(values.values())))
            total = _summed([part.gradients for part in parts])
            yield _SampleStep(parts if is_exact else [], total, losses)

    def _contribution(
        self, twin: nn.Module, row: DataRow, is_exact: bool
    ) -> tuple[dict[str, Tensor], dict[int, float]]:
        """Return the gradients of one microbatch, and the values of its outputs by number, see
        `summary_of`.
        """
        twin.zero_grad(set_to_none=True)
        args, kwargs = decode(row.record.inputs, row.record.tensors)
        dtype = torch.float64 if is_exact else self._precision.weights
        args, kwargs = (tree_map(lambda x: _cast(x, dtype), value) for value in (args, kwargs))
        with self._autocast(is_exact), _NoCollectives():  # type: ignore[no-untyped-call]
            outputs = tree_flatten(twin(*args, **kwargs))[0]
        received, tensors, values = [], [], {}
        for place, gradient in row.record.gradients.items():
            if place >= len(outputs) or not isinstance(outputs[place], Tensor):
                raise ConfigError("the unsharded model returns other outputs than the run's")
            output = outputs[place]
            if output.shape != gradient.shape:
                raise ConfigError(
                    f"output {place} of the run has the shape {tuple(gradient.shape)}, of the "
                    f"unsharded model {tuple(output.shape)}: outputs that ranks share out, as a "
                    "vocabulary-parallel loss or context parallelism do, cannot be replayed"
                )
            tensors.append(output)
            received.append(gradient.to(output.dtype))
            values[place] = summary_of(output)
        logits = [x for x in outputs if isinstance(x, Tensor) and x.dim() >= 2 and x.requires_grad]
        is_first = is_exact and len(logits) > 0
        if is_first:
            logits[0].retain_grad()
        with _NoCollectives():  # type: ignore[no-untyped-call]
            torch.autograd.backward(tensors, received)
        if is_exact:
            ids = row.data_rank, row.microbatch
            weights = target_weights(logits[0], *ids) if is_first else TargetWeights(*ids)
            self._weighting.append(weights)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for name, p in clean_names(twin).items()
            if p.requires_grad
        }
        return gradients, values

    def _autocast(self, is_exact: bool) -> AbstractContextManager[Any]:
        if is_exact or self._precision.compute == self._precision.weights:
            return nullcontext()
        return torch.autocast("cpu", self._precision.compute)

    def _watch_order(self, twin: nn.Module) -> None:
        """Record the order in which the forward first uses the parameters."""
        names = {id(parameter): name for name, parameter in clean_names(twin).items()}

        def use(module: nn.Module, args: Any) -> None:
            for parameter in module.parameters(recurse=False):
                name = names.get(id(parameter))
                if name is not None and name not in self._order:
                    self._order.append(name)

        for module in twin.modules():
            module.register_forward_pre_hook(use)


def crosses_data_ranks(model: nn.Module, step: LoadedStep) -> bool:
    """Whether a model's forward communicates between ranks that read different inputs.

    `model` is a copy of the run's, with its own modules: not one that `reference=` returns.
    """
    first, by_rank = data_rows(step)[0], data_rank_of(step)
    args, kwargs = decode(first.record.inputs, first.record.tensors)
    seen = _NoCollectives()  # type: ignore[no-untyped-call]
    with contextlib.suppress(ConfigError), torch.no_grad(), seen:
        model(*args, **kwargs)
    return len({by_rank[rank] for rank in seen.ranks}) > 1


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `ConfigError` at any collective, for which a replay in one process would wait
    forever; `ranks` are those that it would wait for.
    """

    ranks: tuple[int, ...] = ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.ranks = _ranks_of(args)
            raise ConfigError(
                "the model's own modules communicate, so a copy of them is not an unsharded model; "
                "pass reference=, a function that returns the model before it is sharded"
            )
        return func(*args, **(kwargs or {}))


def _ranks_of(args: Any) -> tuple[int, ...]:
    """Return the ranks of the process group among a collective's arguments; all if there is none
    to be seen.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    return tuple(range(dist.get_world_size()))


class _SampleStep(NamedTuple):
    contributions: list[Contribution]
    total: dict[str, Tensor]
    losses: list[float]


def _losses(
    exact: Sequence[float], rounded: Sequence[Sequence[float]]
) -> list[tuple[float, float]]:
    """Return pairs (exact loss, relative tolerance), one per microbatch."""
    losses = []
    for place, value in enumerate(exact):
        size = max(abs(value), 1e-12)
        noise = max(abs(sample[place] - value) for sample in rounded) / size
        losses.append((value, MARGIN * noise + _LEAST_OF_LOSS * 2.0**-24))
    return losses


def _summed(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sums of gradients over microbatches, in their own dtype, so that they have a run's
    rounding.
    """
    total = {name: tensor.clone() for name, tensor in parts[0].items()}
    for part in parts[1:]:
        for name, tensor in part.items():
            total[name] += tensor
    return total


def _perturbed(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return weights of which a random 1 in 16 is changed by one rounding."""
    if not weight.is_floating_point():
        return weight
    chosen = torch.randint(_PERTURBED, weight.shape, generator=generator) == 0
    return torch.where(chosen, weight * (1 + torch.finfo(weight.dtype).eps), weight)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def replay_updates(
    steps: Sequence[LoadedStep], kinds: Mapping[str, type[torch.optim.Optimizer]]
) -> list[Expected]:
    """Return the expected update of each step: what the optimizers add to the weights, given the
    run's own gradients and norms.

    `kinds` has the optimizer classes by the name in the parameter groups; weights in groups of
    other classes are left out.
    """
    exact, rounded = _updates(steps, kinds, torch.float64), _updates(steps, kinds, None)
    expected = []
    for step, exact_update, rounded_update in zip(steps, exact, rounded, strict=True):
        expected.append(Expected(exact_update, [rounded_update], _first_copies(step.weights)))
    return expected


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Inside the `with` block, optimizers step without the hooks that the script has registered for
    all optimizers.

    Such a hook may change the run's weights, and would change the copy's again.
    """
    registered = global_optimizer_post_hooks
    kept_hooks = dict(registered)
    registered.clear()
    try:
        yield
    finally:
        registered.update(kept_hooks)


def _updates(
    steps: Sequence[LoadedStep],
    kinds: Mapping[str, type[torch.optim.Optimizer]],
    dtype: torch.dtype | None,
) -> list[dict[str, Tensor]]:
    """Return the updates of each step by name, computed in `dtype`; in each weight's own dtype if
    None.
    """
    weights = _first_copies(steps[0].weights)
    parameters, optimizers = dict[str, nn.Parameter](), list[torch.optim.Optimizer]()
    for group in replayed_groups(steps[0], kinds):
        names = [name for name in group["names"] if name in weights]
        ours = {n: nn.Parameter(weights[n].to(dtype or weights[n].dtype, copy=True)) for n in names}
        parameters.update(ours)
        settings = {**group["settings"], "params": list(ours.values())}
        rate = {key: value for key, value in settings.items() if key == "lr"}
        optimizers.append(kinds[group["kind"]]([settings], **rate))
    updates = []
    for step in steps:
        for optimizer, group in zip(optimizers, replayed_groups(step, kinds), strict=True):
            optimizer.param_groups[0].update(group["settings"])
        gradients, before = _first_copies(step.gradients), _first_copies(step.weights)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
                gradient = gradients.get(name)
                factor = _clip_factor(step, name)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype) * factor
        with _without_global_hooks():
            for optimizer in optimizers:
                optimizer.step()
        updates.append(
            {n: p.detach().double() - before[n].double() for n, p in parameters.items()}
            if dtype is None
            else {n: p.detach() - before[n].to(dtype) for n, p in parameters.items()}
        )
    return updates


def replayed_groups(step: LoadedStep, kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups whose optimizer class is in `kinds`, and that hold parameters of
    the model.
    """
    return [group for group in step.groups if group["kind"] in kinds and group["names"]]


def _clip_factor(step: LoadedStep, name: str) -> float:
    by_rank = [math.prod(clip.factor(name) for clip in clips) for clips in step.clips]
    return min(by_rank)


def _first_copies(tensors: Mapping[str, GatheredTensor]) -> dict[str, Tensor]:
    values = {name: gathered.copies[0].value for name, gathered in tensors.items()}
    return {name: value for name, value in values.items() if value is not None}
