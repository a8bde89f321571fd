"""OLMo-core 3.0: its Llama-like mixture without capacities, whose experts are a loop of products.

Its gathers and scatters of tokens are Triton kernels, which a CPU cannot run; torch's index
operations stand in for them. It shares out experts together with HSDP only. `bf16` is autocast in
one rank, and FSDP's bf16 weights on two.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.moe.router import MoERouterGatingFunction
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.ops import moe as ops
from olmo_core.train.train_module.transformer.common import parallelize_model
from olmo_core.train.train_module.transformer.config import (
    TransformerDataParallelConfig,
    TransformerExpertParallelConfig,
)
from torch import Tensor

from benchmarks.mixture_model import MODEL, SEQ
from benchmarks.mixture_peers.common import CLIP_NORM, Task, Trained, adamw, main, token_loss

warnings.filterwarnings("ignore", message="Grouped GEMM not available")


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """Return the rows of tokens `[n, dim]` in the order of their experts `[n * top_k, dim]`."""
    return x.index_select(0, indices // top_k)


def scatter(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
) -> Tensor:
    """Return the weighted sums `[n, dim]` of the rows `[n * top_k, dim]` of each token."""
    if weights is not None:
        x = x * weights.index_select(0, indices).unsqueeze(1).to(x.dtype)
    out = x.new_zeros(x.shape[0] // top_k, x.shape[1])
    return out.index_add(0, indices // top_k, x)


ops.gather, ops.scatter = gather, scatter


def model_config() -> TransformerConfig:
    """Return the config of the same Mixtral."""
    config = TransformerConfig.llama_like_moe(
        d_model=MODEL["dim"],
        vocab_size=MODEL["vocab_size"],
        n_layers=MODEL["n_layers"],
        n_heads=MODEL["n_heads"],
        num_experts=MODEL["experts"],
        top_k=MODEL["top_k"],
        expert_hidden_size=MODEL["ffn_dim"],
        dropless=True,
        z_loss_weight=None,
        rope_theta=10000,
        attn_backend=AttentionBackendName.torch,
    )
    mixture: Any = config.block.feed_forward_moe
    mixture.lb_loss_weight = None
    mixture.router.gating_function = MoERouterGatingFunction.softmax
    mixture.router.normalize_expert_weights = 1.0
    return config


def parallelized(task: Task) -> torch.nn.Module:
    """Return the model with random weights, shared out if there are two ranks."""
    parts: dict[str, Any] = {}
    if task.ranks > 1:
        parts["dp_config"] = TransformerDataParallelConfig(
            name=DataParallelType.hsdp,
            num_replicas=1,
            shard_degree=task.ranks,
            param_dtype=DType.bfloat16 if task.is_bf16 else None,
            reduce_dtype=DType.float32,
        )
        parts["ep_config"] = TransformerExpertParallelConfig(degree=task.ranks)
    mesh = None
    if parts:
        mesh = build_world_mesh(dp=parts["dp_config"], ep=parts["ep_config"], device_type="cpu")
    return parallelize_model(
        model_config().build(init_device="meta"),
        world_mesh=mesh,
        device=torch.device("cpu"),
        max_sequence_length=SEQ,
        rank_microbatch_size=task.rows * SEQ,
        **parts,
    ).train()


def build(task: Task) -> Trained:
    net = parallelized(task)
    optimizer = adamw(net)
    batches = task.microbatches()
    casts = task.is_bf16 and task.ranks == 1

    def step() -> float:
        total = 0.0
        for inputs, targets in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                logits = net(inputs)
            loss = token_loss(logits, targets, task)
            loss.backward()
            total += loss.item()
        net.post_batch()
        clip(net)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Trained(net, step)


def clip(net: torch.nn.Module) -> None:
    """Clip the gradients by their norm, one list for each mesh of ranks."""
    lists: dict[Any, list[Tensor]] = {}
    for weight in net.parameters():
        lists.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    norms = []
    for weights in lists.values():
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights], foreach=True)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = torch.stack(norms).norm()
    for weights in lists.values():
        torch.nn.utils.clip_grads_with_norm_(weights, CLIP_NORM, total, foreach=True)


if __name__ == "__main__":
    main(build)
