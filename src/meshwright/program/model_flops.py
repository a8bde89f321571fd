"""Model FLOPs of a token, without recomputation or other overhead of a layout: PaLM,
arXiv:2204.02311, appendix B."""

from __future__ import annotations

from typing import Final

from meshwright.program.attention import causal_scores
from meshwright.spec.model import LayerSpec, ModelSpec
from meshwright.spec.parts import delta_shape, mamba_shape, parts
from meshwright.spec.recurrences import chunk_flops, state_space_flops

# A forward, and a backward of twice its size.
_PASSES: Final = 3
# Of the head's softmax, for each logit.
_SOFTMAX: Final = 5.0


def layer_flops(spec: ModelSpec, seq_len: int, *, squares: bool = False) -> tuple[float, ...]:
    """Return the forward FLOPs of each layer for one token.

    Two per weight that multiplies it, and attention over the scores that the causal mask and a
    window leave; with `squares`, over twice as many, as if there were no causal mask.
    """
    times = 2.0 * (2 if squares else 1) / max(seq_len, 1)
    costs = {
        kind: 2 * _layer_weights(spec, kind) + times * _scores(spec, kind, seq_len)
        for kind in spec.layer_kinds
    }
    for kind in costs:
        costs[kind] += 0 if kind.mixer is None else kind.mixer.flops
        costs[kind] += chunk_flops(*delta_shape(spec)) if kind.delta else 0
        costs[kind] += state_space_flops(*mamba_shape(spec)) if kind.mamba else 0
    return tuple(costs[spec.layer(layer)] for layer in range(spec.n_layers))


def _scores(spec: ModelSpec, kind: LayerSpec, seq_len: int) -> float:
    """Return the scores of a sequence over all heads, times the widths of the two matmuls of
    each."""
    total = 0.0
    if kind.attends:
        width = spec.n_heads * (spec.head_dim + spec.value_dim)
        total += width * causal_scores(seq_len, kind.window)
    for scores in () if kind.mixer is None else kind.mixer.scores:
        total += scores.heads * scores.width * causal_scores(seq_len, scores.window)
    return total


def _layer_weights(spec: ModelSpec, kind: LayerSpec) -> int:
    """Return the weight elements that multiply a token in a layer: of routed experts, only those it
    selects."""
    single_layer = spec.alike(kind, n_layers=1)
    inside = (part for part in parts(single_layer) if part.name.startswith("layers."))
    return sum(part.active(spec) for part in inside if part.is_matmul)


def head_flops(spec: ModelSpec) -> float:
    """Return the forward FLOPs of the head and its softmax for one token."""
    return _head_products(spec) + _SOFTMAX * spec.vocab_size


def embedding_flops(spec: ModelSpec) -> float:
    """Return the forward FLOPs that one token's embedding lookup counts as: a row read and
    written."""
    return 2.0 * spec.dim


def flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Return the model FLOPs of one training token, forward and backward.

    The backward has two matmuls for each one of the forward, or one if the weight is frozen.
    Includes the head, also if it is tied, and attention without the causal mask; with a window,
    twice the scores that it leaves.
    """
    layers = sum(layer_flops(spec, seq_len, squares=True))
    total = _PASSES * (layers + _head_products(spec))
    if spec.lora is None:
        return total
    frozen = (part for part in parts(spec) if part.is_matmul and not part.trained)
    inside = sum(2.0 * part.active(spec) for part in frozen if part.name.startswith("layers."))
    return total - inside - _head_products(spec)


def _head_products(spec: ModelSpec) -> float:
    return 2.0 * spec.vocab_size * spec.dim
