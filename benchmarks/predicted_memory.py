"""The predicted peak of every rank's memory beside the measured one, over the parity table.

    python -m benchmarks.predicted_memory --ranks 2 --out docs/benchmarks/predicted-memory.json

The layouts, precisions, recomputation, offload and kinds of models are those of `prove --matrix`,
with sizes at which activations and states weigh about the same. Predicted is the peak of
`cost.timeline`; measured is the median of three steps by torch's profiler. Experts take tokens
in turn (`train.routing = "balanced"`), as a prediction assumes. `--every N` takes
each Nth layout, `--family` those of some families alone, `--matmul onednn` computes fp32 products
by oneDNN. Prints those that are furthest off; the last line is the command to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.bench.memory_breakdown import measure
from meshwright.comm.world import World
from meshwright.cost.timeline import timeline
from meshwright.program.lower import lower
from meshwright.program.target import Processor, Target, route
from meshwright.prove.case import Case
from meshwright.prove.matrix import matrix
from meshwright.spec.families import FAMILIES
from meshwright.spec.model import ModelSpec
from meshwright.units import MIB

WIDER, LONGER, MORE_WORDS = 4, 8, 8
WIDTHS: Final = tuple(
    name for name in ModelSpec.model_fields if name == "dim" or name.endswith(("_dim", "_rank"))
)
WORST: Final = 10


def scaled(case: Case, matmul: str) -> Case:
    """Return a case of the table with a model and rows of some size, and a way of products."""
    widths = {name: getattr(case.model, name) for name in WIDTHS}
    sizes = {name: width and WIDER * width for name, width in widths.items()}
    sizes["vocab_size"] = MORE_WORDS * case.model.vocab_size
    changes = {"seq_len": LONGER * case.train.seq_len, "matmul": matmul}
    if case.model.experts:
        changes["routing"] = "balanced"
    train = case.train.model_copy(update=changes)
    return replace(case, model=case.model.model_copy(update=sizes), train=train)


class Choice(NamedTuple):
    """Which of the table's layouts are measured, and how they compute fp32 products."""

    ranks: int
    every: int
    matmul: str
    families: tuple[str, ...] = ()

    @property
    def cases(self) -> list[Case]:
        """Each `every`-th legal layout of the families, scaled; of all families where none is."""
        legal = [
            case
            for case in matrix(self.ranks)
            if case.refused is None and case.model.family in (self.families or FAMILIES)
        ]
        return [scaled(case, self.matmul) for case in legal[:: self.every]]

    @property
    def command(self) -> str:
        """What measures them again."""
        words = ["python -m benchmarks.predicted_memory --ranks", str(self.ranks)]
        words += ["--every", str(self.every), "--matmul", self.matmul]
        return " ".join((*words, *(["--family", *self.families] if self.families else [])))


def _rank(rank: int, choice: Choice, folder: str) -> None:
    """Measure every layout as one rank; rank 0 writes a line for each."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    ranks = choice.ranks
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    world = World(rank, ranks, torch.device("cpu"), store)
    for number, case in enumerate(choice.cases):
        peaks = world.gather_on_host([measure(world, case).peak.total])
        if rank == 0:
            with Path(folder, "peaks.jsonl").open("a") as out:
                out.write(json.dumps([number, [int(row[0]) for row in peaks]]) + "\n")
            print(number, case.label, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def rows_of(choice: Choice, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each rank of each measured layout."""
    rows = []
    cases = choice.cases
    for line in (folder / "peaks.jsonl").read_text().splitlines():
        number, peaks = json.loads(line)
        case = cases[number]
        products = route(case.train.matmul, Processor())
        target = Target("cpu", products, case.packed, fsdp2=case.fsdp2)
        program = lower(case.model, case.train, case.optimizer, case.layout, target)
        for rank, measured in enumerate(peaks):
            peak = timeline(program, rank).peak
            rows.append(
                {
                    "case": case.label,
                    "rank": rank,
                    "measured": measured,
                    "predicted": peak.total,
                    "error": round(peak.total / measured - 1, 4),
                    "at": f"{peak.action}: {peak.what}",
                }
            )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows that are furthest off, and how far all are."""
    errors = sorted(abs(row["error"]) for row in rows)
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:WORST]:
        print(
            f"{row['error']:+.1%}  rank {row['rank']} of {row['case']}: "
            f"{row['predicted'] / MIB:.1f} for {row['measured'] / MIB:.1f} MiB, {row['at']}"
        )
    print(
        f"{len(rows)} ranks: {statistics.median(errors):.2%} in the median, {errors[-1]:.1%} at "
        f"worst, {sum(error <= 0.03 for error in errors)} within 3%"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--matmul", choices=["torch", "onednn"], default="torch")
    parser.add_argument("--family", nargs="+", choices=sorted(FAMILIES), default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    choice = Choice(args.ranks, args.every, args.matmul, tuple(args.family))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (choice, folder), nprocs=choice.ranks)
        rows = rows_of(choice, Path(folder))
    show(rows)
    result = {
        "command": choice.command,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "unit": "bytes",
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(choice.command)


if __name__ == "__main__":
    main()
