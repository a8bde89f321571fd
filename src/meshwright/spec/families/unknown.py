"""What is refused, by what it has that no family here has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from meshwright.errors import nearest, refusal

# Model types of transformers: the family that is nearest, and how it differs from that.
_DIFFERS: Final = {
    "deepseek_v3": ("llama", "latent attention and experts"),
    "gemma": ("llama", "norm weights of 1 + w and an embedding times sqrt(dim)"),
    "gemma2": ("llama", "norms after each sublayer too, soft caps, windows"),
    "gemma3_text": ("qwen3", "norms after each sublayer too, windows, two rotary bases"),
    "gpt_oss": ("llama", "experts, attention sinks, windows"),
    "mixtral": ("mistral", "experts"),
    "olmo2": ("llama", "norms after each sublayer, not before; a norm over all heads"),
    "olmo3": ("llama", "norms after each sublayer, not before; a norm over all heads; windows"),
    "olmoe": ("llama", "experts, a norm over all heads"),
    "qwen2_moe": ("qwen2", "experts"),
    "qwen3_moe": ("qwen3", "experts"),
    "qwen3_next": ("qwen3", "linear attention, experts"),
    "smollm3": ("llama", "layers without rotation"),
}


def refuse_model_type(model_type: object, known: Iterable[str]) -> str:
    """Return what to say of a `model_type` that is not known."""
    what = f"model_type = {model_type!r} is not supported"
    if isinstance(model_type, str) and model_type in _DIFFERS:
        like, more = _DIFFERS[model_type]
        return refusal(f"{what}: it is like {like}, with {more}", legal=[like])
    legal = nearest(model_type, known, 3) if isinstance(model_type, str) else []
    return refusal(what, legal=legal or sorted(known))
