"""The layout of a model over ranks: `Layout`, `Mesh`, and the rules. Never imports torch."""

from meshwright.layout.layout import Layout
from meshwright.layout.mesh import AXES, Mesh
from meshwright.layout.resolve import Machine, resolve_layout, with_padding
from meshwright.layout.rules import broken, nearest_legal
from meshwright.layout.unused import left_over, unsharded

__all__ = [
    "AXES",
    "Layout",
    "Machine",
    "Mesh",
    "broken",
    "left_over",
    "nearest_legal",
    "resolve_layout",
    "unsharded",
    "with_padding",
]
