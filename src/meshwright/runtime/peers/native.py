"""PyTorch's own wrappers: DDP, ZeroRedundancyOptimizer, FSDP2, DTensor's TP, its pipelines.

python -m meshwright.runtime.peers.native --mode ddp
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from meshwright.runtime.peers.catalogue import RANKS
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, PeerClock, Task, main, timed
from meshwright.runtime.peers.llama import Llama, mean_loss


class Replicated:
    """DDP; with ZeroRedundancyOptimizer in mode `zero1`, and autocast in mode `bf16`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        net = Llama(task.sizes)
        self.is_alone = task.ranks == 1
        self.net: nn.Module = (
            net if self.is_alone else DistributedDataParallel(net, gradient_as_bucket_view=True)
        )
        if task.mode == "zero1":
            self.optimizer = ZeroRedundancyOptimizer(
                self.net.parameters(), torch.optim.AdamW, **ADAMW
            )
        else:
            self.optimizer = torch.optim.AdamW(self.net.parameters(), **ADAMW)

    def step(self, number: int) -> float:
        total, last = 0.0, self.task.parts - 1
        for index, (inputs, targets) in enumerate(self.task.microbatches(number)):
            with self.net.no_sync() if index < last and not self.is_alone else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.task.is_bf16):
                    logits = self.net(inputs)
                loss = mean_loss(logits, targets) / self.task.parts
                loss.backward()
            total += loss.item() / self.task.ranks
        clip_grad_norm_(self.net.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Sharded:
    """FSDP2: `zero3` gathers weights for each use, `zero2` keeps them until the backward."""

    def __init__(self, task: Task) -> None:
        self.task = task
        mesh = init_device_mesh("cpu", (RANKS,))
        self.net = Llama(task.sizes)
        for module in (*self.net.layers, self.net):
            fully_shard(module, mesh=mesh, reshard_after_forward=task.mode == "zero3")
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **ADAMW)

    def step(self, number: int) -> float:
        total = 0.0
        for inputs, targets in self.task.microbatches(number):
            loss = mean_loss(self.net(inputs), targets) / self.task.parts
            loss.backward()
            total += loss.item() / RANKS
        clip_grad_norm_(self.net.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class TensorParallel:
    """DTensor's tensor parallelism; embedding, head and loss are sharded over the vocabulary."""

    def __init__(self, task: Task) -> None:
        self.task = task
        mesh = init_device_mesh("cpu", (RANKS,))
        self.net = Llama(task.sizes)
        columns = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
        for layer in self.net.layers:
            parallelize_module(
                layer, mesh, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}
            )
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(use_local_output=False),
        }
        parallelize_module(self.net, mesh, ends)
        # Neither the fused AdamW nor the norm takes a mix of DTensors and tensors.
        cut = [p for p in self.net.parameters() if isinstance(p, DTensor)]
        uncut = [p for p in self.net.parameters() if not isinstance(p, DTensor)]
        self.parts = (cut, uncut)
        self.optimizers = [torch.optim.AdamW(parameters, **ADAMW) for parameters in self.parts]

    def step(self, number: int) -> float:
        total = 0.0
        for inputs, targets in self.task.microbatches(number):
            with loss_parallel():
                loss = mean_loss(self.net(inputs), targets) / self.task.parts
                loss.backward()
            total += _whole(loss.detach()).item() / RANKS
        norms = [_whole(get_total_norm([p.grad for p in parameters])) for parameters in self.parts]
        norm = torch.stack(norms).square().sum().sqrt()
        for parameters, optimizer in zip(self.parts, self.optimizers, strict=True):
            clip_grads_with_norm_(parameters, CLIP_NORM, norm)
            optimizer.step()
            optimizer.zero_grad()
        return total


class Pipelined:
    """`torch.distributed.pipelining` with 1F1B and as many layers on each rank."""

    def __init__(self, task: Task) -> None:
        self.task, rank = task, dist.get_rank()
        layers_per_rank = task.sizes.layers // RANKS
        self.net = Llama(
            task.sizes, layers=range(rank * layers_per_rank, (rank + 1) * layers_per_rank)
        )
        stage = PipelineStage(self.net, rank, RANKS, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, task.parts, loss_fn=mean_loss)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **ADAMW)

    def step(self, number: int) -> float:
        tokens = self.task.rows(number)
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(tokens[:, :-1].contiguous())
        else:
            self.schedule.step(target=tokens[:, 1:].contiguous(), losses=losses)
        clip_over_stages(self.net.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / self.task.parts


def clip_over_stages(parameters: Iterable[nn.Parameter]) -> None:
    """Clip gradients to the norm over all ranks, which hold different parameters."""
    parameters = list(parameters)
    square = get_total_norm([p.grad for p in parameters]).square()
    dist.all_reduce(square)
    clip_grads_with_norm_(parameters, CLIP_NORM, square.sqrt())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(task: Task) -> PeerClock:
    """Train a task in its mode with PyTorch's own wrappers."""
    kinds = {"zero2": Sharded, "zero3": Sharded, "tp": TensorParallel, "pp": Pipelined}
    return timed(task, kinds.get(task.mode, Replicated)(task).step)


def run(task: Task) -> PeerClock:
    dist.init_process_group("gloo")
    return train(task)


if __name__ == "__main__":
    main("native", run)
