"""The compared Llama as a transformers config, for peers that train its models."""

from __future__ import annotations

from transformers import LlamaConfig

from meshwright.runtime.peers.catalogue import PeerSizes


def llama_config(sizes: PeerSizes) -> LlamaConfig:
    """Return the transformers config of the compared Llama, with an untied head."""
    return LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.seq,
        tie_word_embeddings=False,
        use_cache=False,
    )
