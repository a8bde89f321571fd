"""Which kernel a GPU's attention takes, and how fast it is beside the one of plain causal scores.

FlexAttention computes windows, soft caps and sinks; FlashAttention's varlen kernel computes windows
of packed rows: `models.attention`, `execute.kernels.documents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from meshwright.program.attention import ScoreBounds
from meshwright.program.target import Target
from meshwright.spec.model import LayerSpec, ModelSpec

Attends = Literal["", "window", "sinks", "capped"]
"""What decides on the kernel: of several bounds the one that costs most."""


def attends(model: ModelSpec, kind: LayerSpec, span: int) -> Attends:
    """Return what decides on the kernel of a kind of layer, for rows of `span` tokens."""
    bounds = ScoreBounds.of(model, kind).within(span)
    if bounds.cap is not None:
        return "capped"
    if bounds.sinks:
        return "sinks"
    return "" if bounds.window is None else "window"


def rates(target: Target, find: Callable[[str], float]) -> Mapping[Attends, float]:
    """Return the rates of kernels, in times of the plain one's; `find` returns a constant."""
    if target.on_cpu:
        return {}
    bounded = find("attention.bounded")
    window = 1.0 if target.packed else bounded
    return {"window": window, "sinks": bounded, "capped": find("attention.capped")}
