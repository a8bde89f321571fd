"""Small configs of transformers' models, some of each family."""

import transformers

from hf_deepseek import DEEPSEEKS
from hf_gpt_oss import GPT_OSSES
from hf_newer import NEWER

SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def longrope(original, pairs=6, **more):
    return {
        "pad_token_id": None,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "short_factor": [1.0, 1.05, 1.1, 1.3, 1.5, 2.0][:pairs],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0][:pairs],
            "original_max_position_embeddings": original,
            **more,
        },
    }


LLAMAS = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3": {"rope_parameters": LLAMA3, "num_key_value_heads": 2},
    "yarn": {"rope_parameters": LLAMA_YARN},
    "yarn, mscale, real bounds": {
        "rope_parameters": LLAMA_YARN
        | {"mscale": 0.7, "mscale_all_dim": 1.4, "truncate": False, "beta_fast": 8.0}
    },
    "longrope": longrope(16, factor=3.0),
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 24, "num_key_value_heads": 2},
    "gelu": {"hidden_act": "gelu"},
    "large eps": {"rms_norm_eps": 0.1},
}
NEOXES = {
    "parallel": {},
    "sequential": {"use_parallel_residual": False},
    "fully rotary": {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}},
    "half rotary": {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 100.0}},
    "linear": {
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    },
    "tied": {"tie_word_embeddings": True},
    "gelu_new": {"hidden_act": "gelu_new"},
    "gelu_fast": {"hidden_act": "gelu_fast"},
    "no attention bias": {"attention_bias": False},
    "large eps": {"layer_norm_eps": 0.1},
}
QWEN2S = {
    "gqa": {"num_key_value_heads": 2},
    "mqa, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "theta, eps": {
        "num_key_value_heads": 4,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
QWEN3S = {
    "wide heads": {"num_key_value_heads": 2, "head_dim": 24},
    "narrow heads, mqa, tied": {
        "num_key_value_heads": 1,
        "head_dim": 6,
        "tie_word_embeddings": True,
    },
    "biases, eps": {
        "num_key_value_heads": 4,
        "head_dim": 12,
        "attention_bias": True,
        "rms_norm_eps": 0.1,
    },
}
MISTRALS = {
    "gqa": {"num_key_value_heads": 2, "sliding_window": None},
    "wide heads, mqa": {"num_key_value_heads": 1, "head_dim": 24, "sliding_window": None},
    "tied": {"num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": True},
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 3.0,
}
GRANITES = {
    "gqa": {"num_key_value_heads": 2, **MULTIPLIERS},
    "mqa, tied, biases": {
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        **MULTIPLIERS,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "defaults": {},
}
PHI3S = {
    "gqa": {"num_key_value_heads": 2, "pad_token_id": None},
    "mqa, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True, "pad_token_id": None},
    "half rotary, eps": {
        "pad_token_id": None,
        "rms_norm_eps": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "longrope, longer rows": longrope(16),
    "longrope, rows that fit": longrope(50),
    "longrope, half rotary": longrope(39, 3, partial_rotary_factor=0.5, attention_factor=1.3),
}
WINDOWED = ["sliding_attention", "full_attention"]
MISTRALS |= {"window": {"num_key_value_heads": 2, "sliding_window": 7}}
QWEN2S |= {
    "late windows": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
}
QWEN3S |= {
    "windows by layer": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": WINDOWED,
    },
}
SHORT, LONG = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
PHI3S |= {
    "window": {"num_key_value_heads": 2, "pad_token_id": None, "sliding_window": 12},
    "longrope": {
        "pad_token_id": None,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": 16,
        },
    },
}
GEMMA = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GEMMA2S = {
    "wide heads": {**GEMMA, "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 7},
    "mqa, tight caps, three layers": {
        **GEMMA,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "sliding_window": 16,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "no caps, not tied": {
        **GEMMA,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "sliding_window": 40,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
}
GEMMA3S = {
    "seven layers": {
        **GEMMA,
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "sliding_window": 7,
    },
    "linear, mqa": {
        **GEMMA,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "sliding_window": 16,
        "layer_types": WINDOWED,
        "query_pre_attn_scalar": 9,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "capped logits": {
        **GEMMA,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "sliding_window": 5,
        "layer_types": WINDOWED,
        "final_logit_softcapping": 3.0,
    },
}
OLMO = {"pad_token_id": None}
OLMO2S = {
    "gqa": {**OLMO, "num_key_value_heads": 2},
    "mqa, tied": {**OLMO, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "biases, eps, yarn": {
        **OLMO,
        "attention_bias": True,
        "rms_norm_eps": 0.1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.2,
}
OLMO3S = {
    "five layers": {**OLMO, "num_hidden_layers": 5, "num_key_value_heads": 2, "sliding_window": 7},
    "yarn": {
        **OLMO,
        "num_key_value_heads": 1,
        "sliding_window": 16,
        "layer_types": WINDOWED,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "tied": {
        **OLMO,
        "sliding_window": 3,
        "layer_types": WINDOWED,
        "tie_word_embeddings": True,
    },
}
SMOLLM3S = {
    "five layers": {"num_hidden_layers": 5, "num_key_value_heads": 2, "pad_token_id": None},
    "own layers, not tied": {
        "num_key_value_heads": 1,
        "no_rope_layers": [0, 1],
        "tie_word_embeddings": False,
        "attention_bias": True,
        "pad_token_id": None,
    },
    "windows without rotation": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "pad_token_id": None,
    },
}
# Five experts are divisible by nothing; of eleven many are empty in rows of 40 tokens at top-k 1.
MIXTRALS = {
    "two of five": {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2},
    "one of eleven, window, tied": {
        "num_key_value_heads": 1,
        "num_local_experts": 11,
        "num_experts_per_tok": 1,
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "all of three": {"num_key_value_heads": 4, "num_local_experts": 3, "num_experts_per_tok": 3},
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN2_MOES = {
    "gqa": {**EXPERTS, "num_key_value_heads": 2, "shared_expert_intermediate_size": 40},
    "dense first, mqa, renormalised": {
        **EXPERTS,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "shared_expert_intermediate_size": 12,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
    "one of seven, windows": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 1,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
}
QWEN3_MOES = {
    "wide heads": {**EXPERTS, "num_key_value_heads": 2, "head_dim": 24},
    "every other layer, mqa, renormalised": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "all of seven, window": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "num_experts_per_tok": 7,
        "use_sliding_window": True,
        "sliding_window": 9,
    },
}
OLMOES = {
    "gqa": {**OLMO, "num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2},
    "one of nine, renormalised": {
        **OLMO,
        "num_key_value_heads": 1,
        "num_experts": 9,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
    },
    "all of four, tied, gelu": {
        **OLMO,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
}
KINDS = {
    **NEWER,
    "deepseek_v3": (transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config, DEEPSEEKS),
    "gpt_oss": (transformers.GptOssForCausalLM, transformers.GptOssConfig, GPT_OSSES),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, MIXTRALS),
    "qwen2_moe": (transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig, QWEN2_MOES),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, QWEN3_MOES),
    "olmoe": (transformers.OlmoeForCausalLM, transformers.OlmoeConfig, OLMOES),
    "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config, GEMMA2S),
    "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, GEMMA3S),
    "olmo2": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config, OLMO2S),
    "olmo3": (transformers.Olmo3ForCausalLM, transformers.Olmo3Config, OLMO3S),
    "smollm3": (transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config, SMOLLM3S),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config, PHI3S),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLAMAS),
    "neox": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig, NEOXES),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, QWEN2S),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, QWEN3S),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, MISTRALS),
    "granite": (transformers.GraniteForCausalLM, transformers.GraniteConfig, GRANITES),
}
