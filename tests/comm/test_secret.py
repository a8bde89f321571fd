"""The secret of a job: who is counted as a rank, and where rank 0 listens."""

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.comm.interfaces import listen_at
from meshwright.comm.rendezvous import Rendezvous
from meshwright.comm.secret import Secret
from meshwright.comm.world import meet, roll_call
from meshwright.errors import ConfigError, MeshwrightError
from test_rendezvous import SRUN

KNOWN = Secret(b"what only this job's ranks know")


def met(at, before=lambda rank: None, secrets=(KNOWN, KNOWN), timeout_s=20.0):
    """Have two ranks meet in threads; returns what each of them finds, or its error."""
    found = {}

    def join(rank):
        try:
            before(rank)
            found[rank] = meet(
                replace(at, rank=rank, local_rank=rank, secret=secrets[rank]), timeout_s
            )
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def at(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Rendezvous(0, 2, 0, 2, "127.0.0.1", port)


def intruder(at):
    """A client of the store that knows all but the secret."""
    return dist.TCPStore(
        at.host, at.port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
    )


@pytest.mark.case(47)
def test_who_does_not_know_the_secret_is_not_counted(at, outcome):
    """One that takes the place of rank 1 before it comes; without a secret it is rank 1."""
    forged = json.dumps(["evil", "", 0, 2, "6.6.6.6"])

    def before(rank):
        if rank == 1:
            store = intruder(at)
            for key in ("seat/1", "answer/1"):
                store.set(f"meshwright/0/{key}", forged)
            store.set("meshwright/0/seat/all", f"={json.dumps([forged, forged])}")

    found = met(at, before)
    assert [found[rank].rank for rank in (0, 1)] == [0, 1]
    assert "evil" not in str(found)
    outcome.add(None, "the rank that knows the secret is counted, the other one is not", 0.0)


def called(*ranks):
    """Have ranks answer in one store, which is returned."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    threads = [threading.Thread(target=roll_call, args=(store, place(n), "")) for n in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store


def place(rank):
    return Rendezvous(rank, 2, rank, 2, "127.0.0.1", 1, secret=KNOWN)


@pytest.mark.case(47)
@pytest.mark.parametrize(
    ("rank", "keys", "named"), [(0, ["answer/1"], "rank 1"), (1, ["asked", "all"], "rank 0")]
)
def test_what_was_said_at_another_time_proves_nothing(rank, keys, named, outcome):
    """The store lists its keys to anyone: they can be found, copied and written over."""
    before, store, hidden = called(0, 1), dist.HashStore(), KNOWN.tag("keys", "0")
    for key in keys:
        store.set(f"{hidden}/{key}", before.get(f"{hidden}/{key}"))
    with outcome.refused(MeshwrightError, f"{named} does not prove that it knows"):
        roll_call(store, place(rank), "")


def test_ranks_with_another_secret_do_not_meet(at):
    found = met(at, secrets=(KNOWN, Secret(b"0123456789abcdef")), timeout_s=1.0)
    assert "rank 1 did not come within the time-out, or does not know" in str(found[0])
    assert "rank 0 did not come" in str(found[1])


def test_a_secret_is_in_the_environment_or_a_file_of_its_owner_alone(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    named = {"MESHWRIGHT_SECRET_FILE": str(file)}
    assert Secret.from_environment(named) == Secret(b"0123456789abcdef")
    assert "0123" not in repr(Secret.from_environment(named))
    assert not Secret.from_environment({})
    with pytest.raises(ConfigError, match=r"16 to 4096 characters, and has 5\. `openssl rand"):
        Secret.from_environment({"MESHWRIGHT_SECRET": "short"})
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"its owner alone can read: chmod 600"):
        Secret.from_environment(named)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Secret.from_environment({"MESHWRIGHT_SECRET_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize("content", ["", "\n", "0" * 15, "0" * 5000])
def test_a_file_that_holds_no_secret_is_refused(tmp_path, content):
    file = tmp_path / "secret"
    file.write_text(content)
    file.chmod(0o600)
    count = "more than 4096" if len(content) > 4096 else len(content.strip())
    with pytest.raises(ConfigError, match=f"16 to 4096 characters, and has {count}"):
        Secret.from_environment({"MESHWRIGHT_SECRET_FILE": str(file)})


def test_a_secret_may_be_any_bytes():
    found = Secret.from_environment({"MESHWRIGHT_SECRET": os.fsdecode(b"\xff" * 20)})
    assert found == Secret(b"\xff" * 20)


def test_a_pipe_in_place_of_a_secret_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    read = f"Secret.from_environment({{'MESHWRIGHT_SECRET_FILE': {str(tmp_path / 'pipe')!r}}})"
    code = f"from meshwright.comm.secret import Secret; {read}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "its owner alone can read" in done.stderr


def test_the_port_of_a_job_of_slurm_follows_from_its_secret():
    drawn = {
        Rendezvous.from_environment({**SRUN, "MESHWRIGHT_SECRET": f"{n:032}"}).port
        for n in range(20)
    }
    assert len(drawn) > 15
    assert all(15000 <= port < 30000 for port in drawn)


@pytest.mark.case(47)
@pytest.mark.parametrize(
    ("host", "is_alone", "listens"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("127.0.0.1", False, "::"),  # its own name on loopback: others come by another interface
        ("198.51.100.7", False, "::"),  # no address of this machine
    ],
)
def test_rank_0_listens_where_its_address_leads(host, is_alone, listens, outcome):
    server, _ = listen_at(host, 0, is_alone=is_alone)
    with server:
        shown = server.getsockname()[0]
    everywhere = ("::", "0.0.0.0")
    assert shown in (everywhere if listens == "::" else (listens,))
    outcome.add(None, f"listens on {shown}", 0.0)


def test_the_store_of_ranks_on_one_machine_is_on_loopback_alone(at):
    seen = []

    def before(rank):
        if rank == 1:
            intruder(at)  # the store is there
            seen.extend(listening(at.port))

    met(at, before)
    assert seen == ["0100007F"]


def listening(port):
    """Return the addresses, in hex, on which some process of this machine listens at a port."""
    found = []
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net", name)
        lines = path.read_text().splitlines()[1:] if path.is_file() else []
        for words in map(str.split, lines):
            address, _, number = words[1].partition(":")
            if words[3] == "0A" and int(number, 16) == port:
                found.append(address)
    return found
