"""litgpt's model under Lightning Fabric: DDP and FSDP2; `bf16` is Fabric's bf16-mixed."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshwright.runtime.peers.catalogue import RANKS
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, PeerClock, Task, main, timed


def strategy(task: Task) -> Any:
    if task.mode not in ("zero2", "zero3"):
        return "auto" if task.ranks == 1 else DDPStrategy(process_group_backend="gloo")

    def shard(net: Any, mesh: Any) -> Any:
        for module in (*net.transformer.h, net):
            fully_shard(
                module, mesh=mesh["data_parallel"], reshard_after_forward=task.mode == "zero3"
            )
        return net

    return ModelParallelStrategy(
        parallelize_fn=shard, data_parallel_size=RANKS, tensor_parallel_size=1
    )


def model(task: Task) -> GPT:
    sizes = task.sizes
    return GPT(
        Config(
            name="bench",
            block_size=sizes.seq,
            vocab_size=sizes.vocab,
            padded_vocab_size=sizes.vocab,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_query_groups=sizes.heads,
            n_embd=sizes.dim,
            intermediate_size=sizes.ffn,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )


def run(task: Task) -> PeerClock:
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=task.ranks,
        strategy=strategy(task),
        precision="bf16-mixed" if task.is_bf16 else "32-true",
    )
    fabric.launch()
    if not dist.is_initialized():  # of one rank Fabric makes no group
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net: Any = model(task)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    net = fabric.setup(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), **ADAMW))

    def step(number: int) -> float:
        total, last = 0.0, task.parts - 1
        for index, (inputs, targets) in enumerate(task.microbatches(number)):
            with fabric.no_backward_sync(net, enabled=index < last):
                loss = chunked_cross_entropy(net(inputs), targets, chunk_size=0) / task.parts
                fabric.backward(loss)
            total += loss.item() / task.ranks
        fabric.clip_gradients(net, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return timed(task, step)


if __name__ == "__main__":
    main("litgpt", run)
