"""Log-likelihoods of tokens, and from them the perplexity of a text with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from meshwright.data import IGNORE, Tokenizer
from meshwright.errors import CheckpointError, DataError
from meshwright.evaluate.text import Conversations, Windows
from meshwright.models import Transformer
from meshwright.units import MIB

# Logits at a time, in elements: 64 MiB of fp32, whatever the vocabulary.
LOGITS: Final = 16 * MIB


class Scores(NamedTuple):
    """A model's scores of targets: nats, fp64 [rows, seq], which are 0 where targets are `IGNORE`.

    `greedy`, bool [rows, seq], says where the target is the likeliest token.
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
    """Return the negative log-likelihood of each target in nats, on the CPU.

    `inputs`, `targets` and `segments` are int64 [rows, seq]; `segments` is as for
    `Transformer.forward`. Logits are computed only for targets that are not `IGNORE`, and converted
    to fp32. `lengths`, int64 [rows], are those of rows padded on the right, since a model may scale
    rotary embeddings by the length of a text.
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


# Nats per token that no sound model comes near; exp of more is beyond a float.
WILD: Final = 700.0
# rows done, rows in all
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Perplexity:
    """A model's loss on `tokens` targets in `rows` rows.

    `nats` is the sum of the negative log-likelihoods; `text_nats` is that without BOS and
    end-of-document tokens, and `bytes` the UTF-8 bytes of the same text. `stderr` is the standard
    error of `nats_per_token`, None for a single row.
    """

    rows: int
    tokens: int
    bytes: int
    nats: float
    text_nats: float
    stderr: float | None

    @property
    def nats_per_token(self) -> float:
        """The mean loss, as in training."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """`exp(nats_per_token)`."""
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which do not depend on the tokenizer; None without text."""
        return self.text_nats / math.log(2) / self.bytes if self.bytes else None


def measure(
    model: Transformer,
    windows: Windows | Conversations,
    tokenizer: Tokenizer,
    rows: int,
    batch: int,
    progress: Progress | None = None,
) -> Perplexity:
    """Return the perplexity of a model on the first `rows` rows, scored `batch` rows at a time.

    Raises DataError if there is nothing to score, or for an id outside the vocabulary, and
    `CheckpointError` if the loss is not finite, or nearly so.
    """
    marks = [tokenizer.eos_id, *tokenizer.bos_ids]  # which are not text
    sums, counts, text = np.zeros(rows), np.zeros(rows), 0.0
    for first in range(0, rows, batch):
        stop = min(first + batch, rows)
        batch_windows = windows.rows(first, stop)
        targets = torch.from_numpy(batch_windows.targets)
        segments = lengths = None
        if batch_windows.segments is not None:
            segments = torch.from_numpy(batch_windows.segments)
        elif isinstance(windows, Windows):
            lengths = torch.from_numpy(windows.lengths(first, stop))
        nats = score(model, torch.from_numpy(batch_windows.inputs), targets, segments, lengths).nats
        sums[first:stop] = nats.sum(1).numpy()
        counts[first:stop] = (targets != IGNORE).sum(1).numpy()
        text += float(nats[~torch.isin(targets, torch.tensor(marks))].sum())
        if progress is not None:
            progress(stop, rows)
    tokens = int(counts.sum())
    if tokens == 0:
        raise DataError("there is no token to predict: no document has a second one")
    mean = float(sums.sum()) / tokens
    if not mean < WILD:
        raise CheckpointError(f"the loss is {mean} nats per token: the weights have diverged")
    text_bytes = sum(
        len(tokenizer.decode(ids[~np.isin(ids, marks)]).strip("\ufffd").encode())
        for ids in windows.texts(rows)
    )
    return Perplexity(
        rows, tokens, text_bytes, float(sums.sum()), text, standard_error(sums, counts)
    )


def standard_error(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> float | None:
    """Return the standard error of `sum(sums) / sum(counts)` over independent rows.

    Tokens of a row depend on each other, so rows are the sampling unit: the ratio estimator of
    Cochran, Sampling Techniques, equation 6.13, without the finite population correction. None for
    a single row.
    """
    rows = len(sums)
    if rows < 2:
        return None
    away = sums - sums.sum() / counts.sum() * counts
    return float(math.sqrt(rows / (rows - 1) * (away**2).sum()) / counts.sum())
