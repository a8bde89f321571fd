"""What the layer tables of recurrences share: the bytes of states and of a chunk's backward."""

from __future__ import annotations

from typing import Final, NamedTuple

from meshwright.program.lower import Program
from meshwright.program.sizes import Sizes
from meshwright.spec.recurrences import CHUNK

WIDE: Final = 4
"""Bytes of a number of the recurrence, which is computed in fp32."""


class ChunkTensors(NamedTuple):
    """The fp32 tensors that the backward of a chunk has at once, counted by their size.

    That of the values, of the keys, of the pairs of tokens of each head, and of the states.
    """

    values: int
    keys: int
    pairs: int
    states: int


class Widths(NamedTuple):
    """A rank's numbers for each token: of values, of keys, of heads; and those of a state."""

    values: int
    keys: int
    heads: int
    state: int

    def state_bytes(self, program: Program, sizes: Sizes, chunks: int | None = None) -> int:
        """Return the bytes of the states before each chunk of the sequences, or before `chunks`."""
        count = -(-program.sequence // CHUNK) if chunks is None else chunks
        return sizes.rows * count * self.state * WIDE

    def chunk_bytes(self, program: Program, sizes: Sizes, tensors: ChunkTensors) -> int:
        """Return the temporary bytes of a chunk's backward."""
        length = min(CHUNK, program.sequence)
        numbers = tensors.values * self.values + tensors.keys * self.keys
        numbers += tensors.pairs * length * self.heads
        of_tokens = sizes.rows * length * numbers * WIDE
        return of_tokens + tensors.states * self.state_bytes(program, sizes, chunks=1)


def gated_norm_bytes(sizes: Sizes, of_values: int) -> int:
    """Return the workspace of a gated norm's backward on `of_values` bytes of activations.

    The gradient that came and four fp32 tensors, or with activations in half precision five.
    """
    count = 4 if sizes.element == WIDE else 5
    return of_values + count * (WIDE // sizes.element) * of_values
