"""The layout of a model over ranks: `Layout`, `Mesh`, and the rules. Never imports torch."""

from meshwright.layout.layout import AXES, Layout, Mesh
from meshwright.layout.resolution import Machine, left_over, resolve_layout, unsharded, with_padding
from meshwright.layout.rules import broken, nearest_legal

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
