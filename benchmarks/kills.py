"""SIGKILL at random moments of a training run: does it end as the undisturbed one does?

    python -m benchmarks.kills --trials 20 --out docs/benchmarks/kills.json

Each trial trains on two ranks and saves every other step, beside the training in every second
trial. One of the ranks is killed at a random moment between their start and the run's usual end, so
also while it loads and while it saves; one that had ended by then counts as missed, and not as a
trial. A trial is good when `train` ends with code 0 and the files
of the last step are those of the undisturbed run, byte for byte. Detection is what the supervisor
says; recovery is from the kill to the first step that was not done before. Goodput is the
undisturbed run's time over the trial's, both from start to end. The last line is the command to
repeat it.
"""

from __future__ import annotations

import argparse
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

from meshwright.checkpoint.commit import read_manifest, step_name

STEPS: Final = 40
LIMIT_S: Final = 180.0
CONFIG: Final = [
    "model.dim=128",
    "model.n_layers=4",
    "model.n_heads=4",
    "model.dropout=0.1",
    "train.batch=8",
    "train.seq_len=128",
    f"train.steps={STEPS}",
    "layout.dp_shard=2",
    "layout.zero=2",
    "layout.microbatch=2",
    "cluster.device=cpu",
    "train.compile=false",
    "cluster.calibration=shipped",  # a run that measures first has other processes to be killed
    "checkpoint.every=2",
]


class Trial:
    """One run of `train` in a process of its own."""

    def __init__(self, root: Path, name: str, *, beside: bool) -> None:
        self.folder = root / name
        words = [*CONFIG, f"log.dir={root}", f"log.name={name}"]
        words.append(f"checkpoint.async={str(beside).lower()}")
        self.started = time.monotonic()
        self.log = root / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshwright", "train", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that run."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if is_rank(int(child))]

    def wait_for_ranks(self) -> float:
        """Wait until both ranks run, or the run has ended; returns when, on the monotonic clock."""
        while len(self.ranks()) < 2 and self.process.poll() is None:
            time.sleep(0.01)
        return time.monotonic()

    def steps_done(self) -> int:
        """Return the highest step that the events tell of."""
        events = self.folder / "events.jsonl"
        if not events.is_file():
            return 0
        return max((e["step"] for e in read_events(events) if e["event"] == "step"), default=0)

    def wait(self) -> tuple[int, float]:
        """Return the exit code, and the seconds since the start."""
        code = self.process.wait(LIMIT_S)
        return code, time.monotonic() - self.started

    def files(self) -> dict[str, Any]:
        """Return the hashes of the last step's files."""
        manifest = read_manifest(self.folder / "checkpoints" / step_name(STEPS))
        return dict(manifest["files"])


def is_rank(pid: int) -> bool:
    """Whether a process is a rank that trains, and no other that `train` starts."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"meshwright.runtime.ranks.worker" in words


def read_events(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def disturbed(root: Path, number: int, usual_s: float, seed: int) -> dict[str, Any]:
    """Run a trial, kill one of its ranks at a random moment, and say what came of it.

    `usual_s` is how long ranks usually run.
    """
    chance = random.Random(f"{seed}:{number}")
    trial = Trial(root, f"trial-{number}", beside=number % 2 == 1)
    began = trial.wait_for_ranks()
    time.sleep(max(0.0, began + chance.uniform(0.0, 0.95) * usual_s - time.monotonic()))
    ranks = trial.ranks()
    rank = chance.randrange(2)
    done = trial.steps_done()
    if len(ranks) == 2:
        os.kill(ranks[rank], signal.SIGKILL)
    killed = time.monotonic()
    while trial.process.poll() is None and trial.steps_done() <= done:
        time.sleep(0.02)
    recovery = time.monotonic() - killed
    code, seconds = trial.wait()
    restarts = [e for e in read_events(trial.folder / "events.jsonl") if e["event"] == "restart"]
    return {
        "trial": number,
        "beside": number % 2 == 1,
        "rank": rank,
        "killed": len(ranks) == 2,
        "at_s": killed - trial.started,
        "after_step": done,
        "code": code,
        "seconds": seconds,
        "recovery_s": recovery,
        "detect_s": [e["detect_s"] for e in restarts],
        "lost_steps": [e["lost_steps"] for e in restarts],
        "cause": [e["cause"] for e in restarts],
        "files": trial.files() if code == 0 else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        usual, usual_ranks = [], []
        for number in range(3):
            trial = Trial(root, f"undisturbed-{number}", beside=number == 1)
            began = trial.wait_for_ranks()
            code, seconds = trial.wait()
            assert code == 0, trial.log.read_text()
            usual.append(seconds)
            usual_ranks.append(time.monotonic() - began)
        expected, usual_s = trial.files(), statistics.median(usual)
        found: list[dict[str, Any]] = []
        missed = 0
        while len(found) < args.trials:
            number = len(found) + missed
            one = disturbed(root, number, statistics.median(usual_ranks), args.seed)
            if not one["killed"]:
                missed += 1
                continue
            one["good"] = one["code"] == 0 and one.pop("files") == expected
            found.append(one)
            print(
                f"trial {number}: rank {one['rank']} killed after {one['at_s']:.1f} s, step "
                f"{one['after_step']}: {'same' if one['good'] else 'NOT the same'}, recovered in "
                f"{one['recovery_s']:.1f} s, lost {one['lost_steps']} steps",
                flush=True,
            )
    good = sum(one["good"] for one in found)
    hit = [one for one in found if one["detect_s"]]
    summary = {
        "good": good,
        "trials": len(found),
        "missed": missed,
        "beside": sum(one["beside"] for one in found),
        "restarted": len(hit),
        "detect_s": statistics.median(one["detect_s"][0] for one in hit),
        "recovery_s": statistics.median(one["recovery_s"] for one in hit),
        "lost_steps": statistics.mean(one["lost_steps"][0] for one in hit),
        "goodput": statistics.median(usual_s / one["seconds"] for one in hit),
        "undisturbed_s": usual_s,
    }
    print(json.dumps(summary, indent=1))
    command = f"python -m benchmarks.kills --trials {args.trials} --seed {args.seed}"
    if args.out:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        result = {"command": command, "machine": machine, **summary, "rows": found}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(command)
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
