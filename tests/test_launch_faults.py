"""What a user sees when something goes wrong: before the start, and in a rank."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.checkpoint.weights import load_model
from meshwright.errors import ConfigError, DataError, RankFailed
from meshwright.launch.session import train
from meshwright.launch.supervisor import Timing, listen_on_loopback
from runs import TINY, clean_environ, faulty_worker, rank_pids

ONCE = ["layout.dp_replicate=2", "checkpoint.restarts=0"]


def refused(config_made, error=ConfigError):
    started = time.monotonic()
    with pytest.raises(error) as caught:
        train(config_made, clean_environ(), command=lambda folder: ["/bin/false"])
    assert time.monotonic() - started < 5
    return str(caught.value)


def test_refused_before_any_process_starts(config, corpus, tmp_path):
    assert refused(config("data.source=/no/such.txt"), DataError) == (
        "no such file or folder: /no/such.txt. A source is stdlib, tinystories, hf:NAME, or the "
        "path of a file or folder"
    )
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert refused(config(f"data.source={empty}"), DataError) == f"the corpus is empty: {empty}"
    assert refused(config("model.vocab_size=200"), DataError) == (
        "model.vocab_size = 200 is smaller than the vocabulary of 257 of the tokenizer bytes"
    )
    blocked = corpus / "runs"
    assert refused(config(f"log.dir={blocked}")) == (
        f"run folder {blocked}/run cannot be written: Not a directory; set log.dir"
    )
    assert refused(config("log.name=../x")) == (
        "log.name = '../x' must be a plain folder name; log.dir sets where"
    )
    assert refused(config("log.wandb=project")) == (
        "log.wandb is set, but wandb is not installed: pip install 'meshwright[wandb]'"
    )
    assert not (tmp_path / "x").exists()


def test_a_used_run_folder_is_left_alone(config, tmp_path):
    used = tmp_path / "runs" / "run"
    used.mkdir(parents=True)
    (used / "events.jsonl").write_text("{}")
    assert refused(config()) == (
        f"run folder {used} already holds a run; nearest legal: log.name = run-2"
    )


def test_corrupt_store_is_refused_naming_shard_and_sizes(config, tmp_path):
    prepared = config()
    train(config("train.steps=1"), clean_environ())
    shard = next((tmp_path / "cache").rglob("*.bin"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    message = refused(
        prepared.model_copy(update={"log": prepared.log.model_copy(update={"name": "b"})}),
        DataError,
    )
    assert shard.name in message
    assert str(len(content) - 10) in message
    assert str(len(content)) in message


def test_busy_port(config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(config(f"cluster.port={port}"))
    pattern = (
        rf"cluster\.port = {port} on 127\.0\.0\.1 cannot be listened on: Address already in use; "
        r"nearest legal: cluster\.port = \d+ or cluster\.port = \d+\. "
        r"Left out, a free port is taken\."
    )
    assert re.fullmatch(pattern, message)
    listen_on_loopback(None).close()


def test_a_rank_that_raises_is_shown_with_its_traceback(config, tmp_path):
    body = (
        "import meshwright.train.update as update\n"
        "def bad(*a):\n    raise ValueError('the fault of rank 1')\n"
        "if rank == 1:\n    import meshwright.train.loop as loop; loop.update = bad"
    )
    with pytest.raises(RankFailed) as caught:
        train(config(*ONCE), clean_environ(), command=faulty_worker(body))
    text = str(caught.value)
    assert text.startswith("rank 1 raised ValueError: the fault of rank 1\n")
    assert "Traceback (most recent call last)" in text
    assert "in bad" in text
    assert caught.value.exit_code == 3
    assert rank_pids(tmp_path / "runs" / "run") == []


def test_a_killed_rank_is_named_with_its_signal(config, tmp_path):
    body = (
        "import meshwright.train.loop as loop\n"
        "real = loop.update\n"
        "def deadly(*a):\n"
        "    if rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(*a)\n"
        "loop.update = deadly"
    )
    with pytest.raises(RankFailed) as caught:
        train(config(*ONCE), clean_environ(), command=faulty_worker(body))
    assert str(caught.value).startswith(
        "rank 1 was killed by SIGKILL, possibly by the system for want of memory"
    )
    assert rank_pids(tmp_path / "runs" / "run") == []


def test_a_hung_rank_does_not_outlive_its_failed_peer(config, tmp_path):
    body = (
        "import meshwright.train.loop as loop\n"
        "def stuck(*a):\n"
        "    if rank == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        time.sleep(1000)\n"
        "    sys.exit(7)\n"
        "loop.update = stuck"
    )
    timing = Timing(settle_s=0.2)
    with pytest.raises(RankFailed, match=r"rank 1 raised SystemExit: 7"):
        train(
            config(*ONCE),
            clean_environ(),
            timing=timing,
            command=faulty_worker(body),
        )
    assert rank_pids(tmp_path / "runs" / "run") == []


def start_train(corpus, tmp_path, *overrides):
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "log.name=run", *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environ(),
    )


def wait_for_steps(run_folder: Path, process, timeout_s=60.0):
    events = run_folder / "events.jsonl"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if events.is_file() and '"event": "step"' in events.read_text():
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError("no step was reached")


def test_sigterm_saves_and_exits_with_4(corpus, tmp_path):
    process = start_train(corpus, tmp_path, "train.steps=100000", "layout.dp_replicate=2")
    run = tmp_path / "runs" / "run"
    wait_for_steps(run, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 4, out
    assert "stopped on request after" in out
    assert load_model(run) is not None
    assert rank_pids(run) == []


def test_ranks_end_with_a_killed_supervisor_and_listen_on_loopback_only(corpus, tmp_path):
    process = start_train(corpus, tmp_path, "train.steps=100000", "layout.dp_replicate=2")
    run = tmp_path / "runs" / "run"
    wait_for_steps(run, process)
    pids = rank_pids(run)
    assert len(pids) == 2
    assert listening_addresses(pids) == {"127.0.0.1"}
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while rank_pids(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rank_pids(run) == []


def listening_addresses(pids: list[int]) -> set[str]:
    """The addresses on which some processes listen, from the kernel's tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(match[1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                address = socket.inet_ntop(family, b"".join(words))
                found.add(address.removeprefix("::ffff:"))
    return found
