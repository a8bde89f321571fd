"""Grouped matmuls: sorted rows, where each group (an expert) has a matrix of its own.

One kernel computes all groups where there is one (bf16 on CUDA), else one matmul per group that has
rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from meshwright.torch_private import FakeTensor, grouped_mm

# What the kernel of all groups wants widths to be multiples of: 16 bytes of bf16.
ALIGNED: Final = 8


class Sorted(NamedTuple):
    """(token, expert) pairs sorted by expert.

    `tokens` int64 `[pairs]`: the index of each pair's token. `back` int64 `[tokens * top_k]`: the
    sorted position of each token's pairs, in the order of the token's experts. `counts` int64
    `[experts]`: pairs per expert. If pairs were dropped, `tokens` lacks them, and their entries in
    `back` are beyond its end.
    """

    tokens: Tensor
    back: Tensor
    counts: Tensor

    @classmethod
    def of(cls, ids: Tensor, experts: int, *, drops: bool = False) -> Sorted:
        """Return the sorted pairs of tokens with their experts `ids` `[tokens, top_k]`.

        With `drops`, pairs whose id equals `experts` are dropped, and the host waits for the
        device.
        """
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts + drops, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        back = order.argsort()
        if drops:
            counts = counts[:experts]
            order = order[: sum(on_host(counts, len(flat)))]
        return cls(order // ids.shape[-1], back, counts)

    def sorted(self, shares: Tensor) -> Tensor:
        """Return the share of each sorted pair, `[pairs]`, from the tokens' shares `[tokens,
        top_k]`.
        """
        flat = shares.flatten()
        by_pair = torch.empty_like(flat)
        by_pair[self.back] = flat
        return by_pair[: len(self.tokens)]

    def of_tokens(self, pairs: Tensor) -> Tensor:
        """Return values of sorted pairs in the order of tokens, then of their experts; 0 where
        dropped.
        """
        if len(self.tokens) == len(self.back):
            return pairs[self.back]
        padded = torch.cat([pairs, pairs.new_zeros(1, *pairs.shape[1:])])
        return padded[self.back.clamp(max=len(pairs))]

    def summed(self, pairs: Tensor, top_k: int) -> Tensor:
        """Return the sum `[tokens, dim]` of the values `[pairs, dim]` of each token's pairs."""
        return self.of_tokens(pairs).view(-1, top_k, pairs.shape[-1]).sum(1)


def products(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    *,
    transposed: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `rows @ weight.T` of each group (`rows @ weight` if `transposed`), plus the group's
    bias.

    rows `[pairs, in]`, sorted by group; weight `[groups, out, in]`, or `[groups, in, out]` if
    `transposed`; counts int64 `[groups]`, the rows of each group; bias `[groups, out]`.
    """
    factors = weight if transposed else weight.transpose(1, 2)
    if not len(rows):
        return rows.new_empty(0, factors.shape[-1])
    if takes_one_kernel(rows, factors):
        out = grouped_mm(rows, factors, offs=_ends(counts))
        return out if bias is None else out.add_(spread(bias, counts, len(rows)))
    groups = list(torch.split(rows, on_host(counts, len(rows))))
    if bias is None:
        parts = zip(groups, factors, strict=True)
        return torch.cat([part @ factor for part, factor in parts if len(part)])
    added = zip(bias, groups, factors, strict=True)
    return torch.cat(
        [torch.addmm(group_bias, part, factor) for group_bias, part, factor in added if len(part)]
    )


def spread(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """Repeat the values of each group `[groups, dim]` for each of its rows: `[total, dim]`.

    `counts` are the rows of each group, `total` their sum.
    """
    return values.repeat_interleave(counts, 0, output_size=total)


def sums(rows: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of `factor * row` over each group's rows, `[groups, dim]`, 0 for an empty
    group.

    rows `[total, dim]`, sorted by group; factors `[total]`, of the dtype of rows; counts
    `[groups]`.
    """
    if counts_are_on_device(rows):
        totals: Tensor = _sums_by_picks(rows, factors, counts)
        return totals
    sizes = on_host(counts, len(rows))
    parts = zip(torch.split(rows, sizes), torch.split(factors, sizes), strict=True)
    return torch.stack([part.t() @ factor for part, factor in parts])


# An operator of its own, since it is a sum, which no count of a layer's products has.
@torch.library.custom_op("meshwright::sums_by_picks", mutates_args=())
def _sums_by_picks(rows: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
    """Return `sums` by one matmul with a matrix of factors, which needs no wait for the counts."""
    groups = torch.arange(len(counts), device=rows.device)
    group_of_row = groups.repeat_interleave(counts, output_size=len(rows))
    picks = torch.zeros(len(counts), len(rows), dtype=rows.dtype, device=rows.device)
    return picks.scatter_(0, group_of_row[None], factors[None]) @ rows


@_sums_by_picks.register_fake
def _(rows: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(len(counts), rows.shape[-1])


# An operator, because the compiler knows none that has to wait for a gradient.
@torch.library.custom_op("meshwright::rows_again", mutates_args=())
def rows_again(x: Tensor, places: Tensor, after: Tensor) -> Tensor:
    """Return `x[places]`, gathered in the backward and not before the gradient `after` exists.

    Without the dependency, compiled code would save the rows that the forward gathered: `top_k`
    times the tokens.
    """
    return x[places]


@rows_again.register_fake
def _(x: Tensor, places: Tensor, after: Tensor) -> Tensor:
    return x.new_empty(len(places), *x.shape[1:])


def dots(rows: Tensor, vectors: Tensor, counts: Tensor) -> Tensor:
    """Return the dot products `[total]` of sorted rows `[total, dim]` with the vector of their
    group.

    vectors `[groups, dim]`; counts `[groups]`, the rows of each group.
    """
    if counts_are_on_device(rows) or not len(rows):
        return (rows * spread(vectors, counts, len(rows))).sum(-1)
    parts = zip(torch.split(rows, on_host(counts, len(rows))), vectors, strict=True)
    return torch.cat([part @ vector for part, vector in parts])


def weight_grads(grads: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return `grads.T @ rows` of each group: `[groups, out, in]`, 0 for a group without rows.

    grads `[pairs, out]` and rows `[pairs, in]`, sorted by group.
    """
    if len(rows) and takes_one_kernel(rows, grads):
        return grouped_mm(grads.t(), rows, offs=_ends(counts))
    sizes = on_host(counts, len(rows))
    out = rows.new_empty(len(sizes), grads.shape[-1], rows.shape[-1])
    parts = torch.split(grads, sizes), torch.split(rows, sizes)
    for group_out, grad, part in zip(out, *parts, strict=True):
        torch.mm(grad.t(), part, out=group_out)
    return out


def takes_one_kernel(rows: Tensor, factors: Tensor) -> bool:
    """Whether one kernel computes all groups: for bf16 on CUDA, with widths that are multiples of
    8.
    """
    is_aligned = rows.shape[-1] % ALIGNED == 0 and factors.shape[-1] % ALIGNED == 0
    return rows.is_cuda and rows.dtype == torch.bfloat16 and is_aligned


def counts_are_on_device(rows: Tensor) -> bool:
    """Whether group counts are on a GPU, so that the host would have to wait to read them."""
    return rows.is_cuda


def on_host(counts: Tensor, total: int) -> list[int]:
    """Return counts as integers, which add up to `total`; of fake tensors, even shares."""
    if isinstance(counts, FakeTensor):
        groups = len(counts)
        return [(total + index) // groups for index in range(groups)]
    return [int(count) for count in counts.tolist()]


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)
