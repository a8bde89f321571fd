"""Recurrences over a sequence that is sharded over cp: states and last tokens pass between pieces.

Each rank has the pieces of a sequence that its attention has: one, or the two of a ring. A piece
makes of a state before it `transition S + ended`, so all ranks compute these two at once; one
all-gather has them for all pieces, from which a rank adds up the states before its own. In the
backward, the gradients of states go the same way from the last piece to the first. The convolution
gets the last tokens of the pieces before in the same manner. Documents end states on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.comm.groups import Link
from meshwright.models.chunks import StateRule
from meshwright.models.short_conv import Taps, short_conv
from meshwright.program.pieces import held


class Passing:
    """Replaces `convolve` and `recur` of recurrent layers on a rank of cp.

    Tensors are `[batch, tokens of this rank, ...]`, segments those of whole sequences.
    """

    def __init__(self, link: Link, kind: Literal["ring", "ulysses"]) -> None:
        self.link = link
        held_by = [held(kind, link.size, rank) for rank in range(link.size)]
        self.pieces = held_by[link.rank]
        by_rank = [piece for pieces in held_by for piece in pieces]
        # Where the pieces of a row, in their order, are among those of all ranks in theirs.
        self.order = [by_rank.index(piece) for piece in range(len(by_rank))]

    def convolve(self, taps: Sequence[Taps], segments: Tensor | None) -> list[Tensor]:
        """Return what `models.short_conv.convolve` does, given the tokens of earlier pieces."""
        inputs: Sequence[Tensor] = [self._apart(tap.x) for tap in taps]
        count = taps[0].weight.shape[-1] - 1
        befores: Sequence[Tensor | None] = [None] * len(taps)
        if count:
            given = _TokensBefore.apply(self, count, *inputs)  # type: ignore[no-untyped-call]
            inputs, befores = given[: len(taps)], given[len(taps) :]
        of_pieces = None if segments is None else self._segments(segments, count)
        return [
            self._joined(short_conv(x, tap.weight, of_pieces, before, tap.bias))
            for x, tap, before in zip(inputs, taps, befores, strict=True)
        ]

    def recur(
        self,
        rule: StateRule,
        inputs: Sequence[Tensor],
        segments: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return what tokens read, as `models.chunks.recur`, and the last states of the pieces."""
        assert state is None, "a cache is not sharded"
        apart = [self._apart(x) if x.ndim > 1 else x for x in inputs]
        of_pieces = continues = None
        if segments is not None:
            of_pieces, continues = self._segments(segments), self._continues(segments)
        results = _Recurrence.apply(self, rule, of_pieces, continues, *apart)  # type: ignore[no-untyped-call]
        read, last = results
        return self._joined(read), last

    def states(
        self,
        rule: StateRule,
        transition: Tensor,
        ended: Tensor,
        continues: Tensor | None,
        *,
        backwards: bool = False,
    ) -> Tensor:
        """Return the states before this rank's pieces, from transitions and what each ended with.

        All are `[batch * pieces, ...]`. `continues`, bool `[pieces of all ranks, batch]`: whether a
        piece's first token is of the segment of the token before; None: it always is. With
        `backwards`, return the gradients for the states after the pieces; `ended` are then those
        for the states before them, as far as the piece's own tokens go.
        """
        pieces, batch = len(self.pieces), len(ended) // len(self.pieces)
        numbers = torch.cat((transition.flatten(1), ended.flatten(1)), 1)
        gathered = self._gathered(numbers)
        size = transition[0].numel()
        total = len(gathered)
        result = ended.new_zeros(batch, pieces, *ended.shape[1:])
        passing: Tensor | None = None
        for piece in reversed(range(total)) if backwards else range(total):
            if passing is not None:
                # The border that it passes: before this piece, or after it.
                border = piece + 1 if backwards else piece
                if continues is not None:
                    passing = passing * continues[border].view(-1, *[1] * (ended.ndim - 1))
                if piece in self.pieces:
                    result[:, self.pieces.index(piece)] = passing
            if piece == (0 if backwards else total - 1):
                break
            matrix, state = torch.split(gathered[piece], [size, ended[0].numel()], 1)
            reached = state.view(batch, *ended.shape[1:])
            if passing is not None:
                through = rule.passed(matrix.view(batch, *transition.shape[1:]), passing, backwards)
                reached = reached + through
            passing = reached
        return result.flatten(0, 1)

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        """Return the `count` tokens before each piece, from the last tokens of each, `x`.

        Both are `[batch * pieces, ...]`. Tokens before the first piece are zeros. Pieces that are
        shorter than `count` have `x` whole.
        """
        tails = self._gathered(x)
        width = tails[0].shape[1]
        row = F.pad(torch.cat(tails, 1), (0, 0, count, 0))
        windows = [row[:, piece * width : piece * width + count] for piece in self.pieces]
        return torch.stack(windows, 1).flatten(0, 1)

    def to_last_tokens(self, grad: Tensor, length: int) -> Tensor:
        """Return the gradients of the last tokens of each piece from those of `tokens_before`.

        `length` are the tokens of a piece. The result has `min(count, length)`.
        """
        count = grad.shape[1]
        width, grads = min(count, length), self._gathered(grad)
        batch, _, channels = grads[0].shape
        row = grad.new_zeros(batch, count + len(grads) * width, channels)
        for piece, to_window in enumerate(grads):
            row[:, piece * width : piece * width + count] += to_window
        starts = [count + piece * width for piece in self.pieces]
        return torch.stack([row[:, start : start + width] for start in starts], 1).flatten(0, 1)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """Return `[batch, ...]` of each piece of the row, from `[batch * pieces, ...]` of each
        rank's.
        """
        pieces = len(self.pieces)
        sent = torch.unflatten(x, 0, (-1, pieces)).transpose(0, 1).contiguous()
        received = sent.new_empty(self.link.size * pieces, *sent.shape[1:])
        dist.all_gather_into_tensor(received, sent, group=self.link.required)
        return [received[place] for place in self.order]

    def _apart(self, x: Tensor) -> Tensor:
        """Return this rank's tokens `[batch, tokens, ...]` as `[batch * pieces, tokens, ...]`."""
        return torch.unflatten(x, 1, (len(self.pieces), -1)).flatten(0, 1)

    def _joined(self, x: Tensor) -> Tensor:
        """Return the inverse of `_apart`."""
        return torch.unflatten(x, 0, (-1, len(self.pieces))).flatten(1, 2)

    def _segments(self, segments: Tensor, count: int = 0) -> Tensor:
        """Return the segments of each piece and of `count` tokens before it."""
        length = segments.shape[1] // len(self.order)
        row = torch.cat((segments[:, :1].expand(-1, count), segments), 1)
        windows = [row[:, piece * length : (piece + 1) * length + count] for piece in self.pieces]
        return torch.stack(windows, 1).flatten(0, 1)

    def _continues(self, segments: Tensor) -> Tensor:
        length = segments.shape[1] // len(self.order)
        borders = segments[:, ::length] == segments.roll(1, 1)[:, ::length]
        return borders.T


