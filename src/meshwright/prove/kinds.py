"""The kinds of models and batches in the table of proven layouts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from meshwright.spec.lora import Lora


class Kind(NamedTuple):
    """A family with model settings (`flags`), router settings of training (`asked`), and whether
    batches are packed.

    With `lora`, only adapters are trained.
    """

    family: str
    packed: bool = False
    flags: Mapping[str, Any] = MappingProxyType({})
    asked: Mapping[str, float] = MappingProxyType({})
    lora: Lora | None = None


_NEOX: Final = {"rotary_pct": 0.25, "parallel_residual": True}
# Not powers of 2, which would round nothing.
_MULTIPLIED: Final = {
    "embedding_scale": 3.0,
    "residual_scale": 0.7,
    "attention_scale": 0.6,
    "logits_divisor": 1.5,
}
_BIASED: Final = {"attention_bias": True, "mlp_bias": True}
# Sizes that sharding does not divide: the ranks' shards differ, and the last ones may be empty. The
# vocabulary is padded for tp, and the last of eight ranks have nothing but padding.
_ODD: Final = {"dim": 60, "ffn_dim": 144, "vocab_size": 143}
# Windows that end in the middle of a rank's share, and tight caps.
_CAPPED: Final = {
    "layer_pattern": [{"window": 7}, {}],
    "attention_softcap": 2.0,
    "logits_softcap": 4.0,
}
_LOCAL: Final = {"layer_pattern": [{"window": 11, "rope_theta": 50.0}, {}]}
_YARN: Final = {"kind": "yarn", "factor": 4.0, "original_context": 16}
# Of packed rows, some documents are longer than the context that was trained with.
_LONGROPE: Final = {
    "rope_scaling": {
        "kind": "longrope",
        "factor": 4.0,
        "original_context": 12,
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.0, 2.0, 3.0, 5.0],
    }
}
KINDS: Final = (
    Kind("llama"),
    Kind("neox", flags=_NEOX),
    Kind("llama", flags={"tie_embeddings": True}),
    Kind("llama", packed=True, flags={**_BIASED, **_ODD}),
    Kind("neox", packed=True, flags={"rotary_pct": 0.5, "tie_embeddings": True}),
    Kind("llama", flags={"dropout": 0.1}),
    Kind("neox", flags={**_NEOX, **_ODD, "dropout": 0.1}),
    Kind("qwen3"),
    Kind("granite", flags=_MULTIPLIED),
    Kind("qwen2", packed=True),
    Kind("qwen3", packed=True, flags={"tie_embeddings": True, **_ODD}),
    Kind("mistral", flags={"dropout": 0.1}),
    Kind("granite", packed=True, flags={**_MULTIPLIED, "tie_embeddings": True}),
    Kind("phi3", flags={"rotary_pct": 0.5}),
    Kind("qwen2", flags={"tie_embeddings": True, "dropout": 0.1}),
    Kind("phi3", packed=True, flags={**_ODD, **_LONGROPE}),
    Kind("mistral", packed=True, flags={"tie_embeddings": True}),
    Kind("gemma2", flags=_CAPPED),
    Kind("olmo2"),
    Kind("gemma3", packed=True, flags={**_LOCAL, **_ODD}),
    Kind("olmo3", flags={**_LOCAL, "rope_scaling": _YARN}),
    Kind("smollm3", flags={"dropout": 0.1}),
    Kind("mistral", flags={"layer_pattern": [{"window": 9}]}),
    Kind("gemma2", packed=True, flags=_CAPPED),
    Kind("olmo2", packed=True, flags={"tie_embeddings": True, **_ODD}),
    Kind("gemma3", flags=_LOCAL),
    Kind("olmo3", packed=True, flags=_LOCAL),
    Kind("smollm3", packed=True, flags=_ODD),
)
# Large: the gradients of these losses are as large as the others.
_EVEN: Final = {"router_aux_loss": 1.0}
_SMALL: Final = {"router_z_loss": 0.3}
# A step moves a correction by about as much as scores differ.
_MOVED: Final = {"router_bias_rate": 0.05}
# Experts that take little more than an even share: the first of a sequence's tokens.
_FULL: Final = {"expert_capacity": 1.1}
# From one expert of a token to all of them. Most numbers of experts divide among ranks.
_MIXTURE: Final = {"experts": 6, "top_k": 3, "expert_ffn_dim": 48}
_SHARED: Final = {**_MIXTURE, "shared_ffn_dim": 48, "norm_top_k": True}
# Values smaller than keys, or larger; one of two groups is picked from. In half precision tokens
# change experts, and the loss with them: a small scale leaves that within its tolerance.
_LATENT: Final = {
    "experts": 8,
    "top_k": 3,
    "expert_ffn_dim": 48,
    "shared_ffn_dim": 48,
    "dense_layers": 1,
    "routed_scale": 0.7,
    "expert_groups": 2,
    "top_groups": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_UNGROUPED: Final = {"experts": 6, "top_k": 2, "expert_groups": 1, "top_groups": 1}
_LENGTHENED: Final = {**_YARN, "mscale": 0.8, "mscale_all_dim": 1.4}
# A limit that one value in some hundreds exceeds: at a limit the gradient jumps.
_BOUNDED: Final = {"layer_pattern": [{"window": 7}, {}], "swiglu_limit": 5.0}
_GPT_OSS: Final = {"experts": 6, "top_k": 1, "dropout": 0.1}
EXPERT_KINDS: Final = (
    Kind("mixtral", flags={"experts": 4, "top_k": 3}, asked=_FULL),
    Kind("qwen3_moe", packed=True, flags={**_MIXTURE, **_ODD}, asked=_EVEN),
    Kind(
        "qwen2_moe",
        flags={**_MIXTURE, "shared_ffn_dim": 96, "layer_pattern": [{"dense": True}, {}]},
        asked={**_EVEN, **_SMALL},
    ),
    Kind("olmoe", packed=True, flags={"experts": 8, "top_k": 1}),
    Kind("qwen3_moe", flags={"experts": 8, "top_k": 3, "expert_ffn_dim": 64, "dropout": 0.1}),
    Kind("mixtral", packed=True, flags={"experts": 4, "top_k": 2}, asked={**_EVEN, **_SMALL}),
    Kind("qwen2_moe", packed=True, flags={**_SHARED, "tie_embeddings": True}),
    Kind("olmoe", flags={"experts": 4, "top_k": 4}, asked=_SMALL),
    Kind(
        "mixtral",
        flags={"experts": 3, "top_k": 3, "tie_embeddings": True, "layer_pattern": [{"window": 9}]},
    ),
    Kind("qwen3_moe", flags={"experts": 7, "top_k": 1, "expert_ffn_dim": 64}),
    Kind("qwen2_moe", flags={**_SHARED, "experts": 8, "dropout": 0.1}, asked=_EVEN),
    Kind(
        "olmoe",
        packed=True,
        flags={"experts": 8, "top_k": 2, **_ODD},
        asked={**_EVEN, **_FULL},
    ),
    Kind("qwen3_moe", packed=True, flags={**_MIXTURE, "experts": 4, "tie_embeddings": True}),
    Kind("deepseek_v3", flags=_LATENT, asked={**_EVEN, **_MOVED}),
    Kind(
        "deepseek_v3",
        packed=True,
        flags={**_LATENT, "q_lora_rank": 0, **_UNGROUPED, **_ODD},
        asked=_MOVED,
    ),
    Kind(
        "deepseek_v3",
        flags={**_LATENT, "v_head_dim": 12, "rope_scaling": _LENGTHENED},
        asked={**_EVEN, **_FULL},
    ),
    Kind("gpt_oss", flags={**_BOUNDED, "experts": 4, "top_k": 2}),
    Kind("gpt_oss", packed=True, flags={**_BOUNDED, **_ODD, "experts": 8, "top_k": 3}),
    Kind("gpt_oss", flags={**_GPT_OSS, "rope_scaling": _YARN, "tie_embeddings": True}),
)
# As DeepSeek-V3's experts, of whole attention: a dense layer, a shared expert.
_ROUTED: Final = {
    "experts": 6,
    "top_k": 2,
    "expert_ffn_dim": 48,
    "shared_ffn_dim": 48,
    "dense_layers": 1,
    "routed_scale": 0.7,
}
# Heads of values that share one of keys; a convolution across the seams of chunks and documents.
# The first tokens read next to nothing from a state: a norm of it with a small epsilon would
# amplify rounding.
_RECURRENT: Final = {
    "norm_eps": 1e-3,
    "layer_pattern": [{"delta": True}, {"delta": True}, {}],
    "delta_heads": 12,
    "delta_key_heads": 4,
    "delta_key_dim": 5,
    "delta_value_dim": 6,
    "delta_kernel": 3,
    "rotary_pct": 0.5,
}
# One group of heads, which ranks of tp share, or several that they have whole; small steps.
_STATE_SPACE: Final = {
    "norm_eps": 1e-3,
    "layer_pattern": [{"mamba": True}, {}, {"mamba": True}],
    "mamba_heads": 8,
    "mamba_head_dim": 16,
    "mamba_groups": 1,
    "mamba_state": 5,
    "mamba_kernel": 3,
    "mamba_dt_limit": [0.05, 2.0],
}
_GRANITE_HYBRID: Final = {
    **_STATE_SPACE,
    **_MULTIPLIED,
    "layer_pattern": [{"mamba": True}, {"rotary": False}, {"mamba": True}],
}
# Each in every axis, apart from the kinds above, whose turns stay as they are.
NEWER_KINDS: Final = (
    Kind("seed_oss", packed=True, flags={**_ODD, "output_bias": True}),
    Kind("gemma", flags={"tie_embeddings": True}),
    Kind("starcoder2", packed=True, flags={"layer_pattern": [{"window": 7}]}),
    Kind("glm4_moe", flags={**_ROUTED, "qk_norm": "head", "rotary_pct": 0.5}, asked=_MOVED),
    Kind("dots1", packed=True, flags={**_ROUTED, **_ODD}, asked={**_EVEN, **_MOVED}),
    Kind("minimax_m2", flags={"experts": 4, "top_k": 2, "rotary_pct": 0.5}, asked=_MOVED),
    Kind("qwen3_next", packed=True, flags={**_RECURRENT, "experts": 0}),
    Kind(
        "qwen3_next",
        flags={**_RECURRENT, "experts": 6, "top_k": 2, "expert_ffn_dim": 24, "shared_ffn_dim": 20},
        asked=_EVEN,
    ),
    Kind("glm4", packed=True, flags={**_ODD, "attention_bias": True, "rotary_pct": 0.5}),
    Kind("ernie4_5", flags={"tie_embeddings": True}),
    Kind(
        "exaone4",
        packed=True,
        flags={"layer_pattern": [{"window": 7}, {"window": 7}, {"rotary": False}]},
    ),
    Kind("arcee", packed=True, flags={**_BIASED, **_ODD, "activation": "relu2"}),
    Kind("qwen3_5", packed=True, flags={**_RECURRENT, "tie_embeddings": True}),
    Kind(
        "qwen3_5_moe",
        flags={**_RECURRENT, "experts": 4, "top_k": 2, "expert_ffn_dim": 24, "shared_ffn_dim": 20},
    ),
    Kind(
        "granitemoehybrid",
        packed=True,
        flags={**_GRANITE_HYBRID, "experts": 0, "tie_embeddings": True},
    ),
    Kind(
        "granitemoehybrid",
        flags={
            **_STATE_SPACE,
            "mamba_groups": 4,
            "residual_scale": 0.7,
            "attention_scale": 0.3,
            "experts": 4,
            "top_k": 2,
            "expert_ffn_dim": 24,
            "shared_ffn_dim": 48,
        },
    ),
    Kind("bamba", packed=True, flags={**_STATE_SPACE, **_BIASED, "mamba_groups": 2}),
)
# Inputs of which tp cuts whole blocks.
_BLOCKS: Final = {"head_dim": 32, "ffn_dim": 256}
ADAPTED_KINDS: Final = (
    Kind("llama", lora=Lora(rank=4, alpha=6.0)),
    Kind("qwen3", packed=True, lora=Lora(rank=3, alpha=4.0, targets=("q_proj", "v_proj"))),
    Kind("neox", flags=_NEOX, lora=Lora(rank=4, alpha=6.0, targets=("dense*",), dropout=0.2)),
    Kind("mistral", lora=Lora(rank=2, alpha=4.0, rslora=True, dropout=0.1)),
    Kind(
        "llama",
        packed=True,
        flags={"tie_embeddings": True, **_ODD},
        lora=Lora(rank=4, alpha=6.0, targets=("o_proj", "up_proj", "down_proj")),
    ),
    Kind(
        "qwen2_moe",
        flags={**_SHARED, "layer_pattern": [{"dense": True}, {}]},
        lora=Lora(rank=3, alpha=4.0, targets=("q_proj", "v_proj")),
    ),
    Kind("qwen3", flags=_BLOCKS, lora=Lora(rank=4, alpha=6.0, base="nf4")),
    Kind("qwen3_moe", flags=_MIXTURE, lora=Lora(rank=3, alpha=4.0, targets=("*_proj",))),
    Kind(
        "qwen2_moe",
        packed=True,
        flags=_SHARED,
        asked=_EVEN,
        lora=Lora(rank=4, alpha=6.0, targets=("v_proj", "gate_up_proj", "down_proj")),
    ),
    Kind(
        "gpt_oss",
        flags={**_BOUNDED, "experts": 4, "top_k": 2},
        lora=Lora(rank=2, alpha=4.0, targets=("gate_up_proj", "down_proj"), rslora=True),
    ),
    Kind("deepseek_v3", flags=_LATENT, lora=Lora(rank=4, alpha=6.0, targets=("*_proj*",))),
    Kind(
        "mixtral",
        flags={"experts": 8, "top_k": 2, "dropout": 0.1},
        lora=Lora(rank=3, alpha=4.0, targets=("w1", "w2", "w3")),
    ),
)
