"""Saving and loading a run, beside what the disk itself does, and how long training waits for it.

    python -m benchmarks.checkpoint --out docs/benchmarks/checkpoint.json

Two ranks under ZeRO-3 with AdamW: a checkpoint has three times the weights' bytes. The disk's own
figures are of the same bytes in as many files, written by both ranks at once and synced, and read
back after their pages were dropped from memory. A load verifies every hash first. The stall is what
a training loop waits for a save beside it: at the call, before the update that follows, and at the
next save. Medians; the last line is the command to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.checkpoint.commit import steps
from meshwright.checkpoint.restore import StoredSource, newest_good, restore
from meshwright.checkpoint.saver import Saved, Saver
from meshwright.checkpoint.state import Trained, chunks_of, scalars_of
from meshwright.comm.groups import open_groups
from meshwright.comm.world import World
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.layout import Layout
from meshwright.parallel.build import Source, build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parameter_count
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.store import Place
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update
from meshwright.units import MIB

RANKS: Final = 2
MODELS: Final = {
    "1M": model_spec(dim=128, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=384, vocab_size=512),
    "1GB": model_spec(dim=1024, n_layers=16, n_heads=16, n_kv_heads=16, ffn_dim=4096),
}
TRAIN: Final = TrainSpec(batch=2, seq_len=256)
LAYOUT: Final = Layout(dp_shard=RANKS, zero=3)
PIECE: Final = 8 * MIB


def opened(model: ModelSpec, world: World, source: Source) -> Trained:
    parallel = build(
        lower(model, TRAIN, OptimizerSpec(), LAYOUT, target_of(TRAIN, world.device)),
        open_groups(LAYOUT, world),
        world.device,
        source,
    )
    shards = Shards(parallel.held, on_host=False)
    return Trained(parallel, shards, build_optimizer(shards.leaves, shards.parts, OptimizerSpec()))


def timed(world: World, work: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank."""
    world.barrier()
    started = time.perf_counter()
    work()
    return max(row[0] for row in world.gather_on_host([time.perf_counter() - started]))


def drop(paths: Sequence[Path]) -> None:
    """Have the system forget the pages of some files, so that they are read from the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_plainly(path: Path, size: int) -> None:
    data = os.urandom(PIECE)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, PIECE):
            file.write(data[: min(PIECE, size - start)])
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    buffer = bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


class Bench:
    """One model on one rank."""

    def __init__(self, model: ModelSpec, world: World, root: Place, rounds: int) -> None:
        self.model, self.world, self.root, self.rounds = model, world, root, rounds
        self.trained = opened(model, world, seeded(model, 0))
        self.number = 0
        self.saved: list[Saved] = []

    def step(self, before: Callable[[], None] = lambda: None) -> None:
        parallel, shards, optimizer = self.trained
        batch = mine(make_batch(Case(self.model, TRAIN, LAYOUT), 1), parallel.program, self.world)
        update(parallel, batch, self.world, shards, optimizer, LossScale(), 1.0, before)

    def save(self, saver: Saver) -> None:
        self.number += 1
        facts = {"scalars": scalars_of(self.trained)}
        saver.save(self.number, chunks_of(self.trained), facts, {})

    def saver(self, name: str, *, beside: bool) -> Saver:
        return Saver(self.root / name, self.world, 1, self.saved.append, during_training=beside)

    def run(self) -> dict[str, Any]:
        self.step()
        saver = self.saver("at-once", beside=False)
        at_once = [timed(self.world, lambda: self.save(saver)) for _ in range(self.rounds)]
        size = self.saved[-1].bytes
        loads = [timed(self.world, self.load) for _ in range(self.rounds)]
        writes, reads = self.disk(size // RANKS)
        step = statistics.median(timed(self.world, self.step) for _ in range(self.rounds))
        stalls, beside = self.beside(statistics.median(at_once), step)
        return {
            "parameters": parameter_count(self.model),
            "bytes": size,
            "save_s": at_once,
            "load_s": loads,
            "disk_write_s": writes,
            "disk_read_s": reads,
            "step_s": step,
            "stall_s": stalls,
            "beside_s": beside,
        }

    def load(self) -> None:
        root = self.root / "at-once"
        if self.world.rank == 0 and isinstance(root, Path):
            drop(list(steps(root)[-1].iterdir()))
        self.world.barrier()
        good = newest_good(root, self.world, print)
        assert good is not None
        restore(opened(self.model, self.world, StoredSource(good.folder)), good)

    def disk(self, size: int) -> tuple[list[float], list[float]]:
        assert isinstance(self.root, Path)
        path = self.root / f"plain-{self.world.rank}"
        writes, reads = [], []
        for _ in range(self.rounds):
            path.unlink(missing_ok=True)
            writes.append(timed(self.world, lambda: write_plainly(path, size)))
            drop([path])
            reads.append(timed(self.world, lambda: read_plainly(path)))
        path.unlink()
        return writes, reads

    def beside(self, save_s: float, step_s: float) -> tuple[list[float], list[float]]:
        """Return the stalls, and the seconds until the steps were there, of saves in training.

        Between two saves there are steps enough for the first to end. The first of all also makes
        the buffers, and does not count.
        """
        saver = self.saver("beside", beside=True)
        self.saved.clear()
        for _ in range(self.rounds + 1):
            self.save(saver)
            deadline = time.perf_counter() + 2 * save_s + step_s
            while self.world.sum_on_host([float(time.perf_counter() < deadline)])[0] > 0:
                self.step(saver.before_update)
            saver.finish()
        counted = self.saved[1:]
        everyone = self.world.gather_on_host([one.stall_s for one in counted])
        return [max(row) for row in zip(*everyone, strict=True)], [s.seconds for s in counted]


def _rank(rank: int, folder: str, names: list[str], rounds: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world = World(rank, RANKS, torch.device("cpu"), store)
    found = {}
    for name in names:
        root = Path(folder, name)
        root.mkdir(exist_ok=True)
        found[name] = Bench(MODELS[name], world, root, rounds).run()
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def as_table(found: dict[str, dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| weights | checkpoint | save MB/s (disk) | load MB/s (disk) | at once | stall beside |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, one in found.items():
        speed = {
            key: one["bytes"] / 1e6 / statistics.median(one[f"{key}_s"])
            for key in ("save", "load", "disk_write", "disk_read")
        }
        save, stall = statistics.median(one["save_s"]), statistics.median(one["stall_s"])
        lines.append(
            f"| {name} | {one['bytes'] / 1e6:.0f} MB | {speed['save']:.0f} "
            f"({speed['disk_write']:.0f}) | {speed['load']:.0f} ({speed['disk_read']:.0f}) | "
            f"{save:.2f} s | {stall * 1e3:.1f} ms ({stall / save:.1%}) |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        mp.spawn(_rank, (folder, args.models, args.rounds), nprocs=RANKS)
        found = json.loads(Path(folder, "found.json").read_text())
    print(as_table(found))
    command = f"python -m benchmarks.checkpoint --models {' '.join(args.models)}"
    command += f" --rounds {args.rounds}"
    result = {
        "command": command,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "models": found,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(command)


if __name__ == "__main__":
    main()
