"""`calibrate`: all measurements of a machine as the constants that `predict` reads."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from typing import Any, Final

import torch

from meshwright.bench import device as on_device
from meshwright.bench.compiling import compiling
from meshwright.bench.links import collectives, overlap, shared
from meshwright.bench.overheads import overheads
from meshwright.execute.products import take_route
from meshwright.execute.world import World
from meshwright.predict.network import through_lane
from meshwright.predict.step import OPTIMIZER_BYTES
from meshwright.prove.case import Case

_PRECISIONS: Final = ("fp32", "bf16")


def calibrate(world: World, budget_s: float = 3.0, case: Case | None = None) -> dict[str, Any]:
    """Return constants by name, without the kind of the device, and the curves behind them.

    `budget_s` is about what each of the measurements takes; `case` has the blocks whose
    compiling is measured, None for none. All ranks call it; constants are medians over them.
    """
    constants: dict[str, float] = {}
    curves: dict[str, Any] = {}
    overhead = on_device.block_overhead(world.device, budget_s / 3)
    constants["overhead.layer"] = overhead
    take_route("torch", world.device)
    plain = sum(seconds for _, seconds in on_device.products(world.device, "fp32", budget_s / 2))
    take_route("auto", world.device)
    for precision in _PRECISIONS:
        found = on_device.products(world.device, precision, budget_s)
        peak, half = on_device.saturation(found)
        best = max(shape.flops / seconds for shape, seconds in found)
        constants[f"peak.{precision}"] = best
        if precision == "fp32" and world.device.type == "cpu":
            constants["matmul.gain"] = plain / sum(seconds for _, seconds in found)
        constants[f"products.{precision}"] = peak / best
        constants[f"products.half.{precision}"] = half
        curves[f"products.{precision}"] = [(*shape.sides, seconds) for shape, seconds in found]
        core = on_device.attention(world.device, precision, budget_s / 2)
        constants[f"attention.flash2.{precision}"] = core / best
        constants[f"moves.{precision}"] = on_device.seconds_per_byte(
            world.device, precision, budget_s, (peak, half), overhead
        )
        constants[f"moves.loss.{precision}"] = 1 / on_device.loss_rate(
            world.device, precision, budget_s
        )
    bandwidth = on_device.copy_rate(world.device, budget_s / 3)
    constants["bandwidth"] = bandwidth
    for precision in _PRECISIONS:  # of the copy's rate
        constants[f"moves.{precision}"] *= bandwidth
        constants[f"moves.loss.{precision}"] *= bandwidth
    rate = on_device.optimizer_rate(world.device, budget_s / 3, OPTIMIZER_BYTES)
    constants["optimizer"] = rate / bandwidth
    if case is not None:
        constants |= compiling(world.device, case, budget_s)
        take_route("auto", world.device)
    cost = overheads(world)
    constants |= {f"overhead.{name}": seconds for name, seconds in cost._asdict().items()}
    if world.size > 1:
        sent = collectives(world)
        constants |= _links(sent, world.size)
        by_lane = shared(world)
        constants |= _lane(by_lane, world.size)
        constants["overlap"] = overlap(world)
        curves |= sent | {f"lane.{kind}": points for kind, points in by_lane.items()}
    everyone = world.gather_on_host(list(constants.values()))
    medians = [statistics.median(row) for row in zip(*everyone, strict=True)]
    return {
        "constants": dict(zip(constants, medians, strict=True)),
        "curves": curves,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "ranks": world.size,
    }


def _links(sent: dict[str, list[tuple[int, float]]], ranks: int) -> dict[str, float]:
    """Return rate and latency of an all-gather, and by how much other kinds take longer.

    In the form of `predict.network`: `(n - 1) / n` of the bytes at the rate, `n - 1` turns.
    """
    small, large = _line(sent["all_gather"])
    rate = (ranks - 1) / ranks / large
    found = {"inner.rate": rate, "inner.latency": small / (ranks - 1)}
    for kind, times in (
        ("all_reduce", 2 * (ranks - 1) / ranks),
        ("reduce_scatter", (ranks - 1) / ranks),
        ("all_to_all", (ranks - 1) / ranks),
        ("rows", (ranks - 1) / ranks),
        ("send", 1.0),
    ):
        base, per_byte = _line(sent[kind])
        found[f"times.{kind}"] = per_byte * rate / times
        turns = {"all_reduce": 2 * (ranks - 1), "send": 2}.get(kind, ranks - 1)
        found[f"inner.latency.{kind}"] = base / turns
    return found


def _lane(sent: dict[str, list[tuple[int, float]]], ranks: int) -> dict[str, float]:
    """Return latency and rate of each kind of message through shared memory.

    Bytes are those of `predict.network.through_lane`.
    """
    found: dict[str, float] = {}
    for kind, points in sent.items():
        base, per_byte = _line(points)
        _, moved = through_lane(kind, 1.0, ranks)
        found |= {f"lane.latency.{kind}": base, f"lane.rate.{kind}": moved / per_byte}
    return found


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return latency, that of the smallest message, and the seconds per byte of the largest.

    Where noise hides what bytes take, all that the largest took.
    """
    (_, least), *_, (size, most) = points
    return least, (most - least if most > least else most) / size
