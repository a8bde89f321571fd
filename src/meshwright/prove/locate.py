"""Finds the first tensor in which a parallel run differs from one device, in the order of
computation.

First it compares the weights before the step, then the output of each layer in the forward, then
the gradients. A wrong forward makes all gradients wrong, so gradients alone would always name the
last layer. If the first step agrees, it compares the updates of each step, and later gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.comm.groups import Groups
from meshwright.comm.values import gather_values
from meshwright.comm.world import World
from meshwright.data.sampler import IGNORE, PADDING
from meshwright.parallel.apply import Parallel
from meshwright.parallel.batch import Batch
from meshwright.parallel.build import cut
from meshwright.parallel.data_parallel.gradients import (
    GatheredParameter,
    global_norm,
    local_shard,
    scale_gradients,
)
from meshwright.parallel.data_parallel.sharded import DTYPES
from meshwright.program.lower import Program
from meshwright.program.shards import data_rank, whole
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import (
    Difference,
    Fault,
    build_small,
    first_of,
    mine,
    program_of,
)
from meshwright.prove.expected import SPACINGS, Expected
from meshwright.prove.nf4_reference import in_nf4
from meshwright.prove.reference import (
    run_gradients,
    run_streams,
    shared_reference,
)
from meshwright.prove.trial import Trial
from meshwright.prove.verdict import Divergence, Quantity, relative_error
from meshwright.prove.weights import telling
from meshwright.training.update import gradients

# A part of a tensor has fewer roundings than the whole, so it varies more: its bound is wider.
_SLACK: Final = 2.0


class _Search(NamedTuple):
    """The case that is searched, with its program, groups and world, and the fault of a test."""

    case: Case
    program: Program
    groups: Groups
    world: World
    fault: Fault | None

    def build(self) -> Parallel:
        return build_small(self.program, self.groups, self.world, self.fault)

    def step(self, parallel: Parallel, batch: Batch) -> None:
        """Compute the gradients of this rank's part of a global batch, without the loss scale."""
        rows = mine(batch, self.program, self.world)
        gradients(parallel, rows, self.world, self.case.loss_scale)
        scale_gradients(parallel.held, 1 / self.case.loss_scale)


def locate(case: Case, groups: Groups, world: World, fault: Fault | None) -> Divergence | None:
    """Return the first place at which the steps differ from one device's, None if they agree; a
    collective.

    If half precision hides the fault, searches again in fp32.
    """
    program = program_of(case, world)
    search = _Search(case, program, groups, world, fault)
    divergence = (
        _wrong_weight(search)
        or _wrong_output(search)
        or _wrong_gradient(search)
        or _wrong_step(search)
    )
    if divergence is not None or case.train.precision == "fp32":
        return divergence
    train = case.train.model_copy(update={"precision": "fp32", "fp8": False})
    return locate(replace(case, train=train), groups, world, fault)


def _wrong_weight(search: _Search) -> Divergence | None:
    """Return the first parameter whose initial shard is not the right part of the whole
    parameter.
    """
    source = telling(search.program.model, search.program.train.seed)
    dtype, wrong = DTYPES[search.program.train.precision], []
    for param in search.build().held:
        shape = param.sharding.part.real_shape
        full = source(param.name, shape, whole(shape))
        part, shard = _part(full, param, search), param.shard.cpu()
        if rows := len(shard) - len(part):  # padding
            part = torch.cat([part, part.new_zeros(rows, *part.shape[1:])])
        if param.sharding.part.is_nf4:
            part, shard = in_nf4(part.to(dtype)), param.weights(dtype)
        part = part.to(shard.dtype)
        error = (shard - part).abs().sum().item() / max(part.abs().sum().item(), 1e-30)
        if error != 0:
            wrong.append(Difference(error, 0.0, param.name, search.world.rank, param.stage))
    first = first_of(wrong, list(search.program.shardings), search.world)
    if first is None:
        return None
    return Divergence(first.tensor, first.rank, first.stage, None, first.error, "initial weight")


def _part(full: Tensor, param: GatheredParameter, search: _Search) -> Tensor:
    coordinates = search.groups.at
    region = param.sharding.real_region(
        coordinates["tp"], data_rank(search.program.layout, coordinates)
    )
    return cut(full, region)


