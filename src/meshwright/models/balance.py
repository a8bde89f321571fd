"""Router losses and corrections: balanced tokens per expert, small scores.

The load-balancing loss is computed per sequence, so that it doesn't depend on the division of a
batch: arXiv:2412.19437, equations 17 to 20, with the softmax of all scores, or their sigmoids over
the sum of these. The z-loss is that of arXiv:2202.08906, equation 5. A router's backward adds their
gradients; the only messages are the counts of sequences that ranks share. Padding is not a token of
a sequence: it is in no loss, count or capacity.

Without a loss, arXiv:2408.15664 changes each expert's correction by the same amount after each
step: up if it received fewer tokens of the global batch than the mean, down if it received more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.models.context import Unpadded


def full_at(capacity: float, seq_len: int, top_k: int, experts: int) -> int:
    """Return an expert's limit of tokens per sequence: `capacity` times an even share."""
    return math.ceil(capacity * seq_len * top_k / experts)


class Sequences(NamedTuple):
    """The sequences that a router's tokens belong to, and which of the tokens are not padding.

    `number` is the number of sequences. `is_data` bool `[tokens]` is False for padding. `lengths`
    int64 `[number]` are the tokens of each whole sequence without padding, including those that
    other ranks hold. None: no token is padding.
    """

    number: int
    is_data: Tensor | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(cls, number: int, unpadded: Unpadded | None) -> Sequences:
        """Return `number` sequences; `unpadded` says which tokens are not padding, None that all
        are not.
        """
        if unpadded is None:
            return cls(number)
        return cls(number, unpadded.mask.flatten(), unpadded.lengths)

    def data(self, values: Tensor) -> Tensor:
        """Return per-token values `[tokens, ...]` with those of padding set to 0."""
        if self.is_data is None:
            return values
        return values * self.is_data.view(-1, *[1] * (values.dim() - 1))

    def add(self, values: Tensor, into: Tensor) -> None:
        """Add the values of each sequence `[number, n]` to each of its tokens in `into` `[tokens,
        n]`.

        It works in place and leaves padding out.
        """
        by_row = into.view(self.number, -1, into.shape[-1])
        if self.is_data is None:
            by_row += values[:, None]
        else:
            by_row.addcmul_(values[:, None], self.is_data.view(self.number, -1, 1).to(values))

    def lengths_of(self, tokens: int) -> Tensor | int:
        """Return each sequence's length without padding `[number, 1]`, or one integer without
        padding.

        `tokens` counts the tokens of all sequences on all ranks that share them. A sequence of
        padding alone counts as 1.
        """
        if self.lengths is None:
            return tokens // self.number
        return self.lengths.clamp(min=1)[:, None]


