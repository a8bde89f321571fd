"""Blends: the source of each sample of a run, as a pure function of its number."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sampler import Rows, Sampler, chosen_rows


@dataclass(frozen=True)
class _Pair:
    """Two halves of a blend, each a source's number or a pair; `share` is that of the left one."""

    left: int | _Pair
    right: int | _Pair
    share: Fraction

    def before(self, sample: int) -> int:
        """Return how many of the first samples the left half gets: its share, rounded."""
        a, b = self.share.numerator, self.share.denominator
        return (2 * sample * a + b) // (2 * b)


class Blend:
    """Draws samples from sources by weight.

    The sources are joined pairwise, the two lightest first (Huffman 1952), and of the samples that
    a pair gets the left half has as many as rounding its share gives, at every moment. So the count
    of a source after any number of samples is within 2 of its share of them (within 1/2 for two
    sources): a half is added at each join, and the error of a pair reaches a pair inside it by at
    most 2/3, the largest share that a pair can have of another. Unlike the greedy rule of
    Megatron-LM (`build_blending_indices`) it needs no pass over the samples before, and no table.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # As they are written: 0.1 is a tenth.
        exact = [Fraction(repr(weight)) for weight in weights]
        self.shares = tuple(weight / sum(exact) for weight in exact)
        heap: list[tuple[Fraction, int, int | _Pair]] = [
            (share, number, number) for number, share in enumerate(self.shares)
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            right, light_order, light = heapq.heappop(heap)
            left, heavy_order, heavy = heapq.heappop(heap)
            pair = _Pair(heavy, light, left / (left + right))
            heapq.heappush(heap, (left + right, min(light_order, heavy_order), pair))
        self._root = heap[0][2]

    def place(self, sample: int) -> tuple[int, int]:
        """Return the source of a sample, and the number of earlier samples from that source."""
        node = self._root
        while isinstance(node, _Pair):
            before = node.before(sample)
            if node.before(sample + 1) > before:
                node, sample = node.left, before
            else:
                node, sample = node.right, sample - before
        return node, sample

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first samples each source gives."""
        counts = [0] * len(self.shares)

        def walk(node: int | _Pair, count: int) -> None:
            if isinstance(node, _Pair):
                left = node.before(count)
                walk(node.left, left)
                walk(node.right, count - left)
            else:
                counts[node] = count

        walk(self._root, samples)
        return counts


class BlendSampler:
    """Global batches of which each row is a sample of one of several sources.

    Each source is read in its own order, epoch after epoch, independently of the others. `samples`
    is how many are read before the first source starts over.
    """

    def __init__(self, blend: Blend, samplers: Sequence[Sampler], names: Sequence[str]) -> None:
        self.blend = blend
        self.samplers = tuple(samplers)
        self.names = tuple(names)
        self.batch = samplers[0].batch
        pairs = zip(self.samplers, blend.shares, strict=True)
        self.samples = max(1, min(int(sampler.samples / share) for sampler, share in pairs))

    def rows(self, step: int, rows: range | slice | None = None) -> Rows:
        """Return rows of the global batch of a step; left out, all of them; see `Sampler.rows`."""
        first = step * self.batch
        draws = [self.blend.place(first + row) for row in chosen_rows(self.batch, rows)]
        sources = np.array([source for source, _ in draws], dtype=np.int64)
        parts: list[Rows | None] = [None] * len(self.samplers)
        for number in np.unique(sources).tolist():
            samples = [sample for source, sample in draws if source == number]
            parts[number] = self.samplers[number].read(samples)
        drawn = {number: part for number, part in enumerate(parts) if part is not None}
        inputs = _woven(sources, {number: part.inputs for number, part in drawn.items()})
        targets = _woven(sources, {number: part.targets for number, part in drawn.items()})
        segments = {n: part.segments for n, part in drawn.items() if part.segments is not None}
        return Rows(inputs, targets, _woven(sources, segments) if segments else None)

    def passes(self, samples: int) -> list[dict[str, object]]:
        """Return for each source its share, its samples, and how often some samples read it."""
        counts = self.blend.counts(samples)
        rows = zip(self.names, self.blend.shares, self.samplers, counts, strict=True)
        return [
            {
                "source": name,
                "share": float(share),
                "samples": sampler.samples,
                "epochs": count / sampler.samples,
            }
            for name, share, sampler, count in rows
        ]


def _woven(sources: NDArray[np.int64], parts: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the rows of all sources in the order of the batch, int64 [rows, seq_len]."""
    width = next(iter(parts.values())).shape[1] if parts else 0
    out = np.empty((len(sources), width), dtype=np.int64)
    for number, part in parts.items():
        out[sources == number] = part
    return out
