import math

import pytest
import torch
from benchmarks.modes import Entrant, line_up, random_tokens, table
from benchmarks.peers.catalogue import PEERS, Sizes
from benchmarks.peers.common import Task
from benchmarks.peers.native import train

from meshwright.data import open_data
from meshwright.spec.training import DataSpec
from ranks import on_ranks

TINY = Sizes(vocab=64, dim=16, layers=2, heads=2, ffn=32, seq=16, batch=8)


def losses(world, mode, microbatch):
    torch.manual_seed(0)
    return train(Task(mode, 2, microbatch, TINY)).losses


@pytest.mark.parametrize("mode", PEERS["native"].modes)
def test_a_native_mode_trains(mode):
    first, second = on_ranks(2, losses, mode=mode, microbatch=2)[0]
    assert math.isfinite(first)
    assert abs(first - math.log(TINY.vocab)) < 0.1
    assert second < first + 0.1


@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3", "tp"])
def test_native_modes_compute_the_same(mode):
    expected = on_ranks(2, losses, mode="ddp", microbatch=4)[0]
    assert on_ranks(2, losses, mode=mode, microbatch=2)[0] == pytest.approx(expected, abs=1e-5)


def test_the_ratio_is_to_the_best_peer_of_the_mode():
    times = {"meshwright": [2.0, 1.0, 2.0], "native": [4.0], "deepspeed": [1.0], "litgpt": []}
    entrants = [Entrant(name, "ddp", 2, seconds=s) for name, s in times.items()]
    rows = {row["system"]: row for row in table(entrants, 100)}
    assert rows["meshwright"]["tokens_per_s"] == 50
    assert rows["meshwright"]["ratio"] == 0.5
    assert rows["native"]["ratio"] is None
    assert "litgpt" not in rows


def test_peers_enter_the_modes_that_they_have():
    entered = {(e.mode, e.system) for e in line_up(["tp", "ring"], ["meshwright", "native"], None)}
    assert entered == {("tp", "meshwright"), ("tp", "native"), ("ring", "meshwright")}


def test_meshwright_reads_the_random_tokens(tmp_path):
    path = random_tokens(tmp_path, TINY, steps=6)
    spec = DataSpec(source=str(path), tokenizer=str(tmp_path / "tokenizer.json"))
    data = open_data(spec, tmp_path / "cache", TINY.vocab)
    assert data.sampler("train", TINY.seq, TINY.batch).samples >= 6 * TINY.batch
    assert data.vocab_size == TINY.vocab
