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


def simulated_profile(found: Simulation) -> StepProfile:
    """Return what the rehearsed ranks hold and send in a step.

    Memory is known in order, without times: at the highest moment of each action, and after it.
    What a device holds beside tensors is the prediction's.
    """
    mesh = found.program.layout.mesh
    ranks = tuple(
        RankProfile(
            one.rehearsal.rank,
            mesh.coordinates(one.rehearsal.rank),
            one.rehearsal.stages,
            memory=tuple(_memory(one)),
            traffic=tuple(
                Traffic(message.kind, message.axis, message.bytes, times)
                for message, times in sorted(one.rehearsal.messages.items())
            ),
        )
        for one in found.ranks
    )
    layout, device = found.program.layout, found.setting.cluster.device
    return StepProfile(
        "simulated",
        layout.model_dump(mode="json"),
        layout.label,
        device.name,
        ranks,
        memory_limit=device.memory,
    )


def both_profiles(found: Simulation) -> tuple[StepProfile, StepProfile]:
    """Return the prediction for the rehearsed ranks, and the simulation."""
    simulated = simulated_profile(found)
    setting = on_cluster(found.setting, found.program.layout)
    ranks = [one.rank for one in simulated.ranks]
    predicted = predicted_profile(setting, found.program.layout, ranks=ranks)
    return predicted, simulated


def _memory(one: Simulated) -> Iterator[MemoryPoint]:
    fixed = round(one.beside)
    for phase in one.rehearsal.phases:
        name = _ACTION.sub(r"\2 \1 \3", phase.name)
        for held in (phase.peak, phase.end):
            sums = {"fixed": fixed} if fixed else {}
            for kind, size in held.items():
                key = _CATEGORIES.get(kind, kind)
                sums[key] = sums.get(key, 0) + size
            yield MemoryPoint(name, None, {kind: size for kind, size in sums.items() if size})
