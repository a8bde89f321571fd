"""Idle time of pipeline schedules: measured through the executor, beside the tables' own figure.

    python -m benchmarks.bubble --out docs/benchmarks/bubble.json

Four ranks perform the real tables with the real transfers, but their stages sleep instead of
computing, so that four ranks do not contend for two cores. Forward, input gradient and weight
gradient take equal time, each `--unit` seconds for a rank's whole share of the model: a stage of a
rank with two takes half. What is measured is the share of time, from the first rank's first action
to the last one's end, in which a rank does not sleep: waiting, transfers and the executor's own
work. Prints a table with the median of some rounds; the last line is the command to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import Link
from meshwright.comm.world import World
from meshwright.parallel.batch import Batch
from meshwright.parallel.pipeline import Pipeline, Scale
from meshwright.parallel.tensor_parallel.deferred import Deferral
from meshwright.program.schedule import (
    SCHEDULES,
    Action,
    bubble_fraction,
    compute_tables,
    microbatch_rule,
    stage_ranks,
    with_transfers,
)

RANKS: Final = 4
MICROBATCHES: Final = (4, 8, 16)
STREAM: Final = (1, 8)  # shape of what stages hand on


class Sleeper:
    """Sleeps, and knows for how long it really has."""

    def __init__(self, unit_s: float) -> None:
        self.unit_s, self.slept_s = unit_s, 0.0

    def __call__(self) -> None:
        started = time.perf_counter()
        time.sleep(self.unit_s)
        self.slept_s += time.perf_counter() - started


class _Sleep(torch.autograd.Function):
    """A stage: sleeps once forward, once for its input's gradient and once for its weights'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Sleeper, deferral: Deferral) -> Tensor:
        ctx.sleep, ctx.deferral = sleep, deferral
        sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleep()
        if ctx.deferral.pending is None:
            ctx.sleep()
        else:
            ctx.deferral.pending.append(ctx.sleep)
        return grad.clone(), None, None


class SleepingStages:
    """The stages of a rank, as `Pipeline` wants them."""

    zero = 0
    device = torch.device("cpu")

    def __init__(self, ranks_of_stage: tuple[int, ...], pp: Link, unit_s: float) -> None:
        self.stage_ranks, self.pp = ranks_of_stage, pp
        self.deferral, self.recorder = Deferral(), FlightRecorder()
        mine = [stage for stage, rank in enumerate(ranks_of_stage) if rank == pp.rank]
        self.modules: dict[int, nn.Module] = {stage: nn.Module() for stage in mine}
        self.sleep = Sleeper(unit_s / len(mine))

    def stream(self, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        return STREAM, torch.float32

    def forward(self, stage: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        x = torch.zeros(STREAM, requires_grad=True) if hidden is None else hidden
        out: Tensor = _Sleep.apply(x, self.sleep, self.deferral)
        return out.sum() if stage == len(self.stage_ranks) - 1 else out


def measure(world: World, schedule: str, microbatches: int, unit_s: float) -> float:
    """Return the idle share of the ranks' time in one pass of a schedule; a collective."""
    virtual = SCHEDULES[schedule].min_virtual
    ranks_of_stage = stage_ranks(schedule, world.size, virtual)
    tables = with_transfers(
        compute_tables(schedule, world.size, virtual, microbatches), ranks_of_stage
    )
    link = Link(dist.group.WORLD, tuple(range(world.size)), world.rank)
    stages = SleepingStages(ranks_of_stage, link, unit_s)
    nothing = Batch(torch.zeros(1, 1), torch.zeros(1, 1))
    times: list[tuple[float, float]] = []

    def observe(action: Action, started: float, ended: float) -> None:
        times.append((started, ended))

    world.barrier()
    passed = Pipeline(stages, tables[world.rank], [nothing] * microbatches, Scale(torch.ones(())))
    passed.run(observe)
    # The clock is one for all processes of a machine. Rank 0 begins, with a forward.
    seen = world.gather_on_host([times[0][0], times[-1][1], stages.sleep.slept_s])
    length = max(row[1] for row in seen) - seen[0][0]
    return 1 - sum(row[2] for row in seen) / (world.size * length)


def expected(schedule: str, ranks: int, microbatches: int) -> float:
    """Return the idle share after the schedule's table, where only computing takes time."""
    virtual = SCHEDULES[schedule].min_virtual
    tables = compute_tables(schedule, ranks, virtual, microbatches)
    return bubble_fraction(tables, stage_ranks(schedule, ranks, virtual))


def simple(ranks: int, microbatches: int) -> float:
    """Return (p - 1) / (m + p - 1), of GPipe (arXiv:1811.06965, section 2.3) and of 1F1B."""
    return (ranks - 1) / (microbatches + ranks - 1)


def _rank(rank: int, folder: str, rounds: int, unit_s: float) -> None:
    """Measure every schedule as one rank; rank 0 writes the rows."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world = World(rank, RANKS, torch.device("cpu"), store)
    measure(world, "1f1b", RANKS, 0.001)  # connects the ranks
    rows = []
    for schedule, traits in SCHEDULES.items():
        for count in MICROBATCHES:
            if microbatch_rule(schedule, RANKS, traits.min_virtual, count) is None:
                found = [measure(world, schedule, count, unit_s) for _ in range(rounds)]
                rows.append(
                    {
                        "schedule": schedule,
                        "virtual_stages": traits.min_virtual,
                        "microbatches": count,
                        "measured": round(statistics.median(found), 4),
                        "rounds": [round(one, 4) for one in found],
                        "table": round(expected(schedule, RANKS, count), 4),
                        "simple": round(simple(RANKS, count), 4),
                    }
                )
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown: percent measured, and in brackets after the table."""
    head = " | ".join(f"{count} microbatches" for count in MICROBATCHES)
    lines = [f"| schedule | {head} |", "|---|--:|--:|--:|"]
    cells = " | ".join(f"{simple(RANKS, count):.1%}" for count in MICROBATCHES)
    lines.append(f"| (p-1)/(m+p-1) | {cells} |")
    for schedule in SCHEDULES:
        found = {row["microbatches"]: row for row in rows if row["schedule"] == schedule}
        cells = " | ".join(
            f"{found[m]['measured']:.1%} ({found[m]['table']:.1%})" if m in found else "not legal"
            for m in MICROBATCHES
        )
        lines.append(f"| `{schedule}` | {cells} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit", type=float, default=0.04, help="seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, args.rounds, args.unit), nprocs=RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text())
    print(as_table(rows))
    command = f"python -m benchmarks.bubble --rounds {args.rounds} --unit {args.unit}"
    result = {
        "command": command,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "ranks": RANKS,
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(command)


if __name__ == "__main__":
    main()
