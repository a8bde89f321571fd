"""Checks whether ranks with copies of a weight hold the same bits."""

from __future__ import annotations

import json
from collections import Counter
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.world import World, exchange
from meshwright.errors import RankFailed
from meshwright.parallel.apply import Parallel
from meshwright.parallel.build import region_of

# Places are told apart by a number from 1 to this, a prime; so many periods of it at a time.
_PERIOD: Final = 8191
_PERIODS: Final = 512


@torch.no_grad()
def check_replicas(parallel: Parallel, world: World) -> None:
    """Raise `RankFailed` on every rank if copies of a shard differ; a collective.

    The error names the first tensor and the ranks that differ from the majority.
    """
    if world.size == 1:
        return
    digests = {
        f"{parameter.name} {region_of(parameter, parallel)}": bits(parameter.shard)
        for parameter in parallel.held
    }
    for module in parallel.modules.values():
        digests |= {f"{name} of its stage": bits(buffer) for name, buffer in module.named_buffers()}
    everyone = [json.loads(text) for text in exchange(json.dumps(digests), dist.group.WORLD)]
    for key in dict.fromkeys(key for reported in everyone for key in reported):
        holders = {rank: reported[key] for rank, reported in enumerate(everyone) if key in reported}
        usual, count = Counter(holders.values()).most_common(1)[0]
        if count == len(holders):
            continue
        odd = [rank for rank, digest in holders.items() if digest != usual]
        name = key.split(" ", 1)[0]
        where = f"on rank {', '.join(map(str, odd))}"
        if 2 * count <= len(holders):
            where = f"between ranks {', '.join(map(str, holders))}"
        raise RankFailed(
            f"replicas differ: {name} is not the same {where}. A device or a transfer is broken, "
            "or the ranks run different code; the last checkpoint is older than that"
        )


def bits(shard: Tensor) -> int:
    """Return a number that changes if any bit of an fp32 tensor flips."""
    flat = shard.contiguous().view(-1).view(torch.int32)
    weights = torch.arange(1, _PERIOD + 1, device=flat.device, dtype=torch.int64)
    total = torch.zeros((), device=flat.device, dtype=torch.int64)
    # By pieces: in int64 the whole of a large shard would not fit beside it.
    for piece in torch.split(flat, _PERIOD * _PERIODS):
        aligned = len(piece) // _PERIOD * _PERIOD
        rows, tail = piece[:aligned].view(-1, _PERIOD), piece[aligned:]
        total += (rows.to(torch.int64) * weights).sum() + (tail * weights[: len(tail)]).sum()
    return int(total)
