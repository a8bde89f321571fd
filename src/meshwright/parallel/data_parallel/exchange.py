"""Point-to-point forms of reduce-scatter (`Exchange`) and all-gather (`gather`) for ZeRO on CPUs.

An exchange is a reduce-scatter without sums on the way: each rank receives the others' gradients of
its own rows, and adds them up in fp32. It sends half as much as an all-reduce, with no more copies.
`gather` sends each rank's rows of weights to all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.flight_recorder import FlightRecorder, Pending
from meshwright.comm.groups import Link
from meshwright.parallel.data_parallel.master_weights import Weight

# Not that of a ring, whose ranks may be the same: what arrives first is taken first.
_TAG: Final = 2**16


class Exchange:
    """A reduce-scatter of some weights' gradients; on creation it sends them and frees them."""

    def __init__(
        self,
        weights: Sequence[Weight],
        link: Link | None,
        rank: int,
        dtype: torch.dtype,
        recorder: FlightRecorder,
    ) -> None:
        """Start to send other ranks' rows of gradients in `dtype`, and add up this rank's own.

        All weights have gradients. `rank` is this rank's index in the group. A `link` of None sends
        nothing.
        """
        self._weights = list(weights)
        self._sent = self._got = torch.empty(0)
        self._shapes: list[torch.Size] = []
        self._pending: Pending | None = None
        if link is not None:
            self._pending = self._send(link.required, rank, dtype, recorder)
        for weight in weights:
            weight.add(weight.rows_of_gradient(rank))
        for weight in weights:
            weight.clear()

    def _send(
        self, group: dist.ProcessGroup, rank: int, dtype: torch.dtype, recorder: FlightRecorder
    ) -> Pending:
        weights, ranks = self._weights, range(len(self._weights[0].rows))
        peers = [owner for owner in ranks if owner != rank]
        pieces = [[weight.rows_of_gradient(owner) for weight in weights] for owner in ranks]
        counts = [sum(map(torch.numel, owner_pieces)) for owner_pieces in pieces]
        leaving = [counts[owner] * (owner != rank) for owner in ranks]
        arriving = [counts[rank] * (owner != rank) for owner in ranks]
        self._shapes = [piece.shape for piece in pieces[rank]] * len(peers)
        self._got = pieces[rank][0].new_empty(sum(arriving), dtype=dtype)
        self._sent = self._got.new_empty(sum(leaving))
        sent = [piece for owner in peers for piece in pieces[owner]]
        for slot, piece in zip(_views(self._sent, [p.shape for p in sent]), sent, strict=True):
            slot.copy_(piece)
        return Pending(recorder, group.alltoall_base(self._got, self._sent, arriving, leaving))

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """The send and receive buffers."""
        return self._sent, self._got

    def settle(self) -> None:
        """Wait for the others' rows and add them up."""
        if self._pending is not None:
            self._pending.wait()
        rooms = _views(self._got, self._shapes)
        for weight, rows in zip(
            self._weights * (len(rooms) // len(self._weights)), rooms, strict=True
        ):
            weight.add(rows)


def gather(
    weights: Sequence[Weight], link: Link, rank: int, recorder: FlightRecorder
) -> list[Pending]:
    """Start an all-gather of each rank's rows of weights, in place; return the open transfers.

    It makes no copies, while gloo's all-gather copies everything. `rank` is this rank's index in
    the group.
    """
    group = link.required
    works: list[Pending] = []
    for weight in weights:
        ranks = len(weight.rows)
        for step in range(1, ranks):  # no two of them to the same one at a time
            after, before = (rank + step) % ranks, (rank - step) % ranks
            sent, received = weight.rows_used(rank), weight.rows_used(before)
            if sent.numel():
                works.append(Pending(recorder, group.send([sent], after, _TAG)))
            if received.numel():
                works.append(Pending(recorder, group.recv([received], before, _TAG)))
    return works


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return consecutive views of flat memory in the given shapes."""
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
