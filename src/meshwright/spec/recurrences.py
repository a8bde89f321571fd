"""Builds the `Mixer`s of recurrences, gated attention and sparse attention from a config's sizes.

FLOPs are those of one token's forward, over all heads, for kernels that work in chunks. The gated
delta rule: arXiv:2412.06464, section 3.3; Kimi Delta Attention: arXiv:2510.26692, section 4;
Mamba-2: arXiv:2405.21060, section 6; the index of sparse attention: arXiv:2512.02556, section 2.1.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from meshwright.spec.mixers import Matrix, Mixer, PairScores

# Tokens of a chunk of the recurrences that are computed here, as of the delta rule's kernels.
CHUNK: Final = 64


def _delta_flops(heads: int, keys: int, values: int) -> int:
    """Return the FLOPs per token of the delta rule: matmuls within a chunk, then with the state.

    Within: keys with keys, queries with keys, and the triangular system applied to keys and to
    values, then scores with values. With the state: for keys, for queries, and its update.
    """
    within = CHUNK * (6 * keys + 4 * values)
    return heads * (within + 6 * keys * values)


def chunk_flops(heads: int, key_heads: int, key_dim: int, value_dim: int) -> float:
    """Return the FLOPs per token of the delta rule as `models.delta_rule` computes it.

    Matmuls of queries and keys with the keys of a chunk, which value heads share; for each value
    head a triangular system, the matmul of scores with its solution, and three matmuls with the
    state.
    """
    by_head = 6 * key_dim * value_dim + 3 * CHUNK * value_dim
    return float(heads * by_head + key_heads * 4 * CHUNK * key_dim)


def delta_ends_flops(heads: int, key_heads: int, key_dim: int, value_dim: int) -> float:
    """Return the FLOPs per token of the delta rule's last state and transition together.

    Matmuls of keys with the keys of a chunk, which value heads share; for each value head a
    triangular system, and two matmuls with the state, of the dims of values and of keys.
    """
    width = key_dim + value_dim
    by_head = 4 * key_dim * width + CHUNK * width
    return float(heads * by_head + key_heads * 2 * CHUNK * key_dim)


def delta_step_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """Return the FLOPs of a product of a transition and a state of each head."""
    return 2.0 * heads * key_dim * key_dim * value_dim


def state_space_flops(heads: int, groups: int, key_dim: int, value_dim: int) -> float:
    """Return the FLOPs per token of Mamba-2's recurrence as `models.state_space` computes it.

    Matmuls of queries and keys within a chunk, which the heads of a group share; for each head,
    their matmul with the values, and two matmuls with the state.
    """
    by_head = 4 * key_dim * value_dim + 2 * CHUNK * value_dim
    return float(heads * by_head + groups * 2 * CHUNK * key_dim)


def state_space_ends_flops(heads: int, groups: int, key_dim: int, value_dim: int) -> float:
    """Return those of the last state alone, or of the gradient of the first one: one product."""
    return 2.0 * heads * key_dim * value_dim


def _states(heads: int, keys: int, values: int, chunk: int) -> int:
    """Return, per token, the 16-bit elements of one fp32 state saved for each chunk."""
    return 2 * heads * keys * values // chunk  # in fp32


class Delta(NamedTuple):
    """The sizes of the gated delta rule, as in Qwen3-Next and Qwen3.5."""

    dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def mixer(self) -> Mixer:
        """Return the mixer: projections, a short convolution, the recurrence, a gated norm."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        through, heads = 2 * keys + values, self.value_heads
        flops = _delta_flops(heads, self.key_dim, self.value_dim)
        return Mixer(
            heads=math.gcd(self.key_heads, heads),
            matrices=(
                Matrix(name="mixer.qkv", outer=through, inner=self.dim, cut="outer"),
                Matrix(name="mixer.z", outer=values, inner=self.dim, cut="outer"),
                Matrix(name="mixer.ba", outer=2 * heads, inner=self.dim, cut="outer"),
                Matrix(name="mixer.out", outer=self.dim, inner=values, cut="inner"),
            ),
            vectors=2 * heads + through * self.kernel + self.value_dim,
            flops=flops + 2 * through * self.kernel,
            # What the convolution takes and makes, the gate, the recurrence's result.
            saved=2 * through + 2 * values + _states(heads, self.key_dim, self.value_dim, CHUNK),
        )


