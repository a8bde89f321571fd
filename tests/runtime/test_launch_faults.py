"""What a user sees when something goes wrong: before the start, and in a rank."""

import re
import socket

import pytest

from meshwright.errors import ConfigError, DataError, RankFailed
from meshwright.runtime.session import prepare_job, train
from meshwright.runtime.supervise import explain
from meshwright.runtime.supervise.explain import memory_words
from meshwright.runtime.supervise.supervisor import Timing, listen_on_loopback
from meshwright.training.events import append_event
from meshwright.training.run_folder import create
from meshwright.units import GIB
from runs import clean_environ, faulty_worker, rank_pids

ONCE = ["layout.dp_replicate=2", "checkpoint.restarts=0"]


@pytest.fixture(autouse=True)
def forked(forks):
    """Fork the faulty ranks, too."""
    with forks.all_python():
        yield


@pytest.fixture
def refused(outcome):
    """Return a function that trains what is refused, and says with which words."""

    def of(config_made, error=ConfigError):
        with outcome.refused(error) as caught:
            train(config_made, clean_environ(), command=lambda folder: ["/bin/false"])
        return str(caught.value)

    return of


@pytest.mark.case(28)
def test_refused_before_any_process_starts(config, corpus, tmp_path, refused):
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
    assert refused(config(f"checkpoint.dir={blocked}")) == (
        f"checkpoint folder {blocked} cannot be written: Not a directory; set checkpoint.dir"
    )
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / "run").symlink_to(tmp_path / "gone")
    assert refused(config()) == (
        f"run folder {tmp_path}/runs/run cannot be written: File exists; set log.dir"
    )
    (tmp_path / "runs" / "run").unlink()
    (tmp_path / "runs" / "run").touch()
    assert refused(config()) == (
        f"run folder {tmp_path}/runs/run cannot be written: File exists; set log.dir"
    )
    (tmp_path / "runs" / "run").unlink()
    assert refused(config("log.name=../x")) == (
        "log.name = '../x' must be a plain folder name; log.dir sets where"
    )
    assert refused(config("log.wandb=project")) == (
        "log.wandb is set, but wandb is not installed: pip install 'meshwright[wandb]'"
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.case(20)
def test_a_used_run_folder_is_left_alone(config, tmp_path, refused):
    used = tmp_path / "runs" / "run"
    used.mkdir(parents=True)
    (used / "events.jsonl").write_text("{}")
    assert refused(config()) == (
        f"run folder {used} already holds a run; nearest legal: log.name = run-2. "
        f"To continue that run: meshwright train --resume {used}"
    )


@pytest.mark.case(19)
def test_corrupt_store_is_refused_naming_shard_and_sizes(config, tmp_path, refused):
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


@pytest.mark.case(24)
def test_busy_port(config, refused):
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
        "import meshwright.training.update as update\n"
        "def bad(*a):\n    raise ValueError('the fault of rank 1')\n"
        "if rank == 1:\n    import meshwright.training.loop as loop; loop.update = bad"
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
        "import meshwright.training.loop as loop\n"
        "real = loop.update\n"
        "def deadly(*a):\n"
        "    if rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(*a)\n"
        "loop.update = deadly"
    )
    with pytest.raises(RankFailed) as caught:
        train(config(*ONCE), clean_environ(), command=faulty_worker(body))
    assert str(caught.value).startswith(
        "rank 1 was killed by SIGKILL, possibly by the system because memory ran out"
    )
    assert rank_pids(tmp_path / "runs" / "run") == []


def test_what_a_killed_rank_held_is_compared_with_the_memory_of_its_machine(config, monkeypatch):
    job = prepare_job(config("layout.dp_replicate=2"), clean_environ())
    create(job)
    monkeypatch.setattr(explain, "memory_of_machine", lambda: (16 * GIB, GIB))
    assert memory_words(job.folder, 1) == ""  # before the first step nothing is known
    peaks = {"0": GIB, "1": 2 * GIB}
    step = {"event": "step", "step": 7, "step_time_s": 1.0, "loss": 2.0}
    append_event(job.folder.events, step | {"peak_memory_bytes": peaks})
    assert memory_words(job.folder, 1) == (
        " (its process held 2.00 GiB and the ranks of this machine 3.00 GiB of 16.00 GiB at step 7)"
    )
    on_gpus = job.folder.plan.read_text().replace('"device": "cpu"', '"device": "cuda"')
    job.folder.plan.write_text(on_gpus)
    assert memory_words(job.folder, 1) == ""  # the host's memory is another


def test_a_hung_rank_does_not_outlive_its_failed_peer(config, tmp_path):
    body = (
        "import meshwright.training.loop as loop\n"
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
