"""torchtitan 0.3: its Qwen3 without norms of queries and keys, which is a Mixtral.

torchtitan computes experts in bf16 whatever the precision; in fp32 they are computed in fp32 here,
with the same `grouped_mm`. Attention is its causal one, since it offers masked ones only, which a
CPU cannot train. One rank has no FSDP in fp32; all else is FSDP2, which keeps the weights between
forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.runtime.peers import run_torchtitan

assert run_torchtitan  # its shim comes before what follows

from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from benchmarks.mixture_model import MODEL, SEQ
from benchmarks.mixture_peers.common import CLIP_NORM, Task, Trained, adamw, main, token_loss


def model_config() -> Any:
    """Return the config of the same Mixtral."""
    dim, vocab = MODEL["dim"], MODEL["vocab_size"]
    qwen3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=MODEL["n_layers"],
        dim=dim,
        n_heads=MODEL["n_heads"],
        n_kv_heads=MODEL["n_kv_heads"],
        head_dim=MODEL["head_dim"],
        moe_hidden_dim=MODEL["ffn_dim"],
        num_experts=MODEL["experts"],
        top_k=MODEL["top_k"],
        attn_backend="sdpa",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=MODEL["head_dim"], max_seq_len=SEQ, theta=10000.0),
    )
    for layer in layers:
        layer.attention.qk_norm = None
        layer.moe.load_balance_coeff = None
    return qwen3.Qwen3Model.Config(
        vocab_size=vocab,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )


def in_fp32(self: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute the experts as torchtitan does, without its casts to bf16."""
    gate, down, up = (
        weight.to_local() if hasattr(weight, "to_local") else weight
        for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
    )
    offsets = counts.cumsum(0, dtype=torch.int32)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)

    return product(F.silu(product(x, gate)) * product(x, up), down)


def parallelized(config: Any, task: Task) -> tuple[torch.nn.Module, Any]:
    """Return the model with random weights, shared out if there are two ranks; the axes."""
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        data_parallel_shard_degree=task.ranks,
        expert_parallel_degree=task.ranks,
        fsdp_reshard_after_forward="never",
    )
    dist_utils.set_spmd_backend("partial_dtensor")
    dims = ParallelDims.from_config(parallelism, task.ranks)
    dims.build_mesh()
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=task.ranks > 1)
    with torch.device("meta"):
        net = config.build()
    net = qwen3.parallelize_qwen3(
        net,
        parallel_dims=dims,
        training=TrainingConfig(
            mixed_precision_param="bfloat16" if task.is_bf16 else "float32",
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        skip_dp=task.ranks == 1 and not task.is_bf16,
    )
    net.to_empty(device="cpu")
    with torch.no_grad():
        net.init_weights(buffer_device=None)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return net.train(), dims


def build(task: Task) -> Trained:
    if not task.is_bf16:
        GroupedExperts.forward = in_fp32
    net, dims = parallelized(model_config(), task)
    optimizer = adamw(net)
    batches = task.microbatches()

    def step() -> float:
        total = 0.0
        for inputs, targets in batches:
            loss = token_loss(net(inputs), targets, task)
            (loss / task.ranks).backward()  # its FSDP sums over ranks
            total += loss.item()
        dist_utils.clip_grad_norm_(
            net.parameters(), CLIP_NORM, foreach=True, ep_enabled=dims.ep_enabled
        )
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Trained(net, step)


if __name__ == "__main__":
    main(build)
