"""The batches of a proof: random tokens, with very uneven numbers of targets per sequence."""

from __future__ import annotations

import torch

from meshwright.data.sampler import IGNORE, PADDING
from meshwright.kernels.varlen import bounds_of
from meshwright.models.dropout import row_keys
from meshwright.parallel.batch import Batch
from meshwright.prove.case import Case


def make_batch(case: Case, step: int) -> Batch:
    """Return the global batch of step `step` (from 0): random tokens, with very uneven numbers of
    targets per sequence.

    With `case.packed`, sequences hold several documents of random lengths; of three sequences, one
    ends with padding in its last half, one in its last quarter. With `case.chat`, targets are in
    spans, and the first half of the sequences, and so whole microbatches and ranks, has none. The
    last sequence always has a target.
    """
    generator = torch.Generator().manual_seed(1000 * case.train.seed + step)
    rows, seq, vocab = case.train.batch, case.train.seq_len, case.model.vocab_size
    tokens = torch.randint(0, vocab, (rows, seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    middle = (seq - 1) // 2
    for row in range(rows):  # a mean of means would be wrong
        targets[row, : row * seq // (2 * rows)] = IGNORE
    if case.chat:
        turns = (torch.rand(rows, seq, generator=generator) < 4 / seq).cumsum(1)
        targets[turns % 2 == 0] = IGNORE
        targets[: rows // 2] = IGNORE
    segments = bounds = None
    if case.packed:
        starts = torch.rand(rows, seq, generator=generator) < 4 / seq
        starts[-1, middle + 1 : middle + 2] = False  # a document's last token has no target
        segments = starts.cumsum(1).to(torch.int32)
        last = torch.ones(rows, 1, dtype=torch.bool)
        targets[torch.cat((starts[:, 1:], last), 1)] = IGNORE
        for row in range(rows):  # the last one has none
            data = seq - (rows - 1 - row) % 3 * seq // 4
            segments[row, data:], tokens[row, data:] = PADDING, 0
            targets[row, data - 1 :] = IGNORE
        bounds = bounds_of(segments)
    targets[-1, middle] = tokens[-1, middle + 1]  # a batch without a target would prove nothing
    keys = None
    if case.model.drops:
        keys = row_keys(case.train.seed, step, range(rows))
    return Batch(tokens[:, :-1].contiguous(), targets, segments, keys, bounds)


def evaluated(case: Case) -> list[Batch]:
    """Return the global batches on which a case's final weights are evaluated: the first step's,
    and one that no step has seen.
    """
    return [make_batch(case, 0), make_batch(case, case.steps)]
