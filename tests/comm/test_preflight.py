"""What `doctor` measures of a machine, and what nodes find together before a first step."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.comm.interfaces import (
    address_towards,
    asked_for,
    interface_of,
    interfaces,
    is_loopback,
    own_address,
)
from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import ConfigError
from meshwright.runtime.machines import system
from meshwright.runtime.machines.system import examine_system, loopback_speed
from meshwright.runtime.preflight import links_finding, measure_links, preflight, together
from meshwright.spec.loading import load_config
from runs import TINY, torchrun


def fact(host="a", **changes):
    known = {
        "host": host,
        "address": "10.0.0.1",
        "interface": "eth0",
        "is_chosen": True,
        "links": {"turns": {"1" if host == "a" else "0": 1e-4}, "rate": 1e9},
        "versions": {"meshwright": "1", "python": "3.11", "torch": "2.13"},
        "data": {"tokens": "abc"},
        "findings": [],
        "time": 100.0,
    }
    return {**known, **changes}


def states(*facts):
    return {finding.name: finding for _, finding in together(facts)}


def test_nodes_that_agree_have_nothing_in_the_way():
    found = states(fact("a"), fact("b", time=100.4))
    assert {one.state for one in found.values()} == {"ok"}
    assert found["clocks"].text == "at most 0.40 s apart"
    assert found["data"].text == "the same on all nodes"
    assert found["nodes"].text == "a, b"
    assert found["links"].text.startswith("all reach each other, 100 us there and back")
    assert found["interfaces"].text.startswith("a eth0 (10.0.0.1, on the way to MASTER_ADDR); b")


@pytest.mark.parametrize(
    ("change", "name", "state", "text"),
    [
        (
            {"versions": {"meshwright": "1", "python": "3.11", "torch": "2.11"}},
            "torch",
            "bad",
            "differs: a has 2.13; b has 2.11",
        ),
        ({"data": {"tokens": "abd"}}, "data", "bad", "differs"),
        (
            {"address": "127.0.1.1", "interface": "lo"},
            "interfaces",
            "bad",
            "b lo (127.0.1.1, on the way to MASTER_ADDR): other nodes cannot reach",
        ),
        ({"address": ""}, "interfaces", "bad", "no address"),
        (
            {"links": {"turns": {"0": "10.0.0.1: timed out"}, "rate": None}},
            "links",
            "bad",
            "b does not reach a at 10.0.0.1: timed out. ranks listen on ports",
        ),
        (
            {"links": {"turns": {"0": 1e-4}, "rate": 1e8}},
            "links",
            "note",
            "0.10 GB/s in one stream while all send from b to a, and up to 1.00",
        ),
        ({"time": 103.0}, "clocks", "note", "3.00 s apart"),
        ({"host": "a"}, "nodes", "note", "several processes of one node"),
    ],
)
def test_what_differs_between_nodes_is_named(change, name, state, text):
    found = states(fact("a"), {**fact("b"), **change})[name]
    assert found.state == state
    assert text in found.text


def test_what_is_wrong_on_one_node_is_told_with_its_name():
    bad = {"name": "data", "text": "no such file", "state": "bad"}
    well = {"name": "torch", "text": "2.13", "state": "ok"}
    found = together([fact("a", findings=[well]), fact("b", findings=[well, bad])])
    assert [(node, one.text) for node, one in found if node != "all"] == [("b", "no such file")]


def test_a_machine_is_measured(tmp_path):
    found = {finding.name: finding for finding in examine_system(tmp_path)}
    assert {"open files", "shared memory", "clock", "loopback", "disk"} <= set(found)
    assert "MB/s" in found["disk"].text
    rate, turn = loopback_speed()
    assert 1e7 < rate < 1e12
    assert 1e-7 < turn < 0.1
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_in_the_way(tmp_path, monkeypatch):
    full = system.shutil._ntuple_diskusage(10**9, 10**9, 0)
    monkeypatch.setattr(system.shutil, "disk_usage", lambda path: full)
    found = {finding.name: finding for finding in examine_system(tmp_path)}
    assert found["disk"].state == "bad"
    assert found["shared memory"].state == "note"


def test_the_address_is_the_one_on_the_way():
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"


def test_interfaces_are_known_by_their_addresses():
    assert interfaces()["lo"] == "127.0.0.1"
    assert interface_of("127.0.1.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert is_loopback("localhost")
    assert is_loopback("127.0.1.1")
    assert not is_loopback("node0")


def test_a_node_whose_own_name_is_on_loopback_looks_towards_the_others():
    assert own_address("10.0.0.1", ["127.0.1.1"], 1) == "10.0.0.1"
    assert own_address("127.0.1.1", ["127.0.1.1"], 1) == "127.0.1.1"
    # A machine has its own address, whatever it is, on the way to itself.
    own = [address for address in interfaces().values() if not is_loopback(address)]
    for address in own:
        assert own_address("127.0.1.1", ["", "127.0.1.1", address], 1) == address


def test_an_interface_that_is_asked_for_must_be_there():
    assert asked_for({"GLOO_SOCKET_IFNAME": "lo"}) == "lo"
    assert asked_for({"NCCL_SOCKET_IFNAME": "^docker"}) is None
    with pytest.raises(ConfigError, match=r"NCCL_SOCKET_IFNAME = eth99, but .*legal: lo"):
        asked_for({"NCCL_SOCKET_IFNAME": "eth99"})


def test_nodes_measure_the_links_between_them():
    """Three nodes, one of which listens where it is not."""
    met = [threading.Barrier(3), {}]

    def node(number, address):
        def share(key, text):
            met[1][key, number] = text
            met[0].wait(30)
            return [met[1][key, other] for other in range(3)]

        return measure_links(number, 3, address, share)

    addresses = ["127.0.0.1", "127.0.0.2", "203.0.113.7"]
    with ThreadPoolExecutor(3) as pool:
        links = list(pool.map(node, range(3), addresses))
    assert 0 < links[0]["turns"]["1"] < 0.5
    assert links[0]["rate"] > 1e6
    assert links[1]["rate"] is None
    found = links_finding("abc", links)
    assert found.state == "bad"
    assert "a does not reach c at 203.0.113.7: it cannot listen there" in found.text
    assert "reach b" not in found.text


def test_another_number_of_nodes_is_refused():
    config = load_config(None, ["cluster.nodes=3"])
    with pytest.raises(ConfigError, match=r"cluster.nodes = 3, but 2 process\(es\)"):
        preflight(config, {}, Rendezvous(0, 2, 0, 1, "127.0.0.1", 1))


@pytest.mark.slow
def test_processes_of_all_nodes_examine_them_together(corpus, tmp_path):
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "cluster.devices_per_node=1", "--json"]
    document = json.loads(torchrun("doctor", *words))
    found = {one["name"]: one for one in document["findings"] if one["node"] == "all"}
    assert document["ok"]
    assert found["data"]["text"] == "the same on all nodes"
    assert "several processes of one node" in found["nodes"]["text"]
    assert "all reach each other" in found["links"]["text"]
    assert found["interfaces"]["text"].count("lo (127.0.0.1") == 2
    assert not (tmp_path / "runs").exists()
