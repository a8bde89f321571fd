"""OLMo-core: its Trainer with its own Llama, on gloo without changes.

`bf16` is FSDP with bf16 weights and fp32 reduction, its only data parallelism in bf16 on a CPU that
has fp32 master weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from olmo_core.config import DType
from olmo_core.data import (
    NumpyDataLoaderConfig,
    NumpyDatasetDType,
    NumpyFSLDatasetConfig,
    TokenizerConfig,
)
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.parallel.pipeline_parallel import PipelineScheduleType
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
from olmo_core.train.callbacks import Callback
from olmo_core.train.train_module import (
    TransformerDataParallelConfig,
    TransformerTrainModuleConfig,
)
from olmo_core.train.train_module.transformer.config import (
    TransformerContextParallelConfig,
    TransformerPipelineParallelConfig,
    TransformerPipelineTrainModuleConfig,
    TransformerTensorParallelConfig,
)
from olmo_core.utils import seed_all

from meshwright.runtime.peers.catalogue import RANKS
from meshwright.runtime.peers.common import ADAMW, CLIP_NORM, PeerClock, Task, main


def parallelism(task: Task) -> dict[str, Any]:
    """Return the settings of OLMo-core's train module that select a task's mode."""
    sharded = TransformerDataParallelConfig(
        name=DataParallelType.fsdp,
        param_dtype=DType.bfloat16 if task.is_bf16 else None,
        reduce_dtype=DType.float32,
    )
    if task.mode == "ddp":
        return {"dp_config": TransformerDataParallelConfig(name=DataParallelType.ddp)}
    if task.mode == "tp":
        return {"tp_config": TransformerTensorParallelConfig(degree=RANKS)}
    if task.mode == "pp":
        pipeline = TransformerPipelineParallelConfig(
            degree=RANKS, schedule=PipelineScheduleType.single_1F1B
        )
        return {"pp_config": pipeline}
    if task.mode == "ulysses":
        context = TransformerContextParallelConfig.ulysses(degree=RANKS)
        return {"cp_config": context, "dp_config": sharded}
    return {"dp_config": sharded}


class Marks(Callback):
    """A callback that records the end of each step; the clock starts with the first."""

    def pre_train(self) -> None:
        self.clock = PeerClock()

    def post_step(self) -> None:
        self.clock.mark()


def run(task: Task) -> PeerClock:
    sizes, seq = task.sizes, task.sizes.seq
    prepare_training_environment(backend="gloo")
    seed_all(0)
    net = TransformerConfig.llama_like(
        d_model=sizes.dim,
        vocab_size=sizes.vocab,
        n_layers=sizes.layers,
        n_heads=sizes.heads,
        rope_theta=10000,
        hidden_size_multiple_of=128,  # 1408 for a dim of 512
        attn_backend=AttentionBackendName.torch,
    ).build(init_device="meta")
    kind = (
        TransformerPipelineTrainModuleConfig if task.mode == "pp" else TransformerTrainModuleConfig
    )
    module = kind(
        rank_microbatch_size=task.microbatch * seq,
        max_sequence_length=seq,
        optim=AdamWConfig(**ADAMW),
        max_grad_norm=CLIP_NORM,
        **parallelism(task),
    ).build(net)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        count = (task.steps + 2) * sizes.batch * seq
        np.random.default_rng(0).integers(2, sizes.vocab, count, dtype=np.uint16).tofile(tokens)
        dataset = NumpyFSLDatasetConfig(
            paths=[str(tokens)],
            sequence_length=seq,
            tokenizer=TokenizerConfig(vocab_size=sizes.vocab, eos_token_id=0, pad_token_id=1),
            dtype=NumpyDatasetDType.uint16,
            work_dir=folder,
        ).build()
        loader = NumpyDataLoaderConfig(
            global_batch_size=sizes.batch * seq, seed=0, num_workers=0, work_dir=folder
        ).build(dataset, dp_process_group=module.dp_process_group)
        marks = Marks()
        TrainerConfig(
            save_folder=folder,
            save_overwrite=True,
            metrics_collect_interval=1,
            cancel_check_interval=1000,
            max_duration=Duration.steps(task.steps),
            no_checkpoints=True,
            no_evals=True,
        ).with_callback("marks", marks).build(module, loader).fit()
    return marks.clock


if __name__ == "__main__":
    main("olmo", run)
