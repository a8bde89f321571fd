"""Small configs of types that are planned only, and their parameters in transformers 5.23."""

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_PLAIN = {**_SIZES, "head_dim": 32, "intermediate_size": 96}
_NARROW = {**_SIZES, "intermediate_size": 96}  # heads of dim / heads
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}
_LATENT = {
    **_NARROW,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 48,
}
_GEMMA = {
    **_PLAIN,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "global_head_dim": 48,
}
# A type that nobody knows, with Gated DeltaNet in three of four layers, and experts.
LATER = {
    "model_type": "later",
    **_SIZES,
    **_DELTA,
    **_EXPERTS,
    "head_dim": 32,
    "full_attention_interval": 4,
}
# The type, its config, and the parameters of the model on the meta device.
SHAPES = {
    "deepseek_v32": (
        "deepseek_v32",
        {
            **_LATENT,
            "q_lora_rank": 40,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "index_topk": 64,
            "index_head_dim": 16,
            "index_n_heads": 4,
        },
        413_632,
    ),
    "llama4": (
        "llama4_text",
        {
            **_PLAIN,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "pad_token_id": 0,
        },
        335_424,
    ),
    "gemma4": (
        "gemma4_text",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
        },
        373_088,
    ),
    "gemma4 with experts": (
        "gemma4_text",
        {
            **_GEMMA,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
        493_984,
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **{key: value for key, value in _PLAIN.items() if key != "num_hidden_layers"},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "chunk_size": 64,
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "num_experts_per_tok": 2,
        },
        159_448,
    ),
    "falcon_h1": (
        "falcon_h1",
        {**_NARROW, **_MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True},
        295_072,
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **{key: value for key, value in _LATENT.items() if key != "max_position_embeddings"},
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        383_700,
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **_NARROW,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 1,
        },
        362_584,
    ),
}


def config_of(name):
    """Return a type's config.json, and its parameters."""
    model_type, sizes, count = SHAPES[name]
    return {"model_type": model_type, **sizes}, count
