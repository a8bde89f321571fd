"""What the flight recorder and the recorder of collectives cost a real training step.

    python -m benchmarks.flight_recorder --blocks 60 --out docs/benchmarks/flight_recorder.json

Two ranks train the model of examples/demo.toml at its sizes, with one thread each. Blocks of steps
with both and with neither alternate in the same processes (one, other, other, one), so that the
machine's noise hits both alike; the first step of a block does not count. The cost is the median
over pairs of blocks of the difference of their median steps, with a 95% interval from resampled
pairs. Beside it stands what the entries of a step take by themselves, in a loop. The last line is
the command to repeat it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import open_groups
from meshwright.comm.world import World
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.layout import resolve_layout
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.runtime.machines.machine import detect
from meshwright.spec.loading import load_config
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update

RANKS: Final = 2
STEPS: Final = 6  # of a block, of which the first does not count
DEMO: Final = Path(__file__).parents[1] / "examples" / "demo.toml"


class Silent(FlightRecorder):
    """A flight recorder that enters nothing."""

    def step(self, step: int) -> None:
        pass

    def _enter(self, name: str, place: tuple[int, int, int] = (0, 0, 0)) -> None:
        pass

    def action(self, kind: str, stage: int, microbatch: int) -> None:
        pass

    def begin(
        self, kind: str, group: int, size: int, peer: int = -1, *, waits: bool = False
    ) -> int:
        return 0

    def begun_last(self, count: int) -> tuple[int, ...]:
        return ()

    def wait(self, *entries: int) -> None:
        pass

    def end(self, *entries: int) -> None:
        pass


class Training:
    """The demo's training on one rank, step by step."""

    def __init__(self, world: World) -> None:
        config = load_config(DEMO, [])
        layout = resolve_layout(config, detect(config.cluster, {}))
        program = lower(
            config.model,
            config.train,
            config.optimizer,
            layout,
            target_of(config.train, world.device),
        )
        source = seeded(config.model, config.train.seed)
        self.world, self.layout = world, layout
        self.parallel = build(program, open_groups(layout, world), world.device, source)
        self.shards = Shards(self.parallel.held, on_host=False)
        self.optimizer = build_optimizer(self.shards.leaves, self.shards.parts, config.optimizer)
        self.scale, self.clip = LossScale.of(config.train), config.train.clip_norm
        case = Case(config.model, config.train, layout)
        self.batches = [mine(make_batch(case, n), program, world) for n in range(4)]
        self.done = 0

    def step(self) -> float:
        """Do one step as the training loop does, and return its seconds."""
        started = time.perf_counter()
        self.done += 1
        self.world.recorder.step(self.done)
        batch = self.batches[self.done % len(self.batches)]
        found = update(
            self.parallel,
            batch,
            self.world,
            self.shards,
            self.optimizer,
            self.scale,
            self.clip,
        )
        self.world.sum_on_host([found.loss.item(), 0.0])
        return time.perf_counter() - started

    def block(self, *, recorded: bool) -> float:
        """Return the median step of a block."""
        # The flight recorder is held in many places: it changes its kind in all of them at once.
        self.world.recorder.__class__ = FlightRecorder if recorded else Silent
        with CollectiveRecorder(self.world.recorder) if recorded else contextlib.nullcontext():
            return statistics.median([self.step() for _ in range(STEPS)][1:])


def run_rank(rank: int, folder: str, blocks: int) -> None:
    """Measure as one of the ranks; rank 0 writes what it found."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    recorder = FlightRecorder.open(Path(folder) / f"rank-{rank}.recorder", rank, RANKS)
    training = Training(World(rank, RANKS, torch.device("cpu"), store, recorder=recorder))
    for recorded in (True, False):
        training.block(recorded=recorded)  # warms up
    pairs = []
    entries, moves = recorder._number, recorder._moves
    for number in range(blocks):
        order = (True, False) if number % 2 == 0 else (False, True)
        times = {recorded: training.block(recorded=recorded) for recorded in order}
        pairs.append((times[True], times[False]))
    steps = blocks * STEPS
    if rank == 0:
        entries, moves = (recorder._number - entries) / steps, (recorder._moves - moves) / steps
        result = {"layout": training.layout.label, "entries": entries, "moves": moves}
        result |= {"pairs": pairs, "alone_s": alone(recorder)}
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def alone(recorder: FlightRecorder, count: int = 20_000) -> dict[str, float]:
    """Return the seconds that an entry takes from begin to end, and that a phase takes."""
    group = recorder.group("a group", (0, 1), "replicate")
    started = time.perf_counter()
    for _ in range(count):
        recorder.end(recorder.begin("all_reduce", group, 1 << 20, waits=True))
    entry = (time.perf_counter() - started) / count
    started = time.perf_counter()
    for _ in range(count):
        recorder.phase("update")
    return {"entry": entry, "phase": (time.perf_counter() - started) / count}


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return a 95% interval of the median, from resamples."""
    chance = random.Random(0)
    found = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(folder, args.blocks), nprocs=RANKS)
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    without = statistics.median(pair[1] for pair in found["pairs"])
    costs = [(pair[0] - pair[1]) / pair[1] for pair in found["pairs"]]
    low, high = interval(costs)
    # Each entry moves the recorder twice, when it begins and when it ends; the rest are phases.
    phases = max(0.0, found["moves"] - 2 * found["entries"])
    own = found["entries"] * found["alone_s"]["entry"] + phases * found["alone_s"]["phase"]
    command = f"python -m benchmarks.flight_recorder --blocks {args.blocks}"
    result = {
        "command": command,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "layout": found["layout"],
        "step_s": without,
        "cost": statistics.median(costs),
        "interval": [low, high],
        "entries_per_step": found["entries"],
        "phases_per_step": phases,
        "alone_us": {name: 1e6 * seconds for name, seconds in found["alone_s"].items()},
        "own_share": own / without,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps({**result, "pairs": found["pairs"]}, indent=1) + "\n")
    print(command)


if __name__ == "__main__":
    main()
