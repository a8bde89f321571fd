"""Which kernel computes attention on a GPU, and its rate relative to plain causal attention.

FlexAttention computes windows, soft caps and sinks; FlashAttention's varlen kernel computes windows
of packed rows: `models.attention`, `kernels.varlen`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from meshwright.program.attention import ScoreBounds
from meshwright.program.target import Target
from meshwright.spec.model import LayerSpec, ModelSpec

Attends = Literal["", "window", "sinks", "capped"]
"""The bound of scores that decides on the kernel: of several, the slowest."""


def attends(model: ModelSpec, kind: LayerSpec, span: int) -> Attends:
    """Return what decides on the kernel of a kind of layer, for rows of `span` tokens."""
    bounds = ScoreBounds.of(model, kind).within(span)
    if bounds.cap is not None:
        return "capped"
    if bounds.sinks:
        return "sinks"
    return "" if bounds.window is None else "window"


def rates(target: Target, find: Callable[[str], float]) -> Mapping[Attends, float]:
    """Return each kernel's rate as a multiple of the plain one's; `find` returns a constant."""
    if not target.traits.has_masked_attention:
        return {}
    bounded = find("attention.bounded")
    window = 1.0 if target.packed else bounded
    return {"window": window, "sinks": bounded, "capped": find("attention.capped")}
