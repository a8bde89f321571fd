"""Causal attention on a CPU: by blocks of matrix products, and PyTorch's kernel.

    python -m benchmarks.attention --rounds 15 --out docs/benchmarks/attention.json

Forward and backward of both alternate in one process with one thread, started as a rank is;
medians in milliseconds, and the median of the rounds' ratios. Then both within sliding windows, the
kernel with a mask, and the most memory that they take beside what they are given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from meshwright.models import blockwise
from meshwright.models.plain_attention import band
from meshwright.parallel.allocations import events_of, pieces_of
from meshwright.runtime.ranks.local import rank_environ

# rows, heads, heads of keys, length, dim of a head
SHAPES = (
    (8, 4, 2, 128, 32),
    (4, 8, 8, 256, 64),
    (2, 8, 8, 512, 64),
    (1, 8, 8, 1024, 64),
    (1, 8, 2, 2048, 128),
)
# The same of long rows, and the windows and the cap of their scores.
LONG = tuple((1, 8, 4, length, 64) for length in (2048, 4096, 8192))
WINDOWS = (256, 512, 1024)
CAP = 50.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def theirs(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Return PyTorch's."""
    grouped = q.shape[1] != k.shape[1]
    if not window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    mask = band(q, k.shape[2], window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def ours(q: Tensor, k: Tensor, v: Tensor, window: int = 0, cap: float = 0.0) -> Tensor:
    """Return that by blocks, in any dtype."""
    out: Tensor = blockwise.attention(q, k, v, window, cap)[0]
    return out


class Call:
    """A forward and backward of given sizes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        rows, heads, kv_heads, length, dim = shape
        self.leaves = [
            torch.randn(rows, length, count, dim).to(dtype).transpose(1, 2).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        self.grad = torch.randn(rows, length, heads, dim).to(dtype).transpose(1, 2)

    def ms(self, core: Callable[..., Tensor], *bounds: float) -> float:
        """Return what it takes."""
        started = time.perf_counter()
        torch.autograd.grad(core(*self.leaves, *bounds), self.leaves, self.grad)
        return 1e3 * (time.perf_counter() - started)

    def mib(self, core: Callable[..., Tensor], *bounds: float) -> float:
        """Return the most memory that it has at once."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self.ms(core, *bounds)
        pieces = pieces_of(events_of(seen))
        changes = [(piece.start, piece.size) for piece in pieces]
        changes += [(piece.end, -piece.size) for piece in pieces if piece.end is not None]
        return max(accumulate(size for _, size in sorted(changes))) / 2**20


def measure(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Return the medians of both and of their ratio."""
    call = Call(shape, dtype)
    for core in (theirs, ours):
        call.ms(core)
    pairs = [(call.ms(theirs), call.ms(ours)) for _ in range(rounds)]
    return {
        "rows, heads, kv_heads, length, head_dim": shape,
        "kernel_ms": round(statistics.median(a for a, _ in pairs), 2),
        "blocks_ms": round(statistics.median(b for _, b in pairs), 2),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
    }


def measure_window(
    shape: tuple[int, ...], window: int, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    """Return the medians within a window, with a cap too, and the memory."""
    call = Call(shape, dtype)
    call.ms(ours, window, CAP)
    found = [
        (call.ms(theirs, window), call.ms(ours, window), call.ms(ours, window, CAP))
        for _ in range(rounds)
    ]
    kernel, blocks, capped = (statistics.median(column) for column in zip(*found, strict=True))
    return {
        "rows, heads, kv_heads, length, head_dim": shape,
        "window": window,
        "kernel_ms": round(kernel, 1),
        "blocks_ms": round(blocks, 1),
        "capped_ms": round(capped, 1),
        "ratio": round(statistics.median(a / b for a, b, _ in found), 2),
        "kernel_MiB": round(call.mib(theirs, window), 1),
        "blocks_MiB": round(call.mib(ours, window), 1),
        "capped_MiB": round(call.mib(ours, window, CAP), 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environ = rank_environ(os.environ)
    if environ != os.environ:  # the allocator reads its settings as a process starts
        command = [sys.executable, "-m", "benchmarks.attention", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environ).returncode)
    torch.set_num_threads(1)
    rows = []
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            rows.append({"dtype": name, **measure(shape, dtype, args.rounds)})
            print(rows[-1], flush=True)
    windows = []
    for name, dtype in DTYPES.items():
        for shape in LONG:
            for window in WINDOWS:
                found = measure_window(shape, window, dtype, max(1, args.rounds // 3))
                windows.append({"dtype": name, **found})
                print(windows[-1], flush=True)
    if args.out:
        document = {"torch": torch.__version__, "rounds": args.rounds, "rows": rows}
        document["windows"] = windows
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
