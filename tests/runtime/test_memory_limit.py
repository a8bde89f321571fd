"""`cluster.memory`: read, held by the system, and what a rank says that wanted more."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.cli import main
from meshwright.errors import ConfigError, RankFailed
from meshwright.layout import Layout
from meshwright.runtime.ranks.worker import MemoryLimit, is_out_of_memory
from meshwright.runtime.session import train
from meshwright.runtime.supervise.explain import out_of_memory, raised
from meshwright.runtime.supervise.supervisor import failure_of
from meshwright.spec.dump import to_toml
from meshwright.spec.loading import load_config
from meshwright.training.run_folder import RunFolder
from meshwright.units import GIB, MIB, parse_bytes
from runs import clean_environ

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.toml"
TP = ["layout.tp=2", "layout.sp=true"]
CP = ["layout.cp=2"]


def test_bytes_are_read_in_both_systems_of_units():
    read = {"4096": 4096, "2GiB": 2 * GIB, "1.5 GB": 1_500_000_000, "512mib": 512 * MIB, "7 B": 7}
    assert {text: parse_bytes(text) for text in read} == read
    for text in ("", "GiB", "2 gigs", "-1", "1e9", "nan"):
        with pytest.raises(ValueError, match="is not a number of bytes, as 2GiB"):
            parse_bytes(text)


def test_limit_in_the_config(tmp_path):
    config = load_config(None, ["cluster.memory=1.5GiB"])
    assert config.cluster.memory == 1.5 * GIB
    dumped = tmp_path / "config.toml"
    dumped.write_text(to_toml(config))
    assert load_config(dumped).cluster == config.cluster
    assert load_config().cluster.memory is None
    refusals = {
        "2 gigs": "cluster.memory = '2 gigs' is not a number of bytes, as 2GiB, 1.5GB or 4096",
        "0": "cluster.memory = 0 (override cluster.memory=0) must be greater than 0; "
        "nearest legal: cluster.memory=1",
        "1.5": "cluster.memory = 1.5 (override cluster.memory=1.5) must be an integer; "
        "nearest legal: cluster.memory=1 or cluster.memory=2",
    }
    for value, text in refusals.items():
        with pytest.raises(ConfigError) as caught:
            load_config(None, [f"cluster.memory={value}"])
        assert str(caught.value) == text


@pytest.mark.slow
def test_a_rank_over_the_limit_ends_the_run(config, monkeypatch, capsys):
    # The logits of a microbatch are 5 MiB.
    words = ["train.batch=16", "train.seq_len=512", "layout.microbatch=8", "layout.dp_replicate=1"]
    words.append("train.steps=1")
    assert train(config(*words, "cluster.memory=1GiB"), clean_environ()).exit_code == 0
    monkeypatch.setattr("meshwright.runtime.session.check_limit", lambda *_: None)  # to be quick
    with pytest.raises(RankFailed) as caught:
        train(config(*words, "cluster.memory=4MiB", "log.name=small"), clean_environ())
    assert caught.value.exit_code == 3
    # What first finds no room may be torch's allocator, which says how much it wanted, or C++,
    # which doesn't.
    assert re.fullmatch(
        r"out of memory: rank 0 asked for (\d+\.\d\d [KM]iB, )?more than was left of "
        r"cluster\.memory = 4\.00 MiB\. What would fit: meshwright plan --after-oom \S+/small",
        str(caught.value),
    )
    assert main(str(caught.value).partition("meshwright ")[2].split()) == 0
    assert "a device has 4.00 MiB" in capsys.readouterr().out


@pytest.mark.case(40)
def test_a_limit_that_is_too_small_for_any_step_is_refused_before_the_start(config, outcome):
    """Threads cannot start then: "Resource temporarily unavailable", or no word at all."""
    words = ["layout.dp_replicate=2", "train.steps=1"]
    with outcome.refused(ConfigError) as caught:
        train(config(*words, "cluster.memory=12MiB"), clean_environ())
    assert re.fullmatch(
        r"cluster\.memory = 12\.00 MiB is less than a rank needs: \d+\.\d\d KiB for its weights, "
        r"gradients and optimizer states, and 24\.00 MiB for its threads and messages; "
        r"nearest legal: cluster\.memory=25MiB",
        str(caught.value),
    )
    assert not Path(config().log.dir).exists()
    assert train(config(*words, "cluster.memory=25MiB"), clean_environ()).exit_code == 0


def test_a_thread_that_finds_no_room_is_memory_that_ran_out():
    limit = MemoryLimit(job("cluster.memory=30MiB"), 1, torch.device("cuda"))
    with pytest.raises(RankFailed, match="out of memory: rank 1 asked for more"):
        limit.__exit__(None, RuntimeError("Resource temporarily unavailable"), None)


def job(*overrides, **layout):
    config = load_config(EXAMPLE, overrides)
    folder = SimpleNamespace(path=Path("runs/one"))
    return SimpleNamespace(config=config, layout=Layout(**layout), folder=folder)


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("not enough memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", "asked for 20.00 MiB,"),
        ("you tried to allocate 167772160 bytes. Error", "asked for 160.00 MiB,"),
        ("Unable to allocate 160. MiB for an array", "asked for 160.00 MiB,"),
        ("", "asked for"),
    ],
)
def test_what_was_asked_for_is_told(said, asked):
    text = out_of_memory(RunFolder(Path("runs/one")), 3, GIB, said)
    assert text.startswith(
        f"out of memory: rank 3 {asked} more than was left of cluster.memory = 1"
    )


def test_on_a_gpu_torch_holds_the_limit(monkeypatch):
    fractions = []
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * GIB)
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: fractions.append((fraction, device)),
    )
    with (
        pytest.raises(RankFailed, match=r"rank 1 asked for 20\.00 MiB"),
        MemoryLimit(job("cluster.memory=2GiB"), 1, gpu),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has")
    with MemoryLimit(job("cluster.memory=16GiB"), 1, gpu):
        pass
    assert fractions == [(0.25, gpu), (1.0, gpu)]


def example(tmp_path, corpus, *overrides):
    fixed = [f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}", "train.steps=1"]
    where = [f"log.dir={tmp_path / 'runs'}", *overrides]
    return load_config(EXAMPLE, [*fixed, *where])


@pytest.mark.slow  # as a rank over the limit, with the example
def test_long_context_is_refused_alone(tmp_path, corpus, capsys):
    with pytest.raises(RankFailed) as caught:
        train(example(tmp_path, corpus), clean_environ())
    limit = r"more than was left of cluster\.memory = 300\.00 MiB"
    assert re.search(rf"rank 0 asked for .*, {limit}\. What would fit: ", str(caught.value))
    assert main(str(caught.value).partition("meshwright ")[2].split()) == 0
    told = capsys.readouterr().out
    assert "layout.recompute=full" in told


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [TP, CP], ids=["tp", "cp"])
def test_long_context_is_trained_by_two(overrides, tmp_path, corpus):
    run = train(example(tmp_path, corpus, *overrides), clean_environ())
    assert run.exit_code == 0
    (step,) = run.events("step")
    assert 0 < step["loss"] < 8


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_ran_out_in_a_thread_of_cpp_is_told(tmp_path, rank):
    """Nothing catches it there: the process aborts, and only its log says why."""
    folder = RunFolder(tmp_path)
    folder.log(rank).parent.mkdir(parents=True)
    folder.log(rank).write_text(
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
    )
    failure = failure_of(folder, rank, -signal.SIGABRT)
    assert failure.kind == "memory"
    assert failure.cause.startswith(f"out of memory: rank {rank} asked for more than was left. ")
    folder.log(rank).write_text("free(): invalid pointer")
    assert "was killed by SIGABRT" in failure_of(folder, rank, -signal.SIGABRT).cause


def test_an_error_about_a_rank_is_told_once():
    said = {"type": "CheckpointError", "expected": True, "message": "rank 0: no space left"}
    assert raised(1, said) == "rank 0: no space left"
    assert raised(1, said | {"message": "a file"}) == "rank 1 raised a file"
    assert raised(1, said | {"expected": False}) == "rank 0: no space left"
