"""Finds where a parallel model first differs from one device, in the order of computation.

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

from meshwright.data.sampler import IGNORE, PADDING
from meshwright.parallel.apply import Parallel
from meshwright.parallel.batch import Batch
from meshwright.parallel.build import cut
from meshwright.parallel.data_parallel.data import DTYPES
from meshwright.parallel.data_parallel.gradients import (
    HeldParameter,
    global_norm,
    local_shard,
    scale_gradients,
)
from meshwright.parallel.transport.groups import Groups
from meshwright.parallel.transport.world import World
from meshwright.program.lower import Program
from meshwright.program.shards import data_rank, whole
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import (
    Difference,
    Fault,
    build_small,
    everyones,
    first_of,
    mine,
    program_of,
)
from meshwright.prove.expected import Expected
from meshwright.prove.four_bits import in_four_bits
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
    """What is looked at, again and again."""

    case: Case
    program: Program
    groups: Groups
    world: World
    fault: Fault | None

    def build(self) -> Parallel:
        return build_small(self.program, self.groups, self.world, self.fault)

    def step(self, parallel: Parallel, batch: Batch) -> None:
        """Compute the gradients of a global batch, unscaled."""
        rows = mine(batch, self.program, self.world)
        gradients(parallel, rows, self.world, self.case.loss_scale)
        scale_gradients(parallel.held, 1 / self.case.loss_scale)


def locate(case: Case, groups: Groups, world: World, fault: Fault | None) -> Divergence | None:
    """Return where the steps first differ from one device's, None if nowhere; a collective.

    Repeats the search in fp32 for faults that half precision hides.
    """
    program = program_of(case, world)
    search = _Search(case, program, groups, world, fault)
    found = (
        _wrong_weight(search)
        or _wrong_output(search)
        or _wrong_gradient(search)
        or _wrong_step(search)
    )
    if found is not None or case.train.precision == "fp32":
        return found
    train = case.train.model_copy(update={"precision": "fp32", "fp8": False})
    return locate(replace(case, train=train), groups, world, fault)


def _wrong_weight(search: _Search) -> Divergence | None:
    """Return the first parameter whose shard is not that of the whole one, before any step."""
    source = telling(search.program.model, search.program.train.seed)
    dtype, wrong = DTYPES[search.program.train.precision], []
    for held in search.build().held:
        shape = held.sharding.part.real_shape
        part, found = _part(source(held.name, shape, whole(shape)), held, search), held.shard.cpu()
        if rows := len(found) - len(part):  # padding
            part = torch.cat([part, part.new_zeros(rows, *part.shape[1:])])
        if held.sharding.part.four_bits:
            part, found = in_four_bits(part.to(dtype)), held.weights(dtype)
        part = part.to(found.dtype)
        error = (found - part).abs().sum().item() / max(part.abs().sum().item(), 1e-30)
        if error != 0:
            wrong.append(Difference(error, 0.0, held.name, search.world.rank, held.stage))
    first = first_of(wrong, list(search.program.shardings), search.world)
    if first is None:
        return None
    return Divergence(first.tensor, first.rank, first.stage, None, first.error, "initial weight")


def _part(full: Tensor, held: HeldParameter, search: _Search) -> Tensor:
    at = search.groups.at
    region = held.sharding.real_region(at["tp"], data_rank(search.program.layout, at))
    return cut(full, region)


class _Output(NamedTuple):
    """A wrong output of a module, in the order in which to report them."""

    microbatch: int
    depth: int
    rank: int
    stage: int
    tensor: str
    error: float


def _wrong_output(search: _Search) -> Divergence | None:
    """Return the first microbatch and layer whose output is wrong, and the first rank of it."""
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

        def part(whole: Tensor) -> Tensor:
            rows = (whole * is_data)[_rows(search, microbatch)]
            return rows if parallel.places is None else rows[:, parallel.places.cpu()]

        found = out.detach() * part(torch.ones_like(is_data)).to(out)
        error, bound = expected.difference(name, found, part)
        if not error <= _SLACK * bound:
            rank = search.world.rank
            wrong.append(_Output(microbatch, depths[name], rank, stage, name, error))

    for stage, module in parallel.modules.items():
        for name, inner in module.named_modules():
            if name in depths:
                _watch(inner, partial(check, name, stage))
    search.step(parallel, batch)
    found = min(
        (one for one in everyones(min(wrong, default=None), search.world) if one), default=None
    )
    if found is None:
        return None
    at = found.rank, found.stage, found.microbatch
    return Divergence(found.tensor, *at, found.error, "output")


def _watch(module: nn.Module, look: Callable[[Tensor], None]) -> None:
    module.register_forward_hook(lambda module, args, out: look(out))


def _microbatches(search: _Search, stage: int) -> list[int]:
    """Return the microbatches of a stage of this rank in the order of their forwards."""
    table = search.program.tables[search.groups.at["pp"]]
    return [a.microbatch for a in table if a.kind == "F" and a.stage == stage]


def _rows(search: _Search, microbatch: int) -> slice:
    """Return the rows of the global batch that this rank computes as a microbatch."""
    layout = search.program.layout
    first = layout.mesh.data_rank(search.world.rank) * (search.program.train.batch // layout.dp)
    start = first + microbatch * layout.microbatch
    return slice(start, start + layout.microbatch)


def _wrong_gradient(search: _Search) -> Divergence | None:
    """Return the first gradient that is wrong, and whose rows make it so.

    The microbatches are tried one at a time, with the targets of the others ignored, and where one
    disagrees, then those of one data rank; if each alone agrees, the whole step is taken and none
    is named. Among the tensors it is the first whose gradient comes to be.
    """
    batch = make_batch(search.case, 0)
    for microbatch in range(search.program.microbatches):
        found = _gradient_of(search, _only(batch, search, microbatch))
        if found is None:
            continue
        for place in range(search.program.layout.dp):
            alone = _gradient_of(search, _only(batch, search, microbatch, place))
            if alone is not None:
                return _divergence(alone, microbatch, place)
        return _divergence(found, microbatch, None)
    found = _gradient_of(search, batch)
    return None if found is None else _divergence(found, None, None)


def _divergence(found: Difference, microbatch: int | None, data_rank: int | None) -> Divergence:
    return Divergence(
        found.tensor, found.rank, found.stage, microbatch, found.error, data_rank=data_rank
    )


def _only(batch: Batch, search: _Search, microbatch: int, data_rank: int | None = None) -> Batch:
    """Return the batch with the targets of one microbatch alone, of one data rank or of all."""
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
    """Return the first wrong gradient of a batch, in the order of the backward."""
    rounded, exact = run_gradients(search.case, batch)
    parallel = search.build()
    search.step(parallel, batch)
    expected = Expected(exact, [rounded])
    wrong = _wrong(search, parallel, lambda held: held.gradient, expected)
    return first_of(wrong, [*search.program.shardings][::-1], search.world)


def _wrong(
    search: _Search,
    parallel: Parallel,
    tensor_of: Callable[[HeldParameter], Tensor | None],
    expected: Expected,
) -> list[Difference]:
    """Return this rank's own shards that are wrong."""
    wrong = []
    for held in parallel.trained:
        tensor = tensor_of(held)
        local = None if tensor is None else local_shard(tensor)
        part = partial(_part, held=held, search=search)
        error, bound = expected.difference(held.name, local, part)
        if not error <= _SLACK * bound:
            wrong.append(Difference(error, bound, held.name, search.world.rank, held.stage))
    return wrong