class _Output(NamedTuple):
    """A wrong output of a module; instances sort in the order in which they are reported."""

    microbatch: int
    depth: int
    rank: int
    stage: int
    tensor: str
    error: float


def _wrong_output(search: _Search) -> Divergence | None:
    """Compute one step, and return the first wrong output of the embedding or a layer: by
    microbatch, then by depth, then by rank.
    """
    batch = make_batch(search.case, 0)
    rounded, exact = run_streams(search.case, batch)
    expected = Expected(exact, [rounded])
    parallel, wrong = search.build(), list[_Output]()
    # Padding is computed in any way: nothing sees it.
    is_data = torch.ones_like(batch.inputs, dtype=torch.float64)[..., None]
    if batch.segments is not None:
        is_data[batch.segments == PADDING] = 0
    names = [f"layers.{layer}" for layer in range(search.program.model.n_layers)]
    depths = {name: depth for depth, name in enumerate(["embed", *names])}
    calls: Counter[str] = Counter()

    def check(name: str, stage: int, out: Tensor) -> None:
        order = _microbatches(search, stage)
        microbatch, calls[name] = order[calls[name] % len(order)], calls[name] + 1

        def part(tensor: Tensor) -> Tensor:
            rows = (tensor * is_data)[_rows(search, microbatch)]
            return rows if parallel.places is None else rows[:, parallel.places.cpu()]

        output = out.detach() * part(torch.ones_like(is_data)).to(out)
        error, bound = expected.difference(name, output, part)
        if not error <= _SLACK * bound:
            rank = search.world.rank
            wrong.append(_Output(microbatch, depths[name], rank, stage, name, error))

    for stage, module in parallel.modules.items():
        for name, inner in module.named_modules():
            if name in depths:
                _watch(inner, partial(check, name, stage))
    search.step(parallel, batch)
    first = min(wrong, default=None)
    output = min(filter(None, gather_values(first, _Output)), default=None)
    if output is None:
        return None
    location = output.rank, output.stage, output.microbatch
    return Divergence(output.tensor, *location, output.error, "output")


def _watch(module: nn.Module, look: Callable[[Tensor], None]) -> None:
    module.register_forward_hook(lambda module, args, out: look(out))


def _microbatches(search: _Search, stage: int) -> list[int]:
    """Return the microbatches of one of this rank's stages, in the order of their forwards."""
    table = search.program.tables[search.groups.at["pp"]]
    return [a.microbatch for a in table if a.kind == "F" and a.stage == stage]


