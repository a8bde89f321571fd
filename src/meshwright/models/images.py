"""Names of tensors in multimodal checkpoints, from which only the text model is read."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

# How names of the text model begin, and how they begin in a text model's own files; the first that
# fits. Files of transformers 4 and 5, and of Qwen2.5-VL, differ.
_TEXT: Final = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)
_IMAGES: Final = ("vision_tower.", "multi_modal_projector.", "visual.")


class Renamed(NamedTuple):
    """An opened file that returns its tensor `stored` for any name."""

    file: Any
    stored: str

    def get_slice(self, name: str) -> Any:
        """Return a view of the tensor `stored`, whatever `name` is."""
        return self.file.get_slice(self.stored)


def text_name(name: str) -> str | None:
    """Return a stored tensor's name in a text-only model, None for a vision tensor."""
    if name.removeprefix("model.").startswith(_IMAGES):
        return None
    for start, text_start in _TEXT:
        if name.startswith(start):
            return text_start + name.removeprefix(start)
    return name
