"""Seconds of a collective: latency and bandwidth of the links inside nodes and between them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

from meshwright.cost.calibration import Calibration
from meshwright.cost.catalogue import Cluster
from meshwright.program.messages import LARGEST_SHARED, goes_by_channel

# The kinds of collectives, and messages from one rank to another. "rows" is a unit's all-gather
# by sends and receives of each of its weights.
KINDS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "rows")


class Placement(NamedTuple):
    """The placement of `size` ranks of a group: `inside` of them in each of `nodes` nodes."""

    size: int
    inside: int
    nodes: int


class Picks(NamedTuple):
    """A router: each token selects `top_k` of `experts` experts, all equally likely."""

    experts: int
    top_k: int

    def share(self, parts: int) -> float:
        """Return the expected number of ranks (or nodes) that have any of a token's experts,
        divided by `top_k`.

        The experts are divided evenly over `parts` ranks or nodes.
        """
        elsewhere = self.experts - self.experts // parts
        none = math.comb(elsewhere, self.top_k) / math.comb(self.experts, self.top_k)
        return parts * (1 - none) / self.top_k


@lru_cache(maxsize=1024)
def place(size: int, stride: int, per_node: int) -> Placement:
    """Return the placement of `size` ranks whose numbers are `stride` apart, with `per_node`
    consecutive ranks per node."""
    inside = max(1, min(size, per_node // stride)) if stride < per_node else 1
    return Placement(size, inside, -(-size // inside))


def through_channel(kind: str, size_bytes: float, size: int) -> tuple[float, float]:
    """Return the bytes that a rank writes into shared memory for a collective, and those it writes
    and reads.

    `size_bytes` is the whole result of a gather, and the input of a reduce-scatter; `size` is the
    number of ranks.
    """
    left = size_bytes / size if kind == "all_gather" else size_bytes
    read = size * size_bytes if kind == "all_reduce" else size_bytes
    return left, left + read


class Network:
    """Computes the seconds of messages on a cluster; assumes that all groups of an axis communicate
    at once.

    Ring all-gather and reduce-scatter pass `(n - 1) / n` of the bytes over each link and take `n -
    1` turns, an all-reduce twice that: Thakur, Rabenseifner and Gropp, 2005. A ring through several
    nodes leaves each of them over the network devices of its own ranks there, so it has `inside`
    times one device's bandwidth: "Demystifying NCCL", arXiv:2507.04786. Latencies between nodes
    grow with the logarithm of the nodes, as in trees. Messages that CPU ranks of one machine send
    through shared memory take the measured time; without a measurement, they use the links.
    `slower` multiplies all seconds.
    """

    def __init__(self, cluster: Cluster, calibration: Calibration, slower: float = 1.0) -> None:
        kind = cluster.device.kind
        self.slower = slower
        # A search asks for most messages several times: layers send what other layers do.
        self._known: dict[tuple[object, ...], float] = {}
        kinds = [kind]
        self.per_node = cluster.per_node
        # Measured on the machine at hand, or a share of what the catalogue says.
        measured = calibration.constants.get(f"{kind}.inner.rate")
        share = calibration.find("inner.share", *kinds)
        self.inner = cluster.inner.bandwidth * share if measured is None else measured
        self.outer = cluster.outer.bandwidth * calibration.find("outer.share", *kinds)
        constants = calibration.constants
        plain = constants.get(f"{kind}.inner.latency", cluster.inner.latency)
        self.inner_latency = {
            message: constants.get(f"{kind}.inner.latency.{message}", plain) for message in KINDS
        }
        self.times = {message: calibration.find(f"times.{message}", *kinds) for message in KINDS}
        self.times_once = calibration.find("times.once", *kinds)
        self.outer_latency = cluster.outer.latency
        self.channel = {
            message: (
                constants[f"{kind}.channel.latency.{message}"],
                constants[f"{kind}.channel.rate.{message}"],
            )
            for message in KINDS
            if f"{kind}.channel.rate.{message}" in constants
        }

    def seconds(
        self,
        kind: str,
        size_bytes: float,
        size: int,
        stride: int,
        axis: str = "",
        routed: Picks | None = None,
    ) -> float:
        """Return the seconds of one message of `size_bytes` among `size` ranks whose numbers are
        `stride` apart.

        `kind` is one of `KINDS`. `routed` describes the router of an all-to-all that sends a token
        only once to each rank and node; None if it sends one copy per expert.
        """
        if size == 1 or not size_bytes:
            return 0.0
        key = kind, size_bytes, size, stride, axis, routed
        seconds = self._known.get(key)
        if seconds is None:
            if routed is not None and kind == "all_to_all":
                seconds = self._exchange(size_bytes, size, stride, routed)
            else:
                seconds = self._seconds(kind, size_bytes, size, stride, axis)
            seconds = self._known[key] = self.slower * seconds
        return seconds

    def _exchange(self, size_bytes: float, size: int, stride: int, routed: Picks) -> float:
        """Return the seconds of an all-to-all in which a node receives a token once for all its
        ranks."""
        spread = place(size, stride, self.per_node)
        within = size_bytes * routed.share(size) * (size - 1) / size
        across = size_bytes * routed.share(spread.nodes) * (spread.nodes - 1) / spread.nodes
        latency = (spread.inside - 1) * self.inner_latency["all_to_all"]
        if spread.nodes > 1:
            latency += (
                min(spread.nodes - 1, 2 * (spread.nodes - 1).bit_length()) * self.outer_latency
            )
        return max(self.times_once * within / self.inner, across / self.outer) + latency

    def _seconds(self, kind: str, size_bytes: float, size: int, stride: int, axis: str) -> float:
        spread = place(size, stride, self.per_node)
        if spread.nodes == 1 and kind in self.channel and goes_by_channel(axis):
            left, moved = through_channel(kind, size_bytes, size)
            if left <= LARGEST_SHARED:
                latency, rate = self.channel[kind]
                return latency + moved / rate
        if kind in ("send", "recv"):
            crosses = stride >= self.per_node
            rate = self.outer if crosses else self.inner
            latency = self.outer_latency if crosses else self.inner_latency[kind]
            return self.times[kind] * size_bytes / rate + latency
        passed = size_bytes * (size - 1) / size
        turns = (spread.inside - 1) * self.inner_latency[kind]
        rate = self.inner
        if spread.nodes > 1:
            rate = min(self.inner, spread.inside * self.outer)
            turns += min(spread.nodes - 1, 2 * (spread.nodes - 1).bit_length()) * self.outer_latency
        if kind == "all_to_all":  # each rank talks to all others, most of them in other nodes
            across = passed * (1 - (spread.inside - 1) / max(size - 1, 1))
            within = self.times[kind] * (passed - across) / self.inner
            return max(within, across / self.outer) + turns
        turns_again = 2 if kind == "all_reduce" else 1
        return turns_again * (self.times[kind] * passed / rate + turns)
