"""How the layers are split into pipeline stages: contiguous, balanced by cost."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.program.parts import Part, parts
from meshwright.spec.model import ModelSpec


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage holds: layers `first_layer` to `stop_layer`, and the model's ends."""

    index: int
    first_layer: int
    stop_layer: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> range:
        """Global numbers of its layers."""
        return range(self.first_layer, self.stop_layer)

    def holds(self, part: Part, tied: bool) -> bool:
        """Whether the stage holds a parameter; the last one of a tied model has the embedding."""
        room, _, rest = part.name.partition(".")
        if room == "layers":
            return int(rest.partition(".")[0]) in self.layers
        if room == "embed":
            return self.is_first or (self.is_last and tied)
        return self.is_last


def layer_flops(spec: ModelSpec, seq_len: int) -> float:
    """Return the forward FLOPs of one layer for one token.

    Two per weight that multiplies, and attention over the causal half of the sequence:
    arXiv:2204.02311, appendix B.
    """
    weights = sum(
        part.numel for part in parts(spec) if part.name.startswith("layers.0.") and part.is_product
    )
    return 2 * weights + 2 * seq_len * spec.n_heads * spec.head_dim


def head_flops(spec: ModelSpec) -> float:
    """Return the forward FLOPs of the head and its softmax for one token."""
    return 2.0 * spec.vocab_size * spec.dim + 5.0 * spec.vocab_size


def embedding_flops(spec: ModelSpec) -> float:
    """Return the forward FLOPs that the look-up of one token is worth: a row read and written."""
    return 2.0 * spec.dim


def split_stages(spec: ModelSpec, count: int, seq_len: int) -> tuple[Stage, ...]:
    """Return `count` stages whose costliest one is as cheap as a contiguous split allows.

    Every stage has at least one layer. Among equally good splits the first stages are the fuller
    ones, since the last also computes the loss. `count` must not exceed `n_layers`.
    """
    if not 1 <= count <= spec.n_layers:
        raise ValueError(f"{count} stages of {spec.n_layers} layers")
    layer, first, last = layer_flops(spec, seq_len), embedding_flops(spec), head_flops(spec)
    bounds = _balanced(spec.n_layers, count, layer, first, last)
    return tuple(
        Stage(index, bounds[index], bounds[index + 1], index == 0, index == count - 1)
        for index in range(count)
    )


def _balanced(layers: int, count: int, layer: float, first: float, last: float) -> list[int]:
    """Return the bounds of the stages.

    All layers cost the same, so only three sizes matter: give the last stage as many layers as
    keep it no dearer than an even share of the whole, and spread the rest evenly.
    """
    if count == 1:
        return [0, layers]

    def costliest(at_end: int) -> tuple[float, int]:
        rest = layers - at_end
        others = -(-rest // (count - 1))  # ceiling
        lead = layer * (rest // (count - 1)) + first
        return max(layer * others, lead, layer * at_end + last), -at_end

    at_end = min(range(1, layers - count + 2), key=costliest)
    rest, bounds = layers - at_end, [0]
    for index in range(count - 1):
        # The fuller ones come second to last first: the first stage also has the embedding.
        size = rest // (count - 1) + (index >= count - 1 - rest % (count - 1))
        bounds.append(bounds[-1] + size)
    return [*bounds, layers]
