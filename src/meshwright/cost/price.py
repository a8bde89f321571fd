"""`price`: the memory of a layout's largest rank, and the time of its step, on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshwright.cost.evidence import has_evidence
from meshwright.cost.inputs import CostInputs, layers_of_ranks, may_hold_most
from meshwright.cost.memory import (
    STATES,
    KeptBytes,
    Term,
    activations,
    kept_of,
    model_states,
    outside,
    with_measured,
)
from meshwright.cost.peak import peak
from meshwright.cost.step import StepTime, has_table, step_time
from meshwright.cost.systems import OURS
from meshwright.cost.terms import peak_terms
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES
from meshwright.program.lower import Program, lower
from meshwright.program.model_flops import flops_per_token
from meshwright.program.transfers import with_own_transfers

# The walk takes at most this many microbatches for each rank of the pipeline: more of them repeat
# what was done and hold no more. `brief` takes fewer, and is about right.
_ENOUGH: Final = 4
_TURNS: Final = 2
OUTSIDE: Final = ("context", "communicators", "allocator")


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank at its peak within a step, as terms.

    `rank` is its place in the pipeline, `limit` the device's memory in bytes; `at` names the action
    and operation of the peak, or is empty if only closed forms are known.
    """

    rank: int
    terms: tuple[Term, ...]
    limit: int
    at: str = ""

    @property
    def total(self) -> float:
        """Bytes at the peak, including context, communicators and allocator overhead."""
        return sum(term.bytes for term in self.terms)

    @property
    def allocated(self) -> float:
        """Bytes of tensors at the peak."""
        return sum(term.bytes for term in self.terms if term.category not in OUTSIDE)

    @property
    def states(self) -> float:
        """Bytes of model states and communication buffers at the peak, which are exact."""
        return sum(term.bytes for term in self.terms if term.category in STATES)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.total <= self.limit

    def by_category(self) -> dict[str, float]:
        """Return the bytes of each category."""
        sums: dict[str, float] = {}
        for term in self.terms:
            sums[term.category] = sums.get(term.category, 0.0) + term.bytes
        return sums


def memory(
    setting: CostInputs, layout: Layout, rank: int, program: Program | None = None
) -> RankMemory:
    """Return the peak memory of the ranks at one place in the pipeline.

    For Meshwright's engine, it is the highest moment of a simulation of `program` (lowered if
    None), the same as in a predicted timeline; for other systems, the closed form.
    """
    if not _is_walked(setting, layout):
        return estimate(setting, layout, rank)
    program = program or _program(setting, layout, _ENOUGH)
    terms, moment = peak_terms(
        program, layout.mesh.rank({"pp": rank}), _forms(setting, layout, rank)
    )
    return _rank_memory(setting, layout, rank, with_measured(setting, terms), moment)


def _is_walked(setting: CostInputs, layout: Layout) -> bool:
    """Return whether memory is simulated: for Meshwright's engine, if the schedule allows the
    microbatches."""
    count = layout.microbatches(setting.train.batch)
    return setting.system.name == OURS and has_table(layout, count)


def _program(setting: CostInputs, layout: Layout, turns: int) -> Program:
    """Return the program of a layout with at most `turns` microbatches per pipeline rank."""
    train, count = setting.train, layout.microbatches(setting.train.batch)
    if not SCHEDULES[layout.schedule].holds_all:
        count = min(count, turns * layout.pp)
    train = train.model_copy(update={"batch": count * layout.microbatch * layout.dp})
    return lower(setting.model, train, setting.optimizer, layout, setting.target)


def estimate(
    setting: CostInputs, layout: Layout, rank: int, kept_bytes: KeptBytes | None = None
) -> RankMemory:
    """Return the peak memory of a pipeline rank in closed form: a few percent off, and fast.

    `kept_bytes` is the layout's `kept_of`, if the caller has it.
    """
    return _rank_memory(setting, layout, rank, _forms(setting, layout, rank, kept_bytes))


def _forms(
    setting: CostInputs, layout: Layout, rank: int, kept_bytes: KeptBytes | None = None
) -> list[Term]:
    held_layers = layers_of_ranks(setting, layout)[rank]
    return model_states(setting, layout, held_layers) + activations(
        setting, layout, rank, kept_bytes
    )


def _rank_memory(
    setting: CostInputs, layout: Layout, rank: int, terms: list[Term], moment: str = ""
) -> RankMemory:
    allocated = sum(term.bytes for term in terms)
    device = setting.cluster.device
    terms = terms + outside(device, layout, setting.system, setting.calibration, allocated)
    return RankMemory(rank, tuple(terms), device.memory, moment)


def memories(setting: CostInputs, layout: Layout) -> list[RankMemory]:
    """Return the peak memory at each place in the pipeline."""
    program = _program(setting, layout, _ENOUGH) if _is_walked(setting, layout) else None
    return [memory(setting, layout, rank, program) for rank in range(layout.pp)]


