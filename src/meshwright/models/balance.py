"""Router losses and corrections: balanced tokens per expert, small scores.

The load-balancing loss is computed per sequence, so that it doesn't depend on the division of a
batch: arXiv:2412.19437, equations 17 to 20, with the softmax of all scores, or their sigmoids over
the sum of these. The z-loss is that of arXiv:2202.08906, equation 5. A router's backward adds their
gradients; the only messages are the counts of sequences that ranks share. Padding is no token of a
sequence: it is in no loss, count or capacity.

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
    """Return how many tokens of a sequence an expert takes, for a capacity in even shares."""
    return math.ceil(capacity * seq_len * top_k / experts)


class Sequences(NamedTuple):
    """The sequences of a router's tokens: their number, and which of the tokens are data.

    `is_data` bool `[tokens]`; `lengths` int64 `[number]` are the data of each whole sequence, also
    on other ranks. None: every token is data.
    """

    number: int
    is_data: Tensor | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(cls, number: int, unpadded: Unpadded | None) -> Sequences:
        """Return so many sequences, of which some may be padded."""
        if unpadded is None:
            return cls(number)
        return cls(number, unpadded.mask.flatten(), unpadded.lengths)

    def data(self, values: Tensor) -> Tensor:
        """Return values of tokens `[tokens, ...]` with 0 for padding."""
        if self.is_data is None:
            return values
        return values * self.is_data.view(-1, *[1] * (values.dim() - 1))

    def add(self, values: Tensor, into: Tensor) -> None:
        """Add the values of each sequence `[number, n]` to its tokens `[tokens, n]`, in place."""
        by_row = into.view(self.number, -1, into.shape[-1])
        if self.is_data is None:
            by_row += values[:, None]
        else:
            by_row.addcmul_(values[:, None], self.is_data.view(self.number, -1, 1).to(values))

    def lengths_of(self, tokens: int) -> Tensor | int:
        """Return the data of each sequence `[number, 1]`, or the one number; padding alone is 1.

        `tokens` are those of all sequences, on all ranks that share them.
        """
        if self.lengths is None:
            return tokens // self.number
        return self.lengths.clamp(min=1)[:, None]


@dataclass
class Balance:
    """The weights of a router's losses, and its counts and losses since they were last read.

    `aux` weighs the load-balancing loss, `z` the z-loss. `scale` multiplies both: one over the
    sequences of the global batch times the loss scale, 0 on ranks that compute what another does.
    `summed` returns the sum of counts over the `ranks` that share sequences. Of a sequence, this
    rank has such `pieces`, and each of the others as many. `met` are the tokens of each expert,
    int64 `[experts]`, on ranks that count; `losses` the two losses, fp32 `[2]`, without `scale`.
    With a `capacity` c, an expert takes at most c times its even share of a row's tokens; `dropped`
    counts the pairs that it does not take, int64 `[]`. With `is_forced` tokens meet experts in
    turn, whatever their scores. `lately` are the tokens of each expert in the step under way, int64
    `[experts]`, where `rate` moves the router's correction after it.
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
        """Return the weights and ids of each token's experts, from all experts' weights in fp32.

        weights `[tokens, experts]`; the results are `[tokens, top_k]`.
        """
        if not self.is_forced:
            return weights.topk(top_k)
        tokens, experts = weights.shape
        numbers = torch.arange(tokens * top_k, device=weights.device)
        ids = numbers.view(tokens, top_k) % experts
        return weights.gather(-1, ids), ids

    def placed(self, ids: Tensor, sequences: Sequences, experts: int) -> Tensor:
        """Return the ids int64 `[tokens, top_k]`, with padding spread over experts in turn.

        It is alike, and would all meet the same. With a capacity, it meets none: see `bounded`.
        """
        if sequences.is_data is None or self.capacity is not None:
            return ids
        turns = torch.arange(ids.numel(), device=ids.device).view_as(ids) % experts
        return ids.where(sequences.is_data[:, None], turns)

    def bounded(self, ids: Tensor, sequences: Sequences, experts: int) -> Tensor:
        """Return the ids, with those of full experts replaced by the number of experts.

        ids int64 `[tokens, top_k]`. The first tokens of a row have precedence, so that no token
        depends on later ones: GShard, arXiv:2006.16668, algorithm 1, by sequence. Padding meets no
        expert.
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
        """Record how many tokens met each expert, and the pairs that were `dropped`, int64 `[]`.

        ids int64 `[tokens, top_k]`.
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
        """Return the load-balancing loss' gradient of all tokens of a row, fp32 `[rows, experts]`.

        probabilities fp32 `[tokens, experts]` add up to 1 for each token, ids are the experts
        `[tokens, top_k]` with the most of it. The loss is linear in the former: counts of the
        latter have no gradient.
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
        """Return the z-loss gradient of scores, as factors `[tokens, 1]` of their softmax.

        sizes fp32 `[tokens]` are the logarithms of the scores' summed exponentials.
        """
        lengths = sequences.lengths_of(sizes.shape[0] * self.ranks)
        by_row = sequences.data(sizes).view(sequences.number, -1)
        if self.losses is not None:
            self.losses[1] += self.z * (by_row.square() / lengths).sum()
        return (by_row * (2 * self.z * self.scale / lengths)).view(-1, 1)
