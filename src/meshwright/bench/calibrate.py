"""`calibrate`: all measurements of a machine as the constants that `predict` reads."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from typing import Any, Final

import torch

from meshwright.bench import blocks as on_blocks
from meshwright.bench import device as on_device
from meshwright.bench.compiling import compiling
from meshwright.bench.links import collectives, overlap, shared, sums_both_ways
from meshwright.bench.overheads import overheads
from meshwright.execute.products import take_route
from meshwright.execute.world import World
from meshwright.predict.network import through_lane
from meshwright.predict.step import OPTIMIZER_BYTES
from meshwright.program.operations import ELEMENT_BYTES
from meshwright.prove.case import Case

_PRECISIONS: Final = ("fp32", "bf16")


def calibrate(
    world: World, budget_s: float = 3.0, case: Case | None = None, *, compiles: bool = False
) -> dict[str, Any]:
    """Return constants by name, without the kind of the device, and the curves behind them.

    `budget_s` is about what each of the measurements takes; `case` has blocks that are measured
    beside some usual ones, unless they take too long (`is_own` says which), and `compiles` says
    whether to measure what compiling them gains. All ranks call it; constants are medians over
    them.
    """
    own = None if case is None else on_blocks.own(world.device, case)
    constants, curves = _compute(world.device, budget_s, own)
    if case is not None and own is not None:
        constants |= _of_blocks(world, budget_s, case, own)
    if case is not None and compiles:
        constants |= compiling(world.device, case, budget_s)
        take_route("auto", world.device)
    cost = overheads(world)
    constants |= {f"overhead.{name}": seconds for name, seconds in cost._asdict().items()}
    if world.size > 1:
        sent, by_lane = collectives(world), shared(world)
        constants |= _links(sent, world.size) | _lane(by_lane, world.size)
        constants["overlap"] = overlap(world)
        curves |= sent | {f"lane.{kind}": points for kind, points in by_lane.items()}
    everyone = world.gather_on_host(list(constants.values()))
    medians = [statistics.median(row) for row in zip(*everyone, strict=True)]
    return {
        "constants": dict(zip(constants, medians, strict=True)),
        "curves": curves,
        "torch": torch.__version__,
        "machine": _name(world.device),
        "ranks": world.size,
        "is_own": own is not None,
    }


def _name(device: torch.device) -> str:
    """Return what a GPU's driver, or the system, calls a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def block_seconds(world: World, budget_s: float, case: Case) -> float:
    """Return the seconds of a block of a case with its microbatch, the median of all ranks."""
    shape = on_blocks.own(world.device, case)
    assert shape is not None, "blocks that take too long are not asked for"
    take_route("auto", world.device)
    seconds = on_blocks.seconds(world.device, case.train.precision, budget_s, shape)
    return statistics.median(row[0] for row in world.gather_on_host([seconds]))


def _of_blocks(
    world: World, budget_s: float, case: Case, shape: on_blocks.Shape
) -> dict[str, float]:
    """Return what is measured of a case's own blocks beside compiling: see `search.choices`."""
    precision = case.train.precision
    most = max(1, case.train.batch // case.layout.dp)
    rows = on_blocks.by_rows(world.device, precision, budget_s, shape, most)
    found = {f"blocks.rows.{count}.{precision}": seconds for count, seconds in rows.items()}
    element = ELEMENT_BYTES[precision]
    message = shape.rows * shape.length * shape.spec.dim * element
    sums = sums_both_ways(world, message) if world.size > 1 else None
    if sums is not None:
        found |= {"blocks.message": float(message)}
        found |= dict(zip(("blocks.sum.gloo", "blocks.sum.lane"), sums, strict=True))
    return found


def _compute(
    device: torch.device, budget_s: float, own: on_blocks.Shape | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what one rank's computing comes to, and its curves."""
    constants: dict[str, float] = {}
    curves: dict[str, Any] = {}
    shapes = {"": on_blocks.usual(device)} | ({} if own is None else {"blocks.": own})
    take_route("torch", device)
    more = [one for shape in shapes.values() for one in on_blocks.products_of("fp32", shape)]
    plain = sum(seconds for _, seconds in on_device.products(device, "fp32", budget_s / 2, more))
    take_route("auto", device)
    bandwidth = on_device.copy_rate(device, budget_s / 3)
    # What moves bytes is told as a share of a copy's rate, which is all that there is.
    constants |= {"bandwidth": bandwidth, "memory": 1.0}
    for precision in _PRECISIONS:
        found = on_device.products(device, precision, budget_s, more)
        peak, half = on_device.saturation(found)
        best = max(shape.flops / seconds for shape, seconds in found)
        constants[f"peak.{precision}"] = best
        if precision == "fp32" and device.type == "cpu":
            constants["matmul.gain"] = plain / sum(seconds for _, seconds in found)
        constants[f"products.{precision}"] = peak / best
        constants[f"products.half.{precision}"] = half
        curves[f"products.{precision}"] = [(*shape.sides, seconds) for shape, seconds in found]
        for of, shape in shapes.items():
            parts = on_blocks.seconds_of_parts(device, precision, budget_s, shape)
            rate = on_blocks.attention_flops(shape) / parts.attention
            constants[f"{of}attention.flash2.{precision}"] = rate / best
            constants[f"{of}overhead.layer.{precision}"] = parts.overhead
            moves = on_blocks.seconds_per_byte(
                precision, shape, (peak, half), parts, on_cpu=device.type == "cpu"
            )
            constants[f"{of}moves.{precision}"] = moves * bandwidth
        loss = 1 / on_device.loss_rate(device, precision, budget_s)
        constants[f"moves.loss.{precision}"] = loss * bandwidth
    rate = on_device.optimizer_rate(device, budget_s / 3, OPTIMIZER_BYTES)
    constants["optimizer"] = rate / bandwidth
    return constants, curves


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
