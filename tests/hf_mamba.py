"""Small configs of transformers' models with layers of Mamba-2: odd sizes, few and many groups."""

import transformers

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# As of Granite 3, not powers of 2.
MULTIPLIED = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 3.0,
}
WITH_ATTENTION = ["linear_attention", "full_attention", "linear_attention"]
GRANITE_HYBRIDS = {
    "experts, one group, no rotation": {
        **NO_TOKENS,
        **MULTIPLIED,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "shared_intermediate_size": 28,
        "layer_types": [*WITH_ATTENTION, "linear_attention"],
        "mamba_n_heads": 6,
        "mamba_d_state": 7,
        "mamba_d_conv": 4,
    },
    "dense, three groups, rotation, tied, biases, limits": {
        **NO_TOKENS,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "num_local_experts": 0,
        "shared_intermediate_size": 36,
        "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 12,
        "mamba_n_groups": 3,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "time_step_limit": [0.4, 1.2],
        "rms_norm_eps": 0.01,
    },
    "one of seven experts, a group for each head, attention first": {
        **NO_TOKENS,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "num_local_experts": 7,
        "num_experts_per_tok": 1,
        "intermediate_size": 12,
        "shared_intermediate_size": 44,
        "mamba_n_heads": 3,
        "mamba_n_groups": 3,
        "mamba_d_state": 9,
        "mamba_d_conv": 2,
        "mamba_expand": 3,
        "residual_multiplier": 0.5,
    },
}
BAMBAS = {
    "one group, biases": {
        **NO_TOKENS,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 6,
        "mamba_d_state": 7,
        "mamba_d_conv": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 0.01,
    },
    "two groups, tied, limits, attention first": {
        **NO_TOKENS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "attn_layer_indices": [0, 3],
        "mamba_n_heads": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "tie_word_embeddings": True,
        "time_step_limit": [0.3, 1.1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "a group for each head, eps": {
        **NO_TOKENS,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "attn_layer_indices": [1],
        "mamba_n_heads": 3,
        "mamba_n_groups": 3,
        "mamba_d_state": 9,
        "mamba_d_conv": 2,
        "mamba_expand": 3,
        "rms_norm_eps": 0.1,
    },
}
MAMBAS = {
    "bamba": (transformers.BambaForCausalLM, transformers.BambaConfig, BAMBAS),
    "granitemoehybrid": (
        transformers.GraniteMoeHybridForCausalLM,
        transformers.GraniteMoeHybridConfig,
        GRANITE_HYBRIDS,
    ),
}
