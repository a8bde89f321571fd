"""Measures the engine's overhead on the host: per step, microbatch, and unit of ZeRO.

Measured with models so small that their computation doesn't count.
"""

from __future__ import annotations

import statistics
from typing import Final, NamedTuple

from meshwright.bench.layouts import timed
from meshwright.comm.world import World
from meshwright.layout import Layout
from meshwright.prove.case import Case
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec

_STEPS: Final = 12
_MORE: Final = 6


class Overheads(NamedTuple):
    """Seconds per step, per microbatch, and per gather and reduction of a layer, if measured."""

    step: float
    microbatch: float
    unit: float | None


def overheads(world: World, steps: int = _STEPS, *, has_units: bool = True) -> Overheads:
    """Return the engine's overheads, from so many steps each; all ranks call it.

    Without `has_units`, that of a unit is not measured.
    """

    def seconds(layers: int, microbatches: int, zero: int = 0) -> float:
        return _seconds(world, layers, microbatches, zero, steps)

    base, deep, long = seconds(1, 1), seconds(1 + _MORE, 1), seconds(1, 1 + _MORE)
    layer = max(0.0, (deep - base) / _MORE)
    microbatch = max(0.0, (long - base) / _MORE - layer)
    unit = 0.0 if has_units else None
    if has_units and world.size > 1:
        unit = max(0.0, (seconds(1 + _MORE, 1, zero=3) - seconds(1, 1, zero=3)) / _MORE - layer)
    return Overheads(max(0.0, base - microbatch - layer), microbatch, unit)


def _seconds(world: World, layers: int, microbatches: int, zero: int, steps: int) -> float:
    model = model_spec(dim=16, n_layers=layers, n_heads=2, n_kv_heads=2, ffn_dim=32, vocab_size=64)
    train = TrainSpec(batch=world.size * microbatches, seq_len=8)
    axis = "dp_shard" if zero else "dp_replicate"
    layout = Layout.model_validate({axis: world.size, "zero": zero, "microbatch": 1})
    return statistics.median(timed(world, Case(model, train, layout), steps).seconds)
