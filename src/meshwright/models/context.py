"""The inputs of blocks besides the residual stream, and the mask of causal attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.models.cache import KVCache

# x [batch, seq, ...], segments, cache -> what `Attention.core` gets as its mask
MaskOf = Callable[[Tensor, Tensor | None, KVCache | None], Tensor | None]


class Unpadded(NamedTuple):
    """Which tokens are not padding, for sequences that are padded at their end.

    `mask`, bool `[batch, seq]`, is False for padding; it has the tokens that this rank's routers
    see, which sequence and context parallelism divide. `lengths`, int64 `[batch]`, counts the
    tokens of each whole sequence without padding.
    """

    mask: Tensor
    lengths: Tensor


class Context(NamedTuple):
    """The inputs of blocks besides the residual stream; made once per forward.

    - `mask`: the mask of `Attention.core`, bool `[batch or 1, 1, seq, keys]`, or under context
      parallelism the segments of each sequence; None: plain causal attention.
    - `positions` int64 `[seq of attention]`: for rotary embeddings; None: consecutive from the
      cache's length on.
    - `keys` int64 `[batch]`: the dropout key of each sequence; None: no dropout.
    - `places` int64 `[seq of the residual stream]`: positions in the whole sequence, for dropout;
      None: 0, 1, 2, ... Under sequence parallelism they differ from `positions`.
    - `unpadded`: the tokens that count in routers; None: all.
    - `is_long` bool `[batch, seq of attention]`: the tokens that longrope rotates by its long
      factors; None: all tokens use the same factors.
    - `documents` int `[batch, seq of attention]`: the tokens' segments, for recurrences; None: each
      sequence is one document.
    """

    mask: Tensor | None = None
    positions: Tensor | None = None
    cache: KVCache | None = None
    keys: Tensor | None = None
    places: Tensor | None = None
    unpadded: Unpadded | None = None
    is_long: Tensor | None = None
    documents: Tensor | None = None


PLAIN: Final = Context()


def causal_mask(x: Tensor, segments: Tensor | None, cache: KVCache | None) -> Tensor | None:
    """Return the causal mask bool `[batch or 1, 1, seq, keys]`, or None for plain causal attention.

    `segments` int `[batch, seq]`: each token attends to its own segment only. `x` is `[batch, seq,
    ...]`. Raises `ConfigError` if the cache is too small, or is used with segments.
    """
    seq = x.shape[1]
    if cache is not None:
        cache.check(seq)
        if segments is not None:
            raise ConfigError("packed segments cannot be used together with a cache")
        if cache.length == 0 or seq == 1:
            return None
        past = torch.ones(seq, cache.length + seq, dtype=torch.bool, device=x.device)
        return past.tril(cache.length)[None, None]
    if segments is None:
        return None
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril()[:, None]