class KimiDelta(NamedTuple):
    """The sizes of Kimi Delta Attention: the gate of a head's state has one number per key dim."""

    dim: int
    heads: int
    head_dim: int
    kernel: int

    def mixer(self) -> Mixer:
        """Return the mixer: q, k and v with short convolutions, two gates of low rank."""
        width, low = self.heads * self.head_dim, self.head_dim
        columns = [
            Matrix(name=f"mixer.{name}", outer=width, inner=self.dim, cut="outer") for name in "qkv"
        ]
        gates = [
            matrix
            for name in "fg"
            for matrix in (
                Matrix(name=f"mixer.{name}_a", outer=low, inner=self.dim, cut="whole"),
                Matrix(name=f"mixer.{name}_b", outer=width, inner=low, cut="outer"),
            )
        ]
        beta = Matrix(name="mixer.b", outer=self.heads, inner=self.dim, cut="outer")
        out = Matrix(name="mixer.out", outer=self.dim, inner=width, cut="inner")
        flops = _delta_flops(self.heads, low, low)
        return Mixer(
            heads=self.heads,
            matrices=(*columns, *gates, beta, out),
            vectors=3 * width * self.kernel + width + self.heads + low,
            flops=flops + 2 * 3 * width * self.kernel,
            saved=6 * width + 3 * width + _states(self.heads, low, low, CHUNK),
        )


class Mamba(NamedTuple):
    """The sizes of a Mamba-2 mixer, whose heads share two projections (B and C) per group.

    `norm` is the number of weights of a gated norm.
    """

    dim: int
    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    chunk: int
    conv_bias: bool
    bias: bool
    norm: int

    def mixer(self, *, attends: bool = False, feeds: bool = True) -> Mixer:
        """Return the mixer; with `attends`, it runs beside the layer's attention, else in its
        place.
        """
        inner, shared = self.heads * self.head_dim, 2 * self.groups * self.state
        through = inner + shared
        biases = (inner + through + self.heads + self.dim) * self.bias
        vectors = 3 * self.heads + through * (self.kernel + self.conv_bias) + self.norm + biases
        within = 2 * self.chunk * (self.groups * self.state + inner)
        return Mixer(
            attends=attends,
            feeds=feeds,
            heads=self.heads,
            matrices=(
                Matrix(name="mixer.zx", outer=2 * inner, inner=self.dim, cut="outer"),
                Matrix(name="mixer.bc", outer=shared, inner=self.dim, cut="whole"),
                Matrix(name="mixer.dt", outer=self.heads, inner=self.dim, cut="outer"),
                Matrix(name="mixer.out", outer=self.dim, inner=inner, cut="inner"),
            ),
            vectors=vectors,
            flops=within + 4 * inner * self.state + 2 * through * self.kernel,
            saved=2 * through
            + 2 * inner
            + _states(self.heads, self.head_dim, self.state, self.chunk),
        )


def indexer(dim: int, rank: int, heads: int, head_dim: int) -> Mixer:
    """Return the mixer of a sparse attention index, which scores all keys to select some."""
    return Mixer(
        attends=True,
        heads=heads,
        matrices=(
            Matrix(name="mixer.q", outer=heads * head_dim, inner=rank or dim, cut="outer"),
            Matrix(name="mixer.k", outer=head_dim, inner=dim, cut="whole"),
            Matrix(name="mixer.weights", outer=heads, inner=dim, cut="outer"),
        ),
        vectors=2 * head_dim,
        scores=(PairScores(heads=heads, width=head_dim),),
        saved=(heads + 1) * head_dim,
    )


class Heads(NamedTuple):
    """The sizes of one layer's attention where layers differ; `kv_heads` 0: another layer's
    keys.
    """

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    shares_values: bool

    def mixer(self, extra: tuple[Matrix, ...], vectors: int) -> Mixer:
        """Return the mixer of this attention with norms of heads, and `extra` matrices
        beside it.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        names = () if not keys else ("k",) if self.shares_values else ("k", "v")
        columns = [
            Matrix(name="mixer.q", outer=queries, inner=self.dim, cut="outer"),
            *(Matrix(name=f"mixer.{n}", outer=keys, inner=self.dim, cut="outer") for n in names),
        ]
        out = Matrix(name="mixer.out", outer=self.dim, inner=queries, cut="inner")
        scores = PairScores(heads=self.heads, width=2 * self.head_dim, window=self.window)
        return Mixer(
            heads=math.gcd(self.heads, self.kv_heads),
            matrices=(*columns, *extra, out),
            vectors=vectors + self.head_dim * (1 + bool(keys)),
            scores=(scores,),
            saved=2 * queries + 2 * keys,
        )
