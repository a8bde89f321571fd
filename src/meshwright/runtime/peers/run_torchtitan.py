"""torchtitan 0.3: its Trainer on the CPU, through a shim for the accelerator that it expects.

`bf16` is FSDP2's mixed precision with weights kept until the backward, the nearest to plain data
parallelism that it has in bf16.
"""

from __future__ import annotations

import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed as dist

from meshwright.runtime.peers.catalogue import DATA, RANKS, SINGLE
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, PeerClock, Task, main


def pretend_accelerator() -> None:
    """Make torch.cpu look like an accelerator's module, which torchtitan needs at import."""
    cpu: Any = torch.cpu
    original = torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: cpu if kind == "cpu" else original(kind)
    properties = types.SimpleNamespace(total_memory=24 << 30, name="cpu")
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: properties
    cpu.reset_peak_memory_stats = cpu.empty_cache = cpu.set_device = lambda *_: None
    cpu.memory_stats = lambda *_: {}
    cpu.device_count, cpu.current_device = lambda: 1, lambda: 0
    barrier: Any = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)
    dist.set_timeout = lambda *_, **__: None  # torch 2.13 has none


pretend_accelerator()

import torchtitan.tools.utils as tools  # noqa: E402

tools.device_type, tools.device_module = "cpu", torch.cpu
tools.get_peak_flops = lambda *_: 1e12

import torchtitan.hf_datasets.text_datasets as datasets  # noqa: E402
import torchtitan.models.llama3 as llama3  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402


def model_config(task: Task) -> Any:
    """Return torchtitan's config of the compared Llama, with torch's attention."""
    sizes = task.sizes
    rope = ComplexRoPE.Config(
        dim=sizes.dim // sizes.heads, max_seq_len=sizes.seq, theta=10000, scaling="none"
    )

    def flavor(attn_backend: str, tp_gemm_backend: str = "default") -> Any:
        return llama3.Llama3Model.Config(
            dim=sizes.dim,
            vocab_size=sizes.vocab,
            tok_embeddings=Embedding.Config(
                num_embeddings=sizes.vocab,
                embedding_dim=sizes.dim,
                param_init=llama3._EMBEDDING_INIT,
            ),
            norm=RMSNorm.Config(normalized_shape=sizes.dim, param_init=llama3._NORM_INIT),
            lm_head=Linear.Config(
                in_features=sizes.dim,
                out_features=sizes.vocab,
                param_init=llama3._output_linear_init(sizes.dim),
            ),
            layers=llama3._build_llama3_layers(
                fuse_qkv=True,
                n_layers=sizes.layers,
                dim=sizes.dim,
                n_heads=sizes.heads,
                hidden_dim=sizes.ffn,
                rope=rope,
                attn_backend=attn_backend,
                tp_gemm_backend=tp_gemm_backend,
            ),
        )

    llama3.llama3_configs["bench"] = flavor
    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    return llama3.model_registry("bench", attn_backend="sdpa")


def random_text(task: Task) -> type:
    """Return a class that replaces torchtitan's data set: the rows of the task, one by one."""

    class Text(torch.utils.data.IterableDataset):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            for number in range(task.steps + 2):  # it reads ahead
                for row in task.rows(number):
                    positions = torch.arange(task.sizes.seq)
                    yield {"input": row[:-1], "positions": positions}, row[1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    return Text


def settings(task: Task, folder: str) -> Any:
    config = llama3_debugmodel()
    config.model_spec = model_config(task)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=task.sizes.vocab)
    training, parallelism = config.training, config.parallelism
    is_pipeline = task.mode == "pp"
    training.local_batch_size = task.sizes.batch if is_pipeline else task.microbatch
    training.global_batch_size = task.sizes.batch
    training.seq_len, training.steps = task.sizes.seq, task.steps
    training.max_norm = CLIP_NORM
    training.mixed_precision_param = "bfloat16" if task.is_bf16 else "float32"
    training.disable_cuda_graphs = True
    parallelism.spmd_backend = "partial_dtensor"
    parallelism.data_parallel_shard_degree = 1
    parallelism.fsdp_reshard_after_forward = "always" if task.mode == "zero3" else "never"
    if task.mode in (SINGLE, "ddp"):
        parallelism.data_parallel_replicate_degree = task.ranks
    elif task.mode in DATA:
        parallelism.data_parallel_shard_degree = RANKS
    elif task.mode == "tp":
        parallelism.tensor_parallel_degree = RANKS
    elif is_pipeline:
        parallelism.pipeline_parallel_degree = RANKS
        parallelism.pipeline_parallel_schedule = "1F1B"
        parallelism.pipeline_parallel_microbatch_size = task.microbatch
    config.activation_checkpoint = None
    config.checkpoint.enable = False
    config.metrics.log_freq = 1
    config.comm.trace_buf_size = 0
    config.dump_folder = folder
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(Path(folder) / "tokenizer.json"))
    config.hf_assets_path = folder
    return config


def step_microbatches(schedule: Any) -> None:
    """Give a pipeline schedule the method that torchtitan calls and torch 2.13 lacks."""
    loss_fn = schedule._loss_fn
    if loss_fn is not None:

        def first(out: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
            loss = loss_fn(out, target, **options)
            return loss[0] if isinstance(loss, tuple) else loss

        schedule._loss_fn = first

    def step(
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        loss_kwargs: Any = None,
        return_outputs: bool = False,
    ) -> None:
        schedule._stage.has_backward = True
        schedule._stage.clear_runtime_states()
        count = schedule._n_microbatches
        schedule._step_microbatches(
            arg_mbs or [()] * count,
            kwarg_mbs or [{}] * count,
            target_mbs,
            losses,
            return_outputs,
            loss_kwargs=loss_kwargs,
        )

    schedule.step = step


def run(task: Task) -> PeerClock:
    datasets.HuggingFaceTextDataset = random_text(task)
    with tempfile.TemporaryDirectory() as folder:
        trainer = settings(task, folder).build()
    for group in trainer.optimizers:
        for param_group in group.param_groups:
            param_group.update({key: value for key, value in ADAMW.items() if key in param_group})
    for model_part in trainer.model_parts:
        for module in model_part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    if task.mode == "pp":
        step_microbatches(trainer.pp_schedule)
    clock, train_step, losses = PeerClock(), trainer.train_step, [float("nan")]
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)

    def step(*args: Any, **options: Any) -> None:
        train_step(*args, **options)
        clock.mark(losses[-1])

    trainer.train_step = step
    trainer.train()
    return clock


if __name__ == "__main__":
    main("torchtitan", run)
