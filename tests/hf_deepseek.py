"""Small configs of DeepSeek-V3 in transformers."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Values of a size of their own, smaller and larger than keys; a correction decides what is picked.
DEEPSEEK = {
    "hidden_size": 44,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
}
DEEPSEEKS = {
    "three of twelve in groups, yarn": {
        **DEEPSEEK,
        "num_hidden_layers": 3,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "v_head_dim": 9,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4},
    },
    "one of eleven, no low rank, no dense layer": {
        **DEEPSEEK,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "n_routed_experts": 11,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
        "v_head_dim": 20,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "routed_scaling_factor": 0.8,
        "rms_norm_eps": 0.1,
    },
    "all of four, biases, tied": {
        **DEEPSEEK,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "v_head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
    },
}
