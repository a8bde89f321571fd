"""Which files of tests belong to a room, a package of src/meshwright: by what they import."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ROOMS: Final = sorted(
    file.parent.name for file in (ROOT / "src" / "meshwright").glob("*/__init__.py")
)
# Packages beside the rooms: a test of these is no test of a room.
_OTHERS: Final = ("benchmarks", "ci")


def rooms_of(source: str) -> set[str]:
    """Return the rooms that the source of a test imports most names from; several if equal."""
    counts = Counter(room for room in _imported(source) if room in (*ROOMS, *_OTHERS))
    most = max(counts.values(), default=0)
    return {room for room, count in counts.items() if count == most} - {*_OTHERS}


def _imported(source: str) -> Iterator[str]:
    """Yield the room of each name that is imported, or the package that is beside the rooms."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            yield rest.partition(".")[0] if package == "meshwright" else package
