"""What `doctor` measures of a machine, and what nodes find together before a first step."""

import json

import pytest

from meshwright.errors import ConfigError
from meshwright.execute.rendezvous import Rendezvous
from meshwright.launch import system
from meshwright.launch.preflight import address_towards, preflight, together
from meshwright.launch.system import examine_system, loopback_speed
from meshwright.spec.loading import load_config
from runs import TINY, torchrun


def fact(host="a", **changes):
    known = {
        "host": host,
        "address": "10.0.0.1",
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
        ({"address": "127.0.1.1"}, "addresses", "bad", "b 127.0.1.1: other nodes cannot reach"),
        ({"address": "no way to x: unreachable"}, "addresses", "bad", "no way to x"),
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


def test_another_number_of_nodes_is_refused():
    config = load_config(None, ["cluster.nodes=3"])
    with pytest.raises(ConfigError, match=r"cluster.nodes = 3, but 2 process\(es\)"):
        preflight(config, {}, Rendezvous(0, 2, 0, 1, "127.0.0.1", 1))


def test_processes_of_all_nodes_examine_them_together(corpus, tmp_path):
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "cluster.devices_per_node=1", "--json"]
    document = json.loads(torchrun("doctor", *words))
    found = {one["name"]: one for one in document["findings"] if one["node"] == "all"}
    assert document["ok"]
    assert found["data"]["text"] == "the same on all nodes"
    assert "several processes of one node" in found["nodes"]["text"]
    assert not (tmp_path / "runs").exists()