class _TokensBefore(torch.autograd.Function):
    """Inputs of convolutions as they are, then the tokens before each piece, from one message."""

    @staticmethod
    def forward(ctx: Any, passing: Passing, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.passing = passing
        tails = torch.cat([x[:, -count:] for x in inputs], 2)
        befores = torch.split(passing.tokens_before(tails, count), [x.shape[2] for x in inputs], 2)
        return *(x.view_as(x) for x in inputs), *befores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_inputs, to_befores = grads[: len(grads) // 2], grads[len(grads) // 2 :]
        length, widths = to_inputs[0].shape[1], [x.shape[2] for x in to_inputs]
        to_tails = ctx.passing.to_last_tokens(torch.cat(to_befores, 2), length)
        by_input = torch.split(to_tails, widths, 2)
        for to_x, to_tail in zip(to_inputs, by_input, strict=True):
            # In place: only the convolution has seen the input, and this is its gradient.
            to_x[:, length - to_tail.shape[1] :] += to_tail
        return None, None, *to_inputs


class _Recurrence(torch.autograd.Function):
    """A recurrence of this rank's pieces, with the states of those before."""

    @staticmethod
    def forward(
        ctx: Any,
        passing: Passing,
        rule: StateRule,
        segments: Tensor | None,
        continues: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        transition, ended = rule.ends(*inputs, segments)
        first = passing.states(rule, transition, ended, continues)
        read, states, last = rule.forward(*inputs, segments, first)
        ctx.passing, ctx.rule = passing, rule
        ctx.save_for_backward(segments, continues, transition, states, *inputs)
        ctx.mark_non_differentiable(last)
        ctx.set_materialize_grads(False)
        return read, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        segments, continues, transition, states, *inputs = ctx.saved_tensors
        started = ctx.rule.starts(grad, *inputs, segments)
        to_last = ctx.passing.states(ctx.rule, transition, started, continues, backwards=True)
        *grads, _first = ctx.rule.backward(grad, to_last, *inputs, segments, states)
        return None, None, None, None, *grads
