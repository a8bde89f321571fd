"""The text model of a model with images: the part of its `config.json` that describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Model types with images, and that of their text models.
TEXT_MODELS: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_TEXT: Final = "text_config"
_TIED: Final = "tie_word_embeddings"
# Types of which transformers also ties if the text model's own key says so.
_INNER: Final = ("qwen2_5_vl",)
# Of positions in three dims, which are equal in text, so that it rotates as usual.
_SECTIONS: Final = ("mrope_section", "mrope_interleaved")
_ROTARY: Final = ("rope_scaling", "rope_parameters")
# Keys of images in a config whose text model has its keys beside them.
_IMAGES: Final = ("vision_config",)


def has_images(config: Mapping[str, Any]) -> bool:
    """Whether a config describes a model with images whose text model is supported."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in TEXT_MODELS


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a model's text model: its own, unless the model has images."""
    if not has_images(config):
        return config
    inner = config.get(_TEXT)
    text = dict(inner) if isinstance(inner, Mapping) else dict(config)
    for key in _IMAGES:
        text.pop(key, None)
    text["model_type"] = TEXT_MODELS[config["model_type"]]
    if config.get(_TIED) is not None and not (text.get(_TIED) and config["model_type"] in _INNER):
        text[_TIED] = config[_TIED]  # the outer one decides in transformers
    if "quantization_config" in config:
        text["quantization_config"] = config["quantization_config"]
    for key in _ROTARY:
        if isinstance(text.get(key), Mapping) and not text[key].keys().isdisjoint(_SECTIONS):
            text[key] = _without_sections(text[key])
    return text


def _without_sections(rotary: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in rotary.items() if key not in _SECTIONS}
    for key in ("type", "rope_type"):
        if settings.get(key) == "mrope":
            settings[key] = "default"
    return settings
