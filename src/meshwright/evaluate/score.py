"""Log-likelihoods of tokens, on which everything in this package is based."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.data import IGNORE
from meshwright.models import Transformer
from meshwright.units import MIB

# Logits at a time, in elements: 64 MiB of fp32, whatever the vocabulary.
LOGITS: Final = 16 * MIB


class Scores(NamedTuple):
    """A model's scores of its targets: nats fp64 `[rows, seq]`, zero where they are `IGNORE`.

    `greedy` bool `[rows, seq]` says where the target is the likeliest token.
    """

    nats: Tensor
    greedy: Tensor


@torch.no_grad()
def score(
    model: Transformer,
    inputs: Tensor,
    targets: Tensor,
    segments: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Scores:
    """Return the negative log-likelihood of each target in nats; on the CPU.

    All int64 `[rows, seq]`. Logits become fp32 first, and only those of targets are computed.
    `segments` as for `Transformer.forward`. `lengths` int64 `[rows]` are those of rows that are
    padded on the right: a model may rotate long texts in another way.
    """
    device = model.head_weight.device
    if segments is not None:
        segments = segments.to(device)
    wanted = (targets != IGNORE).to(device)
    if lengths is not None:
        lengths = lengths.to(device)[:, None].expand(inputs.shape)
    hidden = model.hidden(inputs.to(device), segments, lengths=lengths)[wanted]
    chosen = targets.to(device)[wanted]
    size = max(1, LOGITS // model.spec.vocab_size)
    nats, greedy = [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
    for first in range(0, len(chosen), size):
        logits = model.logits(hidden[first : first + size]).float()
        batch_targets = chosen[first : first + size]
        nats.append(F.cross_entropy(logits, batch_targets, reduction="none").cpu())
        greedy.append((logits.argmax(-1) == batch_targets).cpu())
    where = wanted.cpu()
    scores = Scores(
        torch.zeros(targets.shape, dtype=torch.float64), torch.zeros_like(where, device="cpu")
    )
    scores.nats[where] = torch.cat(nats).double()
    scores.greedy[where] = torch.cat(greedy)
    return scores
