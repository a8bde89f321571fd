"""Megatron-Core 0.16: its GPT with local layers, one MLP for each expert, tokens sent all-to-all.

Its grouped products are kernels for GPUs. Attention is torch's in place of its unfused one. The
shim that says "cuda" and means the CPU is that of `meshwright bench peers`. `bf16` keeps fp32
masters and reduces in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

torch.compile = lambda function, **_: function  # it would fuse small parts; the shim confuses it

from meshwright.runtime.peers import run_megatron

assert run_megatron  # its shim comes before what follows

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

from benchmarks.mixture_model import MODEL, SEQ
from benchmarks.mixture_peers.common import LR, Task, Trained, main


def as_list(counts: Any) -> Any:
    """Return counts of tokens as gloo takes them; Megatron-Core copies those on GPUs only."""
    return counts.tolist() if isinstance(counts, Tensor) else counts


Nothing = run_megatron.Nothing
Nothing.record_event = lambda *_: Nothing()  # what waits for copies of token counts
_all_to_all = token_dispatcher.all_to_all
token_dispatcher.all_to_all = lambda group, rows, *counts, **rest: _all_to_all(
    group, rows, *(as_list(some) for some in counts), **rest
)
moe_utils.te_general_gemm = None  # 0.16 leaves it undefined without Transformer Engine


def model(task: Task) -> Any:
    """Return the same Mixtral."""
    config = run_megatron.model_config(
        task.is_bf16,
        num_layers=MODEL["n_layers"],
        hidden_size=MODEL["dim"],
        ffn_hidden_size=MODEL["ffn_dim"],
        num_attention_heads=MODEL["n_heads"],
        num_moe_experts=MODEL["experts"],
        moe_router_topk=MODEL["top_k"],
        moe_ffn_hidden_size=MODEL["ffn_dim"],
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=False,
        expert_model_parallel_size=task.ranks,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=MODEL["experts"], moe_grouped_gemm=False, normalization="RMSNorm"
        ),
        vocab_size=MODEL["vocab_size"],
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def build(task: Task) -> Trained:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=task.ranks)
    run_megatron.rng.model_parallel_cuda_manual_seed(1)
    net, optimizer = run_megatron.wrapped(model(task), lr=LR, weight_decay=0.01)
    pass_over = get_forward_backward_func()
    places = torch.arange(SEQ).expand(task.rows, -1)
    batches = task.microbatches()

    def forward(rows: Any, model: Any) -> tuple[Tensor, Any]:
        inputs, targets = next(rows)
        out = model(input_ids=inputs, position_ids=places, attention_mask=None, labels=targets)

        def loss(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = out.float().mean()
            return mean, {"loss": mean.detach().clone()}

        return out, loss

    def step() -> float:
        net.zero_grad_buffer()
        optimizer.zero_grad()
        found = pass_over(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=net,
            num_microbatches=task.parts,
            seq_length=SEQ,
            micro_batch_size=task.rows,
            forward_only=False,
        )
        optimizer.step()
        return sum(part["loss"].item() for part in found) / task.parts

    return Trained(net, step)


if __name__ == "__main__":
    main(build)
