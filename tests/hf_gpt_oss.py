"""Small configs of transformers' gpt-oss."""

# Five experts, top-k 1 of eleven with empty ones, all of three; a limit that many values exceed.
GPT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT_OSSES = {
    "two of five, windows": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 0.3,
        "rope_parameters": {**GPT_YARN, "truncate": False},
    },
    "one of eleven, mqa, no biases of attention": {
        "num_key_value_heads": 1,
        "head_dim": 24,
        "num_local_experts": 11,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 16,
        "attention_bias": False,
        "rope_parameters": {**GPT_YARN, "truncate": True},
    },
    "all of three, tied, three layers": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "num_local_experts": 3,
        "num_experts_per_tok": 3,
        "swiglu_alpha": 1.0,
        "swiglu_limit": 0.5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
