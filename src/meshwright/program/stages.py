"""How the layers are split into pipeline stages: contiguous, balanced by cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.rules import most_stages
from meshwright.program.model_flops import embedding_flops, head_flops, layer_flops
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import Part


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: layers `first_layer` up to `stop_layer`, and maybe the model's ends."""

    index: int
    first_layer: int
    stop_layer: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> range:
        """The global indices of its layers."""
        return range(self.first_layer, self.stop_layer)

    def holds(self, part: Part, tied: bool) -> bool:
        """Whether the stage holds a parameter; with a `tied` head, the last one has the embedding,
        too."""
        room, _, suffix = part.name.partition(".")
        if room == "layers":
            return int(suffix.partition(".")[0]) in self.layers
        if room == "embed":
            return self.is_first or (self.is_last and tied)
        return self.is_last


def split_stages(spec: ModelSpec, count: int, seq_len: int) -> tuple[Stage, ...]:
    """Return `count` contiguous stages that minimize the cost of the costliest one.

    Every stage has at least one layer, unless there are more stages than layers: then the last one
    has the head alone and, of two more, the first one the embedding alone, as in the training of
    Llama 3 405B (arXiv:2407.21783, section 3.3.2). Among equally good splits, the first stages are
    the fuller ones, because the last also computes the loss. Raises `ValueError` for more stages
    than `most_stages`.
    """
    if not 1 <= count <= most_stages(spec.n_layers):
        raise ValueError(f"{count} stages of {spec.n_layers} layers")
    layers, first, last = layer_flops(spec, seq_len), embedding_flops(spec), head_flops(spec)
    if count > spec.n_layers:
        ahead = count - spec.n_layers - 1  # 1 if the embedding has a stage of its own
        bounds = [min(max(index - ahead, 0), spec.n_layers) for index in range(count + 1)]
    elif len(set(layers)) == 1:
        bounds = _balanced(spec.n_layers, count, layers[0], first, last)
    else:
        bounds = _balanced_unlike(layers, count, first, last)
    return tuple(
        Stage(index, bounds[index], bounds[index + 1], index == 0, index == count - 1)
        for index in range(count)
    )


def _balanced_unlike(layers: Sequence[float], count: int, first: float, last: float) -> list[int]:
    """Return the stage bounds for layers of different costs.

    Bisects the cost of the costliest stage; stages are filled from the last one on, since the first
    ones hold most microbatches.
    """

    def filled(limit: float) -> list[int] | None:
        bounds, stop = [len(layers)], len(layers)
        for stage in reversed(range(count)):
            cost = last if stage == count - 1 else 0.0
            start = stop
            while start > stage and (start == stop or cost + layers[start - 1] <= limit):
                start -= 1
                cost += layers[start]
            if cost + (first if stage == 0 else 0.0) > limit:
                return None
            bounds.append(start)
            stop = start
        return bounds[::-1] if stop == 0 else None

    low, high = 0.0, 2 * (first + sum(layers) + last)
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if filled(middle) is None else (low, middle)
    split = filled(high)
    assert split is not None, "so much has room for all"
    return split


def _balanced(layers: int, count: int, layer: float, first: float, last: float) -> list[int]:
    """Return the stage bounds for layers of equal cost.

    Only three sizes matter, those of the first, the largest and the last stage: tries every size of
    the last stage, and spreads the other layers evenly.
    """
    if count == 1:
        return [0, layers]

    def costliest(at_end: int) -> tuple[float, int]:
        remaining = layers - at_end
        largest = -(-remaining // (count - 1))  # ceiling
        lead = layer * (remaining // (count - 1)) + first
        return max(layer * largest, lead, layer * at_end + last), -at_end

    at_end = min(range(1, layers - count + 2), key=costliest)
    remaining, bounds = layers - at_end, [0]
    for index in range(count - 1):
        # The fuller ones come second to last first: the first stage also has the embedding.
        size = remaining // (count - 1) + (index >= count - 1 - remaining % (count - 1))
        bounds.append(bounds[-1] + size)
    return [*bounds, layers]
