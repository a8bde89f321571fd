"""Small cases of every kind of layout, for what a program says to be held against."""

import pytest

from meshwright.layout import Layout, broken
from meshwright.prove.case import Case
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec

SIZES = {"dim": 64, "n_layers": 4, "n_heads": 8, "head_dim": 8, "vocab_size": 128}
MODELS = {
    "llama": {"n_kv_heads": 4, "ffn_dim": 128},
    "biased": {"n_kv_heads": 2, "ffn_dim": 96, "attention_bias": True, "mlp_bias": True},
    "tied": {"n_kv_heads": 4, "ffn_dim": 128, "tie_embeddings": True},
    "dropout": {"n_kv_heads": 4, "ffn_dim": 128, "dropout": 0.1},
    "wide": {"n_layers": 8, "n_kv_heads": 8, "ffn_dim": 128},
    "neox": {"family": "neox", "rotary_pct": 0.25, "parallel_residual": True},
    "qwen2": {"family": "qwen2", "n_kv_heads": 4, "ffn_dim": 96},
    "qwen3": {"family": "qwen3", "n_kv_heads": 4, "ffn_dim": 128},
    "granite": {
        "family": "granite",
        "n_kv_heads": 2,
        "ffn_dim": 128,
        "tie_embeddings": True,
        "embedding_scale": 3.0,
        "residual_scale": 0.7,
        "logits_divisor": 1.5,
    },
    "sequential neox": {"family": "neox", "rotary_pct": 0.0, "tie_embeddings": True},
    # Norms on both sides, caps, every other layer with a window.
    "gemma2": {
        "family": "gemma2",
        "n_kv_heads": 4,
        "ffn_dim": 128,
        "layer_pattern": [{"window": 7}, {}],
        "attention_softcap": 2.0,
        "logits_softcap": 4.0,
    },
    # Norms of heads, windows, two bases.
    "gemma3": {
        "family": "gemma3",
        "n_kv_heads": 2,
        "ffn_dim": 96,
        "layer_pattern": [{"window": 11, "rope_theta": 50.0}, {}],
    },
    # Norms after sublayers and over all heads.
    "olmo2": {"family": "olmo2", "n_kv_heads": 4, "ffn_dim": 128},
    "smollm3": {"family": "smollm3", "n_kv_heads": 2, "ffn_dim": 128},
    # Experts: in every layer; a shared one, every other layer an MLP; all of them for each token.
    "mixtral": {"family": "mixtral", "n_kv_heads": 4, "ffn_dim": 96, "experts": 5, "top_k": 2},
    "qwen2_moe": {
        "family": "qwen2_moe",
        "n_kv_heads": 4,
        "ffn_dim": 128,
        "experts": 6,
        "top_k": 3,
        "expert_ffn_dim": 48,
        "shared_ffn_dim": 32,
        "layer_pattern": [{"dense": True}, {}],
    },
    "olmoe": {"family": "olmoe", "n_kv_heads": 2, "ffn_dim": 64, "experts": 3, "top_k": 3},
    # Latent attention: with and without low-rank queries, with values of other sizes than keys.
    "deepseek_v3": {
        "family": "deepseek_v3",
        "ffn_dim": 128,
        "experts": 8,
        "top_k": 3,
        "expert_ffn_dim": 48,
        "shared_ffn_dim": 48,
        "dense_layers": 1,
        "expert_groups": 2,
        "top_groups": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "moonlight": {
        "family": "deepseek_v3",
        "ffn_dim": 96,
        "experts": 6,
        "top_k": 2,
        "expert_ffn_dim": 48,
        "shared_ffn_dim": 96,
        "dense_layers": 1,
        "expert_groups": 1,
        "top_groups": 1,
        "q_lora_rank": 0,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 1.4},
    },
    # Biases of experts, sinks, a bounded activation.
    "gpt_oss": {
        "family": "gpt_oss",
        "n_kv_heads": 4,
        "ffn_dim": 96,
        "experts": 4,
        "top_k": 2,
        "swiglu_limit": 0.6,
        "layer_pattern": [{"window": 7}, {}],
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        "n_kv_heads": 4,
        "ffn_dim": 128,
        "experts": 4,
        "top_k": 2,
        "expert_ffn_dim": 48,
    },
}


def make(layout, model="llama", precision="fp32", packed=False, **train):
    """A case: the label of its layout, a model of `MODELS` and what differs from the defaults."""
    spec = model_spec(**{**SIZES, **MODELS[model]})
    train = TrainSpec(**{"batch": 8, "seq_len": 32, "precision": precision, **train})
    case = Case(spec, train, Layout.parse(layout), packed=packed)
    assert broken(case.model, case.train, case.layout) is None
    return case


