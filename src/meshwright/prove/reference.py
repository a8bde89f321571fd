"""One device: training steps in plain torch operations, in the precision of a case.

In half precision, this rounds what a layout rounds: the weights in products, the activations
between operations, and each microbatch's gradients. Sums of gradients and updates are in fp32. The
same steps are also computed in fp64, where only the weights in products are rounded. The difference
of the two is the rounding noise, from which the tolerances follow.

One difference is one sample of that noise. If a single ill-conditioned place (such as an RMSNorm of
a nearly zero token) causes most of it, samples of the same noise differ by factors of 40. So the
rounded steps are computed several times, from weights of which some differ by one rounding.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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
from meshwright.prove.packed import packed
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
    """Two experts' scores for a token are closer than allowed."""


class AfterStep(NamedTuple):
    """After a step: its unclipped gradients, all updates so far, states and corrections."""

    gradients: Tensors
    updates: Tensors
    state: Mapping[str, Tensors]
    corrections: Tensors


@dataclass(frozen=True)
class Steps:
    """The results of some steps on one device; tensors by parameter name, fp32.

    `gradients` are those of the first step, `updates` the sums of all updates, `state` the
    optimizer state by its key; `corrections` are those of routers. `evaluation` is the mean loss of
    the last weights on the first and one more batch, without dropout. `moments` are those of each
    step, if requested.
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
    """What a layout is compared with: one device's steps, exact and with a layout's rounding.

    `start` are the initial weights, `optimizer` and `clip_norm` the settings of the steps. The
    latter is half of the first gradient's norm, if the case clips at all, so that every step is
    clipped. `rounded` are samples of the same steps. `noises` are their errors of each step's whole
    gradient, relative to its norm: the largest of all samples.
    """

    start: Tensors
    optimizer: OptimizerSpec
    clip_norm: float
    rounded: tuple[Steps, ...]
    exact: Steps
    noises: tuple[float, ...]

    @property
    def drift(self) -> float:
        """The largest relative error of a loss after an update, caused by noise in the weights.

        With a layout's rounding, over the steps after the first and the evaluation.
        """
        exact = self._later(self.exact)
        by_sample = [zip(self._later(sample), exact, strict=True) for sample in self.rounded]
        return max(abs(a - b) / b for pairs in by_sample for a, b in pairs)

    @property
    def first_noise(self) -> float:
        """The largest relative error of the first loss in the samples."""
        exact = self.exact.losses[0]
        return max(abs(sample.losses[0] - exact) / exact for sample in self.rounded)

    @staticmethod
    def _later(steps: Steps) -> tuple[float, ...]:
        return (*steps.losses[1:], steps.evaluation)


def run_reference(case: Case, *, keeps: bool = False) -> Reference:
    """Return one device's results; with `keeps`, also the moments of each step."""
    computed = _Computed.of(case)
    rounded = [computed.rounded(number) for number in range(case.samples)]
    return computed.reference(computed.exact(), rounded, keeps=keeps)


def tells_apart(case: Case, least_gap: float) -> bool:
    """Return whether the exact steps select every expert by more than such a distance of scores.

    Stops at the first batch in which a token's experts are closer.
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
    """Return the reference on every rank; ranks 0 and 1 each compute half. A collective."""
    if world.size == 1:
        return run_reference(case, keeps=keeps)
    samples: list[Steps] = []
    if world.rank < 2:
        computed = _Computed.of(case)
        count = case.samples
        numbers = range(count // 3) if world.rank == 0 else range(count // 3, count)
        samples = [computed.rounded(number) for number in numbers]
    box = [b""]
    if world.rank == 0:
        exact, gathered = computed.exact(), box * world.size
        dist.gather_object(b"", gathered)
        reference = computed.reference(exact, [*samples, *pickle.loads(gathered[1])], keeps=keeps)
        dist.broadcast_object_list([packed(reference)])
        return reference
    dist.gather_object(packed(samples if keeps else [_lean(steps) for steps in samples]))
    dist.broadcast_object_list(box)
    received: Reference = pickle.loads(box[0])
    return received


def _lean(steps: Steps) -> Steps:
    """Return steps whose moments have their gradients alone, of which the noise is made."""
    return replace(steps, moments=tuple(AfterStep(m.gradients, {}, {}, {}) for m in steps.moments))


class _Computed(NamedTuple):
    """What one device computes for a case, with an optimizer and a clipping that suit it."""

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
    """Return a group whose rate does not drown the others, and whose decay is none of theirs.

    What is nothing stays so.
    """
    update = {"lr_scale": min(max(group.lr_scale, _LEAST), _MOST) if group.lr_scale else 0.0}
    if group.weight_decay is not None:
        update["weight_decay"] = _MOST * decay if group.weight_decay else 0.0
    return group.model_copy(update=update)


def _noises(rounded: Steps, exact: Steps) -> Iterator[float]:
    """Yield the error of each step's whole gradient, over its norm."""
    for a, b, size in zip(rounded.moments, exact.moments, exact.norms, strict=True):
        far = {
            name: gradient.double() - b.gradients[name] for name, gradient in a.gradients.items()
        }
        yield _norm(far) / size


