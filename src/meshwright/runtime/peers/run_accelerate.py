"""transformers' Llama under accelerate: DDP, its FSDP2 plugin, autocast; `tp_plan="auto"` for TP.

On a CPU accelerate accepts its FSDP plugin but silently trains with DDP; `_sharded` fixes that.
"""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM

from meshwright.comm.values import gather_values
from meshwright.runtime.peers.catalogue import RANKS
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, PeerClock, Task, main, timed
from meshwright.runtime.peers.hf import llama_config
from meshwright.runtime.peers.llama import mean_loss


def _sharded(task: Task) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=task.mode == "zero3",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.parts, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def accelerated(task: Task) -> PeerClock:
    if task.mode in ("zero2", "zero3"):
        accelerator = _sharded(task)
    else:
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=task.parts,
            mixed_precision="bf16" if task.is_bf16 else "no",
        )
    net = LlamaForCausalLM(llama_config(task.sizes))
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    net, optimizer = accelerator.prepare(net, optimizer)

    def step(number: int) -> float:
        total = 0.0
        for inputs, targets in task.microbatches(number):
            with accelerator.accumulate(net):
                loss = mean_loss(net(input_ids=inputs).logits, targets)
                accelerator.backward(loss)  # divides by the number of microbatches
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / task.parts / task.ranks
        return total

    return timed(task, step)


def tensor_parallel(task: Task) -> PeerClock:
    dist.init_process_group("gloo")
    new_folder = None
    if dist.get_rank() == 0:
        new_folder = tempfile.mkdtemp()
        LlamaForCausalLM(llama_config(task.sizes)).save_pretrained(new_folder)
    folder = gather_values(new_folder)[0]
    net = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder))
    cut = [p for p in net.parameters() if isinstance(p, DTensor)]
    uncut = [p for p in net.parameters() if not isinstance(p, DTensor)]
    parts = [parameters for parameters in (cut, uncut) if parameters]
    optimizers = [torch.optim.AdamW(parameters, **ADAMW) for parameters in parts]

    def step(number: int) -> float:
        total = 0.0
        for inputs, targets in task.microbatches(number):
            loss = mean_loss(net(input_ids=inputs).logits, targets) / task.parts
            loss.backward()
            total += loss.item() / RANKS
        norm = torch.stack([_norm(parameters) for parameters in parts]).square().sum().sqrt()
        for parameters, optimizer in zip(parts, optimizers, strict=True):
            clip_grads_with_norm_(parameters, CLIP_NORM, norm)
            optimizer.step()
            optimizer.zero_grad()
        return total

    return timed(task, step)


def _norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    norm = get_total_norm([p.grad for p in parameters])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def run(task: Task) -> PeerClock:
    return tensor_parallel(task) if task.mode == "tp" else accelerated(task)


if __name__ == "__main__":
    main("accelerate", run)
