"""`calibrate`: measures a machine and returns the constants that predictions use."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from meshwright.bench import blocks as on_blocks
from meshwright.bench import device as on_device
from meshwright.bench.blocks import compiling
from meshwright.bench.layouts import timed
from meshwright.bench.links import collectives, overlap, shared, sums_both_ways
from meshwright.comm.world import World
from meshwright.cost.calibration import QUIET
from meshwright.cost.kernels import PASSES
from meshwright.cost.network import through_channel
from meshwright.cost.work import Product
from meshwright.kernels.fp32_matmuls import take_route
from meshwright.layout import Layout
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.program.target import Matmul
from meshwright.prove.case import Case
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

_STEPS: Final = 12
_MORE: Final = 6


class Overheads(NamedTuple):
    """The engine's overheads in seconds: per step, per microbatch, and per FSDP unit.

    `unit` is for the gathers and the reduction of one layer, None if not measured.
    """

    step: float
    microbatch: float
    unit: float | None


def overheads(world: World, steps: int = _STEPS, *, has_units: bool = True) -> Overheads:
    """Return the engine's overheads, each from `steps` steps of tiny models.

    All ranks must call this. Without `has_units`, that of an FSDP unit is not measured.
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


# Other ways of fp32 products than "auto": where they differ from it, they have constants.
_WAYS: Final[tuple[Matmul, ...]] = ("torch", "onednn")


class Effort(NamedTuple):
    """How much of a device to measure.

    `budget_s` is the approximate time of each measurement. Matmuls and blocks with more than
    `most_flops` are left out, as are messages of more than `most_bytes`; up to `depth` blocks are
    timed together; a message is sent `times` times, and a tiny model trains `steps` steps.
    `in_full` also measures the gains of automatic choices, every kind of collective, and the
    overlap of collectives with matmuls.
    """

    budget_s: float = 3.0
    precisions: tuple[str, ...] = ("fp32", "bf16")
    most_flops: float = math.inf
    most_bytes: float = math.inf
    depth: int = 6
    times: int = 12
    steps: int = 12
    in_full: bool = True


def quick(precision: str) -> Effort:
    """Return the effort of about two seconds, for the main constants of a precision on a CPU.

    The shipped constants price everything else.
    """
    return Effort(0.2, (precision,), 4e9, 2**20, depth=2, times=4, steps=5, in_full=False)


def calibrate(
    world: World, effort: Effort, case: Case | None = None, *, compiles: bool = False
) -> dict[str, Any]:
    """Return measured constants by name, without the kind of device, and the curves behind them.

    The blocks of `case` are measured in addition to representative ones, unless they take too long
    (`is_own` says whether), with `compiles` also their gain from torch.compile. All ranks must call
    this; constants are medians over them. `had_core` is the share of the time in which a rank had
    its core, for the rank with the least.
    """
    began, own_shape = time.perf_counter(), None
    if case is not None:
        own_shape = on_blocks.own(world.device, case, effort.most_flops)
    busy = time.perf_counter(), time.thread_time()
    constants, curves = _compute(world.device, effort, own_shape)
    share = (time.thread_time() - busy[1]) / (time.perf_counter() - busy[0])
    share = 1.0 if world.device.type == "cuda" else share  # whose host waits for it
    had_core = min(row[0] for row in world.gather_on_host([share]))
    if effort.in_full and case is not None and own_shape is not None:
        constants |= _of_blocks(world, effort.budget_s, case, own_shape)
    if case is not None and compiles:
        constants |= compiling(world.device, case, effort.budget_s, constants["bandwidth"])
        take_route("auto", world.device)
    # On a machine that is busy otherwise, what ranks wait for is mostly what others do.
    if effort.in_full or had_core >= QUIET:
        waits, points = _waiting(world, effort)
        constants |= waits
        curves |= points
    everyone = world.gather_on_host(list(constants.values()))
    medians = [statistics.median(row) for row in zip(*everyone, strict=True)]
    return {
        "constants": dict(zip(constants, medians, strict=True)),
        "had_core": had_core,
        "seconds": time.perf_counter() - began,
        "curves": curves,
        "torch": torch.__version__,
        "machine": _name(world.device),
        "ranks": world.size,
        "is_own": own_shape is not None,
    }


