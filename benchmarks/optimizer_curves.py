"""Loss curves of one small model on real text: optimizers, and what is kept in bf16.

    python -m benchmarks.optimizer_curves --steps 2000 --seeds 3 --out optimizer-curves.json

Each way trains the same model on Python's standard library with the same batches, on one rank, and
is evaluated on held-out text every so many steps. Rates are each optimizer's own, and the same for
all ways of AdamW. Prints the last held-out loss of each way: mean and spread over seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

_ADAMW: Final = ("optimizer.name=adamw", "optimizer.lr=0.002")
_IN_BF16: Final = (*_ADAMW, "train.precision=bf16")
_NARROW: Final = (*_IN_BF16, "optimizer.state_dtype=bf16")
_STOCHASTIC: Final = "optimizer.rounding=stochastic"
WAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "AdamW, fp32": _ADAMW,
    "AdamW, bf16 with masters": _IN_BF16,
    "AdamW, moments in bf16": _NARROW,
    "AdamW, moments in bf16, stochastic": (*_NARROW, _STOCHASTIC),
    "AdamW, weights in bf16": (*_IN_BF16, "train.master=none"),
    "AdamW, weights in bf16, stochastic": (*_IN_BF16, "train.master=none", _STOCHASTIC),
    "AdamW, all in bf16, stochastic": (*_NARROW, "train.master=none", _STOCHASTIC),
    "Muon, fp32": ("optimizer.name=muon", "optimizer.lr=0.002"),
    "Lion, fp32": ("optimizer.name=lion", "optimizer.lr=0.0002"),
}
_MODEL: Final = (
    *("model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2"),
    *("model.ffn_dim=176", "data.source=stdlib", "train.batch=8", "train.seq_len=128"),
    *("layout.dp_replicate=1", "layout.microbatch=8", "cluster.devices_per_node=1"),
    *("cluster.device=cpu", "train.compile=false", "log.trace=0"),
)


def losses(way: str, steps: int, seed: int, folder: Path) -> list[tuple[int, float]]:
    """Return held-out losses of a run by step, in nats per token."""
    words = (
        *_MODEL,
        *WAYS[way],
        f"train.steps={steps}",
        f"train.seed={seed}",
        f"data.seed={seed}",
        f"train.eval_every={max(steps // 10, 1)}",
        f"log.dir={folder}",
        f"log.name={len(list(folder.iterdir()))}",
    )
    command = [sys.executable, "-m", "meshwright", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    (newest,) = (folder / words[-1].partition("=")[2]).rglob("events.jsonl")
    events = [json.loads(line) for line in newest.read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "eval"]


def table(curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]]) -> str:
    """Return the last held-out losses as a table: the mean over seeds, and their range."""
    lines = ["| way | held-out loss | lowest | highest |", "|---|--:|--:|--:|"]
    for way, runs in curves.items():
        last = [run[-1][1] for run in runs]
        cells = (f"{value:.4f}" for value in (statistics.mean(last), min(last), max(last)))
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all ways with all seeds, print the table, and write the curves where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_curves")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="ways whose names contain a text")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    ways = [way for way in WAYS if any(text in way for text in args.only)]
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            runs = [losses(way, args.steps, seed, Path(folder)) for seed in range(args.seeds)]
        curves[way] = runs
        print(table({way: runs}).splitlines()[-1], flush=True)
    content: dict[str, Any] = {
        "command": f"python -m benchmarks.optimizer_curves --steps {args.steps}",
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "config": list(_MODEL),
        "ways": {way: list(WAYS[way]) for way in ways},
        "curves": curves,
    }
    print(table(curves))
    if args.out is not None:
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
