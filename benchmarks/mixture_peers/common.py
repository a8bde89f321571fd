"""What the loops of all peers share: the model, random tokens, the clock, the line they print."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.mixture_model import BATCH, IDS, NOT_COUNTED, SEQ

THREADS = 2
LR = 3e-4
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Task:
    """What one run does; `rows` are those of a microbatch."""

    precision: str
    rows: int
    steps: int
    ranks: int

    @property
    def is_bf16(self) -> bool:
        """Whether products are in bf16; the master weights are fp32 all the same."""
        return self.precision == "bf16"

    @property
    def parts(self) -> int:
        """Microbatches of a step on a rank."""
        return BATCH // self.ranks // self.rows

    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's inputs and targets `[rows, SEQ]`, the same in each step."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(IDS, (BATCH, SEQ + 1), generator=generator)
        own = tokens.chunk(self.ranks)[dist.get_rank()]
        return [
            (some[:, :-1].contiguous(), some[:, 1:].contiguous()) for some in own.split(self.rows)
        ]


class Trained(NamedTuple):
    """A peer's model; what trains it for a step and returns this rank's mean loss."""

    model: torch.nn.Module
    step: Callable[[], float]


def token_loss(logits: Tensor, targets: Tensor, task: Task) -> Tensor:
    """Return a microbatch's share of the rank's mean loss."""
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss / task.parts


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of the loop over transformers' model."""
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def main(build: Callable[[Task], Trained]) -> None:
    """Be a rank: train for some steps, and print what the first rank found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(THREADS // ranks)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net, step = build(Task(args.precision, args.rows, args.steps, ranks))
    experts = _local(net)
    before = {name: value.clone() for name, value in experts.items()}
    seconds, losses = [], []
    for _ in range(args.steps + NOT_COUNTED):
        began = time.perf_counter()
        loss = torch.tensor(step())
        dist.all_reduce(loss)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item() / ranks)
    moved = min(
        (value - before[name]).abs().mean().item() / LR for name, value in _local(net).items()
    )
    found = {
        "seconds": seconds[NOT_COUNTED:],
        "losses": losses,
        "parameters": sum(value.numel() for value in net.parameters()),
        "experts_moved": moved,
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # threads of some peers block an ordinary exit


def _local(net: torch.nn.Module) -> dict[str, Tensor]:
    """Return this rank's weights of experts, as copies in fp32."""
    weights = {name: value for name, value in net.named_parameters() if "experts" in name}
    assert weights, "no weights of experts"
    return {
        name: getattr(value, "_local_tensor", value).detach().float()
        for name, value in weights.items()
    }
