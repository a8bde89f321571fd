"""Refusals of unsupported architectures, with the feature that no family here has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from meshwright.errors import nearest, refusal

# Model types of transformers: the family that is nearest, and how it differs from that.
_DIFFERS: Final = {
    "deepseek_v2": ("deepseek_v3", "a router of softmaxes"),
    "gemma": ("gemma2", "norms before each sublayer alone, no caps, no windows"),
    "gemma3": ("gemma3", "images; its text model alone is gemma3_text"),
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
