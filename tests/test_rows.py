"""Data parallelism through memory that ranks share, against gloo: the same bits and messages."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from meshwright.bench.layouts import Stepper
from meshwright.execute import groups
from meshwright.execute.channel import LARGEST
from meshwright.execute.gather import full_tensor
from meshwright.execute.groups import open_groups
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
# Of five rows, which are those of two ranks and one: the last of four ranks has none, neither of
# the embedding, which is a unit, nor of the MLP's.
FEW = model_spec(dim=60, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=5, vocab_size=5)


@pytest.mark.often(4)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "label",
    [
        "shard2 zero1 mb3",
        "shard2 zero2 mb3",
        "shard2 zero3 mb3",
        "shard3 zero3 mb2",
        "dp2 shard2 zero2 mb3",
        "zero2 cp2-ring mb6",
        "pp2 1f1b shard2 zero2 mb3",
        "pp2 1f1b shard2 zero3 mb3",
        "shard2 tp2 zero1 mb3",
        "shard2 tp2 zero3 mb3",
    ],
)
def test_steps_are_those_by_gloo(label, precision):
    world = Layout.parse(label).world
    on_ranks(world, same_steps, model=MODEL, label=label, precision=precision)


@pytest.mark.parametrize("label", ["shard4 zero1 mb3", "shard4 zero2 mb3", "shard4 zero3 mb3"])
def test_steps_are_those_by_gloo_where_a_rank_has_no_rows(label):
    on_ranks(4, same_steps, model=FEW, label=label, precision="bf16")


def same_steps(world, model, label, precision):
    """Two steps with channels and without: messages along tp use them in both runs."""
    case = Case(model, TRAIN.model_copy(update={"precision": precision}), Layout.parse(label))
    found = []
    for axes in ({"tp", "shard"}, {"tp"}):
        with mock.patch.object(groups, "goes_by_channel", axes.__contains__):
            step = Stepper(world, case)
            opened = open_groups(case.layout, world)
        assert opened.shard.is_shared == ("shard" in axes)
        assert opened.tp.is_shared == (case.layout.tp > 1)
        sent = Wire(opened)
        step()
        with sent:
            step()
        held = {h.name: full_tensor(h.parameter.detach()) for h in step._parallel.held}
        found.append((held, sent.messages))
    (ours, sent), (theirs, by_gloo) = found
    assert sent == by_gloo
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@ranks(2)
def test_groups_have_channels_where_rows_are_shared(world):
    assert open_groups(Layout.parse("shard2 zero2 mb1"), world).shard.is_shared
    assert not open_groups(Layout.parse("dp2 mb1"), world).replicate.is_shared
    two = mock.Mock(wraps=world, rank=world.rank, size=2, opened={}, device=world.device)
    two.node = lambda rank: f"node {rank}"
    assert not open_groups(Layout.parse("shard2 zero2 mb1"), two).shard.is_shared
