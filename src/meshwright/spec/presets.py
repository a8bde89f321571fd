"""Model presets with the published sizes, each with its source in its family's file.

A preset is a partial set of `ModelSpec` fields; `resolve` derives missing ones (`n_kv_heads`,
`head_dim`, `ffn_dim`, `context`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.spec.families import FAMILIES

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    name: preset for family in FAMILIES.values() for name, preset in family.presets.items()
}
