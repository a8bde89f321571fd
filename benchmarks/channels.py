"""Steps with messages through shared memory beside steps with gloo's, alternating in one process.

    python -m benchmarks.channels --out docs/benchmarks/channels.json

Two CPU ranks with a core each train the model of `examples/peers.toml`. The ratio is the median of
the pairs' ratios: above 1, channels are faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.bench.layouts import Stepper
from meshwright.comm import groups
from meshwright.comm.world import World
from meshwright.kernels.fp32_matmuls import take_route
from meshwright.layout import Layout
from meshwright.prove.case import Case
from meshwright.runtime.ranks.local import ALLOCATOR
from meshwright.spec.loading import load_config

RANKS = 2
CASES = [
    (precision, label)
    for precision in ("fp32", "bf16")
    for label in (
        *("tp2 mb4", "tp2 mb8", "tp2 sp mb8"),
        *("shard2 zero1 mb4", "shard2 zero2 mb4", "shard2 zero3 mb4"),
    )
]


def seconds(step: Stepper) -> float:
    """Return the seconds of a step."""
    dist.barrier()
    began = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - began


def serve(rank: int, folder: str, precision: str, label: str, pairs: int) -> None:
    """Time one case on a rank; rank 0 writes what it found."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    device = torch.device("cpu")
    config = load_config(Path("examples/peers.toml"), [f"train.precision={precision}"])
    take_route(config.train.matmul, device)
    world = World(rank, RANKS, device, store)
    case = Case(config.model, config.train, Layout.parse(label))
    channel = Stepper(world, case)
    with mock.patch.object(groups, "share", return_value=None):
        gloo = Stepper(world, case)
    found: dict[Stepper, list[float]] = {gloo: [], channel: []}
    for step in found:
        seconds(step)
    for turn in range(pairs):
        for step in list(found)[:: -1 if turn % 2 else 1]:
            found[step].append(seconds(step))
    if rank == 0:
        gloo_s, channel_s = found.values()
        ratios = [before / after for before, after in zip(gloo_s, channel_s, strict=True)]
        row = {
            "precision": precision,
            "layout": label,
            "gloo_s": round(statistics.median(gloo_s), 3),
            "channel_s": round(statistics.median(channel_s), 3),
            "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 2),
            "most": round(max(ratios), 2),
            "pairs": pairs,
        }
        Path(folder, "row.json").write_text(json.dumps(row))


def main() -> None:
    """Run all cases; prints a row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # What `train` starts its ranks with.
    os.environ.update(OMP_NUM_THREADS="1", GLIBC_TUNABLES=ALLOCATOR)
    rows = []
    for precision, label in CASES:
        if args.only not in f"{precision} {label}":
            continue
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(serve, args=(folder, precision, label, args.pairs), nprocs=RANKS)  # type: ignore[no-untyped-call]
            rows.append(json.loads(Path(folder, "row.json").read_text()))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        result = {"torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
