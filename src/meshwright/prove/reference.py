"""The reference: training steps on one device in plain torch operations, with rounding and without.

The rounded steps have a layout's precision: weights in matmuls, activations between operations and
the gradients of each microbatch are in half precision; gradient sums and updates are in fp32. The
exact steps are in fp64, and only the weights in matmuls are rounded. The difference of the two is
the rounding noise, from which tolerances follow.

One difference is one sample of that noise. If a single ill-conditioned place (such as an RMSNorm of
a nearly zero token) causes most of it, samples differ by factors of 40. So the rounded steps run
several times, from weights of which some differ by one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.values import (
    broadcast_bytes,
    from_bytes,
    receive_bytes,
    send_bytes,
    to_bytes,
)
from meshwright.comm.world import World
from meshwright.data.sampler import IGNORE
from meshwright.parallel.batch import Batch
from meshwright.parallel.data_parallel.sharded import DTYPES
from meshwright.program.shards import shard
from meshwright.prove.batches import evaluated, make_batch
from meshwright.prove.case import Case
from meshwright.prove.nf4_reference import kept_in_nf4
from meshwright.prove.optimizer import Updates
from meshwright.prove.oracle import loss_sum, streams
from meshwright.prove.oracle_routers import Routed, router_losses
from meshwright.prove.weights import whole_buffers, whole_weights
from meshwright.spec.groups import GroupSpec
from meshwright.spec.model import ModelSpec, padded
from meshwright.spec.parts import parts
from meshwright.spec.training import OptimizerSpec

Tensors = Mapping[str, Tensor]

# Rate and decay: each part of an update moves weights by far more than their rounding.
_RATE: Final = 2e-3
# Above half a step of bf16 between 1 and 2: norms without masters move, rounded to nearest.
_RATE_TO_NEAREST: Final = 8e-3
_DECAY: Final = 1.0
# Limits of a group's factor of the rate; its decay is the latter times that of the others.
_LEAST, _MOST = 0.25, 4.0
# The first sample of the noise starts from the weights themselves. For the others this share of the
# weights is moved by one rounding of the case's precision, so that each operation rounds anew.
_MOVED: Final = 1 / 16
# Where a clamp ends, a gradient jumps, and a value that close to it may be on either side in a
# layout. Samples have limits that differ by this share, so that their noise includes such jumps.
_MOVED_LIMIT: Final = 2e-6
# Where a direction of Lion is zero, its sign jumps, and so does a state where it rounds to bf16.
# Samples are on one side and on the other of values that are so many roundings off.
_ROUNDINGS_OF_JUMP: Final = {"fp32": 128, "bf16": 4, "fp16": 4}


class _TooNear(Exception):
    """Raised if the router scores of a selected and an unselected expert are closer than
    allowed.
    """


class AfterStep(NamedTuple):
    """One device's tensors after a step: its unclipped gradients, the sum of all updates so far,
    the optimizer state and the router corrections.
    """

    gradients: Tensors
    updates: Tensors
    state: Mapping[str, Tensors]
    corrections: Tensors


@dataclass(frozen=True)
class Steps:
    """The results of some steps on one device; tensors are whole, in fp32, by parameter name.

    `gradients` are those of the first step, `updates` the sums of all updates, `state` the
    optimizer state by its key, `corrections` those of routers. `evaluation` is the mean loss of the
    final weights on the first batch and one more, without dropout. `moments` has the tensors after
    each step, if requested.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    evaluation: float
    gradients: Tensors
    updates: Tensors
    state: Mapping[str, Tensors]
    moments: tuple[AfterStep, ...] = ()
    corrections: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """The steps on one device with which a layout is compared: exact, and several times with
    rounding.

    `start` has the initial weights, `optimizer` and `clip_norm` the settings of the steps. If the
    case clips, `clip_norm` is half of the first gradient's norm, so that clipping takes effect.
    `noises` has, for each step, the largest error of the whole gradient over the rounded runs,
    relative to the gradient's norm.
    """

    start: Tensors
    optimizer: OptimizerSpec
    clip_norm: float
    rounded: tuple[Steps, ...]
    exact: Steps
    noises: tuple[float, ...]

    @property
    def drift(self) -> float:
        """The largest relative error of a later loss over the rounded runs: those of steps after
        the first, and of the evaluation.

        It includes the noise of weights that were updated.
        """
        exact = self._later(self.exact)
        by_sample = [zip(self._later(sample), exact, strict=True) for sample in self.rounded]
        return max(abs(a - b) / b for pairs in by_sample for a, b in pairs)

    @property
    def first_noise(self) -> float:
        """The largest relative error of the first step's loss over the rounded runs."""
        exact = self.exact.losses[0]
        return max(abs(sample.losses[0] - exact) / exact for sample in self.rounded)

    @staticmethod
    def _later(steps: Steps) -> tuple[float, ...]:
        return (*steps.losses[1:], steps.evaluation)