def _wrong_step(search: _Search) -> Divergence | None:
    """Return the first wrong gradient, share of the norm, update or correction of a step."""
    reference = shared_reference(search.case, search.world, keeps=True)
    trial = Trial(search.case, search.groups, search.world, reference, search.fault)
    for step in range(search.case.steps):
        exact = reference.exact.moments[step]
        rounded = [one.moments[step] for one in reference.rounded]
        gradients_of = Expected(exact.gradients, [one.gradients for one in rounded])
        wrong, norms = list[Difference](), list[Difference]()
        look = partial(_look, search, trial, gradients_of, wrong, norms)
        trial.step(step, look)
        updates = Expected(exact.updates, [one.updates for one in rounded], reference.start)
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
        for quantity, some, order in later:
            found = first_of(some, order, search.world)
            if found is not None:
                at = found.tensor, found.rank, found.stage, None, found.error
                return Divergence(*at, quantity, step=step + 1)
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
    """Return this rank's parameters that count wrongly in the gradient's norm; a collective."""
    wrong = []
    for name, exact in expected.exact.items():
        mine = [held for held in parallel.held if held.name == name]
        norm = global_norm(mine, search.world.size, parallel.device).total.item()
        found = norm / search.case.loss_scale
        error = relative_error(found, exact.double().norm().item())
        bound = _SLACK * expected.difference(name, exact)[1]
        if mine and not error <= bound:
            wrong.append(Difference(error, bound, name, search.world.rank, mine[0].stage))
    return wrong
