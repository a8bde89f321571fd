"""A mixture of experts: `train` on one rank, on two that share out the experts, and other systems.

    python -m benchmarks.mixture --rounds 2 --steps 2 --precision fp32 --out mixture.json \\
        --peer torchtitan=PYTHON --peer megatron=PYTHON --peer olmo=PYTHON

One process of transformers has two threads, and takes the fastest of its ways to compute experts.
Each peer is run by the interpreter that has it: one rank with two threads, and two ranks that share
out the experts. Every run has its own fastest microbatch. Runs alternate, so that the machine's
noise hits all alike; prints medians of tokens/s and their ratios to transformers. All train on
random bytes, which meet experts about evenly.
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
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import mixture_peers
from benchmarks.mixture_model import BATCH, IDS, MODEL, NOT_COUNTED, SEQ
from meshwright.data.megatron_pair import write_megatron
from meshwright.data.view import Shard

WAYS = ("eager", "grouped_mm")
MICROBATCHES = (2, 4, 8)
LEAST_MOVED = 0.1  # of the learning rate, by each matrix of experts on average
Take = Callable[[], list[float]]
RUNS = {
    "train, 1 rank": (1, ("layout.dp_replicate=1",)),
    "train, 2 ranks": (2, ("layout.dp_shard=2", "layout.zero=1")),
    "train, 2 ranks, ep 2": (2, ("layout.dp_shard=2", "layout.zero=1", "layout.ep=2")),
}


def theirs(way: str, rows: int, precision: str, steps: int) -> list[float]:
    """Return the step times of a plain loop over transformers' model, in a process of its own."""
    words = ["--loop", way, str(rows), "--precision", precision, "--steps", str(steps)]
    return json.loads(_python("benchmarks.mixture", *words).stdout.splitlines()[-1])


