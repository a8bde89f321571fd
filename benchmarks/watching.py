"""What `watch` costs: steps of two ranks without it, after its last step, and with alarms.

    python -m benchmarks.watching --out docs/benchmarks/watching.json

Steps alternate in one run, so that the machine's noise hits all alike. The time of a step is that
of the slower rank; "cpu" is the processor time of both, which other processes disturb less.
"check" is the processor time of both ranks inside of the alarms, which is part of their steps: a
ratio of whole steps varies by more than the alarms take.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from meshwright.prove.trainers.alarms import ReplicaAlarms

ENGINES = ("ddp", "fsdp2")
MODES = ("without", "off", "alarms")
VOCAB, DIM, HEADS, LAYERS, LENGTH = 1024, 256, 4, 4, 128
KINDS = ("wall", "cpu", "check")
NOT_COUNTED = 2  # the first steps of each mode


class Transformer(nn.Module):
    """A causal transformer of 3.7 million parameters, of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                DIM, HEADS, 4 * DIM, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(LAYERS)
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of each next token."""
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


class Loop:
    """A model on an engine, with its optimizer."""

    def __init__(self, engine: str, rows: int) -> None:
        torch.manual_seed(0)
        self._rows = rows
        model: nn.Module = Transformer()
        if engine == "ddp":
            model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model, self.steps = model, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def take_step(self) -> tuple[float, float]:
        """Take a step; return its seconds, and those of the processor."""
        generator = torch.Generator().manual_seed(1000 * self.steps + dist.get_rank())
        ids = torch.randint(0, VOCAB, (self._rows, LENGTH + 1), generator=generator)
        self.steps += 1
        dist.barrier()
        start = time.perf_counter(), time.process_time()
        logits = self.model(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start[0], time.process_time() - start[1]


class TimedAlarms(ReplicaAlarms):
    """Alarms that add up the processor time of their checks."""

    seconds = 0.0

    def _step_begins(self, *args: Any) -> None:
        start = time.process_time()
        super()._step_begins(*args)
        self.seconds += time.process_time() - start


def measure(engine: str, rows: int, rounds: int, folder: str) -> dict[str, dict[str, list[float]]]:
    """Return the seconds, processor seconds, and those of checks of each mode's steps."""
    plain, watched = Loop(engine, rows), Loop(engine, rows)
    with mw.watch(watched.model, folder=folder, say=lambda line: None) as watch:
        for _ in range(3):
            watched.take_step()
    assert dist.get_rank() or watch.verdict.passed
    times: dict[str, dict[str, list[float]]] = {m: {kind: [] for kind in KINDS} for m in MODES}
    for number in range(rounds + NOT_COUNTED):
        for mode in MODES[number % 3 :] + MODES[: number % 3]:
            loop = watched if mode == "off" else plain
            alarms = TimedAlarms(loop.model, say=lambda line: None)
            if mode == "alarms":
                alarms.start()
                loop.take_step()  # the first finds out which parameters the optimizer holds
                alarms.seconds = 0.0
            numbers = torch.tensor([*loop.take_step(), alarms.seconds], dtype=torch.float64)
            alarms.stop()
            slowest = numbers.clone()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(numbers)
            if number >= NOT_COUNTED:
                for kind, value in zip(KINDS, (slowest[0], *numbers[1:]), strict=True):
                    times[mode][kind].append(float(value))
    return times


def rank_of(engine: str, rows: int, rounds: int) -> None:
    """Measure on one rank, and print the times on rank 0."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, 0)
        times = measure(engine, rows, rounds, folders[0])
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def table(engine: str, rows: int, times: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Return a row for each mode: median milliseconds, and ratios to steps without `watch`.

    A ratio is the median over rounds, in which all modes took a step one after another. The share
    of the checks is that of their median in the median processor time of a step without `watch`.
    """
    plain = times["without"]
    return [
        {
            "engine": engine,
            "tokens": rows * LENGTH,
            "watch": mode,
            **{f"{kind}_ms": round(1e3 * statistics.median(s), 2) for kind, s in seconds.items()},
            **{
                f"{kind}_ratio": round(
                    statistics.median(
                        x / y for x, y in zip(seconds[kind], plain[kind], strict=True)
                    ),
                    4,
                )
                for kind in ("wall", "cpu")
            },
            "check_share": round(
                statistics.median(seconds["check"]) / statistics.median(plain["cpu"]), 4
            ),
            "steps": len(seconds["wall"]),
        }
        for mode, seconds in times.items()
    ]


def launch(engine: str, rows: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the times of two ranks, with one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--nproc-per-node", "2", "-m", "benchmarks.watching", "--rounds", str(rounds)]
    words += ["--rows", str(rows)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*launcher, *words, "--rank-of", engine],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environ,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both engines, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="a step and rank")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank_of:
        rank_of(args.rank_of, args.rows[0], args.rounds)
        return
    rows = [
        row
        for engine in ENGINES
        for n in args.rows
        for row in table(engine, n, launch(engine, n, args.rounds))
    ]
    for row in rows:
        print(
            f"{row['engine']:6} {row['tokens']:5} tokens, {row['watch']:8} {row['wall_ms']:8.1f} "
            f"ms, ratio {row['wall_ratio']:.3f}; cpu {row['cpu_ms']:8.1f} ms, ratio "
            f"{row['cpu_ratio']:.3f}; checks {row['check_ms']:.2f} ms, {row['check_share']:.2%}"
        )
    result = {
        "command": f"python -m benchmarks.watching --rounds {args.rounds} "
        f"--rows {' '.join(map(str, args.rows))}",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
