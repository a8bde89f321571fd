"""What it costs a real run to record its steps.

    python -m benchmarks.tracing --blocks 40 --out docs/benchmarks/tracing.json

Two ranks train the model of examples/demo.toml at its sizes, with one thread each. Blocks of steps
that are all recorded and blocks of steps that are not alternate in the same processes (one, other,
other, one), so that the machine's noise hits both alike; the first step of a block does not count.
A recorded step includes gathering what all ranks have of it and writing `ledger.json`. The cost of
one is the median over pairs of blocks of the difference of their median steps, with a 95% interval
from resampled pairs. Each n-th step being recorded, a run pays a n-th of it. Once in a run it pays
for the step whose memory is recorded: that step with the reading of its profile, less an ordinary
one; the median of some. The last line is the command to repeat it.
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

from benchmarks.flight_recorder import DEMO, RANKS, STEPS, Training, interval
from meshwright.checkpoint.state import Trained
from meshwright.comm.collective_recorder import CollectiveRecorder
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.world import World
from meshwright.runtime.machines.machine import detect
from meshwright.spec.loading import Config, load_config
from meshwright.training.run_folder import Job, RunFolder, RunTokenizer
from meshwright.training.step_recording import MEMORY_AFTER, Recording

PROFILES: Final = 5


class Traced(Training):
    """The demo's training on one rank, recorded or not."""

    def __init__(self, world: World, folder: Path) -> None:
        super().__init__(world)
        self.trained = Trained(self.parallel, self.shards, self.optimizer)
        self.folder = folder

    def recording(self) -> Recording:
        """Return one that has yet to see a step, and records each from the third."""
        config: Config = load_config(DEMO, ["log.trace=1"])
        machine, folder = detect(config.cluster, {}), RunFolder(self.folder)
        none = RunTokenizer("bytes", "", None)
        job = Job(config, self.layout, machine, self.folder, folder, none)
        return Recording(job, self.world, self.trained, 0)

    def traced(self, recording: Recording | None, number: int) -> float:
        """Return the seconds of a step and of recording it."""
        started = time.perf_counter()
        if recording is not None:
            recording.begin(number)
        self.step()
        if recording is not None:
            recording.end(number)
        return time.perf_counter() - started

    def median(self, recording: Recording | None) -> float:
        """Return the median step of a block; a recording has seen its first steps."""
        steps = range(MEMORY_AFTER + 1, MEMORY_AFTER + 1 + STEPS)
        return statistics.median([self.traced(recording, step) for step in steps][1:])

    def profile_seconds(self) -> float:
        """Return what the step whose memory is recorded takes, beyond the one before it."""
        recording = self.recording()
        before = self.traced(recording, MEMORY_AFTER - 1)
        return self.traced(recording, MEMORY_AFTER) - before


def run_rank(rank: int, folder: str, blocks: int) -> None:
    """Measure as one of the ranks; rank 0 writes what it found."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    recorder = FlightRecorder.open(Path(folder) / f"rank-{rank}.recorder", rank, RANKS)
    with CollectiveRecorder(recorder):
        training = Traced(
            World(rank, RANKS, torch.device("cpu"), store, recorder=recorder), Path(folder)
        )
        training.median(None)  # warms up
        profiles = [training.profile_seconds() for _ in range(PROFILES)]
        recording = training.recording()
        training.traced(recording, MEMORY_AFTER)  # so that memory is written, too
        pairs = []
        for number in range(blocks):
            order = (recording, None) if number % 2 == 0 else (None, recording)
            times = {one is None: training.median(one) for one in order}
            pairs.append((times[False], times[True]))
    if rank == 0:
        size = (Path(folder) / "ledger.json").stat().st_size
        result = {"layout": training.layout.label, "profiles_s": profiles, "bytes": size}
        (Path(folder) / "result.json").write_text(json.dumps({**result, "pairs": pairs}))
    dist.destroy_process_group()


def summary(found: dict[str, Any], every: int) -> dict[str, Any]:
    """Return the costs, in shares of a step that is not recorded."""
    without = statistics.median(pair[1] for pair in found["pairs"])
    costs = [(pair[0] - pair[1]) / without for pair in found["pairs"]]
    profile = statistics.median(found["profiles_s"])
    return {
        "layout": found["layout"],
        "step_s": without,
        "every_step": statistics.median(costs),
        "interval": interval(costs),
        "every": every,
        "by_default": statistics.median(costs) / every,
        "memory_once_s": profile,
        "memory_first_s": found["profiles_s"][0],
        "ledger_bytes": found["bytes"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(folder, args.blocks), nprocs=RANKS)
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    command = f"python -m benchmarks.tracing --blocks {args.blocks}"
    result = {
        "command": command,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        **summary(found, load_config(DEMO, []).log.trace),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        result |= {"pairs": found["pairs"], "profiles_s": found["profiles_s"]}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(command)


if __name__ == "__main__":
    main()