def loop(way: str, rows: int, precision: str, steps: int) -> list[float]:
    """Train transformers' model for some steps, and return their seconds."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    from meshwright.spec.hf import hf_config
    from meshwright.spec.resolve import model_spec

    torch.set_num_threads(2)
    config = MixtralConfig(**hf_config(model_spec(**MODEL)))
    config._experts_implementation = way
    model = AutoModelForCausalLM.from_config(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(IDS, (BATCH, SEQ + 1))
    seconds = []
    for _ in range(steps + NOT_COUNTED):
        began = time.perf_counter()
        for some in tokens.split(rows):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                found = model(some[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(
                    found.flatten(0, 1).float(), some[:, 1:].flatten()
                )
            (loss * rows / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds[NOT_COUNTED:]


def ours(layout: Sequence[str], rows: int, precision: str, steps: int) -> list[float]:
    """Return the step times of `meshwright train`."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"model.{key}={value}" for key, value in MODEL.items()]
        words += [f"train.batch={BATCH}", f"train.seq_len={SEQ}", f"train.precision={precision}"]
        words += [f"train.steps={steps + NOT_COUNTED}", "train.compile=false"]
        words += [*layout, f"layout.microbatch={rows}"]
        words += [f"data.source={random_bytes(Path(folder))}"]
        words += [f"log.dir={folder}", "log.name=run", f"checkpoint.dir={folder}/weights"]
        _python("meshwright", "train", *words)
        events = (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
    done = [event for event in map(json.loads, events) if event["event"] == "step"]
    return [event["step_time_s"] for event in done[NOT_COUNTED:]]


def random_bytes(folder: Path) -> Path:
    """Write the random bytes of one step, and as many held-out ones, as a Megatron pair."""
    step = BATCH * (SEQ + 1)
    tokens = np.random.default_rng(0).integers(IDS, size=2 * step)
    shard = Shard(folder, tokens, np.array([step, 2 * step]))
    write_megatron(folder / "random", [shard], IDS)
    return folder / "random.bin"


def _python(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        raise RuntimeError(f"{module}: {' | '.join(done.stderr.splitlines()[-3:])}")
    return done


def fastest(precision: str) -> tuple[str, int]:
    """Return transformers' fastest way and microbatch; ways that fail are left out, and named."""
    times = {}
    for way, rows in product(WAYS, MICROBATCHES):
        try:
            times[way, rows] = min(theirs(way, rows, precision, 1))
        except RuntimeError as error:
            print(f"{way}, {rows} rows: {error}", flush=True)
    print(precision, {key: round(value, 2) for key, value in times.items()}, flush=True)
    return min(times, key=times.__getitem__)


def peer_steps(
    peer: str, python: str, ranks: int, rows: int, precision: str, steps: int
) -> list[float]:
    """Return the step times of a peer, whose loss must fall and whose experts must learn."""
    words = ["--precision", precision, "--steps", str(steps)]
    found = mixture_peers.run(peer, python, ranks, rows, words)
    losses, moved = found["losses"], found["experts_moved"]
    if not (losses[-1] < losses[0] and moved > LEAST_MOVED):
        raise RuntimeError(f"{peer} does not learn: losses {losses}, experts moved {moved}")
    return found["seconds"]


def peer_runs(peers: Mapping[str, str], precision: str, steps: int) -> dict[str, Take]:
    """Return the runs of peers, each with its fastest microbatch; those that fail are named."""
    runs: dict[str, Take] = {}
    for (peer, python), ranks in product(peers.items(), (1, mixture_peers.THREADS)):
        name = f"{peer}, 1 rank" if ranks == 1 else f"{peer}, {ranks} ranks, ep {ranks}"
        runs |= with_fastest_rows(
            name, ranks, partial(peer_steps, peer, python, ranks), precision, steps
        )
    return runs


def with_fastest_rows(
    name: str, ranks: int, take: Callable[[int, str, int], list[float]], precision: str, steps: int
) -> dict[str, Take]:
    """Return a run with the microbatch whose best step is fastest; what fails is named."""
    times = {}
    for rows in (rows for rows in MICROBATCHES if rows <= BATCH // ranks):
        try:
            times[rows] = min(take(rows, precision, 2))
        except RuntimeError as error:
            print(f"{name}, {rows} rows: {error}", flush=True)
    print(precision, name, {key: round(value, 2) for key, value in times.items()}, flush=True)
    if not times:
        return {}
    rows = min(times, key=times.__getitem__)
    return {f"{name}, {rows} rows": partial(take, rows, precision, steps)}


def measure(
    precision: str, rounds: int, steps: int, peers: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a row for each run: median tokens/s, spread, ratio to transformers."""
    way, rows = fastest(precision)
    name = f"transformers, {way}, {rows} rows"
    runs: dict[str, Take] = {name: partial(theirs, way, rows, precision, steps)}
    runs |= peer_runs(peers, precision, steps)
    for run, (ranks, layout) in RUNS.items():
        runs |= with_fastest_rows(run, ranks, partial(ours, layout), precision, steps)
    found: dict[str, list[float]] = {run: [] for run in runs}
    for _ in range(rounds):
        for run, take in runs.items():
            found[run] += take()
    bar = statistics.median(found[name])
    return [
        {
            "precision": precision,
            "run": run,
            "tokens_per_s": round(BATCH * SEQ / statistics.median(seconds), 1),
            "slowest": round(BATCH * SEQ / max(seconds), 1),
            "fastest": round(BATCH * SEQ / min(seconds), 1),
            "steps": len(seconds),
            "ratio": round(bar / statistics.median(seconds), 3),
        }
        for run, seconds in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--loop", nargs=2, metavar=("WAY", "ROWS"), help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.loop:
        print(json.dumps(loop(args.loop[0], int(args.loop[1]), args.precision, args.steps)))
        return
    peers = dict(word.split("=", 1) for word in args.peer)
    if unknown := set(peers) - set(mixture_peers.MODULES):
        parser.error(f"no peer is called {unknown}; there are {list(mixture_peers.MODULES)}")
    rows = measure(args.precision, args.rounds, args.steps, peers)
    for row in rows:
        print(json.dumps(row))
    command = f"python -m benchmarks.mixture --rounds {args.rounds} --steps {args.steps}"
    print(command + f" --precision {args.precision}")
    if args.out:
        content = {"command": command, "torch": torch.__version__, "rows": rows}
        content["machine"] = platform.processor() or platform.machine()
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