def worst_memory(setting: CostInputs, layout: Layout) -> RankMemory:
    """Return the memory of the pipeline rank that needs most.

    Among consecutive ranks with the same layers, the activations in flight and deferred gradients
    rise or fall with the rank, so the first or last of them needs most; a test checks this.
    """
    # What has no program of ours may have stages without a layer: those are never lowered.
    program = _program(setting, layout, _ENOUGH) if _is_walked(setting, layout) else None
    return max(
        (memory(setting, layout, rank, program) for rank in may_hold_most(setting, layout)),
        key=lambda rank_memory: rank_memory.total,
    )


def brief(setting: CostInputs, layout: Layout, rank: int) -> RankMemory:
    """Return nearly what `memory` does, faster: by simulating a step with few microbatches.

    They fill the pipeline twice, and each transfer is next to the action that it belongs to.
    """
    if not _is_walked(setting, layout):
        return estimate(setting, layout, rank)
    program = _program(setting, layout, _TURNS)
    table = with_own_transfers(program.compute_tables[rank], program.stage_ranks)
    moment = peak(program, layout.mesh.rank({"pp": rank}), table)
    terms = [Term(category, size, "") for category, size in moment.held.items()]
    return _rank_memory(setting, layout, rank, with_measured(setting, terms))


def worst_estimate(
    setting: CostInputs, layout: Layout, kept_bytes: KeptBytes | None = None
) -> RankMemory:
    """Return the highest closed-form memory of the pipeline ranks; see `worst_memory` and
    `estimate`."""
    kept_bytes = kept_bytes or kept_of(setting, layout)
    return max(
        (estimate(setting, layout, rank, kept_bytes) for rank in may_hold_most(setting, layout)),
        key=lambda rank_memory: rank_memory.total,
    )


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a layout: the largest rank's memory, the time of a step, and
    throughput.

    `tokens` are those of a global batch; `flops_per_token` counts model FLOPs; `peak` is the
    device's FLOP/s. `spread` bounds the interval of step times in multiples of the predicted one,
    and `memory_spread` that of memory in multiples of the predicted bytes outside of model states.
    """

    layout: Layout
    memory: RankMemory
    time: StepTime
    tokens: int
    flops_per_token: float
    devices: int
    peak: float
    spread: tuple[float, float] = (1.0, 1.0)
    memory_spread: tuple[float, float] = (1.0, 1.0)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval in seconds that contains 80% of step times, from sources to which no
        constant was fitted."""
        return self.time.total * self.spread[0], self.time.total * self.spread[1]

    @property
    def memory_interval(self) -> tuple[float, float]:
        """The interval in bytes that contains 80% of peaks: see `memory_spread`."""
        states, (low, high) = self.memory.states, self.memory_spread
        other_bytes = self.memory.total - states
        return states + low * other_bytes, states + high * other_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all devices."""
        return self.tokens / self.time.total

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s per device, with attention counted without the causal mask:
        arXiv:2204.02311."""
        return self.tokens_per_s * self.flops_per_token / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """The model FLOP/s as a share of the device's peak."""
        return self.tflops_per_device * 1e12 / self.peak


def price(setting: CostInputs, layout: Layout, *, worst: RankMemory | None = None) -> Prediction:
    """Return the predicted cost of a layout, as plans show it: see `worst_memory` and `step_time`.

    `worst` is its `worst_memory`, if the caller has it.
    """
    return _prediction(
        setting,
        layout,
        worst_memory(setting, layout) if worst is None else worst,
        step_time(setting, setting.kernels(), layout),
    )


def estimated(setting: CostInputs, layout: Layout) -> Prediction:
    """Return the closed-form cost of a layout, for comparing thousands of them; never shown to
    users."""
    time = step_time(setting, setting.kernels(), layout, events=False)
    return _prediction(setting, layout, worst_estimate(setting, layout), time)


def _prediction(
    setting: CostInputs, layout: Layout, worst: RankMemory, time: StepTime
) -> Prediction:
    return Prediction(
        layout,
        worst,
        time,
        setting.train.batch * setting.train.seq_len,
        flops_per_token(setting.model, setting.train.seq_len),
        layout.world,
        setting.peak,
        _widened(setting, _spread(setting, layout)),
        _widened(setting, _memory_spread(setting)),
    )


def _widened(setting: CostInputs, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return wider bounds for a model planned only from its config's shapes, as none like it is
    measured."""
    if setting.model.planned is None:
        return bounds
    share = setting.calibration.find("interval.planned")
    return bounds[0] / share, bounds[1] * share


def _spread(setting: CostInputs, layout: Layout) -> tuple[float, float]:
    """Return the lower and upper bound of step times, in multiples of the predicted one.

    They are narrower after a measurement on this machine, and wider if few published sources are
    similar.
    """
    kind, find = setting.cluster.device.kind, setting.calibration.find
    is_measured = f"{setting.system.name}.{kind}.measured.compute" in setting.calibration.constants
    name = "interval.plain" if has_evidence(setting, layout) else "interval.few"
    name = "interval.measured" if is_measured else name
    return find(f"{name}.low", kind), find(f"{name}.high", kind)


def _memory_spread(setting: CostInputs) -> tuple[float, float]:
    """Return the lower and upper bound of memory, in multiples of the predicted bytes outside of
    model states."""
    system, find = setting.system.name, setting.calibration.find
    return find("interval.memory.low", system), find("interval.memory.high", system)
