"""A recurrent layer on a CPU: Meshwright's, and transformers' in plain torch.

    python -m benchmarks.recurrence --rounds 7 --out docs/benchmarks/recurrence.json

Layers of Gated DeltaNet (Qwen3-Next) and Mamba-2 (Granite 4 hybrid) with the same weights: both are
the layer of one folder. transformers computes them in plain torch where flash-linear-attention and
mamba-ssm are not installed, as on any CPU. Forward and backward of both alternate in one process
with one thread, started as a rank is; medians in milliseconds, and the median of the rounds'
ratios. Before, outputs and gradients of the input are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from meshwright.models import build_model, init_model
from meshwright.models.hf import save_hf
from meshwright.runtime.ranks.local import rank_environ
from meshwright.spec.resolve import model_spec

# The published layers are those of Qwen3-Next-80B-A3B and Granite 4.0 H Micro.
KINDS: Final[dict[str, dict[str, Any]]] = {
    "Gated DeltaNet": {
        "family": "qwen3_next",
        "layer_pattern": [{"delta": True}, {}],
        "delta_kernel": 4,
        "experts": 0,
    },
    "Mamba-2": {
        "family": "granitemoehybrid",
        "layer_pattern": [{"mamba": True}, {"rotary": False}],
        "mamba_groups": 1,
        "mamba_kernel": 4,
        "experts": 0,
    },
}
SMALL: Final[dict[str, dict[str, int]]] = {
    "Gated DeltaNet": {
        "dim": 256,
        "delta_heads": 8,
        "delta_key_heads": 4,
        "delta_key_dim": 32,
        "delta_value_dim": 32,
    },
    "Mamba-2": {"dim": 256, "mamba_heads": 16, "mamba_head_dim": 32, "mamba_state": 32},
}
PUBLISHED: Final[dict[str, dict[str, int]]] = {
    "Gated DeltaNet": {
        "dim": 2048,
        "delta_heads": 32,
        "delta_key_heads": 16,
        "delta_key_dim": 128,
        "delta_value_dim": 128,
    },
    "Mamba-2": {"dim": 2048, "mamba_heads": 64, "mamba_head_dim": 64, "mamba_state": 128},
}
# Sizes of a layer, rows, tokens of a row.
SHAPES: Final = (
    ("small", SMALL, 4, 256),
    ("small", SMALL, 1, 1024),
    ("small", SMALL, 1, 4096),
    ("published", PUBLISHED, 1, 512),
    ("published", PUBLISHED, 1, 2048),
)
REST: Final = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 64}
# Both compute in fp32, in different orders.
TOLERANCE: Final = 1e-4

Layer = Callable[[Tensor], Tensor]


def layers(kind: str, sizes: dict[str, int]) -> tuple[Layer, Layer]:
    """Return transformers' layer and Meshwright's, with the same weights."""
    spec = model_spec(**KINDS[kind], **REST, **sizes)
    model = init_model(build_model(spec, "cpu"), spec, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = theirs.model.layers[0]
    return first.linear_attn if kind == "Gated DeltaNet" else first.mamba, model.blocks[0].attn


class Call:
    """A forward and backward of a layer on a given input."""

    def __init__(self, rows: int, tokens: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, tokens, dim, generator=generator).requires_grad_()
        self.grad = torch.randn(rows, tokens, dim, generator=generator)

    def run(self, layer: Layer) -> tuple[float, Tensor, Tensor]:
        """Return milliseconds, the output, and the gradient of the input."""
        self.x.grad = None
        started = time.perf_counter()
        out = layer(self.x)
        out.backward(self.grad)
        elapsed = 1e3 * (time.perf_counter() - started)
        assert self.x.grad is not None
        return elapsed, out.detach(), self.x.grad


def measure(kind: str, sizes: dict[str, int], rows: int, tokens: int, rounds: int) -> Any:
    """Return the medians of both layers and of their ratio; raise if they do not agree."""
    theirs, ours = layers(kind, sizes)
    call = Call(rows, tokens, sizes["dim"])
    (_, *expected), (_, *results) = call.run(theirs), call.run(ours)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)]
    assert max(errors) < TOLERANCE, errors
    pairs = [(call.run(theirs)[0], call.run(ours)[0]) for _ in range(rounds)]
    return {
        "transformers_ms": round(statistics.median(a for a, _ in pairs), 2),
        "meshwright_ms": round(statistics.median(b for _, b in pairs), 2),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "difference": max(errors),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environ = rank_environ(os.environ)
    if environ != os.environ:  # the allocator reads its settings as a process starts
        command = [sys.executable, "-m", "benchmarks.recurrence", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environ).returncode)
    torch.set_num_threads(1)
    measured = []
    for kind in KINDS:
        for name, sizes, rows, tokens in SHAPES:
            shape = {"layer": kind, "sizes": name, "rows": rows, "tokens": tokens}
            measured.append({**shape, **measure(kind, sizes[kind], rows, tokens, args.rounds)})
            print(measured[-1], flush=True)
    if args.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        document = {**versions, "rounds": args.rounds, "rows": measured}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
