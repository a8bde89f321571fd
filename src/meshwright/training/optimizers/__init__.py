"""The builders of the optimizers in `spec.optimizers`, by name: one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshwright.training.optimizers import adamw, lion, muon, sgd
from meshwright.training.optimizers.base import Builder, ParameterGroup

BUILDERS: Final[Mapping[str, Builder]] = {
    "adamw": adamw.build,
    "lion": lion.build,
    "muon": muon.build,
    "sgd": sgd.build,
}

__all__ = ["BUILDERS", "Builder", "ParameterGroup"]
