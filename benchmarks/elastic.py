"""Goodput of four replicas of which one is killed every 20 s: all restart, or the others go on.

    python -m benchmarks.elastic --rounds 2 --seconds 80 --replay --out docs/benchmarks/elastic.json

Each round trains three times with the same config, one after another: undisturbed, with a restart
of all ranks after each kill, and with `cluster.elastic`. From the first step on, a random rank is
killed every `--every` seconds, the first half an interval in, and the run is stopped after
`--seconds`. Goodput is the steps that a run has reached by then, over those of the undisturbed run;
steps that are repeated count once. The losses of the elastic run are compared with those of the
undisturbed one at the steps that both have. With `--replay`, the elastic run of the first round is
repeated without a fault: it stops where replicas were lost or joined, and is resumed with as many
replicas as trained then, so both add up the same numbers in the same order, and their last steps
must be the same bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.kills import read_events
from meshwright.checkpoint.commit import steps, verify
from meshwright.checkpoint.restore import stored_of
from meshwright.checkpoint.state import OPTIMIZER, WEIGHTS
from meshwright.comm.flight_recorder_file import read_flight_recorder
from meshwright.errors import EXIT_STOPPED
from meshwright.program.shards import whole

REPLICAS: Final = 4
LIMIT_S: Final = 180.0
CONFIG: Final = [
    "model.dim=192",
    "model.n_layers=4",
    "model.n_heads=4",
    "model.dropout=0.1",
    "train.batch=12",
    "train.seq_len=128",
    "train.log_every=1",
    "train.compile=false",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "layout.microbatch=1",
    f"cluster.devices_per_node={REPLICAS}",
    "cluster.device=cpu",
    "cluster.calibration=shipped",
    "checkpoint.every=10",
    "checkpoint.async=true",
]
MODES: Final = {
    "undisturbed": [],
    "restart of all": ["checkpoint.restarts=1000"],
    "elastic": ["checkpoint.restarts=1000", "cluster.elastic=true"],
}


class TimedRun:
    """One run of `train` in a process of its own."""

    def __init__(self, root: Path, name: str, words: Sequence[str]) -> None:
        self.folder, self.log = root / name, root / f"{name}.log"
        command = ["train", *CONFIG, f"log.dir={root}", f"log.name={name}", *words]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshwright", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def events(self) -> list[dict[str, Any]]:
        """Return the events so far."""
        path = self.folder / "events.jsonl"
        return read_events(path) if path.is_file() else []

    def step(self) -> int:
        """Return the last step that is logged, of the newest attempt."""
        done = [event["step"] for event in self.events() if event["event"] == "step"]
        return int(done[-1]) if done else 0

    def kill(self, rank: int) -> bool:
        """Kill a rank; returns whether it ran."""
        reading = read_flight_recorder(self.folder / "logs" / f"rank-{rank}.recorder")
        with contextlib.suppress(ProcessLookupError):
            if reading is not None:
                os.kill(reading.pid, signal.SIGKILL)
                return True
        return False

    def end(self, code: int) -> None:
        """Wait for the end of the run, which must have an exit code."""
        assert self.process.wait(LIMIT_S) == code, self.log.read_text()[-4000:]


def measured(root: Path, mode: str, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train for the given seconds, and return how far the run has come."""
    layout = [f"layout.dp_replicate={REPLICAS}", "train.steps=1000000"]
    run = TimedRun(root, f"{mode.replace(' ', '-')}-{number}", [*layout, *MODES[mode]])
    while run.step() < 1:
        assert run.process.poll() is None, run.log.read_text()[-4000:]
        time.sleep(0.02)
    chance = random.Random(f"{args.seed}:{number}")
    began, first, kills = time.monotonic(), run.step(), 0
    due = began + args.every / 2
    while time.monotonic() < began + args.seconds:
        if mode != "undisturbed" and time.monotonic() >= due:
            kills += run.kill(chance.randrange(REPLICAS))
            due += args.every
        assert run.process.poll() is None, run.log.read_text()[-4000:]
        time.sleep(0.02)
    done = run.step() - first
    run.process.send_signal(signal.SIGTERM)
    run.end(EXIT_STOPPED)
    kinds = [event["event"] for event in run.events()]
    return {
        "mode": mode,
        "round": number,
        "steps": done,
        "kills": kills,
        "restarts": kinds.count("restart"),
        "replicas_lost": kinds.count("replica_lost"),
        "joins": sum(bool(event.get("joined")) for event in run.events()),
        "folder": run.folder.name,
    }


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step; the newest line counts where a step is there twice."""
    events = read_events(folder / "events.jsonl")
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def compared(elastic: Path, undisturbed: Path) -> dict[str, Any]:
    """Return how far losses of two runs over the same rows are apart, at steps that both have."""
    ours, theirs = losses(elastic), losses(undisturbed)
    common = sorted(ours.keys() & theirs.keys())
    apart = [abs(ours[step] - theirs[step]) for step in common]
    shown = sorted({common[len(common) * part // 4] for part in range(4)} | {common[-1]})
    return {
        "common_steps": len(common),
        "missing_steps": max(ours) - len(ours),
        "mean_apart": statistics.mean(apart),
        "largest_apart": max(apart),
        "losses": [[step, ours[step], theirs[step]] for step in shown],
    }


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and optimizer states of a run's last step, by name."""
    step = steps(folder / "checkpoints")[-1]
    verify(step)
    tensors = {}
    for kind in (WEIGHTS, OPTIMIZER):
        stored = stored_of(step, kind)
        for name in stored.names:
            tensors[f"{kind} {name}"] = stored.read(name, whole(stored.shape(name)))
    return tensors


