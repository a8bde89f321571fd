"""`instead_of`: the key of a config for a name that other frameworks use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Of DeepSpeed, Hugging Face, Megatron-LM, torchtitan, nanotron and Accelerate.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "layout.tp": (
        *("tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_degree"),
        *("model_parallel_size", "tensor_parallel", "tp_size", "tp_degree"),
    ),
    "layout.pp": (
        *("pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline_parallel_degree"),
        *("pipe_parallel_size", "pipeline_parallel", "pp_size", "pp_degree"),
    ),
    "layout.cp": (
        *("context_parallel_size", "context_parallel_degree", "context_parallel", "cp_size"),
    ),
    "layout.ep": (
        *("expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree"),
        *("expert_parallel", "ep_size"),
    ),
    "layout.sp": ("sequence_parallel",),
    "layout.dp_replicate": (
        *("dp", "data_parallel_size", "data_parallel_replicate_degree", "data_parallel", "dp_size"),
    ),
    "layout.dp_shard": ("data_parallel_shard_degree",),
    "layout.zero": ("zero_stage", "zero_optimization", "fsdp", "sharding_strategy"),
    "layout.schedule": ("pipeline_schedule", "pipeline_parallel_schedule"),
    "layout.virtual_stages": ("virtual_pipeline_model_parallel_size", "num_virtual_stages"),
    "layout.recompute": (
        *("activation_checkpointing", "activation_checkpoint", "gradient_checkpointing"),
        *("recompute_granularity", "checkpoint_activations"),
    ),
    "layout.offload": ("cpu_offload", "offload_optimizer", "offload_param"),
    "layout.microbatch": (
        *("micro_batch_size", "micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
        *("per_device_train_batch_size", "local_batch_size", "microbatch_size"),
    ),
    "train.batch": ("global_batch_size", "train_batch_size", "batch_size"),
    "train.seq_len": ("seq_length", "max_seq_len", "sequence_length", "max_length"),
    "train.steps": ("max_steps", "train_iters", "num_steps", "training_steps"),
    "train.precision": ("dtype", "bf16", "fp16", "mixed_precision", "param_dtype"),
    "train.clip_norm": ("clip_grad", "gradient_clipping", "max_grad_norm", "grad_clip"),
    "optimizer.lr": ("learning_rate",),
    "optimizer.warmup_steps": ("lr_warmup_iters", "num_warmup_steps"),
    "model.dim": ("hidden_size", "d_model", "n_embd"),
    "model.n_layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "model.n_heads": ("num_attention_heads", "n_head", "num_heads"),
    "model.n_kv_heads": ("num_key_value_heads", "num_query_groups", "num_kv_heads"),
    "model.ffn_dim": ("intermediate_size", "ffn_hidden_size", "hidden_dim"),
    "model.experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "model.top_k": ("num_experts_per_tok", "moe_router_topk"),
    "model.pad_vocab_to_multiple_of": (
        *("make_vocab_size_divisible_by", "padding_multiple", "resize_token_embeddings_to_32x"),
    ),
    "model.init_from": (
        *("hf", "pretrained", "model_name", "model_name_or_path"),
        "pretrained_model_name_or_path",
    ),
    "cluster.devices_per_node": (
        *("gpus", "n_gpus", "num_gpus", "ngpu", "gpus_per_node", "num_gpus_per_node", "devices"),
        *("nproc_per_node", "num_processes", "world_size"),
    ),
    "cluster.nodes": ("nnodes", "num_nodes", "num_machines", "n_nodes"),
    "cluster.preset": ("gpu", "gpu_type", "accelerator"),
    "data.tokenizer": ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
    "checkpoint.every": ("interval", "save_interval", "save_steps", "save_every"),
    "log.dir": ("out", "out_dir", "run_dir"),
    "checkpoint.dir": ("save", "output_dir", "save_dir"),
}
_KEYS: Final = {name: key for key, names in _NAMES.items() for name in names}
# Names without a key of ours, and why.
_FOLLOWS: Final = "It follows from train.batch and layout.microbatch"
_WITHOUT: Final = {"gradient_accumulation_steps": _FOLLOWS, "num_microbatches": _FOLLOWS}


def instead_of(name: str) -> tuple[list[str], str]:
    """Return our key, as `section.key`, for another framework's name, or why there is none."""
    name = name.replace("-", "_")
    return [_KEYS[name]] if name in _KEYS else [], _WITHOUT.get(name, "")
