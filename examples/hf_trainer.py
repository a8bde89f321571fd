"""The Trainer of transformers with tensor parallelism, which proves its own first steps.

torchrun --nproc-per-node 2 examples/hf_trainer.py FAMILY MICROBATCHES

FAMILY is llama or qwen3. It needs transformers and accelerate.
"""

import sys
import tempfile

import accelerate.parallelism_config
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig

import meshwright as mw

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def main(family: str, microbatches: int) -> int:
    """Train three steps; 1 if the gradients are wrong."""
    dist.init_process_group("gloo")
    config, kind = FAMILIES[family]
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, 0)
    if dist.get_rank() == 0:
        set_seed(0)
        kind(config(**SIZES)).save_pretrained(f"{folders[0]}/model")
    dist.barrier()
    layout = DistributedConfig(tp_size=dist.get_world_size())
    model = kind.from_pretrained(
        f"{folders[0]}/model", distributed_config=layout, dtype=torch.float32
    )
    rows = torch.randint(0, 96, (12, 16), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        output_dir=f"{folders[0]}/out",
        per_device_train_batch_size=4 // microbatches,
        gradient_accumulation_steps=microbatches,
        max_steps=3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    # accelerate accepts tensor parallelism on GPUs only; on them, this line is not needed.
    accelerate.parallelism_config.ParallelismConfig._validate_accelerator = lambda *args: None
    callback = mw.WatchCallback(f"{folders[0]}/watched")
    Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[callback],
    ).train()
    passed = [callback.verdict is None or callback.verdict.passed]
    dist.broadcast_object_list(passed, 0)
    dist.destroy_process_group()
    return 0 if passed[0] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
