"""Checks a config on all nodes before its first step, with one process per node.

Each process runs the checks of `doctor`; together they find what no node finds alone: different
versions, different data, broken links, unsynchronized clocks. They exchange results only through
the rendezvous store, so that nodes that cannot reach each other can still report it.
"""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from meshwright.comm.interfaces import is_loopback
from meshwright.comm.rendezvous import Rendezvous
from meshwright.comm.world import Meeting, meet, part, shared
from meshwright.errors import ConfigError, MeshwrightError, refusal
from meshwright.runtime.doctor import data_identity, examine_config, examine_machine
from meshwright.runtime.machines.system import Finding
from meshwright.spec.loading import Config
from meshwright.units import MIB
from meshwright.version import __version__

# Of every node, in the order of the nodes; a name for the round, and this node's text.
Share = Callable[[str, str], list[str]]

_CONNECT_S: Final = 5.0
_TURNS: Final = 20
_SENT: Final = 64 * MIB
_PIECE: Final = MIB
_SLOWEST: Final = 0.5  # of the fastest link: less is worth a note


class _Listener:
    """A TCP server for the measurements of other nodes, as a context manager.

    It echoes single bytes, or acknowledges a whole stream with one byte.
    """

    def __init__(self, address: str) -> None:
        """Listen on an address; raises `OSError` if it is not an address of this machine."""
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
    """Measure a node's latency to all other nodes and its throughput to the next one.

    Returns `turns`, the round trip of one byte in seconds to each node or a line on why it failed,
    and `rate` in bytes/s while all nodes send, or None. `share` exchanges a text with all nodes.
    All nodes must call this together.
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
    """Return a finding on the links of all nodes: which fail, or how fast they are."""
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


_APART_S: Final = 1.0  # clocks: what makes logs of nodes hard to read together
_VERSIONS: Final = ("meshwright", "python", "torch")


def preflight(
    config: Config, environ: Mapping[str, str], rendezvous: Rendezvous
) -> list[tuple[str, Finding]]:
    """Check a config on all nodes, and return the same findings, by node name, on every process.

    The processes of `rendezvous`, one per node, must call this together. Raises `ConfigError` if
    their number differs from `cluster.nodes`.
    """
    if config.cluster.nodes not in (1, rendezvous.size):
        problem = (
            f"cluster.nodes = {config.cluster.nodes}, but {rendezvous.size} process(es) "
            "examine them"
        )
        raise ConfigError(refusal(problem, legal=[f"cluster.nodes = {rendezvous.size}"]))
    config = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"nodes": rendezvous.size})}
    )
    findings = [*examine_machine(environ, Path(config.log.dir)), *examine_config(config, environ)]
    met = meet(rendezvous, config.cluster.timeout)
    rendezvous = replace(rendezvous, rank=met.rank)

    def share(key: str, text: str) -> list[str]:
        return shared(met.store, rendezvous, f"preflight/{key}", text)

    facts = facts_of(config, environ, met, findings)
    address = met.address or "127.0.0.1"
    facts["links"] = measure_links(rendezvous.rank, rendezvous.size, address, share)
    facts["time"] = time.time()  # links were measured together: it is one moment
    texts = share("facts", json.dumps(facts))
    part(met.store, rendezvous)
    return together([json.loads(text) for text in texts])


def facts_of(
    config: Config, environ: Mapping[str, str], met: Meeting, findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return this node's findings, versions and data identity, for comparison with other nodes."""
    try:
        data = data_identity(config, environ)
    except MeshwrightError:
        data = {}  # it is among the findings
    return {
        "host": socket.gethostname(),
        "address": met.address,
        "interface": met.interface,
        "is_chosen": met.is_chosen,
        "versions": dict(
            zip(_VERSIONS, (__version__, platform.python_version(), torch.__version__), strict=True)
        ),
        "data": data,
        "findings": [finding.as_dict() for finding in findings],
    }


def together(facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, Finding]]:
    """Return the findings of each node, then those of comparing all nodes, under the name "all"."""
    names = _names(facts)
    findings = [
        (name, Finding(**finding))
        for name, fact in zip(names, facts, strict=True)
        for finding in fact["findings"]
        if finding["state"] != "ok" or len(facts) == 1
    ]
    for key in _VERSIONS:
        findings.append(("all", _same(key, names, [fact["versions"][key] for fact in facts])))
    data = [json.dumps(fact["data"], sort_keys=True) for fact in facts]
    same = _same("data", names, data)
    if same.state == "ok":
        same = replace(same, text="the same on all nodes")
    findings.append(("all", same))
    findings += [("all", finding) for finding in (_names_differ(facts), _addresses(names, facts))]
    findings.append(("all", links_finding(names, [fact["links"] for fact in facts])))
    times = [fact["time"] for fact in facts]
    skew = max(times) - min(times)
    state: Any = "note" if skew > _APART_S else "ok"
    findings.append(("all", Finding("clocks", f"at most {skew:.2f} s apart", state)))
    return findings


def _names(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each node: its host name, and its index if several have the same."""
    hosts = [fact["host"] for fact in facts]
    return [
        host if hosts.count(host) == 1 else f"{host} ({index})" for index, host in enumerate(hosts)
    ]


def _same(fact: str, names: Sequence[str], values: Sequence[str]) -> Finding:
    if len(set(values)) == 1:
        return Finding(fact, values[0])
    differing = "; ".join(f"{name} has {value}" for name, value in zip(names, values, strict=True))
    return Finding(fact, f"differs: {differing}", "bad")


def _names_differ(facts: Sequence[Mapping[str, Any]]) -> Finding:
    hosts = [fact["host"] for fact in facts]
    if len(set(hosts)) == len(hosts):
        return Finding("nodes", ", ".join(hosts))
    text = f"{', '.join(hosts)}: several processes of one node; one for each node is enough"
    return Finding("nodes", text, "note")


def _addresses(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> Finding:
    """Return a finding on the network interface of each node; bad if nodes would use loopback."""
    text = "; ".join(f"{name} {_interface(fact)}" for name, fact in zip(names, facts, strict=True))
    several = len({fact["host"] for fact in facts}) > 1
    if several and any(not fact["address"] or is_loopback(fact["address"]) for fact in facts):
        text += (
            ": other nodes cannot reach loopback. MASTER_ADDR must be an address that all nodes "
            "see; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"
        )
        return Finding("interfaces", text, "bad")
    return Finding("interfaces", text)


def _interface(fact: Mapping[str, Any]) -> str:
    reason = "on the way to MASTER_ADDR" if fact["is_chosen"] else "asked for"
    return f"{fact['interface'] or 'none'} ({fact['address'] or 'no address'}, {reason})"