CASES = [
    # Experts.
    make("mb2", "mixtral"),
    make("mb4 recompute-full", "qwen2_moe", "bf16", packed=True),
    make("mb4 recompute-selective", "qwen2_moe"),
    make("mb2 recompute-selective", "olmoe", "bf16"),
    make("tp2 mb4", "qwen2_moe"),
    make("tp2 sp mb2", "mixtral", "bf16"),
    make("tp2 sp mb4 recompute-full", "qwen2_moe"),
    make("tp2 mb2 recompute-selective", "qwen2_moe", "bf16"),
    make("shard2 zero3 mb2", "mixtral", packed=True),
    make("shard2 zero2 mb2 offload-params", "qwen2_moe", "bf16"),
    make("pp2 zbv v2 mb1", "qwen2_moe"),
    make("tp2 sp pp2 interleaved_zero_bubble v2 mb1", "olmoe", "bf16"),
    make("cp2-ring mb4", "mixtral", packed=True),
    # Latent attention.
    make("mb2", "deepseek_v3"),
    make("mb4 recompute-selective", "moonlight", "bf16", packed=True),
    make("mb4 recompute-full", "deepseek_v3"),
    make("tp2 mb2", "deepseek_v3", "bf16"),
    make("tp2 sp mb2 recompute-selective", "moonlight"),
    make("tp2 sp mb2", "deepseek_v3", packed=True),
    make("shard2 zero3 mb2", "moonlight"),
    make("cp2-ring mb4", "deepseek_v3", packed=True),
    make("cp2-ulysses mb4 recompute-full", "moonlight"),
    make("tp2 sp pp2 interleaved_zero_bubble v2 mb1", "deepseek_v3"),
    # Sinks, biases of experts.
    make("mb2", "gpt_oss"),
    make("mb4 recompute-selective", "gpt_oss", "bf16", packed=True),
    make("tp2 sp mb2", "gpt_oss", "bf16"),
    make("tp2 mb4 recompute-full", "gpt_oss"),
    make("cp2-ring mb4 recompute-selective", "gpt_oss", packed=True),
    make("cp2-ulysses mb4", "gpt_oss", "bf16"),
    make("shard2 zero3 pp2 zbv v2 mb1", "gpt_oss"),
    # One rank.
    make("mb2"),
    make("mb4", "neox", "bf16", packed=True),
    make("mb4 recompute-full", "biased"),
    make("mb4 recompute-full", "dropout", "bf16"),
    make("mb4 recompute-selective", "sequential neox", packed=True),
    make("zero3 mb4", "tied", "fp16"),
    make("mb2 recompute-selective", "qwen3", "bf16"),
    make("mb2", "granite", packed=True),
    make("mb4", "gemma2"),
    make("mb4 recompute-full", "gemma2", "bf16", packed=True),
    make("mb2 recompute-selective", "gemma3", packed=True),
    make("mb4 recompute-full", "olmo2"),
    # Data.
    make("dp2 mb2", "neox"),
    make("dp2 mb1", "tied", "bf16", reduce_dtype="same"),
    make("shard2 zero1 mb2", "biased", "bf16"),
    make("shard2 zero1 mb2 offload-params"),
    make("dp2 shard2 zero1 mb1", "tied", reduce_dtype="same"),
    make("shard2 zero2 mb2 recompute-selective"),
    make("shard2 zero3 mb2 recompute-full offload-params", packed=True),
    make("dp2 zero3 mb2"),
    make("dp2 shard2 zero2 mb1", "tied", "bf16"),
    make("shard4 zero3 mb1", "biased"),
    # Tensors and the sequence.
    make("tp2 mb2", "qwen3"),
    make("tp4 mb2 recompute-selective", "qwen3", "bf16"),
    make("tp2 sp mb2 recompute-full", "qwen3", packed=True),
    make("tp2 sp mb2", "granite"),
    make("tp2 mb4", "qwen2", "bf16"),
    make("shard2 zero3 tp2 mb2", "qwen3"),
    make("tp2 mb4", "biased"),
    make("tp2 mb4 recompute-full", "dropout"),
    make("tp2 sp mb2", "sequential neox", packed=True),
    make("tp2 sp mb4 recompute-full", "neox", "bf16"),
    make("tp2 sp mb1 recompute-selective", "tied"),
    make("tp4 sp mb4 recompute-full", "dropout", "fp16"),
    make("tp2 mb4", "gemma2", "bf16"),
    make("tp2 sp mb4 recompute-full", "gemma2"),
    make("tp2 mb4", "olmo2"),
    make("tp2 sp mb4", "olmo2", "bf16"),
    make("tp2 mb4 recompute-full", "olmo2"),
    make("tp4 sp mb2 recompute-selective", "olmo2", "bf16"),
    make("tp2 sp mb2", "gemma3"),
    # Logits in several rounds, which need not be alike.
    make("mb2", "tied", "bf16", seq_len=257),
    make("tp2 mb3", batch=9, seq_len=171),
    make("tp2 sp mb2 recompute-selective", "tied", "bf16", seq_len=258),
    make("pp2 zbv v2 mb4", "neox", seq_len=130),
    # Context.
    make("cp2-ring mb4", packed=True),
    make("cp2-ring mb4 recompute-full zero3", "neox"),
    make("cp2-ring mb4 recompute-selective", "biased", packed=True),
    make("cp4-ring mb4 recompute-selective", "tied", "bf16"),
    make("cp2-ring mb4", "neox", "fp16", packed=True),
    make("cp2-ulysses mb4 zero2", "neox", packed=True),
    make("cp2-ulysses mb4 recompute-selective"),
    make("cp2-ring mb4", "qwen3"),
    make("cp2-ulysses tp2 mb4 recompute-selective", "qwen3"),
    make("cp2-ring mb4", "gemma3"),
    make("cp2-ring mb4 recompute-selective", "gemma3", "bf16"),
    make("cp4-ring mb4 recompute-full", "gemma3", packed=True),
    make("cp2-ring mb4", "gemma2", packed=True),
    make("cp2-ulysses mb4", "gemma2", "bf16"),
    make("cp2-ring tp2 mb4", "olmo2"),
    make("cp2-ring mb4", "smollm3"),
    # Pipelines.
    make("pp2 1f1b mb2", "gemma2"),
    make("pp2 zbv v2 mb1", "olmo2", "bf16"),
    make("pp2 interleaved_1f1b v2 mb2 recompute-full", "smollm3"),
    make("pp2 interleaved_zero_bubble v2 mb1", "qwen3", "bf16"),
    make("pp2 naive mb4", "neox"),
    make("pp2 gpipe mb2", "tied", "bf16"),
    make("pp2 1f1b mb1 recompute-full", packed=True),
    make("pp2 interleaved_1f1b v2 mb2", "dropout"),
    make("pp2 looped_bfs v2 mb2", "neox"),
    make("pp2 interleaved_zero_bubble v2 mb1 recompute-selective", "biased"),
    make("pp2 zbv v2 mb1", "sequential neox", "bf16"),
    make("pp2 dualpipev v2 mb1 recompute-full", "tied"),
    make("pp4 1f1b mb2", "tied"),
    # All together.
    make("dp2 tp2 sp mb2 recompute-full", "neox"),
    make("shard2 zero3 cp2-ring mb4 recompute-full", "biased", "bf16", packed=True),
    make("shard2 zero1 pp2 1f1b mb1", "biased"),
    make("shard2 zero1 tp2 sp mb2", "tied", "bf16"),
    make("zero1 cp2-ring pp2 zbv v2 mb2", "biased", "fp16"),
    make("shard2 zero2 pp2 zbv v2 mb1", "neox", "bf16"),
    make("shard2 zero3 pp2 interleaved_zero_bubble v2 mb1", "biased"),
    make("dp2 zero2 pp2 zbv v2 mb1", "tied", "bf16"),
    make("tp2 sp pp2 zbv v2 mb1", "neox"),
    make("cp2-ulysses pp2 1f1b mb4 zero3", "tied"),
    make("zero2 tp2 sp cp2-ring mb4", "sequential neox", packed=True),
    make("shard2 zero2 tp2 sp pp2 1f1b mb2", "tied", "bf16"),
    make("dp2 shard2 zero3 tp2 sp mb2 recompute-full", "neox"),
    make("cp2-ring tp2 pp2 zbv v2 mb2", packed=True),
]

# What a rank keeps depends on how many tokens come to its experts: messages are compared alone.
SHARED_OUT = [
    make("dp2 ep2 mb2", "qwen3_moe", "bf16"),
    make("shard2 zero1 ep2 mb2 recompute-full", "qwen3_moe"),
    make("shard4 zero3 ep2 mb1 recompute-selective", "qwen3_moe", "bf16", packed=True),
    make("shard2 zero2 ep2 tp2 sp mb2 offload-params", "qwen2_moe"),
    make("dp2 shard2 zero2 ep2 mb2", "qwen2_moe", reduce_dtype="same"),
    make("cp2-ring zero2 ep2 pp2 zbv v2 mb2", "qwen3_moe"),
    make("shard2 zero2 ep2 tp2 sp mb2", "deepseek_v3", packed=True),
    make("dp4 ep2 mb2 offload-optimizer", "qwen3_moe", "fp16"),
    make("dp2 ep2 tp2 sp mb2", "gpt_oss", "bf16"),
]


def labelled(cases):
    return [pytest.param(case, id=f"{case.layout.world}: {case.label}") for case in cases]
