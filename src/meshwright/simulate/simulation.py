"""`simulate`: dry-runs chosen ranks of a layout and compares them with their prediction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshwright.comm.wire import message_differences
from meshwright.cost.byte_count import PredictedMoment
from meshwright.cost.inputs import CostInputs
from meshwright.cost.memory import Term, outside
from meshwright.cost.price import RankMemory as PredictedMemory
from meshwright.cost.price import memory as predicted_memory
from meshwright.cost.profile import predicted_profile
from meshwright.cost.timeline import timeline
from meshwright.cost.units import OPTIMIZER
from meshwright.errors import ConfigError, refusal
from meshwright.layout import Layout, Machine, resolve_layout
from meshwright.planner.plan import cost_inputs_of, explain, on_cluster, prediction_json
from meshwright.program.flops import attention_flops, matmul_flops
from meshwright.program.layers.block import inside_kernels
from meshwright.program.lower import Program, lower
from meshwright.program.profile import MemoryPoint, RankProfile, StepProfile, Traffic
from meshwright.program.update import update_flops
from meshwright.simulate.dry_run import DryRun, dry_run
from meshwright.simulate.memory_tracker import Breach
from meshwright.spec.loading import Config
from meshwright.units import KIB, format_bytes

# How far the peak of a rehearsed rank's tensors may be from the program's, as a share of it: a
# product's workspace and what a kernel of torch saves differ by processor.
PEAK_TOLERANCE: Final = 0.08
# Or by so much, which a batch and its loss take: more than that of a tiny model's peak.
LEAST_TOLERANCE: Final = 256 * KIB
# Predicted categories by other names: what one action needs alone, and copies that kernels of a GPU
# keep beside what autograd does.
_CATEGORIES: Final = {
    "activations: layer at work": "temporary",
    "logits and loss": "temporary",
    "activations: copies": "copies",
}


@dataclass(frozen=True)
class Simulated:
    """A dry-run rank, with what the program states and what is predicted.

    `outside` is what a device holds besides tensors, as measured; `limit` its memory in bytes.
    `timeline` is the peak of the program's own timeline; `products` (matmuls), `attention` and
    `update` are its FLOPs. `inside_kernels` is an upper bound of bytes in the timeline that a dry
    run does not see, because kernels on fake tensors allocate only results.
    """

    rehearsal: DryRun
    predicted: PredictedMemory
    timeline: PredictedMoment
    products: float
    attention: float
    update: float
    outside: tuple[Term, ...]
    limit: int
    inside_kernels: int = 0

    @property
    def breach(self) -> Breach | None:
        """The first moment at which memory exceeds the device's; None if it fits."""
        return self.rehearsal.breach

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by category at the peak, including context, communicators and allocator
        overhead."""
        sizes = {name: size for name, size in self.rehearsal.worst.peak.items() if size}
        return {**sizes, **{t.category: round(t.bytes) for t in self.outside if t.bytes}}

    @property
    def peak(self) -> int:
        """Bytes at the peak, including those besides tensors."""
        return sum(self.memory.values())

    @property
    def beside(self) -> float:
        """Bytes that the device holds besides tensors."""
        return sum(term.bytes for term in self.outside)

    @property
    def differences(self) -> list[str]:
        """Sentences on messages, FLOPs and memory that differ from the program's; empty if none
        do."""
        rehearsal = self.rehearsal
        lines = [
            *message_differences(rehearsal.expected, rehearsal.messages),
            *self._memory_differences(),
        ]
        for part, counted, stated in (
            ("matrix products", rehearsal.products, self.products),
            ("attention", rehearsal.attention, self.attention),
            ("the update", rehearsal.update, self.update),
        ):
            if counted != stated:
                lines.append(f"{part}: {counted:.6g} FLOPs where the program has {stated:.6g}")
        return lines

    def _memory_differences(self) -> Iterator[str]:
        """Yield sentences if optimizer states differ from the program's at all, or the peak by more
        than a tolerance."""
        states = self.rehearsal.phases[-1].end.get(OPTIMIZER, 0)
        predicted_states = self.timeline.held.get(OPTIMIZER, 0)
        if states != predicted_states:
            yield (
                f"optimizer states: {format_bytes(states)} where the program has "
                f"{format_bytes(predicted_states)}"
            )
        peak, predicted_peak = self.rehearsal.worst.total, self.timeline.total
        seen = min(max(peak, predicted_peak - self.inside_kernels), predicted_peak)
        if abs(peak - seen) > max(PEAK_TOLERANCE * peak, LEAST_TOLERANCE):
            yield (
                f"peak of tensors: {format_bytes(peak)} where the program has "
                f"{format_bytes(predicted_peak)}, more than {PEAK_TOLERANCE:.0%} apart"
            )

    def predicted_memory(self) -> dict[str, int]:
        """Return the predicted bytes at the peak by the categories of the simulation."""
        sums: dict[str, float] = {}
        for name, size in self.predicted.by_category().items():
            key = _CATEGORIES.get(name, name.partition(":")[0])
            sums[key] = sums.get(key, 0.0) + size
        return {name: round(size) for name, size in sums.items() if size}


@dataclass(frozen=True)
class Simulation:
    """The dry-run ranks of a layout."""

    config: Config
    program: Program
    setting: CostInputs
    ranks: tuple[Simulated, ...]

    @property
    def worst(self) -> Simulated:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda simulated: simulated.peak)

    @property
    def fits(self) -> bool:
        """Whether all dry-run ranks fit in the device's memory."""
        return all(simulated.breach is None for simulated in self.ranks)

    @property
    def agrees(self) -> bool:
        """Whether messages, FLOPs and memory of all dry-run ranks agree with the program's."""
        return not any(simulated.differences for simulated in self.ranks)