def _name(device: torch.device) -> str:
    """Return the name of a device by the GPU's driver or the system."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def block_seconds(world: World, budget_s: float, case: Case) -> float:
    """Return the seconds of a block of the case's model with its microbatch, median over ranks."""
    shape = on_blocks.own(world.device, case)
    assert shape is not None, "blocks that take too long are not asked for"
    take_route("auto", world.device)
    seconds = on_blocks.seconds(world.device, case.train.precision, budget_s, shape)
    return statistics.median(row[0] for row in world.gather_on_host([seconds]))


def _waiting(world: World, effort: Effort) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the constants of engine overheads and messages, and the curves behind them."""
    cost = overheads(world, effort.steps, has_units=effort.in_full)._asdict()
    constants = {f"overhead.{name}": cost[name] for name in cost if cost[name] is not None}
    if world.size == 1:
        return constants, {}
    kinds = () if effort.in_full else ("all_gather", "all_reduce")
    sent = collectives(world, kinds, effort.most_bytes, effort.times)
    by_channel = shared(world, effort.times)
    constants |= _links(sent, world.size) | _channel(by_channel, world.size)
    if effort.in_full:
        constants["overlap"] = overlap(world)
    return constants, sent | {f"channel.{kind}": points for kind, points in by_channel.items()}


def _of_blocks(
    world: World, budget_s: float, case: Case, shape: on_blocks.Shape
) -> dict[str, float]:
    """Return constants measured on the case's own blocks, for the automatic choice of a microbatch.

    See `planner.choices`. Those of torch.compile are separate.
    """
    precision = case.train.precision
    max_sequences = max(1, case.train.batch // case.layout.dp)
    seconds_by_sequences = on_blocks.by_rows(
        world.device, precision, budget_s, shape, max_sequences
    )
    constants = {
        f"blocks.rows.{count}.{precision}": seconds
        for count, seconds in seconds_by_sequences.items()
    }
    element = ELEMENT_BYTES[precision]
    message = shape.rows * shape.length * shape.spec.dim * element
    sums = sums_both_ways(world, message) if world.size > 1 else None
    if sums is not None:
        constants |= {"blocks.message": float(message)}
        constants |= dict(zip(("blocks.sum.gloo", "blocks.sum.channel"), sums, strict=True))
    return constants


def _compute(
    device: torch.device, effort: Effort, own_shape: on_blocks.Shape | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the constants of one rank's computation, and the curves behind them.

    `own_shape` is the block of the user's model, or None.
    """
    curves: dict[str, Any] = {}
    budget_s = effort.budget_s
    shapes = {} if own_shape is None else {"blocks.": own_shape}
    if effort.in_full or own_shape is None:
        shapes = {"": on_blocks.usual(device, is_small=not effort.in_full)} | shapes
    of_blocks = [
        matmul for shape in shapes.values() for matmul in on_blocks.products_of("fp32", shape)
    ]
    tried = on_device.SIZES[device.type].shapes
    tried = tuple(matmul for matmul in tried if PASSES * matmul.flops < effort.most_flops)
    bandwidth = on_device.copy_rate(device, budget_s / 3)
    # What moves bytes is told as a share of a copy's rate, which is all that there is.
    constants = {"bandwidth": bandwidth, "memory": 1.0}
    for precision in effort.precisions:
        rates, timed_matmuls = _products(
            device, precision, budget_s, list(dict.fromkeys([*tried, *of_blocks]))
        )
        constants |= rates
        best = rates[f"peak.{precision}"]
        peak = rates.get("peak.tf32", best) * rates[f"products.{precision}"]
        half = rates[f"products.half.{precision}"]
        curves[f"products.{precision}"] = [
            (*shape.sides, seconds) for shape, seconds in timed_matmuls
        ]
        for prefix, asked in shapes.items():
            shape = on_blocks.outlasting(device, precision, budget_s / 10, asked)
            block_times = on_blocks.seconds_of_parts(
                device, precision, budget_s, shape, effort.depth
            )
            rate = on_blocks.attention_flops(shape) / block_times.attention
            constants[f"{prefix}attention.flash2.{precision}"] = rate / best
            # A tiny block's, whoever's are measured beside it.
            constants |= {
                f"{o}overhead.layer.{precision}": block_times.overhead for o in {prefix, ""}
            }
            moves = on_blocks.seconds_per_byte(
                precision, shape, (peak, half), block_times, runs_ahead=device.type != "cpu"
            )
            constants[f"{prefix}moves.{precision}"] = moves * bandwidth
        loss = 1 / on_device.loss_rate(device, precision, budget_s)
        constants[f"moves.loss.{precision}"] = loss * bandwidth
    moved = OPTIMIZERS["adamw"].rules[0].moved(OptimizerSpec())
    rate = on_device.optimizer_rate(device, budget_s / 3, moved)
    constants["optimizer"] = rate / bandwidth
    return constants, curves


