"""`simulated_profile`: rehearsed ranks in the common schema, and their prediction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from meshwright.cost.profile import predicted_profile
from meshwright.planner.plan import on_cluster
from meshwright.program.profile import MemoryPoint, RankProfile, StepProfile, Traffic
from meshwright.simulate.run import Simulated, Simulation

# What the tracker's categories are in the profile; the others are called the same.
_CATEGORIES: Final[Mapping[str, str]] = {
    "weights": "parameters",
    "temporary": "activations",
    "inputs": "activations",
}
_ACTION: Final = re.compile(r"(\d+)([A-Z_]+)(\d+)")


def simulated_profile(simulation: Simulation) -> StepProfile:
    """Return what the rehearsed ranks hold and send in a step.

    Memory is known in order, without times: at the highest moment of each action, and after it.
    What a device holds beside tensors is the prediction's.
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
    """Return the prediction for the rehearsed ranks, and the simulation."""
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
                key = _CATEGORIES.get(kind, kind)
                sums[key] = sums.get(key, 0) + size
            yield MemoryPoint(name, None, {kind: size for kind, size in sums.items() if size})
