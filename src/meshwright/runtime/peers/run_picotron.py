"""picotron: its data (bucketed), tensor, pipeline and ring parallelism, on gloo.

Its model imports flash-attention even where it does not use it; a stand-in replaces it. It has no
gradient clipping, so the clipping here is that of `native`.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from meshwright.runtime.peers.catalogue import CONTEXT, RANKS
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, PeerClock, Task, main, timed
from meshwright.runtime.peers.llama import mean_loss

os.environ |= {"FLASH_ATTEN": "0", "DTYPE": "float32", "DEVICE": "cpu", "CONTEXT_PARALLEL": "0"}
for name, function in (
    ("flash_attn_interface", "flash_attn_func"),
    ("layers.rotary", "apply_rotary_emb"),
    ("ops.triton.layer_norm", "layer_norm_fn"),
):
    path = "flash_attn"
    for part in ("", *name.split(".")):
        path = f"{path}.{part}" if part else path
        sys.modules.setdefault(path, types.ModuleType(path))
    setattr(sys.modules[path], function, None)

import picotron.process_group_manager as groups  # noqa: E402
from picotron.context_parallel.context_parallel import apply_context_parallel  # noqa: E402
from picotron.data_parallel.data_parallel import DataParallelBucket  # noqa: E402
from picotron.model import Llama  # noqa: E402
from picotron.pipeline_parallel.pipeline_parallel import (  # noqa: E402
    PipelineParallel,
    train_step_pipeline_1f1b,
)
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel  # noqa: E402


def model(task: Task) -> Any:
    sizes = task.sizes
    config = types.SimpleNamespace(
        vocab_size=sizes.vocab,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.seq,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )
    net: Any = Llama(config)
    if task.mode == "tp":
        net = apply_tensor_parallel(net)
    if task.mode == "pp":
        net = PipelineParallel(net, config)
    if task.mode == "ring":
        net = apply_context_parallel(net)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return DataParallelBucket(net) if task.mode in ("ddp", *CONTEXT) else net


def clip(task: Task, net: Any) -> None:
    """Clip gradients to the norm over the whole model."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    square = get_total_norm(gradients).square()
    if task.mode in ("tp", "pp"):
        # Under tp the norms' small gradients, which both ranks hold, count twice: as much work.
        dist.all_reduce(square)
    clip_grads_with_norm_(net.parameters(), CLIP_NORM, square.sqrt())


class Loader:
    """Yields the microbatches of a step in the form that picotron's pipeline expects."""

    def __init__(self, task: Task) -> None:
        self.grad_acc_steps = task.parts
        self._parts = self._endless(task)

    def _endless(self, task: Task) -> Iterator[dict[str, Tensor]]:
        for number in range(task.steps):
            for inputs, targets in task.microbatches(number):
                positions = task.places.expand(len(inputs), -1)
                yield {"input_ids": inputs, "target_ids": targets, "position_ids": positions}

    def __next__(self) -> dict[str, Tensor]:
        return next(self._parts)


def backward(task: Task, net: Any, number: int) -> float:
    """Accumulate a step's gradients as picotron's `train_step` does; returns the loss share."""
    total, last = 0.0, task.parts - 1
    for index, (inputs, targets) in enumerate(task.microbatches(number)):
        net.require_backward_grad_sync = index == last
        loss = mean_loss(net(input_ids=inputs), targets) / task.parts
        loss.backward()
        total += loss.item() / RANKS
    return total


def run(task: Task) -> PeerClock:
    dist.init_process_group("gloo")
    degrees = {"tp": 1, "ring": 1, "pp": 1, "ddp": 1} | {task.mode: RANKS}
    groups.setup_process_group_manager(
        tp_size=degrees["tp"],
        cp_size=degrees["ring"],
        pp_size=degrees["pp"],
        dp_size=degrees["ddp"],
    )
    net = model(task)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    loader = Loader(task)
    shape = (task.microbatch, task.sizes.seq, task.sizes.dim)

    def step(number: int) -> float:
        optimizer.zero_grad()
        if task.mode == "pp":
            cpu = torch.device("cpu")
            loss = train_step_pipeline_1f1b(net, loader, shape, cpu, torch.float32)
        else:
            loss = backward(task, net, number)
        clip(task, net)
        optimizer.step()
        if hasattr(net, "reset"):
            net.reset()
        return loss

    return timed(task, step)


if __name__ == "__main__":
    main("picotron", run)