# The classes that a reference consists of.
_SENT: Final = (Reference, Steps, AfterStep, OptimizerSpec)


def run_reference(case: Case, *, keeps: bool = False) -> Reference:
    """Compute the reference of a case in this process; with `keeps`, it has the tensors after each
    step.
    """
    computed = _Computed.of(case)
    rounded = [computed.rounded(number) for number in range(case.samples)]
    return computed.reference(computed.exact(), rounded, keeps=keeps)


def tells_apart(case: Case, least_gap: float) -> bool:
    """Return whether every token's selected experts score more than `least_gap` above the others,
    in all exact steps.

    Stops at the first batch that fails.
    """
    try:
        computed = _Computed.of(case, least_gap)
        _run(
            _OneDevice(case, exact=True, least_gap=least_gap),
            computed.optimizer,
            computed.clip_norm,
        )
    except _TooNear:
        return False
    return True


def shared_reference(case: Case, world: World, *, keeps: bool = False) -> Reference:
    """Compute the reference on ranks 0 and 1, and return it on every rank; a collective.

    Rank 0 computes the exact steps and a third of the rounded runs, rank 1 the others. `keeps` as
    in `run_reference`.
    """
    if world.size == 1:
        return run_reference(case, keeps=keeps)
    samples: list[Steps] = []
    if world.rank < 2:
        computed = _Computed.of(case)
        count = case.samples
        numbers = range(count // 3) if world.rank == 0 else range(count // 3, count)
        samples = [computed.rounded(number) for number in numbers]
    if world.rank == 0:
        exact = computed.exact()
        samples += from_bytes(receive_bytes(1), Steps, AfterStep)
        reference = computed.reference(exact, samples, keeps=keeps)
        broadcast_bytes(to_bytes(reference), 0)
        return reference
    if world.rank == 1:
        send_bytes(to_bytes(samples if keeps else [_lean(steps) for steps in samples]), 0)
    received: Reference = from_bytes(broadcast_bytes(None, 0), *_SENT)
    return received


def _lean(steps: Steps) -> Steps:
    """Return steps without the tensors that the noise does not need: after each step, only the
    gradients stay.
    """
    return replace(steps, moments=tuple(AfterStep(m.gradients, {}, {}, {}) for m in steps.moments))


class _Computed(NamedTuple):
    """Runs the reference's steps of a case, with an optimizer and a clipping scaled to its
    gradients.
    """

    case: Case
    optimizer: OptimizerSpec
    clip_norm: float

    @classmethod
    def of(cls, case: Case, least_gap: float = 0.0) -> _Computed:
        device = _OneDevice(case, exact=True, least_gap=least_gap)
        first = device.gradients(make_batch(case, 0))[1]
        norm = _norm(first)
        # AdamW divides a gradient by its size and `eps`. With one as large as the gradients are, an
        # element near zero takes no step of either sign, and the clipping is seen.
        eps = norm / 2 / math.sqrt(sum(gradient.numel() for gradient in first.values()))
        size = eps if case.optimizer.name == "sgd" else 1.0  # SGD does not divide by it
        decay = _DECAY * size if case.optimizer.weight_decay else 0.0
        is_lost = case.train.master == "none" and case.optimizer.rounding == "nearest"
        rate = _RATE_TO_NEAREST if is_lost else _RATE
        scaled = {"lr": rate / size, "eps": eps, "weight_decay": decay}
        groups = tuple(_visible(group, _DECAY * size) for group in case.optimizer.groups)
        optimizer = case.optimizer.model_copy(update={**scaled, "groups": groups})
        return cls(case, optimizer, norm / 2 if case.train.clip_norm else 0.0)

    def exact(self) -> Steps:
        return _run(_OneDevice(self.case, exact=True), self.optimizer, self.clip_norm)

    def rounded(self, sample: int) -> Steps:
        device = _OneDevice(self.case, exact=False, sample=sample)
        return _run(device, self.optimizer, self.clip_norm)

    def reference(self, exact: Steps, rounded: Sequence[Steps], *, keeps: bool) -> Reference:
        noises = tuple(map(max, zip(*(_noises(sample, exact) for sample in rounded), strict=True)))
        if not keeps:
            exact, *rounded = (replace(steps, moments=()) for steps in (exact, *rounded))
        start = _start_of(self.case)
        return Reference(start, self.optimizer, self.clip_norm, tuple(rounded), exact, noises)


def _visible(group: GroupSpec, decay: float) -> GroupSpec:
    """Return a parameter group whose settings show in a few steps: a rate of 1/4 to 4 times the
    others', and four times their weight decay.

    A rate or decay of 0 stays 0.
    """
    update = {"lr_scale": min(max(group.lr_scale, _LEAST), _MOST) if group.lr_scale else 0.0}
    if group.weight_decay is not None:
        update["weight_decay"] = _MOST * decay if group.weight_decay else 0.0
    return group.model_copy(update=update)


def _noises(rounded: Steps, exact: Steps) -> Iterator[float]:
    """Yield, for each step, the distance of the rounded whole gradient from the exact one, relative
    to the exact norm.
    """
    for a, b, size in zip(rounded.moments, exact.moments, exact.norms, strict=True):
        far = {
            name: gradient.double() - b.gradients[name] for name, gradient in a.gradients.items()
        }
        yield _norm(far) / size


def run_gradients(case: Case, batch: Batch) -> tuple[Tensors, Tensors]:
    """Return (rounded, exact) gradients of a global batch at the initial weights, fp32 by parameter
    name.
    """
    rounded, exact = (
        _narrow(_OneDevice(case, exact=which).gradients(batch)[1]) for which in (False, True)
    )
    return rounded, exact


@torch.no_grad()
def run_streams(case: Case, batch: Batch) -> tuple[Tensors, Tensors]:
    """Return (rounded, exact) outputs of the embedding and of each layer for a batch, fp64 `[batch,
    seq, dim]` by module name.
    """
    outputs = []
    for exact in (False, True):
        device = _OneDevice(case, exact=exact)
        capacity = case.train.expert_capacity
        streamed = streams(
            case.model, device.used() | device.beside, batch, fp8=device.fp8, capacity=capacity
        )
        outputs.append({name: x.double() for name, x in streamed})
    return outputs[0], outputs[1]


def _run(device: _OneDevice, optimizer: OptimizerSpec, clip_norm: float) -> Steps:
    case = device.case
    trained = {name: device.masters[name] for name in device.trained}
    is_narrow = case.train.master == "none"
    parameters = parts(padded(case.model, case.layout.tp))
    rows = {part.name: shard(part, case.layout).tp_shape[-1] for part in parameters}
    step_of = Updates(trained, optimizer, case.steps, tilt=device.tilt, narrow=is_narrow, rows=rows)
    losses, norms, moments = [], [], []
    first: Tensors = {}
    for step in range(case.steps):
        loss, gradients = device.gradients(make_batch(case, step))
        losses.append(loss)
        norms.append(_norm(gradients))
        first = first or gradients
        factor = min(1.0, clip_norm / norms[-1]) if clip_norm else 1.0
        step_of.step({name: factor * gradient for name, gradient in gradients.items()}, step)
        device.correct()
        after = device.updates(), step_of.state(), dict(device.beside)
        moments.append(AfterStep(_narrow(gradients), *after))
    evaluation = device.evaluate(evaluated(case))
    return Steps(
        tuple(losses),
        tuple(norms),
        evaluation,
        _narrow(first),
        device.updates(),
        step_of.state(),
        tuple(moments),
        device.beside,
    )


class _OneDevice:
    """One device's weights, and the gradients and losses that they give.

    `exact` computes in fp64. `trained` are the names of the weights that an optimizer updates: with
    adapters, theirs alone. A `sample` other than 0 begins with weights of which some differ by one
    rounding, and has slightly other limits of a clamp. Raises `_TooNear` if a selected expert's
    router score exceeds an unselected one's by less than `least_gap`.
    """

    def __init__(self, case: Case, *, exact: bool, sample: int = 0, least_gap: float = 0.0) -> None:
        self.case, self._is_exact = case, exact
        self._model = _limited(case.model, sample)
        self._half = DTYPES[case.train.precision]
        start = _start_of(case)
        self.tilt = _tilt(case, sample)
        self._start = kept_in_nf4(case.model, start, self._half)
        self.beside = whole_buffers(case.model, case.train.seed)
        if sample:
            generator = torch.Generator().manual_seed(sample)
            self._start = {
                name: _moved(weight, self._half, generator) for name, weight in self._start.items()
            }
        dtype = torch.float64 if exact else torch.float32
        self.masters = {name: weight.to(dtype, copy=True) for name, weight in self._start.items()}
        names = [name for name in self.masters if name.endswith((".lora_a", ".lora_b"))]
        self.trained = names if case.model.lora is not None else list(self.masters)
        self.fp8 = case.train.fp8 and not exact
        self.gaps: list[float] = []
        self._least_gap = least_gap
        self._met: dict[str, Tensor] = {}
        capacity = case.train.expert_capacity
        self._more: dict[str, Any] = {"fp8": self.fp8, "gaps": self.gaps, "capacity": capacity}

    def used(self) -> dict[str, Tensor]:
        """Return the weights as matmuls take them: rounded to the case's precision; in fp64 if
        exact.
        """
        dtype = torch.float64 if self._is_exact else self._half
        return {
            name: master.to(self._half).to(dtype) if self._half != torch.float32 else master.clone()
            for name, master in self.masters.items()
        }

    def gradients(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss of a global batch, in nats, and the gradients of the trained
        weights.
        """
        case, scale = self.case, self.case.loss_scale
        count = max(int((batch.targets != IGNORE).sum()), 1)
        used = self.used()
        trained = {name: used[name].requires_grad_() for name in self.trained}
        total, sums = 0.0, dict[str, Tensor]()
        self._met = {}
        for part in self._parts(batch):
            routers: list[Routed] = []
            weights = used | self.beside
            loss = loss_sum(self._model, weights, part, **self._more, routers=routers)
            self._check_gaps()
            router_terms = [
                router_losses(self._model, case.train, routed.scores, routed.is_data)
                for routed in routers
            ]
            for routed in routers:
                met = (routed.picked & routed.is_data[..., None]).sum((0, 1))
                self._met[routed.name] = (
                    self._met[routed.name] + met if routed.name in self._met else met
                )
            objective = loss / count + sum(router_terms) / len(batch.inputs)
            grads = torch.autograd.grad(objective * scale, list(trained.values()))
            total += loss.item() / count
            for name, gradient in zip(trained, grads, strict=True):
                wide = gradient.to(self._summed)
                sums[name] = sums[name] + wide if name in sums else wide
        like = next(iter(self.masters.values()))
        return total, {name: gradient_sum.to(like) / scale for name, gradient_sum in sums.items()}

    def correct(self) -> None:
        """Update the router corrections by the number of the last batch's tokens on each expert.
        arXiv:2408.15664, algorithm 1.
        """
        for name, met in self._met.items() if self.beside else ():
            error = met.double().mean() - met
            key = f"{name}.router.correction"
            moved = torch.tensor(self.case.train.router_bias_rate) * error.sign().float()
            self.beside[key] = self.beside[key] + moved

    def _parts(self, batch: Batch) -> Sequence[Batch]:
        """Return the microbatches of all ranks if each one's gradients are rounded; otherwise, the
        whole batch as one.
        """
        if self._is_exact or self._half == torch.float32:
            return [batch]
        return batch.split(self.case.layout.microbatch)

    @property
    def _summed(self) -> torch.dtype:
        if self._is_exact:
            return torch.float64
        return torch.float32 if self.case.train.reduce_dtype == "fp32" else self._half

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Return the mean loss per target of some batches, in nats, without dropout."""
        used, model = self.used() | self.beside, self._model
        total = sum(
            loss_sum(model, used, part, drops=False, **self._more).item()
            for batch in batches
            for part in self._parts(batch)
        )
        self._check_gaps()
        return total / max(sum(int((batch.targets != IGNORE).sum()) for batch in batches), 1)

    def _check_gaps(self) -> None:
        if min(self.gaps, default=math.inf) < self._least_gap:
            raise _TooNear

    def updates(self) -> dict[str, Tensor]:
        """Return final minus initial weights, fp32 by name, for the trained ones."""
        return {
            name: (self.masters[name].double() - self._start[name]).float() for name in self.trained
        }


def _start_of(case: Case) -> dict[str, Tensor]:
    """Return the initial weights, fp32 by name, rounded to the dtype that the optimizer trains."""
    dtype = DTYPES[case.train.weight_dtype]
    start = whole_weights(case.model, case.train.seed)
    return {name: weight.to(dtype).float() for name, weight in start.items()}


def _limited(model: ModelSpec, sample: int) -> ModelSpec:
    """Return the model with its SwiGLU clamp limit a little larger (odd samples) or smaller (even
    ones); unchanged for sample 0.
    """
    if model.swiglu_limit is None or not sample:
        return model
    limit = model.swiglu_limit * (1 + (_MOVED_LIMIT if sample % 2 else -_MOVED_LIMIT))
    return model.model_copy(update={"swiglu_limit": limit})


def _tilt(case: Case, sample: int) -> float:
    """Return the relative offset of a sample, positive or negative, for values at which the
    optimizer's result jumps; 0 for sample 0.

    See `optimizer.Updates`.
    """
    if not sample:
        return 0.0
    precision = case.train.precision
    share = _ROUNDINGS_OF_JUMP[precision] * torch.finfo(DTYPES[precision]).eps
    return share if sample % 2 else -share


def _moved(weight: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return the weight with one in 16 elements moved by one rounding of `dtype`, up or down at
    random.
    """
    draw = torch.rand(weight.shape, generator=generator)
    sign = (draw < _MOVED / 2).to(weight) - (draw > 1 - _MOVED / 2).to(weight)
    return weight * (1 + sign * torch.finfo(dtype).eps)


def _narrow(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}


def _norm(gradients: Tensors) -> float:
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())