@dataclass
class Balance:
    """A router's auxiliary losses, capacity and bias correction, with counts since the last
    reading.

    `aux` weighs the load-balancing loss, `z` the z-loss. `scale` multiplies both: the loss scale
    divided by the sequences of the global batch, or 0 on ranks that duplicate another's work.
    `ranks` ranks share each sequence; `summed` returns the sum of counts over them. `pieces` are
    the numbers of the pieces of a sequence on this rank; every other rank has equally many. `met`
    are the tokens of each expert, int64 `[experts]`, None on ranks that do not count; `losses` the
    two losses, fp32 `[2]`, without `scale`. With a `capacity` c, an expert accepts at most c times
    its even share of a sequence's tokens; `dropped` counts the (token, expert) pairs beyond it,
    int64 `[]`. With `is_forced`, tokens are assigned to experts round-robin, whatever their scores.
    `lately` are the tokens of each expert in the current step, int64 `[experts]`; by it, the
    router's correction changes by `rate` after the step.
    """

    aux: float = 0.0
    z: float = 0.0
    rate: float = 0.0
    scale: float = 0.0
    ranks: int = 1
    pieces: tuple[int, ...] = (0,)
    summed: Callable[[Tensor], Tensor] = lambda counts: counts
    capacity: float | None = None
    is_forced: bool = False
    met: Tensor | None = None
    losses: Tensor | None = None
    lately: Tensor | None = None
    dropped: Tensor | None = None

    def picked(self, weights: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Select `top_k` experts of each token; return their weights and ids, both `[tokens,
        top_k]`.

        `weights` fp32 `[tokens, experts]`: the largest win, unless the selection `is_forced`.
        """
        if not self.is_forced:
            return weights.topk(top_k)
        tokens, experts = weights.shape
        numbers = torch.arange(tokens * top_k, device=weights.device)
        ids = numbers.view(tokens, top_k) % experts
        return weights.gather(-1, ids), ids

    def placed(self, ids: Tensor, sequences: Sequences, experts: int) -> Tensor:
        """Return `ids` int64 `[tokens, top_k]` with those of padding spread evenly over the
        experts.

        All padding has the same scores, so it would load the same experts. With a capacity, `ids`
        stay as they are, since `bounded` assigns no expert to padding.
        """
        if sequences.is_data is None or self.capacity is not None:
            return ids
        turns = torch.arange(ids.numel(), device=ids.device).view_as(ids) % experts
        return ids.where(sequences.is_data[:, None], turns)

    def bounded(self, ids: Tensor, sequences: Sequences, experts: int) -> Tensor:
        """Return `ids` with the id `experts`, "dropped", wherever an expert is beyond its capacity.

        `ids` int64 `[tokens, top_k]`. The first tokens of a sequence have precedence, so that no
        token depends on later ones: GShard, arXiv:2006.16668, algorithm 1, per sequence. All pairs
        of padding are dropped.
        """
        assert self.capacity is not None
        rows = sequences.number
        by_row = ids.view(rows, -1, ids.shape[-1])
        seq = by_row.shape[1]
        limit: Tensor | int = full_at(self.capacity, seq * self.ranks, ids.shape[-1], experts)
        if sequences.lengths is not None:
            limit = (self.capacity * sequences.lengths.double() * ids.shape[-1] / experts).ceil()
            limit = limit[:, None, None]
        picks = torch.zeros(rows, seq, experts, dtype=torch.int32, device=ids.device)
        counted = sequences.data(torch.ones_like(ids, dtype=torch.int32)).view_as(by_row)
        picks = picks.scatter_(2, by_row, counted).view(rows, len(self.pieces), -1, experts)
        positions = picks.cumsum(2, dtype=torch.int32)
        if self.ranks > 1:  # what comes before each piece is on the other ranks
            totals = picks.new_zeros(rows, self.ranks * len(self.pieces), experts)
            # One by one: a list of numbers would be copied to the device, which the host awaits.
            for index, piece in enumerate(self.pieces):
                totals[:, piece] = positions[:, index, -1]
            totals = self.summed(totals)
            before = totals.cumsum(1, dtype=torch.int32) - totals
            positions += torch.stack([before[:, piece] for piece in self.pieces], 1)[:, :, None]
        positions = positions.view(rows, seq, experts).gather(2, by_row)
        limited = by_row.where(positions <= limit, experts).view_as(ids)
        return (
            limited
            if sequences.is_data is None
            else limited.where(sequences.is_data[:, None], experts)
        )

    def count(
        self, ids: Tensor, sequences: Sequences, experts: int, dropped: Tensor | None
    ) -> None:
        """Add the tokens per expert in `ids` int64 `[tokens, top_k]` to the counters, without
        padding.

        `dropped` int64 `[]` is the number of (token, expert) pairs beyond the capacity; None: no
        capacity.
        """
        if self.dropped is not None and dropped is not None:
            self.dropped += dropped
        pairs = ids.flatten()
        counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, pairs, sequences.data(torch.ones_like(ids)).flatten())
        for noted in (self.met, self.lately):
            if noted is not None:
                noted += counts

    def to_shares(self, probabilities: Tensor, ids: Tensor, sequences: Sequences) -> Tensor:
        """Return the gradient of the load-balancing loss with respect to each token's
        probabilities.

        It is the same for all tokens of a sequence: fp32 `[sequences, experts]`. `probabilities`
        fp32 `[tokens, experts]` add up to 1 for each token; `ids` `[tokens, top_k]` are its most
        probable experts. Counts of `ids` have no gradient, so the loss is linear in
        `probabilities`.
        """
        by_row, experts = ids.view(sequences.number, -1), probabilities.shape[-1]
        counts = torch.zeros(sequences.number, experts, dtype=torch.float32, device=ids.device)
        met = sequences.data(torch.ones_like(ids, dtype=torch.float32))
        counts.scatter_add_(1, by_row, met.view_as(by_row))
        lengths = sequences.lengths_of(probabilities.shape[0] * self.ranks)
        gradient = self.summed(counts) * (self.aux * experts / (ids.shape[-1] * lengths**2))
        if self.losses is not None:
            self.losses[0] += (
                sequences.data(probabilities).view(sequences.number, -1, experts).sum(1) * gradient
            ).sum()
        return gradient * self.scale

    def to_scores(self, sizes: Tensor, sequences: Sequences) -> Tensor:
        """Return factors `[tokens, 1]`: times the softmax of the scores, they are the z-loss'
        gradient.

        `sizes` fp32 `[tokens]` are the log-sum-exp of each token's scores.
        """
        lengths = sequences.lengths_of(sizes.shape[0] * self.ranks)
        by_row = sequences.data(sizes).view(sequences.number, -1)
        if self.losses is not None:
            self.losses[1] += self.z * (by_row.square() / lengths).sum()
        return (by_row * (2 * self.z * self.scale / lengths)).view(-1, 1)
