"""Measures the gain from compiling blocks, and the compile time.

Compiled and uncompiled passes alternate, because a machine's speed drifts by more than the gain.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch
from torch import Tensor, UntypedStorage, nn

from meshwright.bench.blocks import bytes_moved, own, stack
from meshwright.kernels.fp32_matmuls import take_route
from meshwright.parallel.build import compiler
from meshwright.parallel.data_parallel.sharded import DTYPES
from meshwright.prove.case import Case

_DEPTH: Final = 4  # blocks that are timed together
_LEAST: Final = 5  # turns


def compiling(
    device: torch.device, case: Case, budget_s: float, bandwidth: float
) -> dict[str, float]:
    """Return constants: speedup, saved time, share of saved memory, compile seconds.

    The saved time is a multiple of the time in which a copy, at the rate `bandwidth`, moves the
    bytes of a block besides matmuls: it prices blocks of other shapes. Measured on the blocks of a
    case, with one of its microbatches. The seconds are those of a compiler with an empty cache.
    Empty if a pass of a block takes too long to be repeated.
    """
    # Not at the top: the compiler is a second of imports.
    from torch._inductor.utils import fresh_cache

    shape, precision = own(device, case), case.train.precision
    if shape is None:
        return {}
    spec, length, sequences = shape
    depth = max(1, min(_DEPTH, spec.n_layers))
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
    """Return the seconds of a forward and a backward."""
    stack.zero_grad()
    x.grad = None
    started = time.perf_counter()
    stack(x).backward(x.detach())
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - started


def _kept(stack: nn.Sequential, x: Tensor) -> int:
    """Return the bytes that a forward keeps for the backward beside weights and input.

    The hooks store nothing in the graph: a stored result would refer back to the graph, and
    Python's garbage collector does not free such a cycle.
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
