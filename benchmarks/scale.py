"""What planning, rehearsing and starting cost as worlds and models grow.

    python -m benchmarks.scale --out docs/benchmarks/scale.json

Each figure is the median of a few runs of a process of its own, one after the other. `work` is what
a figure is held against: layouts considered, actions rehearsed, ranks started, weights made.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NODES = (1, 8, 64, 512)
RANKS = (1, 2, 4, 8)
LAYERS = (2, 8, 32)
REHEARSED = "train.precision=bf16 train.seq_len=4096 layout.tp=8 layout.sp=true layout.zero=1"


def run(*words: str, cwd: Path | None = None) -> tuple[float, str]:
    """Return the seconds of a command from start to end, and what it printed."""
    source = str(Path(__file__).parents[1] / "src")
    environ = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
        cwd=cwd,
    )
    return time.perf_counter() - started, done.stdout


def planned(nodes: int) -> dict[str, Any]:
    """Plan a model of 70B on so many nodes of eight GPUs."""
    model = ["model.preset=llama-3-70b", "cluster.preset=h100-sxm", f"cluster.nodes={nodes}"]
    train = ["train.precision=bf16", f"train.batch={16 * nodes}", "train.seq_len=8192"]
    seconds, out = run("plan", *model, *train, "--json")
    found = json.loads(out)
    return {"of": f"{8 * nodes} GPUs", "work": found["considered"], "seconds": seconds}


def rehearsed(nodes: int) -> dict[str, Any]:
    """Rehearse three ranks of a model of 8B on so many nodes, with 8 microbatches each."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    model = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", f"cluster.nodes={nodes}"]
    batch = [f"train.batch={8 * nodes}", "layout.microbatch=1", f"layout.dp_shard={nodes}"]
    words = [word for word in REHEARSED.split() if nodes > 1 or "zero" not in word]
    seconds, _ = run("simulate", *model, *words, *batch, "--ranks", "0,middle,last", "--json")
    peak = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    return {"of": f"{8 * nodes} ranks", "work": 3, "seconds": seconds, "max_rss_kib": peak}


def started(ranks: int, layers: int = 2) -> dict[str, Any]:
    """Train one step on so many local ranks; the time from the command to the step's event."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        model = ["model.dim=256", f"model.n_layers={layers}", "train.seq_len=32"]
        words = [*model, "train.steps=1", "train.batch=8", f"layout.dp_replicate={ranks}"]
        run("train", *words, "cluster.device=cpu", "log.dir=runs", "log.name=a", cwd=Path(folder))
        lines = (Path(folder) / "runs/a/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    start = next(event for event in events if event["event"] == "start")
    step = next(event for event in events if event["event"] == "step")
    seconds = start["time"] + step["step_time_s"] - begun
    return {"of": f"{ranks} ranks, {layers} layers", "work": start["parameters"] * ranks} | {
        "seconds": seconds
    }


def median(make: Callable[[], dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Return a row with the median of its seconds over some rounds."""
    rows = [make() for _ in range(rounds)]
    return rows[0] | {"seconds": statistics.median(row["seconds"] for row in rows)}


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Return all rows as Markdown; growth is that of seconds over that of the work."""
    lines = [
        "| | of | work | seconds | by the first: work | seconds |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for what, found in rows.items():
        first = found[0]
        for row in found:
            work, seconds = (row[key] / first[key] for key in ("work", "seconds"))
            lines.append(
                f"| {what} | {row['of']} | {row['work']:,} | {row['seconds']:.2f} | "
                f"{work:.1f} | {seconds:.1f} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = {
        "plan": [median(lambda n=n: planned(n), args.rounds) for n in NODES],
        "simulate": [median(lambda n=n: rehearsed(n), 1) for n in NODES],
        "first step": [median(lambda n=n: started(n), args.rounds) for n in RANKS],
        "first step of a larger model": [
            median(lambda n=n: started(2, n), args.rounds) for n in LAYERS
        ],
    }
    print(table(rows))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
