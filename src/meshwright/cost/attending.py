"""Which kernel computes attention on a GPU, and its speed relative to plain causal attention.

FlexAttention computes windows, soft caps and sinks; FlashAttention's varlen kernel computes windows
of packed sequences: `models.attention`, `kernels.varlen`.
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
    """Return the feature that decides which attention kernel a kind of layer needs: "capped" (soft
    cap), "sinks", "window", or "" for plain causal attention.

    A window of at least `span` tokens, the sequence length, counts as none.
    """
    bounds = ScoreBounds.of(model, kind).within(span)
    if bounds.cap is not None:
        return "capped"
    if bounds.sinks:
        return "sinks"
    return "" if bounds.window is None else "window"


def rates(target: Target, find: Callable[[str], float]) -> Mapping[Attends, float]:
    """Return the speed of each attention kernel as a multiple of the plain one's; empty on devices
    without masked attention.

    `find` returns a constant of the calibration by name.
    """
    if not target.traits.has_masked_attention:
        return {}
    bounded = find("attention.bounded")
    window = 1.0 if target.packed else bounded
    return {"window": window, "sinks": bounded, "capped": find("attention.capped")}
