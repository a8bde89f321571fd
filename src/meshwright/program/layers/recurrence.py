"""What the layer tables of recurrences share: the bytes of states and of a chunk's backward, and
what passes between the pieces of a sequence under cp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from meshwright.program.lower import Program
from meshwright.program.messages import Collective, Phase
from meshwright.program.pieces import held
from meshwright.program.saved import Op
from meshwright.program.sizes import Sizes
from meshwright.spec.recurrences import CHUNK

WIDE: Final = 4
"""Bytes of a number of the recurrence, which is computed in fp32."""
_INT64: Final = 8


class ChunkTensors(NamedTuple):
    """The fp32 tensors that the backward of a chunk has at once, counted by their size.

    That of the values, of the keys, of the pairs of tokens of each head, and of the states. The
    numbers are the closest to the profiled peaks of layers of eight to nine sizes with several
    chunks: within 7% for the delta rule, and 10% for Mamba-2.
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
        """Return the bytes of the states before each chunk of the sequences, or before `chunks` of
        each piece."""
        count = -(-piece_length(program) // CHUNK) if chunks is None else chunks
        return sizes.rows * pieces(program) * count * self.state * WIDE

    def chunk_bytes(self, program: Program, sizes: Sizes, tensors: ChunkTensors) -> int:
        """Return the temporary bytes of a chunk's backward, in all pieces at once."""
        length = min(CHUNK, piece_length(program))
        numbers = tensors.values * self.values + tensors.keys * self.keys
        numbers += tensors.pairs * length * self.heads
        of_tokens = sizes.rows * pieces(program) * length * numbers * WIDE
        return of_tokens + tensors.states * self.state_bytes(program, sizes, chunks=1)


def pieces(program: Program) -> int:
    """Return how many pieces of a sequence a rank of cp has: two in a ring."""
    layout = program.layout
    return len(held(layout.cp_kind, layout.cp, 0)) if layout.cp > 1 else 1


def piece_length(program: Program) -> int:
    """Return the tokens of a piece of a sequence."""
    return program.sequence // pieces(program)


class Passed(NamedTuple):
    """What passes from piece to piece under cp: the numbers of one sequence.

    Of a state, and of the transition by which a piece changes it; the channels of the convolution,
    and how many tokens before its own it sees. `ends` and `starts` are the FLOPs per token of
    computing both and of the gradient for a piece's first state; `step` those of passing a state on
    by a piece.
    """

    state: int
    transition: int
    channels: int
    taps: int
    ends: float
    starts: float
    step: float

    def operations(self, program: Program, sizes: Sizes) -> Iterator[Op]:
        """Yield the operation of states between pieces; nothing without cp.

        The last piece's state goes nowhere, and the first one's needs no product. The recurrence
        itself saves the transitions: see `transition_bytes`.
        """
        if program.layout.cp == 1:
            return
        borders = program.layout.cp * pieces(program) - 2
        steps = sizes.rows * borders * self.step
        flops = sizes.tokens * self.ends + steps
        transition, state = self._bytes(program, sizes)
        yield Op(
            "attn.pieces",
            "attention",
            flops=flops,
            kept=(transition, state, sizes.rows * borders * self.state * WIDE if steps else 0),
            indices=self._segment_bytes(program, sizes),
            backward=(sizes.tokens * self.starts + steps) / flops,
        )

    def before_bytes(self, program: Program, sizes: Sizes) -> int:
        """Return the bytes of the tokens before each piece; 0 without cp."""
        if program.layout.cp == 1:
            return 0
        return sizes.rows * pieces(program) * self.taps * self.channels * sizes.element

    def transition_bytes(self, program: Program, sizes: Sizes) -> int:
        """Return the bytes of the transitions of this rank's pieces; 0 without cp."""
        return self._bytes(program, sizes)[0] if program.layout.cp > 1 else 0

    def workspace(self, program: Program, sizes: Sizes, core: int) -> int:
        """Return the workspace of the backward of a recurrence that takes `core` bytes by itself.

        Before it, transitions and gradients of states are sent and gathered; during it, there are
        the gradients for the last states.
        """
        if program.layout.cp == 1:
            return core
        transition, state = self._bytes(program, sizes)
        gathering = 2 * state + (program.layout.cp + 1) * (transition + state)
        return max(core + state, gathering)

    def messages(self, program: Program, sizes: Sizes, layers: int) -> Iterator[Collective]:
        """Yield the messages of so many layers along cp."""
        layout, passes = program.layout, program.microbatches * layers
        recomputed = 0 if layout.recompute == "none" else passes
        before = self.before_bytes(program, sizes)
        tails = before * min(self.taps, piece_length(program)) // max(self.taps, 1)
        states = sum(self._bytes(program, sizes))
        to_tails, to_states = "what the tokens before pieces get", "what states before pieces get"
        sent: tuple[tuple[Phase, int, int, str], ...] = (
            ("forward", passes, tails, "last tokens of pieces"),
            ("forward", passes, states, "states after pieces"),
            ("recompute", recomputed, tails, "last tokens of pieces"),
            ("recompute", recomputed, states, "states after pieces"),
            ("backward", passes, states, to_states),
            ("backward", passes, before, to_tails),
        )
        for phase, count, size, label in sent:
            if size:
                reason = f"{phase}: gather the {label}"
                yield Collective(
                    "all_gather", "cp", layout.cp * size, count, phase, "attention", reason
                )

    def _bytes(self, program: Program, sizes: Sizes) -> tuple[int, int]:
        """Return the bytes of the transitions of a rank's pieces, and of a state of each."""
        count = sizes.rows * pieces(program) * WIDE
        return count * self.transition, count * self.state

    def _segment_bytes(self, program: Program, sizes: Sizes) -> int:
        """Return the bytes of the segments that a layer saves: of tokens, also with those before
        them, and whether pieces continue segments."""
        if not program.target.packed:
            return 0
        count = pieces(program)
        tokens = 2 * sizes.tokens + sizes.rows * count * self.taps
        return tokens * _INT64 + sizes.rows * count * program.layout.cp


def gated_norm_bytes(sizes: Sizes, of_values: int) -> int:
    """Return the workspace of a gated norm's backward on `of_values` bytes of activations.

    The gradient that came and four fp32 tensors, or with activations in half precision five.
    """
    count = 4 if sizes.element == WIDE else 5
    return of_values + count * (WIDE // sizes.element) * of_values
