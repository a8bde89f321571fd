"""Measures a model's transformer blocks on a device, as constants of the cost model.

These are overhead, attention, memory traffic, the time by number of sequences, and the gain from
torch.compile with its compile time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from meshwright.bench.timing import seconds_in_turns, seconds_of
from meshwright.cost.kernels import PASSES, forward_moved
from meshwright.cost.systems import SYSTEMS
from meshwright.cost.work import Product, Work, layout_work
from meshwright.kernels.fp32_matmuls import take_route
from meshwright.models.attention import attend
from meshwright.models.blocks import Block
from meshwright.models.rope import Rope
from meshwright.parallel.build import compiler
from meshwright.parallel.data_parallel.sharded import DTYPES
from meshwright.program.attention import causal_scores
from meshwright.program.saved import ATTENTION_BACKWARD
from meshwright.prove.case import Case
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parameter_count
from meshwright.spec.resolve import model_spec

# Blocks that are timed together: as many as have the weights that no cache holds, at most these.
_DEPTH: Final = 6
_UNCACHED: Final = 2**23
_ROWS: Final = (1, 2, 4, 8, 16)
# A pass of a block with more FLOPs than this takes too long to be repeated.
_MOST_FLOPS: Final[Mapping[str, float]] = {"cpu": 2e11, "cuda": 2e13}
_MOST_WEIGHTS: Final = 2**28


class Shape(NamedTuple):
    """A model's block and its input: `rows` sequences of `length` tokens."""

    spec: ModelSpec
    length: int
    rows: int


_TINY: Final = Shape(model_spec(dim=16, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=32), 8, 1)
# On a GPU a measured block takes at least so many times as long as the host needs to launch it.
_OUTLASTS: Final = 2.0


def usual(device: torch.device, *, is_small: bool = False) -> Shape:
    """Return a representative block, by which other models are priced.

    That of a GPU is large enough to fill it; `is_small` is for quick measurements on a CPU.
    """
    if is_small:
        spec = model_spec(dim=256, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=512)
        return Shape(spec, 256, 1)
    if device.type == "cuda":
        spec = model_spec(dim=2048, n_layers=1, n_heads=16, n_kv_heads=4, ffn_dim=8192)
        return Shape(spec, 4096, 1)
    spec = model_spec(dim=512, n_layers=1, n_heads=8, n_kv_heads=8, ffn_dim=1024)
    return Shape(spec, 512, 1)


def own(device: torch.device, case: Case, most_flops: float = math.inf) -> Shape | None:
    """Return the block of a case's model with its microbatch, without dropout.

    None if a pass of one block needs more than `most_flops`, or takes too long to be repeated.
    """
    spec = case.model.model_copy(update={"dropout": 0.0})
    shape = Shape(spec, case.train.seq_len, case.layout.microbatch)
    flops_limit = min(most_flops, _MOST_FLOPS[device.type])
    if _flops(shape) > flops_limit or weights_of(spec) > _MOST_WEIGHTS:
        return None
    return shape


def weights_of(spec: ModelSpec) -> int:
    """Return the number of weights of a block."""
    one_layer, two_layers = (spec.model_copy(update={"n_layers": count}) for count in (1, 2))
    return parameter_count(two_layers) - parameter_count(one_layer)


