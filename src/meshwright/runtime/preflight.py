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

from meshwright.comm.interfaces import is_loopback
from meshwright.comm.rendezvous import Rendezvous
from meshwright.comm.world import Meeting, meet, part, shared
from meshwright.errors import ConfigError, MeshwrightError, refusal
from meshwright.runtime.doctor import data_identity, examine_config, examine_machine
from meshwright.runtime.machines.finding import Finding
from meshwright.runtime.machines.reach import links_finding, measure_links
from meshwright.spec.loading import Config
from meshwright.version import __version__

_APART_S: Final = 1.0  # clocks: what makes logs of nodes hard to read together
_VERSIONS: Final = ("meshwright", "python", "torch")


def preflight(
    config: Config, environ: Mapping[str, str], rendezvous: Rendezvous
) -> list[tuple[str, Finding]]:
    """Return the findings of all nodes, by node name; the same list on every process.

    A collective of the processes in `rendezvous`, one per node. Raises `ConfigError` if
    their number differs from the config's nodes.
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
        "findings": [finding.as_dict() for finding in findings],
    }


def together(facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, Finding]]:
    """Return the findings of each node, and then those of the comparison, as "all"."""
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
    """Return a name for each node; those of the same name get their place, too."""
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
    reason = "on the way to MASTER_ADDR" if fact["is_chosen"] else "asked for"
    return f"{fact['interface'] or 'none'} ({fact['address'] or 'no address'}, {reason})"
