"""A compiled block is one graph: counted for every way that blocks are cut, on one core."""

import pytest
import torch

from graphs import SEQ_LEN, compiled
from meshwright.layout import Layout
from meshwright.models import grouped
from meshwright.program.target import Target
from meshwright.prove.shrink import shrink
from meshwright.spec.families import FAMILIES
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec

GPU = Target("gpu")  # for which FSDP2 keeps every ZeRO
LAYOUTS = ("mb2", "tp2 mb2", "tp2 sp mb2", "cp2-ring mb2", "cp2-ulysses mb2", "pp2 1f1b mb1")
SHARDED = ("shard2 zero1 mb1", "shard2 zero2 mb1", "shard2 zero3 mb1", "dp2 zero3 mb1")
MIXED = ("shard2 zero3 tp2 sp mb1", "shard2 zero2 cp2-ring mb1", "shard2 zero3 pp2 1f1b mb1")
RECOMPUTES = ("", " recompute-selective", " recompute-full")
MIXTURE = {"family": "mixtral", "experts": 4, "top_k": 2}
# What linear layers leave between them: norm, attention, norm, activation, sum; tp has another.
BETWEEN = {"": 5, " tp2 sp": 6}


@pytest.fixture
def one_kernel(monkeypatch):
    """Experts' products as on a GPU: all groups in one."""

    def takes(rows, others):
        return rows.dtype == torch.bfloat16 and rows.shape[-1] % 8 == 0 == others.shape[-1] % 8

    monkeypatch.setattr(grouped, "takes_one_kernel", takes)
    monkeypatch.setattr(grouped, "counts_are_on_device", lambda rows: True)


def is_one_graph(found):
    return found.graphs == 1 and found.calls and not found.breaks


def some(layouts, often):
    """Each layout under each recompute; `often` those that are not slow."""
    every = [layout + recompute for layout in layouts for recompute in RECOMPUTES]
    return [one if one in often else pytest.param(one, marks=pytest.mark.slow) for one in every]


OFTEN = (
    "mb2 recompute-selective",
    "tp2 mb2 recompute-full",
    "cp2-ring mb2 recompute-full",
    "cp2-ulysses mb2",
    "shard2 zero3 tp2 sp mb1 recompute-selective",
)


@pytest.mark.slow
@pytest.mark.parametrize("label", some((*LAYOUTS, *SHARDED, *MIXED), OFTEN))
def test_a_block_is_one_graph_without_a_break(label):
    found = compiled(label, GPU)
    assert is_one_graph(found), found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mb2", "tp2 sp mb2", "cp2-ring mb2 recompute-selective"])
def test_so_it_is_where_rows_hold_documents_and_on_a_cpu(layout):
    for target, precision in ((GPU, "fp16"), (Target("cpu"), "fp32")):
        found = compiled(layout, target, packed=True, precision=precision)
        assert is_one_graph(found), found


EXPERTS = ("mb2", "tp2 mb2", "tp2 sp mb2", "shard2 zero3 mb1")


@pytest.mark.slow
@pytest.mark.parametrize("label", some(EXPERTS, ["tp2 sp mb2"]))
def test_a_block_with_experts_has_graphs_before_its_router_and_after(label, one_kernel):
    found = compiled(label, GPU, **{**MIXTURE, "family": "qwen2_moe"}, shared_ffn_dim=64)
    if "recompute" in label:
        assert is_one_graph(found), found  # attention
        return
    assert found.graphs <= 4  # of the block and of its MLP, before the router and after
    assert all("disable" in reason for reason in found.breaks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "pp2 zbv v2 mb1",
        "pp2 interleaved_zero_bubble v2 mb1",
    ],
)
def test_linear_layers_whose_gradients_wait_are_outside_of_graphs(layout):
    for more, count in BETWEEN.items():
        found = compiled(layout + more, GPU)
        assert found.graphs == count
        assert all("disable" in reason for reason in found.breaks)
    for recompute in RECOMPUTES[1:]:  # all of it at once, or none: what is between q, k, v and o
        assert compiled(layout + recompute, GPU).graphs == 1


@pytest.mark.slow
def test_experts_that_the_host_counts_are_outside_of_graphs(one_kernel):
    for layout, target, precision in (
        ("shard2 zero3 ep2 mb1", GPU, "bf16"),
        ("tp2 sp ep2 etp1 mb1", GPU, "bf16"),
        ("mb2", GPU, "fp32"),
        ("mb2", Target("cpu"), "bf16"),
    ):
        found = compiled(layout, target, precision=precision, **MIXTURE)
        assert found.graphs <= 5
        assert all("disable" in reason for reason in found.breaks)
        for recompute in RECOMPUTES[-1:]:
            found = compiled(layout + recompute, target, precision=precision, **MIXTURE)
            assert is_one_graph(found), found  # attention


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_a_graph_for_each_kind_of_block(family, one_kernel):
    spec = TrainSpec(batch=4, seq_len=SEQ_LEN)
    preset = next(iter(FAMILIES[family].presets))
    for layout in ("mb2", "tp2 sp mb2 recompute-full"):
        (case,) = shrink(model_spec(preset=preset), spec, Layout.parse(layout))
        found = compiled(layout, GPU, model=case.model)
        assert found.calls
        assert all("disable" in reason for reason in found.breaks)
        assert not (found.breaks and not case.model.experts)
        parts = 4 if case.model.experts else 1
        assert found.graphs <= parts * len(case.model.layer_kinds)