def _rows(search: _Search, microbatch: int) -> slice:
    """Return which sequences of the global batch this rank computes as a microbatch."""
    layout = search.program.layout
    first = layout.mesh.data_rank(search.world.rank) * (search.program.train.batch // layout.dp)
    start = first + microbatch * layout.microbatch
    return slice(start, start + layout.microbatch)


def _wrong_gradient(search: _Search) -> Divergence | None:
    """Return the first wrong gradient in the order of the backward, with the microbatch and data
    rank that cause it.

    Computes each microbatch alone, with the targets of all others ignored, and for the first wrong
    one each data rank's part of it. If every microbatch alone is right, computes the whole step,
    and names neither.
    """
    batch = make_batch(search.case, 0)
    for microbatch in range(search.program.microbatches):
        difference = _gradient_of(search, _only(batch, search, microbatch))
        if difference is None:
            continue
        for place in range(search.program.layout.dp):
            alone = _gradient_of(search, _only(batch, search, microbatch, place))
            if alone is not None:
                return _divergence(alone, microbatch, place)
        return _divergence(difference, microbatch, None)
    difference = _gradient_of(search, batch)
    return None if difference is None else _divergence(difference, None, None)


def _divergence(
    difference: Difference, microbatch: int | None, data_rank: int | None
) -> Divergence:
    return Divergence(
        difference.tensor,
        difference.rank,
        difference.stage,
        microbatch,
        difference.error,
        data_rank=data_rank,
    )


def _only(batch: Batch, search: _Search, microbatch: int, data_rank: int | None = None) -> Batch:
    """Return the batch with all targets ignored except for those of one microbatch, of one data
    rank or of all.
    """
    layout = search.program.layout
    rows = torch.arange(len(batch.targets))
    per_rank = search.program.train.batch // layout.dp
    is_left = rows % per_rank // layout.microbatch == microbatch
    if data_rank is not None:
        is_left &= rows // per_rank == data_rank
    targets = batch.targets.clone()
    targets[~is_left] = IGNORE
    return batch._replace(targets=targets)


def _gradient_of(search: _Search, batch: Batch) -> Difference | None:
    """Compute the gradients of a batch, and return the first wrong one in the order of the
    backward.
    """
    rounded, exact = run_gradients(search.case, batch)
    parallel = search.build()
    search.step(parallel, batch)
    expected = Expected(exact, [rounded])
    wrong = _wrong(search, parallel, lambda param: param.gradient, expected)
    return first_of(wrong, [*search.program.shardings][::-1], search.world)


def _wrong(
    search: _Search,
    parallel: Parallel,
    tensor_of: Callable[[GatheredParameter], Tensor | None],
    expected: Expected,
) -> list[Difference]:
    """Compare this rank's own shards (`tensor_of` a parameter, such as its gradient), and return
    the wrong ones.
    """
    wrong = []
    for param in parallel.trained:
        tensor = tensor_of(param)
        local = None if tensor is None else local_shard(tensor)
        part = partial(_part, param=param, search=search)
        error, bound = expected.difference(param.name, local, part)
        if not error <= _SLACK * bound:
            wrong.append(Difference(error, bound, param.name, search.world.rank, param.stage))
    return wrong


def _wrong_step(search: _Search) -> Divergence | None:
    """Take all steps, and return the first wrong gradient, norm of a parameter's gradient, update
    or router correction.
    """
    reference = shared_reference(search.case, search.world, keeps=True)
    trial = Trial(search.case, search.groups, search.world, reference, search.fault)
    for step in range(search.case.steps):
        exact = reference.exact.moments[step]
        rounded = [sample.moments[step] for sample in reference.rounded]
        gradients_of = Expected(exact.gradients, [sample.gradients for sample in rounded])
        wrong, norms = list[Difference](), list[Difference]()
        look = partial(_look, search, trial, gradients_of, wrong, norms)
        trial.step(step, look)
        spacing = SPACINGS[search.case.train.weight_dtype]
        updates = Expected(
            exact.updates, [sample.updates for sample in rounded], reference.start, spacing
        )
        added = _wrong(search, trial.parallel, trial.added, updates)
        is_exact = search.case.train.precision == "fp32"
        miscorrected = trial.miscorrected(exact.corrections) if is_exact else []
        names = [*search.program.shardings]
        later: list[tuple[Quantity, list[Difference], list[str]]] = [
            ("gradient", wrong, names[::-1]),
            ("gradient norm", norms, names),
            ("update", added, names),
            ("router correction", miscorrected, [*exact.corrections]),
        ]
        for quantity, differences, order in later:
            first = first_of(differences, order, search.world)
            if first is not None:
                location = first.tensor, first.rank, first.stage, None, first.error
                return Divergence(*location, quantity, step=step + 1)
    return None


def _look(
    search: _Search,
    trial: Trial,
    expected: Expected,
    wrong: list[Difference],
    norms: list[Difference],
) -> None:
    wrong += _wrong(search, trial.parallel, trial.gradient, expected)
    norms += _wrong_norms(search, trial.parallel, expected)


def _wrong_norms(search: _Search, parallel: Parallel, expected: Expected) -> list[Difference]:
    """Compute the norm of each parameter's gradient as clipping does, and return this rank's wrong
    ones; a collective.
    """
    wrong = []
    for name, exact in expected.exact.items():
        params = [param for param in parallel.held if param.name == name]
        norm = global_norm(params, search.world.size, parallel.device).total.item()
        unscaled = norm / search.case.loss_scale
        error = relative_error(unscaled, exact.double().norm().item())
        bound = _SLACK * expected.difference(name, exact)[1]
        if params and not error <= bound:
            wrong.append(Difference(error, bound, name, search.world.rank, params[0].stage))
    return wrong
