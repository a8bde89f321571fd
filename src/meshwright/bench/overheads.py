"""What the engine itself costs on the host: of a step, of a microbatch, of a unit of ZeRO.

Measured with models so small that they compute nothing to speak of.
"""

from __future__ import annotations

import statistics
from typing import Final, NamedTuple

from meshwright.bench.layouts import timed
from meshwright.execute.world import World
from meshwright.layout import Layout
from meshwright.prove.case import Case
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec

_STEPS: Final = 12
_MORE: Final = 6


class Overheads(NamedTuple):
    """Seconds of a step, of a microbatch, and of gathering and reducing a layer."""

    step: float
    microbatch: float
    unit: float


def overheads(world: World) -> Overheads:
    """Return the engine's costs; all ranks call it."""
    base = _seconds(world, layers=1, microbatches=1, zero=0)
    deep = _seconds(world, layers=1 + _MORE, microbatches=1, zero=0)
    long = _seconds(world, layers=1, microbatches=1 + _MORE, zero=0)
    layer = max(0.0, (deep - base) / _MORE)
    microbatch = max(0.0, (long - base) / _MORE - layer)
    unit = 0.0
    if world.size > 1:
        one = _seconds(world, layers=1, microbatches=1, zero=3)
        many = _seconds(world, layers=1 + _MORE, microbatches=1, zero=3)
        unit = max(0.0, (many - one) / _MORE - layer)
    return Overheads(max(0.0, base - microbatch - layer), microbatch, unit)


def _seconds(world: World, layers: int, microbatches: int, zero: int) -> float:
    model = model_spec(dim=16, n_layers=layers, n_heads=2, n_kv_heads=2, ffn_dim=32, vocab_size=64)
    train = TrainSpec(batch=world.size * microbatches, seq_len=8)
    axis = "dp_shard" if zero else "dp_replicate"
    layout = Layout.model_validate({axis: world.size, "zero": zero, "microbatch": 1})
    return statistics.median(timed(world, Case(model, train, layout), _STEPS).seconds)
