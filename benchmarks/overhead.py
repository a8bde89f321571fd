"""`train` beside the plain loop at its best: one rank with two threads, two ranks with one each.

    python -m benchmarks.overhead --rounds 3 --out docs/benchmarks/overhead.json

Runs alternate, so that the machine's noise hits all alike; prints medians of tokens/s and their
ratios to the faster plain loop. The last line is the command to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.plain_loop import BATCH, DIM, FFN, HEADS, LAYERS, NOT_COUNTED, SEQ, VOCAB

TOKENS = BATCH * SEQ
MICROBATCHES = (1, 2, 4, 8)


class Loop(NamedTuple):
    """A plain loop: whose operations, how many rows at a time, handed to torch.compile or not."""

    ops: str
    microbatch: int
    compiled: bool = False

    @property
    def name(self) -> str:
        whose = "torch's operations" if self.ops == "torch" else "our modules"
        return f"plain loop, {whose}" + (", compiled" if self.compiled else "")


def plain(loop: Loop, precision: str, steps: int) -> list[float]:
    """Return the step times of a plain loop with two threads."""
    words = ["--precision", precision, "--ops", loop.ops, "--steps", str(steps)]
    words += ["--microbatch", str(loop.microbatch)] + ["--compile"] * loop.compiled
    done = _python("benchmarks.plain_loop", *words)
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


def best_loops(precision: str) -> list[Loop]:
    """Return the plain loops, with the number of rows whose step was the shortest."""
    times = {rows: min(plain(Loop("torch", rows), precision, 2)) for rows in MICROBATCHES}
    rows = min(times, key=times.__getitem__)
    print(precision, {rows: round(seconds, 2) for rows, seconds in times.items()}, flush=True)
    return [Loop("torch", rows), Loop("torch", rows, compiled=True), Loop("meshwright", rows)]


def trained(ranks: int, precision: str, steps: int, compiled: bool = False) -> list[float]:
    """Return the step times of `meshwright train` on a number of ranks that share two cores."""
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "model.vocab_size": VOCAB,
            "model.dim": DIM,
            "model.n_layers": LAYERS,
            "model.n_heads": HEADS,
            "model.n_kv_heads": HEADS,
            "model.ffn_dim": FFN,
            "train.batch": BATCH,
            "train.seq_len": SEQ,
            "train.steps": steps + NOT_COUNTED,
            "train.precision": precision,
            "train.compile": str(compiled).lower(),
            "layout.dp_replicate": ranks,
            "optimizer.lr": 3e-4,
            "log.dir": folder,
            "log.name": "run",
            "checkpoint.dir": str(Path(folder) / "weights"),
        }
        _python("meshwright", "train", *(f"{key}={value}" for key, value in words.items()))
        events = (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
        steps_done = [e for e in map(json.loads, events) if e["event"] == "step"]
    return [event["step_time_s"] for event in steps_done[NOT_COUNTED:]]


def _python(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )


def measure(rounds: int, steps: int, precision: str) -> dict[str, list[float]]:
    """Return all step times by what was run; the runs alternate, after a search of the loops."""
    runs = {loop.name: partial(plain, loop, precision, steps) for loop in best_loops(precision)}
    runs["train, 1 rank"] = partial(trained, 1, precision, steps)
    runs["train, 1 rank, compiled"] = partial(trained, 1, precision, steps, compiled=True)
    runs["train, 2 ranks"] = partial(trained, 2, precision, steps)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            found.setdefault(name, []).extend(run())
    return found


def table(precision: str, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each run: median tokens/s, spread, ratio to the fastest plain loop."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    bar = min(seconds for name, seconds in medians.items() if name.startswith("plain"))
    return [
        {
            "precision": precision,
            "run": name,
            "tokens_per_s": round(TOKENS / medians[name], 1),
            "slowest": round(TOKENS / max(seconds), 1),
            "fastest": round(TOKENS / min(seconds), 1),
            "steps": len(seconds),
            "ratio": round(bar / medians[name], 3),
        }
        for name, seconds in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], nargs="*", default=["fp32", "bf16"]
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for precision in args.precision:
        rows += table(precision, measure(args.rounds, args.steps, precision))
    for row in rows:
        print(
            f"{row['precision']}  {row['run']:32} {row['tokens_per_s']:8.1f} tok/s "
            f"({row['slowest']:.0f} to {row['fastest']:.0f}, {row['steps']} steps)  "
            f"ratio {row['ratio']:.3f}"
        )
    import torch

    result = {
        "command": f"python -m benchmarks.overhead --rounds {args.rounds} --steps {args.steps}",
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(result["command"])


if __name__ == "__main__":
    main()