def replayed(root: Path, folder: Path) -> dict[str, Any]:
    """Train an elastic run's steps without a fault, and return whether it ends the same.

    It has as many replicas at each step as the elastic run had.
    """
    events = read_events(folder / "events.jsonl")
    changes = [(e["step"], len(e["replicas"])) for e in events if e["event"] == "regroup"]
    last = next(event["step"] for event in events if event["event"] == "end")
    ends = [*(step for step, _ in changes), last]
    begun = 0
    for end, replicas in zip(ends, [REPLICAS, *(count for _, count in changes)], strict=True):
        if end > begun:
            words = [f"train.steps={end}", f"layout.dp_replicate={replicas}"]
            resume = ["--resume", str(root / "replayed")] if begun else []
            TimedRun(root, "replayed", [*words, *resume]).end(0)
            begun = end
    ours, theirs = state_of(folder), state_of(root / "replayed")
    same = ours.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )
    logged = losses(folder)
    same_losses = logged == {step: losses(root / "replayed").get(step) for step in logged}
    return {"steps": last, "changes": len(changes), "same": same, "same_losses": same_losses}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(args.rounds):
            of = {mode: measured(root, mode, number, args) for mode in MODES}
            for mode, row in of.items():
                row["goodput"] = row["steps"] / of["undisturbed"]["steps"]
                print(f"round {number}, {mode}: {row}", flush=True)
            folders = [root / of[mode]["folder"] for mode in ("elastic", "undisturbed")]
            of["elastic"]["beside"] = compared(*folders)
            if args.replay and number == 0:
                of["elastic"]["replayed"] = replayed(root, folders[0])
            rows += of.values()
    goodput = {
        mode: statistics.median(row["goodput"] for row in rows if row["mode"] == mode)
        for mode in MODES
    }
    words = [f"--rounds {args.rounds} --seconds {args.seconds:g} --every {args.every:g}"]
    words += [f"--seed {args.seed}", *(["--replay"] if args.replay else [])]
    result = {
        "command": f"python -m benchmarks.elastic {' '.join(words)}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "goodput": goodput,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    verdicts = [row["replayed"] for row in rows if "replayed" in row]
    return 0 if all(verdict["same"] and verdict["same_losses"] for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
