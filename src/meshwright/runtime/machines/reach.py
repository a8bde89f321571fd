"""Whether nodes reach each other at the addresses that ranks use, and how fast. No torch here.

Every node listens on a port that the system assigns, as gloo's and NCCL's ranks do, and connects to
every other one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from meshwright.runtime.machines.finding import Finding
from meshwright.units import MIB

# Of every node, in the order of the nodes; a name for the round, and this node's text.
Share = Callable[[str, str], list[str]]

_CONNECT_S: Final = 5.0
_TURNS: Final = 20
_SENT: Final = 64 * MIB
_PIECE: Final = MIB
_SLOWEST: Final = 0.5  # of the fastest link: less is worth a note


class _Listener:
    """Answers the other nodes, as a context: a byte at a time, or one byte for a whole stream."""

    def __init__(self, address: str) -> None:
        """Listen; raises `OSError` where the address is not this machine's."""
        self._server = socket.create_server((address, 0))
        self.port = int(self._server.getsockname()[1])

    def __enter__(self) -> _Listener:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed at the end
            while True:
                peer, _ = self._server.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            is_stream = peer.recv(1) == b"s"
            buffer = bytearray(_PIECE)
            while size := peer.recv_into(buffer):
                if not is_stream:
                    peer.sendall(buffer[:size])
            if is_stream:
                peer.sendall(b".")

    def __exit__(self, *_: object) -> None:
        self._server.close()


def measure_links(node: int, nodes: int, address: str, share: Share) -> dict[str, Any]:
    """Return a node's measurements of its links: `turns` to the others, `rate` to the next.

    A turn is the round trip of one byte in seconds, or why it failed; the rate is in bytes/s, while
    all nodes send. A collective of one process per node.
    """
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(_Listener(address))
            own_end = {"address": address, "port": listener.port}
        except OSError as error:
            own_end = {"address": address, "port": 0, "problem": error.strerror}
        ends = [json.loads(text) for text in share("listen", json.dumps(own_end))]
        turns = {
            str(peer): _turn(ends[peer])
            for peer in ((node + step) % nodes for step in range(1, nodes))
        }
        share("turns", "")  # nothing else is on the links while latency is measured
        rate = None
        if nodes > 1 and isinstance(turns[str((node + 1) % nodes)], float):
            rate = _rate(ends[(node + 1) % nodes])
        share("rates", "")  # before anyone stops listening
    return {"turns": turns, "rate": rate}


def _connect(peer: Mapping[str, Any], kind: bytes) -> socket.socket:
    if not peer["port"]:
        raise OSError(f"it cannot listen there: {peer['problem']}")
    link = socket.create_connection((peer["address"], peer["port"]), timeout=_CONNECT_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(kind)
    return link


def _turn(peer: Mapping[str, Any]) -> float | str:
    try:
        with _connect(peer, b"t") as link:
            link.sendall(b"x")  # the first is late: the other end starts a thread for it
            link.recv(1)
            started = time.perf_counter()
            for _ in range(_TURNS):
                link.sendall(b"x")
                link.recv(1)
            return (time.perf_counter() - started) / _TURNS
    except OSError as error:
        return f"{peer['address']}: {error.strerror or error}"


def _rate(peer: Mapping[str, Any]) -> float | None:
    try:
        with _connect(peer, b"s") as link:
            link.settimeout(60 * _CONNECT_S)
            piece, started = bytes(_PIECE), time.perf_counter()
            for _ in range(_SENT // _PIECE):
                link.sendall(piece)
            link.shutdown(socket.SHUT_WR)
            link.recv(1)
            return _SENT / (time.perf_counter() - started)
    except OSError:
        return None


def links_finding(names: Sequence[str], links: Sequence[Mapping[str, Any]]) -> Finding:
    """Return all nodes' findings on links: who does not reach whom, or how fast."""
    lost, turns = [], []
    for name, link in zip(names, links, strict=True):
        for peer, turn in link["turns"].items():
            if isinstance(turn, str):
                lost.append(f"{name} does not reach {names[int(peer)]} at {turn}")
            else:
                turns.append(turn)
    if lost:
        hint = (
            "ranks listen on ports that the system gives out: a firewall must let them through; "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"
        )
        return Finding("links", f"{'; '.join(lost)}. {hint}", "bad")
    if not turns:
        return Finding("links", "one node")
    rates = [link["rate"] for link in links if link["rate"]]
    text = f"all reach each other, {max(turns) * 1e6:.0f} us there and back at most"
    if not rates:
        return Finding("links", text)
    slowest = min(range(len(links)), key=lambda node: links[node]["rate"] or float("inf"))
    text += f", {min(rates) / 1e9:.2f} GB/s in one stream while all send"
    if min(rates) < _SLOWEST * max(rates):
        pair = f"{names[slowest]} to {names[(slowest + 1) % len(names)]}"
        return Finding("links", f"{text} from {pair}, and up to {max(rates) / 1e9:.2f}", "note")
    return Finding("links", text)
