"""Megatron-core 0.16 on the CPU, through a shim that answers torch.cuda calls for the CPU.

Its local layers, with torch's attention in place of its unfused one, which is what it would use on
a GPU. `zero1` is its distributed optimizer; `bf16` has fp32 master weights and reduces in fp32.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # before the shim, which would confuse its tables
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from meshwright.runtime.peers.catalogue import RANKS
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, PeerClock, Task, main, timed


class Nothing:
    """A stand-in for CUDA streams and events that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...


def pretend_cuda() -> None:
    """Replace functions of torch.cuda by ones that answer for the CPU."""
    cuda: Any = torch.cuda
    cpu = torch.device("cpu")
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = Nothing
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.synchronize = cuda.set_device = lambda *_: None
    cuda.current_device, cuda.device_count = lambda: cpu, lambda: 1
    cuda.memory_allocated, cuda.is_current_stream_capturing = lambda *_: 0, lambda: False
    cuda.get_device_capability = lambda *_: (0, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        major=0, minor=0, multi_processor_count=1, total_memory=1 << 34
    )
    cuda.manual_seed = torch.manual_seed
    for module in (cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.nvtx = types.SimpleNamespace(
        range_push=lambda *_: None, range_pop=lambda *_: None, range=contextlib.nullcontext
    )
    for name in ("Float", "Int", "Long", "BFloat16"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_: self
    kind = torch.Tensor.type

    def cuda_type(self: Tensor, *args: Any, **options: Any) -> Any:
        if args or options:
            return kind(self, *args, **options)
        return kind(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = cuda_type
    for name in ("empty", "zeros", "ones", "tensor", "full", "arange", "rand", "randn"):
        setattr(torch, name, _not_on_cuda(getattr(torch, name)))


def _not_on_cuda(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


warnings.filterwarnings("ignore")
pretend_cuda()

import megatron.core.tensor_parallel.random as rng  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()


def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return causal attention of q, k, v `[seq, rows, heads, head_dim]`, with heads flattened."""
    out = F.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True
    )
    return out.permute(2, 0, 1, 3).flatten(2)


DotProductAttention.forward = attend


def model_config(is_bf16: bool, **sizes: Any) -> TransformerConfig:
    """Return Megatron's config of a Llama with the given sizes, without GPU kernels."""
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    return TransformerConfig(
        **sizes,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=is_bf16,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        deallocate_pipeline_outputs=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def wrapped(net: Any, shards: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return a model in Megatron-core's DistributedDataParallel, and its Adam optimizer.

    `shards` selects the distributed optimizer; `options` are those of the optimizer.
    """
    config = net.config
    if config.bf16:
        net = Float16Module(config, net)
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=shards, grad_reduce_in_fp32=config.bf16
    )
    net = DistributedDataParallel(config, wrapping, net)
    config.no_sync_func = net.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=shards,
            clip_grad=CLIP_NORM,
            **options,
        ),
        [net],
    )
    config.grad_scale_func = optimizer.scale_loss
    return net, optimizer


def build(task: Task) -> tuple[Any, Any]:
    """Return the wrapped model and the optimizer of a task."""
    sizes = task.sizes
    config = model_config(
        task.is_bf16,
        num_layers=sizes.layers,
        hidden_size=sizes.dim,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        tensor_model_parallel_size=RANKS if task.mode == "tp" else 1,
        pipeline_model_parallel_size=RANKS if task.mode == "pp" else 1,
        batch_p2p_comm=True,
    )
    net: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return wrapped(
        net,
        task.mode == "zero1",
        lr=ADAMW["lr"],
        weight_decay=ADAMW["weight_decay"],
        adam_beta1=0.9,
        adam_beta2=0.95,
    )


def run(task: Task) -> PeerClock:
    dist.init_process_group("gloo")
    tp, pp = (RANKS if task.mode == mode else 1 for mode in ("tp", "pp"))
    parallel_state.initialize_model_parallel(tp, pp)
    rng.model_parallel_cuda_manual_seed(1)
    net, optimizer = build(task)
    pass_over = get_forward_backward_func()
    positions = torch.arange(task.sizes.seq).expand(task.microbatch, -1)
    shares = task.parts if pp > 1 else task.parts * RANKS

    def forward(microbatches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
        inputs, targets = next(microbatches)
        out = model(input_ids=inputs, position_ids=positions, attention_mask=None, labels=targets)

        def loss(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = out.float().mean()
            return mean, {"loss": mean.detach().clone()}

        return out, loss

    def step(number: int) -> float:
        net.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = pass_over(
            forward_step_func=forward,
            data_iterator=iter(task.microbatches(number)),
            model=net,
            num_microbatches=task.parts,
            seq_length=task.sizes.seq,
            micro_batch_size=task.microbatch,
            forward_only=False,
        )
        optimizer.step()
        return sum(output["loss"].item() for output in outputs) / shares

    return timed(task, step)


if __name__ == "__main__":
    main("megatron", run)