def run_gradients(case: Case, batch: Batch) -> tuple[Tensors, Tensors]:
    """Return the rounded and the exact gradients of a global batch."""
    rounded, exact = (
        _narrow(_OneDevice(case, exact=which).gradients(batch)[1]) for which in (False, True)
    )
    return rounded, exact


@torch.no_grad()
def run_streams(case: Case, batch: Batch) -> tuple[Tensors, Tensors]:
    """Return the rounded and the exact outputs of the embedding and of each layer."""
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
    """Masters, and what is computed with them; with adapters these alone are `trained`.

    A `sample` other than the first begins with weights of which some are one rounding off, and has
    other limits of a clamp. Raises `_TooNear` if a selected router score exceeds one that was not
    by less than `least_gap`.
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
        """Return the weights in the form that products use."""
        dtype = torch.float64 if self._is_exact else self._half
        return {
            name: master.to(self._half).to(dtype) if self._half != torch.float32 else master.clone()
            for name, master in self.masters.items()
        }

    def gradients(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss of a global batch and its gradients."""
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
        """Update routers' corrections by the last batch's tokens. arXiv:2408.15664, algorithm 1."""
        for name, met in self._met.items() if self.beside else ():
            error = met.double().mean() - met
            key = f"{name}.router.correction"
            moved = torch.tensor(self.case.train.router_bias_rate) * error.sign().float()
            self.beside[key] = self.beside[key] + moved

    def _parts(self, batch: Batch) -> Sequence[Batch]:
        """Return the microbatches of all ranks, where each one's gradients are rounded."""
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
        """Return the mean loss over the targets of some batches, without dropout."""
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
        """Return the sum of all updates to the weights since the start."""
        return {
            name: (self.masters[name].double() - self._start[name]).float() for name in self.trained
        }


def _start_of(case: Case) -> dict[str, Tensor]:
    """Return the initial weights, as the optimizer trains them."""
    dtype = DTYPES[case.train.weight_dtype]
    start = whole_weights(case.model, case.train.seed)
    return {name: weight.to(dtype).float() for name, weight in start.items()}


def _limited(model: ModelSpec, sample: int) -> ModelSpec:
    """Return a model whose clamp has a slightly larger or smaller limit, by the sample."""
    if model.swiglu_limit is None or not sample:
        return model
    limit = model.swiglu_limit * (1 + (_MOVED_LIMIT if sample % 2 else -_MOVED_LIMIT))
    return model.model_copy(update={"swiglu_limit": limit})


def _tilt(case: Case, sample: int) -> float:
    """Return the share by which a sample moves what jumps in the optimizer, up or down."""
    if not sample:
        return 0.0
    precision = case.train.precision
    share = _ROUNDINGS_OF_JUMP[precision] * torch.finfo(DTYPES[precision]).eps
    return share if sample % 2 else -share


def _moved(weight: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a weight of which some elements are one rounding of a dtype off."""
    draw = torch.rand(weight.shape, generator=generator)
    sign = (draw < _MOVED / 2).to(weight) - (draw > 1 - _MOVED / 2).to(weight)
    return weight * (1 + sign * torch.finfo(dtype).eps)


def _narrow(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}


def _norm(gradients: Tensors) -> float:
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())
