"""Causal attention on a CPU: by blocks of matrix products, and PyTorch's kernel.

    python -m benchmarks.attention --rounds 15 --out docs/benchmarks/attention.json

Forward and backward of both alternate in one process with one thread, started as a rank is;
medians in milliseconds, and the median of the rounds' ratios.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.launch.rank_environ import rank_environ
from meshwright.models import blockwise

# rows, heads, heads of keys, length, dim of a head
SHAPES = (
    (8, 4, 2, 128, 32),
    (4, 8, 8, 256, 64),
    (2, 8, 8, 512, 64),
    (1, 8, 8, 1024, 64),
    (1, 8, 2, 2048, 128),
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return PyTorch's."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return that by blocks, in any dtype."""
    out: Tensor = blockwise.attention(q, k, v)[0]
    return out


def measure(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Return the medians of both and of their ratio."""
    rows, heads, kv_heads, length, dim = shape
    leaves = [
        torch.randn(rows, length, count, dim).to(dtype).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    grad = torch.randn(rows, length, heads, dim).to(dtype).transpose(1, 2)

    def seconds(core: Callable[..., Tensor]) -> float:
        started = time.perf_counter()
        torch.autograd.grad(core(*leaves), leaves, grad)
        return time.perf_counter() - started

    for core in (theirs, ours):
        seconds(core)
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(rounds)]
    return {
        "rows, heads, kv_heads, length, head_dim": shape,
        "kernel_ms": round(1e3 * statistics.median(a for a, _ in pairs), 2),
        "blocks_ms": round(1e3 * statistics.median(b for _, b in pairs), 2),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
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
    if args.out:
        document = {"torch": torch.__version__, "rounds": args.rounds, "rows": rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
