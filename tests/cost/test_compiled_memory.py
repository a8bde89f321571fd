"""What compiled blocks keep for the backward is what the program says that they keep."""

import shutil

import pytest
import torch

from graphs import SEQ_LEN, SIZES
from kept import kept_bytes, kept_of_graphs
from meshwright.layout import Layout
from meshwright.models import build_model, grouped
from meshwright.program.lower import lower
from meshwright.program.operations import operations
from meshwright.program.sizes import fuses_loss, loss_element
from meshwright.program.target import Target
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

TOKENS = 2 * SEQ_LEN
COMPILED = Target("gpu", compiled=True)


@pytest.mark.slow
def test_a_compiled_mixture_gathers_the_rows_of_experts_again(monkeypatch):
    def takes(rows, others):
        return rows.dtype == torch.bfloat16

    monkeypatch.setattr(grouped, "takes_one_kernel", takes)
    monkeypatch.setattr(grouped, "counts_are_on_device", lambda rows: True)
    experts, top_k = 8, 4
    found = kept_of_graphs("mb2", family="olmoe", experts=experts, top_k=top_k)
    kept = [shape for graph in found for shape in graph]
    assert kept.count((TOKENS * top_k, SIZES["ffn_dim"])) == 2  # gate and up
    assert (TOKENS * top_k, SIZES["dim"]) not in kept


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_norms_of_heads_take_them_in_their_order_of_memory(family):
    spec = model_spec(**SIZES, family=family)
    model = build_model(spec)
    taken = []
    for norm in (model.layers["0"].attn.q_norm, model.layers["0"].attn.k_norm):
        norm.register_forward_hook(lambda _, given, out: taken.append((given[0], out)))
    model.hidden(torch.zeros(2, SEQ_LEN, dtype=torch.int64))
    assert len(taken) == 2  # of the first layer
    assert all(given.is_contiguous() and out.is_contiguous() for given, out in taken)


def kept(target, fp8):
    model = model_spec(**SIZES)
    train = TrainSpec(batch=4, seq_len=SEQ_LEN, precision="bf16", fp8=fp8)
    program = lower(model, train, OptimizerSpec(), Layout.parse("mb2"), target)
    ops = operations(program, program.stages[0])
    return {op.name: op.saved_bytes for op in ops if op.kind == "product" and op.layer}


def test_a_compiled_block_in_float8_keeps_no_inputs_of_products():
    size = TOKENS * SIZES["dim"] * 2
    plain = kept(COMPILED, fp8=False)
    assert plain["layers.*.attn.q"] == plain["layers.*.mlp.gate"] == size
    assert plain["layers.*.mlp.down"] == 2 * size
    assert kept(Target("gpu"), fp8=True) == plain
    assert set(kept(COMPILED, fp8=True).values()) == {0}


def test_a_compiled_loss_has_no_logits_in_fp32():
    assert fuses_loss(2, 1, COMPILED)
    assert not fuses_loss(2, 2, COMPILED)  # other ranks' logits
    assert not fuses_loss(4, 1, COMPILED)
    assert not fuses_loss(2, 1, Target("gpu"))
    assert loss_element(2, capped=True) == 10
    assert loss_element(2, capped=True, fused=True) == 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
def test_a_compiled_block_that_recomputes_keeps_its_input_alone():
    assert kept_bytes("mb2 recompute-full") == 0
    assert kept_bytes("mb2") > 0
