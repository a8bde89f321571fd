"""Small configs of transformers' models, some of each of the families that came later."""

import transformers

from hf_mamba import MAMBAS

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WINDOWED = ["sliding_attention", "full_attention"]
HALF_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}
SEED_OSSES = {
    "gqa, wide heads": {**NO_TOKENS, "num_key_value_heads": 2, "head_dim": 24},
    "all biases, mqa, tied": {
        **NO_TOKENS,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "no biases, eps": {
        **NO_TOKENS,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "attention_bias": False,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
}
GEMMAS = {
    "wide heads": {**NO_TOKENS, "num_key_value_heads": 2, "head_dim": 24},
    "mqa, narrow heads, biases": {
        **NO_TOKENS,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "attention_bias": True,
    },
    "not tied, gelu that is its approximation": {
        **NO_TOKENS,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
        "rms_norm_eps": 0.1,
    },
}
STARCODER2S = {
    "gqa": {**NO_TOKENS, "num_key_value_heads": 2},
    "mqa, no biases, window": {
        **NO_TOKENS,
        "num_key_value_heads": 1,
        "use_bias": False,
        "sliding_window": 7,
    },
    "not tied, silu, eps": {
        **NO_TOKENS,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "norm_epsilon": 0.1,
    },
}
ROUTED = {"moe_intermediate_size": 24, "pad_token_id": None}
GLM4_MOES = {
    "three of seven, norms of heads, a dense layer": {
        **ROUTED,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "one of twelve in groups, mqa, yarn": {
        **ROUTED,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "n_routed_experts": 12,
        "num_experts_per_tok": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 0.8,
        "rope_parameters": HALF_YARN,
    },
    "all of three, tied, whole heads rotate": {
        **ROUTED,
        "num_key_value_heads": 4,
        "n_routed_experts": 3,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
        "rms_norm_eps": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 1.0,
        },
    },
}
DOTS1S = {
    "two of five, a dense layer": {
        **ROUTED,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "one of eight in groups, late windows": {
        **ROUTED,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 1,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "all of three, tied, biases, windows by layer": {
        **ROUTED,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "n_routed_experts": 3,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "sliding_window": 9,
        "layer_types": WINDOWED,
    },
}
MINIMAX_M2S = {
    "two of five, half of a head rotates": {
        **NO_TOKENS,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rotary_dim": 6,
    },
    "one of eleven, mqa, tied": {
        **NO_TOKENS,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "num_local_experts": 11,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
        "rms_norm_eps": 0.1,
    },
    "all of three, yarn": {
        **NO_TOKENS,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "num_local_experts": 3,
        "num_experts_per_tok": 3,
        "rope_parameters": {**HALF_YARN, "partial_rotary_factor": 1 / 3},
    },
}
# Odd sizes: heads of keys that one, two or three heads of values share, kernels of two to four.
# The recurrence reads small numbers, which its norm divides by their size: with the usual epsilon
# of 1e-6, fp32 itself is 4e-5 away from fp64 in both.
QWEN3_NEXTS = {
    "two of five, three heads of values for one of keys": {
        **NO_TOKENS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 0.2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 7,
        "linear_conv_kernel_dim": 4,
    },
    "dense, every other layer, tied, biases": {
        **NO_TOKENS,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "num_experts": 0,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rms_norm_eps": 0.1,
    },
    "one of seven, a dense layer, half of a head rotates": {
        **NO_TOKENS,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "rms_norm_eps": 0.1,
        "num_experts": 7,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 36,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 2,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
# As Qwen3-Next, of which each projection is stored apart, and all experts of a layer together.
ROTATED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
QWEN3_5S = {
    "three heads of values for one of keys": {
        **NO_TOKENS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 0.2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 7,
        "linear_conv_kernel_dim": 4,
    },
    "every other layer, tied, biases": {
        **NO_TOKENS,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rms_norm_eps": 0.1,
    },
    "half of a head rotates": {
        **NO_TOKENS,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "rms_norm_eps": 0.2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 2,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "rope_parameters": ROTATED,
    },
}
QWEN3_5_EXPERTS = (
    {"num_experts": 5, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20},
    {"num_experts": 3, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 8},
    {"num_experts": 7, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 36},
)
QWEN3_5_MOES = {
    name: {**config, **experts, "moe_intermediate_size": 12}
    for (name, config), experts in zip(QWEN3_5S.items(), QWEN3_5_EXPERTS, strict=True)
}
GLM4S = {
    "gqa, wide heads": {**NO_TOKENS, "num_key_value_heads": 2, "head_dim": 24},
    "mqa, no biases, whole heads rotate": {
        **NO_TOKENS,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "attention_bias": False,
        "rms_norm_eps": 0.1,
        "rope_parameters": {**ROTATED, "partial_rotary_factor": 1.0},
    },
    "tied, linear scaling": {
        **NO_TOKENS,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": 1e4,
            "factor": 4.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
ERNIE4_5S = {
    "gqa, wide heads": {**NO_TOKENS, "num_key_value_heads": 2, "head_dim": 24},
    "mqa, biases, not tied": {
        **NO_TOKENS,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "use_bias": True,
        "tie_word_embeddings": False,
    },
    "eps, llama3's scaling": {
        **NO_TOKENS,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "rms_norm_eps": 0.1,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}
EXAONE4S = {
    "a window and rotation in three of four": {
        **NO_TOKENS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "sliding_window": 7,
    },
    "no window, all rotate, tied": {
        **NO_TOKENS,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "sliding_window": None,
        "layer_types": ["full_attention", "full_attention"],
        "tie_word_embeddings": True,
        "rms_norm_eps": 0.1,
    },
    "none has the window, none rotates": {
        **NO_TOKENS,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", "full_attention"],
    },
}
ARCEES = {
    "gqa": {**NO_TOKENS, "num_key_value_heads": 2},
    "mqa, biases, wide heads, tied": {
        **NO_TOKENS,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "silu, eps": {
        **NO_TOKENS,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 0.1,
    },
}
NEWER = {
    "glm4": (transformers.Glm4ForCausalLM, transformers.Glm4Config, GLM4S),
    "ernie4_5": (transformers.Ernie4_5ForCausalLM, transformers.Ernie4_5Config, ERNIE4_5S),
    "exaone4": (transformers.Exaone4ForCausalLM, transformers.Exaone4Config, EXAONE4S),
    "arcee": (transformers.ArceeForCausalLM, transformers.ArceeConfig, ARCEES),
    **MAMBAS,
    "qwen3_next": (
        transformers.Qwen3NextForCausalLM,
        transformers.Qwen3NextConfig,
        QWEN3_NEXTS,
    ),
    "qwen3_5": (transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig, QWEN3_5S),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeForCausalLM,
        transformers.Qwen3_5MoeTextConfig,
        QWEN3_5_MOES,
    ),
    "seed_oss": (transformers.SeedOssForCausalLM, transformers.SeedOssConfig, SEED_OSSES),
    "gemma": (transformers.GemmaForCausalLM, transformers.GemmaConfig, GEMMAS),
    "starcoder2": (transformers.Starcoder2ForCausalLM, transformers.Starcoder2Config, STARCODER2S),
    "glm4_moe": (transformers.Glm4MoeForCausalLM, transformers.Glm4MoeConfig, GLM4_MOES),
    "dots1": (transformers.Dots1ForCausalLM, transformers.Dots1Config, DOTS1S),
    "minimax_m2": (
        transformers.MiniMaxM2ForCausalLM,
        transformers.MiniMaxM2Config,
        MINIMAX_M2S,
    ),
}
