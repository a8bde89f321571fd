"""Recorded steps: what a tape keeps, what is made of it, and that it agrees with the program."""

import json
import time
from collections import Counter

import pytest
import torch

from meshwright.bench.memory import Held
from meshwright.execute.allocations import MarkedTape, Piece, StepProfile, moments_of
from meshwright.execute.build import build, seeded
from meshwright.execute.clock import DeviceClock, clock_offset
from meshwright.execute.groups import open_groups
from meshwright.execute.ledger import Ledger
from meshwright.execute.measured import Moment, memory_points, recorded
from meshwright.execute.optimize import Shards
from meshwright.execute.recorder import Recorder
from meshwright.execute.tape import Tape
from meshwright.execute.wire import Message, Wire, expected_messages
from meshwright.execute.world import World
from meshwright.layout import Layout
from meshwright.predict.timeline import timeline
from meshwright.program.ledger import MemoryPoint, RankLedger, Span, Traffic
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.reference import make_batch
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.train.loss_scale import LossScale
from meshwright.train.optimizer import build_optimizer
from meshwright.train.step_ledger import gather_ranks, is_detailed
from meshwright.train.update import update
from ranks import on_ranks, ranks

MODEL = model_spec(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=512)
TRAIN = TrainSpec(batch=8, seq_len=128)


class Times:
    """A clock that says what it is told to."""

    def __init__(self, *times):
        self.times = iter(times)

    def stamp(self):
        return next(self.times)

    def seconds(self, stamp):
        return 100.0 + stamp


def test_a_step_is_told_by_what_the_rank_waited_for():
    ledger = Ledger()
    pp, tp = ledger.group("1", (0, 1), "pp"), ledger.group("2", (0, 2), "tp")
    own = ledger.group("3", (0, 1, 2, 3))  # of a save beside the training
    ledger.end(ledger.begin("all_reduce", tp, 8, waits=True))  # before: not on the tape
    ledger.tape = Tape(Times(0, 0, 1, 2, 2, 4, 5, 6, 7, 7, 8, 8, 8, 9, 10))
    ledger.step(3)  # 0
    ledger.action("RECV_F", 1, 0)  # 1
    received = ledger.begin("recv", pp, 64, peer=0)
    ledger.action("F", 1, 0)  # 2
    ledger.wait(received)  # 2
    ledger.end(received)  # 4
    ledger.end(ledger.begin("all_reduce", tp, 128, waits=True))  # 5 to 6
    ledger.end(ledger.begin("all_gather", own, 4, waits=True))  # 7 to 7
    ledger.phase("update")  # 8
    sent = ledger.begin("send", pp, 64, peer=0)
    ledger.end(sent)  # was not waited for
    ledger.phase("log")  # 8
    ledger.end(ledger.begin("all_reduce", tp, 16, waits=True))  # 8 to 9
    tape, ledger.tape = ledger.tape, None
    tape.stop()  # 10
    ledger.phase("save")
    found = recorded(tape, ledger.label, pp=2, dp=1)
    assert (found.began, found.seconds, found.turns) == (100, 10, (0, 1, 2, 8, 8, 10))
    assert found.spans == (
        Span("host", "input", 0, 1),
        Span("messages", "RECV_F", 1, 2, 1, 0, "pp"),
        Span("messages", "RECV_F", 2, 4, 1, 0, "pp", 64),
        Span("compute", "F", 4, 8, 1, 0),  # begins where its input is there
        Span("messages", "all_reduce", 5, 6, -1, -1, "tp", 128),
        Span("host", "log", 8, 10),
        Span("host", "update", 8, 8),
        Span("messages", "all_reduce", 8, 9, -1, -1, "tp", 16),
    )
    assert found.traffic == (
        Traffic("all_reduce", "tp", 128, 1, 1),
        Traffic("recv", "pp", 64, 1, 2),
        Traffic("send", "pp", 64, 1, 0),
    )
    told = {cause: seconds for cause, seconds in found.causes.items() if seconds}
    assert told == {"compute": 3, "bubble": 3, "tp": 2, "input": 1, "host": 1}
    assert sum(told.values()) == 10


def test_waits_that_overlap_count_once():
    ledger = Ledger()
    groups = [ledger.group(axis, (0, 1), axis) for axis in ("shard", "cp")]
    ledger.tape = Tape(Times(0, 0, 1, 2, 4, 5, 6))
    ledger.action("B", 0, 0)  # 0
    first, second = (ledger.begin("all_gather", group, 8) for group in groups)
    ledger.wait(first)  # 1
    ledger.wait(second)  # 2
    ledger.end(first)  # 4
    ledger.end(second)  # 5
    ledger.tape.stop()  # 6
    found = recorded(ledger.tape, ledger.label, pp=1, dp=2)
    assert {k: v for k, v in found.causes.items() if v} == {"compute": 2, "data": 3, "cp": 1}
    assert [one.seconds for one in found.traffic] == [3, 3]
