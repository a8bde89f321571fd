"""`train` beside the plain loop: one rank with two threads, two ranks with one thread each.

    python -m benchmarks.overhead --rounds 3 --out docs/benchmarks/overhead.json

Runs take turns, so that the machine's noise hits all alike; prints medians of tokens/s and their
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
from pathlib import Path
from typing import Any

from benchmarks.plain_loop import BATCH, DIM, FFN, HEADS, LAYERS, SEQ, VOCAB

TOKENS = BATCH * SEQ


def plain(ops: str, precision: str, steps: int) -> list[float]:
    """Return the step times of the plain loop with two threads."""
    words = ["--precision", precision, "--ops", ops, "--steps", str(steps)]
    done = _python("benchmarks.plain_loop", *words)
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


def trained(ranks: int, precision: str, steps: int) -> list[float]:
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
            "train.steps": steps + 1,
            "train.precision": precision,
            "layout.dp_replicate": ranks,
            "optimizer.lr": 3e-4,
            "log.dir": folder,
            "log.name": "run",
            "checkpoint.dir": str(Path(folder) / "weights"),
        }
        _python("meshwright", "train", *(f"{key}={value}" for key, value in words.items()))
        events = (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
        steps_done = [e for e in map(json.loads, events) if e["event"] == "step"]
    return [event["step_time_s"] for event in steps_done[1:]]


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
    """Return all step times by what was run; the runs take turns."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, run in (
            ("plain loop, torch's operations", lambda: plain("torch", precision, steps)),
            ("plain loop, our modules", lambda: plain("meshwright", precision, steps)),
            ("train, 1 rank", lambda: trained(1, precision, steps)),
            ("train, 2 ranks", lambda: trained(2, precision, steps)),
        ):
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
