"""How a model is laid out over ranks: `Layout`, `Mesh`, and the rules. Never imports torch."""

from meshwright.layout.layout import Layout, Machine, resolve_layout
from meshwright.layout.mesh import AXES, Mesh
from meshwright.layout.rules import broken, nearest_legal

__all__ = ["AXES", "Layout", "Machine", "Mesh", "broken", "nearest_legal", "resolve_layout"]
