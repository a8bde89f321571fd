"""What a config may name: presets of models, and the devices and links of `catalogue.toml`.

A preset of a model is a partial set of `ModelSpec` fields with its source in its family's file;
`resolve` derives missing ones (`n_kv_heads`, `head_dim`, `ffn_dim`, `context`). `cost.catalogue`
converts devices and links for pricing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from meshwright.errors import ConfigError, nearest, refusal
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


# Names the machine at hand instead of a device.
LOCAL = "local"

# Names that people type, each of the usual one of several devices.
_SHORT: Final[Mapping[str, str]] = {
    "v100": "v100-32gb",
    "a100": "a100-80gb",
    "h100": "h100-sxm",
    "gh200": "gh200-96gb",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "rtx6000": "rtx6000-ada",
    "mi250": "mi250x",
    "mi300": "mi300x",
}

Rows = Mapping[str, Mapping[str, Any]]


@cache
def catalogue_rows() -> Mapping[str, Rows]:
    """Return the rows by name, of `devices` and of `links`."""
    text = resources.files("meshwright.spec").joinpath("catalogue.toml").read_text("utf-8")
    return tomllib.loads(text)


def full_device_name(name: object) -> object:
    """Return the catalogue's name of a device for a short one, as `h100`, `RTX 4090` or 4090.

    Anything else is returned as it is.
    """
    word = re.sub(r"[\s_]+", "-", str(name).strip().lower()) if isinstance(name, str | int) else ""
    known = catalogue_rows()["devices"]
    for candidate in (word, _SHORT.get(word, ""), word.replace("-", "")):
        if candidate in known:
            return candidate
    return name


def check_device(name: str, where: str = "") -> None:
    """Raise `ConfigError` with the nearest names for a device that the catalogue lacks.

    `where` says where the name was written, in brackets after a space.
    """
    devices = catalogue_rows()["devices"]
    if name not in devices:
        rule = f"cluster.preset = {name!r}{where} is not known"
        raise ConfigError(refusal(rule, legal=_nearest(name, (LOCAL, *devices))))


def check_link(name: str, where: str = "") -> None:
    """Raise `ConfigError` as `check_device` does, for a link."""
    links = catalogue_rows()["links"]
    if name not in links:
        rule = f"cluster.links{where} has {name!r}, which is not known"
        raise ConfigError(refusal(rule, legal=_nearest(name, links)))


def _nearest(name: str, known: Collection[str]) -> list[str]:
    return nearest(name, known, 3) or sorted(known)
