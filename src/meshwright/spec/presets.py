"""Model presets with the published sizes, each with its source in its family's file.

A preset is a partial set of `ModelSpec` fields; `resolve` derives missing ones (`n_kv_heads`,
`head_dim`, `ffn_dim`, `context`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from meshwright.spec.families import FAMILIES

# What a name on the Hugging Face Hub says besides the model: who tuned it, for what, how stored.
_MORE: Final = re.compile(r"-(?:hf|instruct|chat|base|it|pt|bf16|4k-instruct)$")

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    name: preset for family in FAMILIES.values() for name, preset in family.presets.items()
}
# Other names of the same sizes there.
_SAME: Final[Mapping[str, str]] = {
    "llama-3.1-405b": "llama-3-405b",
    "olmo-2-0425-1b": "olmo-2-1b",
    "olmo-2-1124-7b": "olmo-2-7b",
    "olmo-2-1124-13b": "olmo-2-13b",
    "olmo-2-0325-32b": "olmo-2-32b",
}


def preset_of(name: str) -> str | None:
    """Return the preset of a model by its name on the Hugging Face Hub; None if there is none.

    Of `meta-llama/Llama-3.1-8B-Instruct` it is `llama-3.1-8b`: a preset has a model's sizes, which
    its tuned versions share.
    """
    word = name.rpartition("/")[2].lower()
    if word in PRESETS:
        return word
    word = word.removeprefix("meta-")
    while (shorter := _MORE.sub("", word)) != word:
        word = shorter
    known = {_MORE.sub("", preset): preset for preset in PRESETS}
    return known.get(_SAME.get(word, word))