def _depth(device: torch.device, shape: Shape, max_blocks: int = _DEPTH) -> int:
    """Return how many blocks to time together, so that their weights exceed the caches."""
    enough = -(-_UNCACHED // weights_of(shape.spec))
    return max(1, min(max_blocks, enough, int(_MOST_FLOPS[device.type] / _flops(shape))))


def _flops(shape: Shape) -> float:
    """Return the FLOPs of a block's forward and backward."""
    products = 2.0 * PASSES * weights_of(shape.spec) * shape.rows * shape.length
    return products + attention_flops(shape)


def stack(
    device: torch.device, precision: str, spec: ModelSpec, length: int, depth: int
) -> nn.Sequential:
    """Return `depth` blocks as a sequential module."""
    rope = Rope(spec, length)
    rope.reach(length, device)
    dtype = DTYPES[precision]
    layers = (str(n % spec.n_layers) for n in range(depth))
    return nn.Sequential(*(Block(spec, rope, layer).to(device, dtype) for layer in layers))


class BlockTimes(NamedTuple):
    """The seconds of a block's forward and backward, of its attention, and of a tiny block."""

    block: float
    attention: float
    overhead: float


def seconds(device: torch.device, precision: str, budget_s: float, shape: Shape) -> float:
    """Return the seconds of a block's forward and backward."""
    work, depth = _pass(device, precision, shape)
    return seconds_of(work, budget_s, device) / depth


def outlasting(device: torch.device, precision: str, budget_s: float, shape: Shape) -> Shape:
    """Return the shape with enough sequences that a GPU takes longer than the host to launch it.

    With fewer sequences, the measurement would be of the host's time, which is that of a tiny
    block.
    """
    if device.type == "cpu":
        return shape
    host = seconds(device, precision, budget_s, _TINY)
    while seconds(device, precision, budget_s, shape) < _OUTLASTS * host:
        wider = shape._replace(rows=2 * shape.rows)
        if _flops(wider) > _MOST_FLOPS[device.type]:
            break
        shape = wider
    return shape


def seconds_of_parts(
    device: torch.device, precision: str, budget_s: float, shape: Shape, depth: int = _DEPTH
) -> BlockTimes:
    """Return the times of a block, its attention and a tiny block, measured alternately.

    Up to `depth` blocks are timed together.
    """
    block, depth = _pass(device, precision, shape, depth)
    small, tiny_depth = _pass(device, precision, _TINY)
    works = (block, _attention(device, precision, shape), small)
    times = seconds_in_turns(works, budget_s, device)
    return BlockTimes(times[0] / depth, times[1], times[2] / tiny_depth)


def _pass(
    device: torch.device, precision: str, shape: Shape, max_blocks: int = _DEPTH
) -> tuple[Callable[[], object], int]:
    """Return a function that runs a forward and backward of several blocks, and their number.

    There are so many blocks that caches no longer contain a block when its backward begins, but at
    most `max_blocks`.
    """
    depth = _depth(device, shape, max_blocks)
    blocks = stack(device, precision, shape.spec, shape.length, depth)
    input_shape = (shape.rows, shape.length, shape.spec.dim)
    x = torch.randn(input_shape, device=device, dtype=DTYPES[precision], requires_grad=True)

    def work() -> None:
        blocks.zero_grad()
        blocks(x).backward(x.detach())

    return work, depth


def _attention(device: torch.device, precision: str, shape: Shape) -> Callable[[], object]:
    """Return a function that runs a block's causal attention, forward and backward."""
    spec, length, sequences = shape
    dtype = DTYPES[precision]
    q, k, v = (
        torch.randn(
            sequences, heads, length, spec.core_dim, device=device, dtype=dtype
        ).requires_grad_()
        for heads in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
    )
    grad = torch.randn_like(q)
    return lambda: torch.autograd.grad(attend(q, k, v, None), (q, k, v), grad)


def attention_flops(shape: Shape) -> float:
    """Return the FLOPs of the first layer's attention, forward and backward."""
    spec, length, sequences = shape
    scores = causal_scores(length, spec.layer(0).window)
    forward = 4.0 * sequences * spec.n_heads * spec.core_dim * scores
    return forward * (1 + ATTENTION_BACKWARD)


def products_of(precision: str, shape: Shape) -> tuple[Product, ...]:
    """Return the matmuls of a block's forward."""
    return tuple(_work(precision, shape).products)


def _work(precision: str, shape: Shape) -> Work:
    spec, length, sequences = shape
    return layout_work(spec, length, precision, 1, False, 1, "ring", sequences, "none").layers[0]


def seconds_per_byte(
    precision: str,
    shape: Shape,
    rates: tuple[float, float],
    block_times: BlockTimes,
    *,
    runs_ahead: bool,
) -> float:
    """Return the seconds per byte that a block moves outside matmuls and attention.

    This is the time of the block less that of its matmuls, attention and overhead, divided by the
    bytes that `cost.work` counts. `rates` are the peak and the half of `device.saturation`. It is
    measured at the model's own size, because this time is not proportional to bytes alone. The
    overhead is not subtracted if the host `runs_ahead` of a GPU.
    """
    peak, half = rates
    work = _work(precision, shape)
    left = block_times.block - block_times.attention - (0.0 if runs_ahead else block_times.overhead)
    for matmul in work.products:
        share = math.prod(side / (side + half) for side in matmul.sides)
        left -= PASSES * matmul.flops / (peak * share)
    return max(left, 0.0) / bytes_moved(precision, shape)


def bytes_moved(precision: str, shape: Shape) -> float:
    """Return the bytes that a block's forward and backward move outside matmuls."""
    return PASSES * forward_moved(_work(precision, shape), SYSTEMS["meshwright"])


def by_rows(
    device: torch.device, precision: str, budget_s: float, shape: Shape, max_sequences: int
) -> dict[int, float]:
    """Return the seconds of a block per token for several numbers of sequences in a microbatch.

    These are up to `max_sequences`, and include that of the shape.
    """
    flops = _flops(shape._replace(rows=1))
    able = min(max_sequences, _MOST_FLOPS[device.type] / flops)
    tried = sorted({shape.rows, *(sequences for sequences in _ROWS if sequences <= able)})
    passes = [_pass(device, precision, shape._replace(rows=sequences)) for sequences in tried]
    times = seconds_in_turns([work for work, _ in passes], budget_s, device)
    return {
        sequences: block_s / depth / (sequences * shape.length)
        for sequences, block_s, (_, depth) in zip(tried, times, passes, strict=True)
    }


_COMPILED_DEPTH: Final = 4  # blocks that are timed together
_LEAST: Final = 5  # turns


def compiling(
    device: torch.device, case: Case, budget_s: float, bandwidth: float
) -> dict[str, float]:
    """Return constants of torch.compile: speedup, saved time and memory, compile seconds.

    They are measured on the blocks of a case with its microbatch, with an empty compile cache. The
    saved time is relative to the time in which a copy, at the rate `bandwidth`, moves the bytes of
    a block outside matmuls: it prices blocks of other shapes. The saved memory is a share. Empty if
    a pass of a block takes too long to be repeated.
    """
    # Not at the top: the compiler is a second of imports.
    from meshwright.torch_private import fresh_cache

    shape, precision = own(device, case), case.train.precision
    if shape is None:
        return {}
    spec, length, sequences = shape
    depth = max(1, min(_COMPILED_DEPTH, spec.n_layers))
    plain, compiled = (stack(device, precision, spec, length, depth) for _ in range(2))
    wrap = compiler(take_route(case.train.matmul, device))
    for block in compiled:
        wrap(block)
    input_shape = (sequences, length, spec.dim)
    x = torch.randn(input_shape, device=device, dtype=DTYPES[precision], requires_grad=True)
    with fresh_cache():
        first = _seconds(compiled, x)
    usual = [_seconds(stack, x) for stack in (plain, plain, compiled)]
    turns = max(_LEAST, round(budget_s / sum(usual[1:])))
    pairs = [(_seconds(plain, x), _seconds(compiled, x)) for _ in range(turns)]
    saved = statistics.median(plain_s - compiled_s for plain_s, compiled_s in pairs) / depth
    return {
        f"compile.gain.{precision}": statistics.median(
            plain_s / compiled_s for plain_s, compiled_s in pairs
        ),
        f"saves.{precision}": saved * bandwidth / bytes_moved(precision, shape),
        f"compile.memory.{precision}": _kept(compiled, x) / _kept(plain, x),
        f"compile.seconds.{precision}": max(first - usual[-1], 0.0),
    }


def _seconds(stack: nn.Sequential, x: Tensor) -> float:
    """Return the seconds of one forward and backward of some blocks."""
    stack.zero_grad()
    x.grad = None
    started = time.perf_counter()
    stack(x).backward(x.detach())
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - started


def _kept(stack: nn.Sequential, x: Tensor) -> int:
    """Return the bytes of activations that a forward saves for the backward.

    Weights and the input do not count. The hooks store nothing in the graph: a stored result would
    refer back to the graph, and Python's garbage collector does not free such a cycle.
    """
    given = {t.untyped_storage().data_ptr() for t in (x, *stack.parameters(), *stack.buffers())}
    saved_storages: dict[int, UntypedStorage] = {}  # alive, so that no other has its address

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved_storages[storage.data_ptr()] = storage

    with torch.autograd.graph.saved_tensors_hooks(note, lambda packed: packed):
        stack(x)
    return sum(storage.nbytes() for storage in saved_storages.values())
