"""Refusals of unsupported architectures, with the feature that no family here has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from meshwright.errors import nearest, refusal

# Model types of transformers: the family that is nearest, and how it differs from that.
_DIFFERS: Final = {
    "apertus": ("llama", "an activation with parameters (xIELU)"),
    "arcee": ("llama", "an activation of squares (relu2)"),
    "cohere2": ("neox", "a LayerNorm without biases and adjacent rotated pairs"),
    "deepseek_v2": ("deepseek_v3", "a router of softmaxes"),
    "deepseek_v32": ("deepseek_v3", "sparse attention"),
    "ernie4_5": ("llama", "adjacent rotated pairs"),
    "ernie4_5_moe": ("deepseek_v3", "a router of softmaxes and adjacent rotated pairs"),
    "exaone4": ("olmo3", "layers without rotation"),
    "glm4": ("gemma2", "adjacent rotated pairs"),
    "gpt2": ("neox", "learned positions"),
    "hunyuan_v1_dense": ("qwen3", "norms of heads after the rotation"),
    "llama4_text": ("qwen2_moe", "attention in chunks"),
    "nemotron": ("neox", "a LayerNorm of 1 + weight and an activation of squares (relu2)"),
    "qwen3_next": ("qwen3_moe", "linear attention"),
}


def refuse_model_type(model_type: object, known: Iterable[str]) -> str:
    """Return the message about an unknown `model_type`."""
    rule = f"model_type = {model_type!r} is not supported"
    if isinstance(model_type, str) and model_type in _DIFFERS:
        like, difference = _DIFFERS[model_type]
        return refusal(f"{rule}: it is like {like}, with {difference}", legal=[like])
    legal = nearest(model_type, known, 3) if isinstance(model_type, str) else []
    return refusal(rule, legal=legal or sorted(known))
