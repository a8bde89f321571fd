"""DeepSpeed: its engine with ZeRO 0 to 3, AutoTP over transformers' Llama, PipelineModule, Ulysses.

`bf16` is DeepSpeed's: bf16 weights with fp32 master weights, ZeRO-1, gradients reduced in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from meshwright.runtime.peers.catalogue import RANKS
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, PeerClock, Task, main, timed
from meshwright.runtime.peers.hf import llama_config
from meshwright.runtime.peers.llama import Llama, LlamaBlock, mean_loss

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "bf16": 1}


def settings(task: Task) -> dict[str, Any]:
    """Return the DeepSpeed config of a task."""
    return {
        "train_micro_batch_size_per_gpu": task.microbatch,
        "gradient_accumulation_steps": task.parts,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": STAGES.get(task.mode, 0)},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": task.is_bf16},
        **({"tensor_parallel": {"autotp_size": RANKS}} if task.mode == "tp" else {}),
    }


def engine(task: Task, net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=settings(task))[0]


def model(task: Task) -> nn.Module:
    if task.mode == "tp":
        return LlamaForCausalLM(llama_config(task.sizes))
    if task.mode == "zero3":
        with deepspeed.zero.Init(config_dict_or_path=settings(task)):
            return Llama(task.sizes)
    net = Llama(task.sizes, positions=task.places)
    if task.mode == "ulysses":
        spread = DistributedAttention(_attend, dist.group.WORLD)
        for layer in net.layers:
            layer.attend = lambda q, k, v: _turned(spread(*map(_turned, (q, k, v)), 0))
    return net


def _turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2)  # [rows, heads, seq, head_dim] and [rows, seq, heads, head_dim]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _turned(F.scaled_dot_product_attention(*map(_turned, (q, k, v)), is_causal=True))


class Layer(nn.Module):
    """A block with its own rotary tables, since pipeline stages pass on only one tensor."""

    def __init__(self, block: LlamaBlock, net: Llama) -> None:
        super().__init__()
        self.block, self.cos, self.sin = block, net.cos, net.sin

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.cos, self.sin)


def pipelined(task: Task) -> PeerClock:
    net = Llama(task.sizes)
    layers = [net.embed, *(Layer(block, net) for block in net.layers), net.norm, net.head]
    stages = PipelineModule(
        layers,
        num_stages=RANKS,
        loss_fn=mean_loss,
        partition_method="type:Layer",
        activation_checkpoint_interval=0,
    )
    trainer = engine(task, stages)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(task.steps):
            yield from task.microbatches(number)

    microbatches = endless()
    return timed(task, lambda _: trainer.train_batch(data_iter=microbatches).item() / RANKS)


def run(task: Task) -> PeerClock:
    deepspeed.init_distributed()
    if task.mode == "pp":
        return pipelined(task)
    trainer = engine(task, model(task))

    def step(number: int) -> float:
        total = 0.0
        for inputs, targets in task.microbatches(number):
            logits = trainer(inputs)
            loss = mean_loss(getattr(logits, "logits", logits), targets)
            trainer.backward(loss)  # divides by the number of microbatches
            trainer.step()
            total += loss.item() / task.parts / task.ranks
        return total

    return timed(task, step)


if __name__ == "__main__":
    main("deepspeed", run)