def _products(
    device: torch.device, precision: str, budget_s: float, shapes: Sequence[Product]
) -> tuple[dict[str, float], list[tuple[Product, float]]]:
    """Return the constants of matmuls, and each shape's seconds, by the implementation of "auto".

    Other implementations of fp32 matmuls have separate constants. On a GPU, "auto" uses TF32, which
    has its own peak; that of fp32 is measured with the implementation "torch".
    """
    auto_route = take_route("auto", device)
    timed = on_device.products(device, precision, budget_s, shapes)
    if device.type != "cpu":
        timed = on_device.by_device(timed)
    peak, half = on_device.saturation(timed)
    best = max(shape.flops / seconds for shape, seconds in timed)
    name = f"products.{precision}", f"products.half.{precision}"
    constants = {f"peak.{precision}": best, name[0]: peak / best, name[1]: half}
    if precision == "fp32" and device.type != "cpu":
        constants |= _in_full(device, budget_s / 2, shapes) | {"peak.tf32": best}
    if precision != "fp32" or device.type != "cpu":
        return constants, timed
    constants["matmul.gain"] = 1.0
    for matmul in _WAYS:
        if take_route(matmul, device) == auto_route:
            continue
        other_timed = on_device.products(device, precision, budget_s / 2, shapes)
        peak, half = on_device.saturation(other_timed)
        constants |= {f"{name[0]}.{matmul}": peak / best, f"{name[1]}.{matmul}": half}
        if matmul == "torch":
            auto_seconds = sum(seconds for _, seconds in timed)
            constants["matmul.gain"] = sum(seconds for _, seconds in other_timed) / auto_seconds
    take_route("auto", device)
    return constants, timed


def _in_full(device: torch.device, budget_s: float, shapes: Sequence[Product]) -> dict[str, float]:
    """Return the constants of a GPU's matmuls in full fp32, without TF32."""
    take_route("torch", device)
    timed = on_device.by_device(on_device.products(device, "fp32", budget_s, shapes))
    take_route("auto", device)
    peak, half = on_device.saturation(timed)
    best = max(shape.flops / seconds for shape, seconds in timed)
    return {
        "peak.fp32": best,
        "products.fp32.torch": peak / best,
        "products.half.fp32.torch": half,
    }


def _links(sent: dict[str, list[tuple[int, float]]], ranks: int) -> dict[str, float]:
    """Return the rate and latency of all-gather, and those of other collectives relative to it.

    In the form of `cost.network`: `(n - 1) / n` of the bytes at the rate, and `n - 1` latencies.
    `sent` has (bytes, seconds) of each collective at several sizes.
    """
    small, large = _line(sent["all_gather"])
    rate = (ranks - 1) / ranks / large
    constants = {"inner.rate": rate, "inner.latency": small / (ranks - 1)}
    for kind, times in (
        ("all_reduce", 2 * (ranks - 1) / ranks),
        ("reduce_scatter", (ranks - 1) / ranks),
        ("all_to_all", (ranks - 1) / ranks),
        ("rows", (ranks - 1) / ranks),
        ("send", 1.0),
    ):
        if kind not in sent:
            continue
        base, per_byte = _line(sent[kind])
        constants[f"times.{kind}"] = per_byte * rate / times
        turns = {"all_reduce": 2 * (ranks - 1), "send": 2}.get(kind, ranks - 1)
        constants[f"inner.latency.{kind}"] = base / turns
    return constants


def _channel(sent: dict[str, list[tuple[int, float]]], ranks: int) -> dict[str, float]:
    """Return the latency and rate of each kind of message through shared memory.

    Bytes are counted as in `cost.network.through_channel`.
    """
    constants: dict[str, float] = {}
    for kind, points in sent.items():
        base, per_byte = _line(points)
        _, moved = through_channel(kind, 1.0, ranks)
        constants |= {f"channel.latency.{kind}": base, f"channel.rate.{kind}": moved / per_byte}
    return constants


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the latency, the time of the smallest message, and the seconds per byte.

    The latter is from the largest message less the latency, unless noise makes this negative.
    """
    (_, smallest_s), *_, (byte_count, largest_s) = points
    return smallest_s, (
        largest_s - smallest_s if largest_s > smallest_s else largest_s
    ) / byte_count
