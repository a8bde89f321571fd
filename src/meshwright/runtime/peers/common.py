"""Shared by the adapters of all peers: sizes, ranks, random tokens, timing and output.

The time of a step includes reading tokens, forward, backward, gradient clipping to norm 1, AdamW,
and the loss as a number on every rank. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.values import gather_values
from meshwright.runtime.peers.catalogue import CONTEXT, DATA, PEERS, RANKS, PeerSizes, ranks_of

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Task:
    """One run of a peer: its mode, steps, rows per microbatch, and sizes."""

    mode: str
    steps: int
    microbatch: int
    sizes: PeerSizes

    @property
    def is_bf16(self) -> bool:
        """Whether matmuls are in bf16; master weights are fp32 in any case."""
        return self.mode == "bf16"

    @property
    def reads_share(self) -> bool:
        """Whether each rank reads different rows (data parallelism)."""
        return self.mode in DATA

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return ranks_of(self.mode)

    @property
    def local_rows(self) -> int:
        """The number of rows of a step that a rank reads."""
        return self.sizes.batch // self.ranks if self.reads_share else self.sizes.batch

    @property
    def parts(self) -> int:
        """The number of microbatches of a step on a rank."""
        return self.local_rows // self.microbatch

    def rows(self, step: int) -> Tensor:
        """Return this rank's random tokens of a step, int64 `[local_rows, seq + 1]`."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.sizes.batch, self.sizes.seq + 1)
        tokens = torch.randint(0, self.sizes.vocab, shape, generator=generator)
        if self.reads_share:
            tokens = tokens.chunk(self.ranks)[dist.get_rank()]
        return tokens

    @property
    def places(self) -> Tensor:
        """The positions in a row that this rank reads, int64 `[seq]`, or half of them under cp."""
        positions = torch.arange(self.sizes.seq)
        return positions.chunk(RANKS)[dist.get_rank()] if self.mode in CONTEXT else positions

    def microbatches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return (inputs, targets) for each microbatch of a step, each `[microbatch, tokens]`."""
        positions = self.places
        microbatches = self.rows(step).split(self.microbatch)
        return [
            (microbatch[:, positions], microbatch[:, positions + 1]) for microbatch in microbatches
        ]


class PeerClock:
    """The wall-clock and CPU seconds of each step, and its loss."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []
        self._last = (time.perf_counter(), time.process_time())

    def mark(self, loss: float = float("nan")) -> None:
        """Record the end of a step."""
        moment = (time.perf_counter(), time.process_time())
        self.seconds.append(moment[0] - self._last[0])
        self.cpu_seconds.append(moment[1] - self._last[1])
        self.losses.append(loss)
        self._last = moment

    def slowest(self) -> dict[str, Any]:
        """Return each step's times on its slowest rank, the losses and the peak memory.

        The peak is the resident bytes of the largest rank. All ranks must call this.
        """
        own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of Linux, in KiB
        gathered = gather_values((self.seconds, self.cpu_seconds, own_peak))
        seconds, cpu_seconds, peaks = zip(*gathered, strict=True)
        return {
            "seconds": [max(of_step) for of_step in zip(*seconds, strict=True)],
            "cpu_seconds": [max(of_step) for of_step in zip(*cpu_seconds, strict=True)],
            "losses": self.losses,
            "peak_bytes": max(peaks),
        }


def timed(task: Task, step: Callable[[int], float]) -> PeerClock:
    """Run the steps of a task, timing each; `step` returns this rank's share of the loss."""
    clock = PeerClock()
    for number in range(task.steps):
        total = torch.tensor(step(number))
        dist.all_reduce(total)
        clock.mark(total.item())
    return clock


def main(peer: str, run: Callable[[Task], PeerClock]) -> None:
    """Run an adapter from the command line: start the ranks or, if RANK is set, be one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=PEERS[peer].modes, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatch", type=int, default=2)
    for field in fields(PeerSizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        _start_ranks(ranks_of(args.mode))
    torch.set_num_threads(RANKS // ranks_of(args.mode))
    torch.manual_seed(0)
    sizes = PeerSizes(**{name: getattr(args, name) for name in asdict(PeerSizes())})
    result = run(Task(args.mode, args.steps, args.microbatch, sizes)).slowest()
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # threads of some peers block an ordinary exit


def _start_ranks(count: int) -> None:
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "run it with python -m"
    os.environ |= {"OMP_NUM_THREADS": str(RANKS // count), "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", spec.name, *sys.argv[1:]])