def layout_of(config: Config, setting: CostInputs, world: int | None = None) -> Layout:
    """Return the layout of a config on its cluster, or on `world` devices.

    Raises `ConfigError` if the layout is illegal, or has another number of ranks.
    """
    cluster = setting.cluster
    devices = world or cluster.devices
    device: Any = "cpu" if cluster.device.kind == "cpu" else "cuda"
    machine = Machine(device, devices, 1, cluster.device.name, is_fixed=world is not None)
    one_node = config.cluster.model_copy(update={"nodes": 1})
    layout = resolve_layout(config.model_copy(update={"cluster": one_node}), machine)
    if world is not None and layout.world != world:
        raise ConfigError(
            refusal(f"--world {world}, but the layout has other ranks", legal=[layout.world])
        )
    return layout


def ranks_of(text: str, layout: Layout) -> list[int]:
    """Return the ranks that a text lists, sorted: numbers, `middle`, `last`, `stages` (one of
    each), `all`.

    Raises `ConfigError` for anything else, and for ranks that don't exist.
    """
    mesh, world = layout.mesh, layout.world
    named = {
        "middle": [mesh.rank({"pp": layout.pp // 2})],
        "last": [world - 1],
        "stages": [mesh.rank({"pp": stage}) for stage in range(layout.pp)],
        "all": list(range(world)),
    }
    ranks: list[int] = []
    for word in filter(None, text.replace(" ", "").split(",")):
        if not word.isdecimal() and word not in named:
            raise ConfigError(refusal(f"--ranks has {word!r}", legal=["a number", *named]))
        ranks += [int(word)] if word.isdecimal() else named[word]
    outsiders = [rank for rank in ranks if rank >= world]
    if outsiders or not ranks:
        problem = f"rank {outsiders[0]}" if outsiders else "no rank"
        raise ConfigError(refusal(f"--ranks has {problem}", legal=[f"0 to {world - 1}"]))
    return sorted(set(ranks))


def simulate(
    config: Config,
    layout: Layout | None = None,
    ranks: Sequence[int] | None = None,
    setting: CostInputs | None = None,
    on_rank: Callable[[Simulated], None] = lambda simulated: None,
) -> Simulation:
    """Dry-run one training step on some ranks of a layout, one after the other in this process.

    `layout` defaults to the config's on its cluster, `ranks` to one of each pipeline stage,
    `setting` to the cost inputs of the config. `on_rank` is called with each finished rank.
    Compiled blocks run uncompiled. Raises `ConfigError` for what cannot run.
    """
    setting = setting or cost_inputs_of(config)
    layout = layout or layout_of(config, setting)
    program = lower(config.model, config.train, config.optimizer, layout, setting.target)
    simulated = []
    for rank in ranks_of("stages", layout) if ranks is None else ranks:
        simulated.append(_simulated(config, program, setting, rank))
        on_rank(simulated[-1])
    return Simulation(config, program, setting, tuple(simulated))


def _simulated(config: Config, program: Program, setting: CostInputs, rank: int) -> Simulated:
    device, layout = setting.cluster.device, program.layout

    def beside(allocated: float) -> tuple[Term, ...]:
        terms = outside(device, layout, setting.system, setting.calibration, allocated)
        return tuple(terms)

    fixed, with_one_byte = (sum(term.bytes for term in beside(size)) for size in (0.0, 1.0))
    limit = (device.memory - fixed) / (1 + with_one_byte - fixed)
    done = dry_run(program, rank, limit=limit)
    return Simulated(
        done,
        predicted_memory(setting, layout, done.pp_rank),
        timeline(program, rank).peak,
        matmul_flops(program, done.pp_rank),
        attention_flops(program, done.pp_rank, layout.mesh.coordinates(rank)["cp"]),
        update_flops(program, layout.mesh.coordinates(rank)),
        beside(done.worst.total),
        device.memory,
        inside_kernels(program),
    )


def as_json(simulation: Simulation) -> dict[str, Any]:
    """Return the results of all ranks and the prediction as JSON.

    The top-level keys are those of a prediction, for the worst rank; `ranks` has each rank in full,
    with FLOPs, differences and where it runs out of memory. Bytes and FLOPs are of one step.
    """
    worst = simulation.worst
    return {
        "layout": simulation.program.layout.model_dump(mode="json"),
        "label": simulation.program.layout.label,
        "fits": simulation.fits,
        "peak_memory_bytes": worst.peak,
        "worst_rank": worst.rehearsal.rank,
        "memory_bytes": worst.memory,
        "agrees": simulation.agrees,
        "ranks": [_rank_json(simulated) for simulated in simulation.ranks],
        "predicted": prediction_json(explain(simulation.setting, simulation.program.layout)),
    }


def _rank_json(simulated: Simulated) -> dict[str, Any]:
    rehearsal = simulated.rehearsal
    return {
        "rank": rehearsal.rank,
        "pipeline_rank": rehearsal.pp_rank,
        "stages": list(rehearsal.stages),
        "fits": simulated.breach is None,
        "peak_memory_bytes": simulated.peak,
        "peak_at": rehearsal.worst.name,
        "memory_bytes": simulated.memory,
        "predicted_memory_bytes": simulated.predicted_memory(),
        "timeline_peak": {
            "at": simulated.timeline.action,
            "memory_bytes": dict(simulated.timeline.held),
        },
        "breach": None
        if simulated.breach is None
        else {
            "at": simulated.breach.phase,
            "category": simulated.breach.largest,
            "asked_for": simulated.breach.asked,
            "asked_bytes": simulated.breach.size,
            "memory_bytes": simulated.breach.held,
        },
        "collectives": [
            {
                "kind": message.kind,
                "axis": message.axis,
                "bytes": message.bytes,
                "count": rehearsal.messages[message],
                "program_count": rehearsal.expected[message],
            }
            for message in sorted(rehearsal.messages | rehearsal.expected)
        ],
        "flops": {
            "matrix products": rehearsal.products,
            "attention": rehearsal.attention,
            "update": rehearsal.update,
            "by_stage": rehearsal.stage_flops,
            "program": {
                "matrix products": simulated.products,
                "attention": simulated.attention,
                "update": simulated.update,
            },
        },
        "differences": simulated.differences,
        "timeline": [
            {"at": phase.name, "peak_bytes": phase.total, "peak": phase.peak, "end": phase.end}
            for phase in rehearsal.phases
        ],
        "seconds": rehearsal.seconds,
    }


# What the tracker's categories are in the profile; the others are called the same.
_PROFILE_CATEGORIES: Final[Mapping[str, str]] = {
    "weights": "parameters",
    "temporary": "activations",
    "inputs": "activations",
}
_ACTION: Final = re.compile(r"(\d+)([A-Z_]+)(\d+)")


def simulated_profile(simulation: Simulation) -> StepProfile:
    """Return the step profile of the dry-run ranks: memory and messages.

    Memory has an order but no times: the peak and the end of each action. What a device holds
    besides tensors is predicted.
    """
    mesh = simulation.program.layout.mesh
    ranks = tuple(
        RankProfile(
            simulated.rehearsal.rank,
            mesh.coordinates(simulated.rehearsal.rank),
            simulated.rehearsal.stages,
            memory=tuple(_memory(simulated)),
            traffic=tuple(
                Traffic(message.kind, message.axis, message.bytes, times)
                for message, times in sorted(simulated.rehearsal.messages.items())
            ),
        )
        for simulated in simulation.ranks
    )
    layout, device = simulation.program.layout, simulation.setting.cluster.device
    return StepProfile(
        "simulated",
        layout.model_dump(mode="json"),
        layout.label,
        device.name,
        ranks,
        memory_limit=device.memory,
    )


def both_profiles(simulation: Simulation) -> tuple[StepProfile, StepProfile]:
    """Return the predicted step profile of the dry-run ranks, and the simulated one."""
    simulated = simulated_profile(simulation)
    setting = on_cluster(simulation.setting, simulation.program.layout)
    ranks = [profile.rank for profile in simulated.ranks]
    predicted = predicted_profile(setting, simulation.program.layout, ranks=ranks)
    return predicted, simulated


def _memory(simulated: Simulated) -> Iterator[MemoryPoint]:
    fixed = round(simulated.beside)
    for phase in simulated.rehearsal.phases:
        name = _ACTION.sub(r"\2 \1 \3", phase.name)
        for allocated in (phase.peak, phase.end):
            sums = {"fixed": fixed} if fixed else {}
            for kind, size in allocated.items():
                key = _PROFILE_CATEGORIES.get(kind, kind)
                sums[key] = sums.get(key, 0) + size
            yield MemoryPoint(name, None, {kind: size for kind, size in sums.items() if size})
