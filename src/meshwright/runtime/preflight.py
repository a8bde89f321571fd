"""Checks a config on all nodes before its first step, with one process per node.

Each process runs the checks of `doctor`; together they find what no node finds alone: different
versions, different data, broken links, unsynchronized clocks. They meet only in a store, so that
nodes that cannot reach each other can report it.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from meshwright.errors import ConfigError, MeshwrightError, refusal
from meshwright.parallel.machine.interfaces import is_loopback
from meshwright.parallel.machine.rendezvous import Rendezvous
from meshwright.parallel.transport.world import Meeting, meet, part, shared
from meshwright.runtime.doctor import data_identity, examine_config, examine_machine
from meshwright.runtime.machines.finding import Finding
from meshwright.runtime.machines.reach import links_finding, measure_links
from meshwright.spec.loading import Config
from meshwright.version import __version__

_APART_S: Final = 1.0  # clocks: what makes logs of nodes hard to read together
_VERSIONS: Final = ("meshwright", "python", "torch")


def preflight(
    config: Config, environ: Mapping[str, str], at: Rendezvous
) -> list[tuple[str, Finding]]:
    """Return the findings of all nodes, by node name; the same list on every process.

    A collective of the processes in `at`, one per node. Raises `ConfigError` if their number
    differs from the config's nodes.
    """
    if config.cluster.nodes not in (1, at.size):
        what = f"cluster.nodes = {config.cluster.nodes}, but {at.size} process(es) examine them"
        raise ConfigError(refusal(what, legal=[f"cluster.nodes = {at.size}"]))
    config = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"nodes": at.size})}
    )
    own = [*examine_machine(environ, Path(config.log.dir)), *examine_config(config, environ)]
    met = meet(at, config.cluster.timeout)
    at = replace(at, rank=met.rank)

    def share(key: str, text: str) -> list[str]:
        return shared(met.store, at, f"preflight/{key}", text)

    facts = facts_of(config, environ, met, own)
    address = met.address or "127.0.0.1"
    facts["links"] = measure_links(at.rank, at.size, address, share)
    facts["time"] = time.time()  # links were measured together: it is one moment
    texts = share("facts", json.dumps(facts))
    part(met.store, at)
    return together([json.loads(text) for text in texts])


def facts_of(
    config: Config, environ: Mapping[str, str], met: Meeting, own: Sequence[Finding]
) -> dict[str, Any]:
    """Return this node's facts for the comparison with other nodes."""
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
        "findings": [finding.as_dict() for finding in own],
    }


def together(facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, Finding]]:
    """Return the findings of each node, and then those of the comparison, as "all"."""
    names = _names(facts)
    found = [
        (name, Finding(**finding))
        for name, fact in zip(names, facts, strict=True)
        for finding in fact["findings"]
        if finding["state"] != "ok" or len(facts) == 1
    ]
    for key in _VERSIONS:
        found.append(("all", _same(key, names, [fact["versions"][key] for fact in facts])))
    data = [json.dumps(fact["data"], sort_keys=True) for fact in facts]
    same = _same("data", names, data)
    if same.state == "ok":
        same = replace(same, text="the same on all nodes")
    found.append(("all", same))
    found += [("all", one) for one in (_names_differ(facts), _addresses(names, facts))]
    found.append(("all", links_finding(names, [fact["links"] for fact in facts])))
    times = [fact["time"] for fact in facts]
    apart = max(times) - min(times)
    state: Any = "note" if apart > _APART_S else "ok"
    found.append(("all", Finding("clocks", f"at most {apart:.2f} s apart", state)))
    return found


def _names(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each node; those of the same name get their place, too."""
    hosts = [fact["host"] for fact in facts]
    return [
        host if hosts.count(host) == 1 else f"{host} ({place})" for place, host in enumerate(hosts)
    ]


def _same(what: str, names: Sequence[str], values: Sequence[str]) -> Finding:
    if len(set(values)) == 1:
        return Finding(what, values[0])
    each = "; ".join(f"{name} has {value}" for name, value in zip(names, values, strict=True))
    return Finding(what, f"differs: {each}", "bad")


def _names_differ(facts: Sequence[Mapping[str, Any]]) -> Finding:
    hosts = [fact["host"] for fact in facts]
    if len(set(hosts)) == len(hosts):
        return Finding("nodes", ", ".join(hosts))
    text = f"{', '.join(hosts)}: several processes of one node; one for each node is enough"
    return Finding("nodes", text, "note")


def _addresses(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> Finding:
    """Say through which interface each node talks; several that do so on loopback never meet."""
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
    why = "on the way to MASTER_ADDR" if fact["is_chosen"] else "asked for"
    return f"{fact['interface'] or 'none'} ({fact['address'] or 'no address'}, {why})"
