"""Data parallelism through memory that ranks share, against gloo: the same bits and messages."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from meshwright.bench.layouts import Stepper
from meshwright.execute import groups, shared
from meshwright.execute.gather import full_tensor
from meshwright.execute.groups import open_groups
from meshwright.execute.lane import LARGEST
from meshwright.execute.wire import Wire
from meshwright.layout import Layout
from meshwright.prove.case import Case
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks, ranks

# Rows that do not divide evenly, and an embedding that takes more than one message.
MODEL = model_spec(
    dim=60, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=121, vocab_size=LARGEST // 4 // 60 * 3
)
TRAIN = TrainSpec(batch=12, seq_len=16)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "label",
    [
        "shard2 zero1 mb3",
        "shard2 zero2 mb3",
        "shard2 zero3 mb3",
        "shard3 zero3 mb2",
        "dp2 shard2 zero2 mb3",
        "zero2 cp2-ring mb6",
    ],
)
def test_steps_are_those_by_gloo(label, precision):
    world = Layout.parse(label).world
    on_ranks(world, same_steps, label=label, precision=precision)


def same_steps(world, label, precision):
    case = Case(MODEL, TRAIN.model_copy(update={"precision": precision}), Layout.parse(label))
    found = []
    for is_shared in (True, False):
        with mock.patch.object(groups, "share", shared.share if is_shared else no_lane):
            step = Stepper(world, case)
            sent = Wire(open_groups(case.layout, world))
            step()
            with sent:
                step()
        held = {h.name: full_tensor(h.parameter.detach()) for h in step._parallel.held}
        found.append((held, sent.messages))
    (ours, sent), (theirs, by_gloo) = found
    assert sent == by_gloo
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def no_lane(*_):
    return False


@ranks(2)
def test_groups_have_lanes_where_rows_are_shared(world):
    assert open_groups(Layout.parse("shard2 zero2 mb1"), world).shard.is_shared
    assert not open_groups(Layout.parse("dp2 mb1"), world).replicate.is_shared
    two = mock.Mock(wraps=world, rank=world.rank, size=2, opened={}, device=world.device)
    two.node = lambda rank: f"node {rank}"
    assert not open_groups(Layout.parse("shard2 zero2 mb1"), two).shard.is_shared
