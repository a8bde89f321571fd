"""Products in pieces beside the messages of sequence parallelism: who is refused, what is found."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._inductor.fx_passes import micro_pipeline_tp

from graphs import compiled
from meshwright.comm.groups import Link
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.layout import Layout
from meshwright.layout.rules import broken, nearest_legal
from meshwright.parallel import build
from meshwright.parallel.tensor_parallel.async_tp import OPTIONS, take_async_tp
from meshwright.program.target import Target
from meshwright.runtime.machines.engine import check_async_tp
from meshwright.runtime.machines.machine import Gpus
from meshwright.runtime.session import prepare_job
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from runs import clean_environ

CUDA = torch.device("cuda")
NVIDIA = Gpus("NVIDIA", 8, 8)
SEQUENCE = "tp2 sp mb2"


@pytest.mark.parametrize("label", ["mb2", "tp2 mb2"])
def test_without_sequence_parallelism_it_is_refused(label):
    model = model_spec(dim=64, n_layers=2, n_heads=4, vocab_size=64)
    train, layout = TrainSpec(batch=4, seq_len=32, async_tp=True), Layout.parse(label)
    assert "is for sequence parallelism" in broken(model, train, layout)
    assert "train.async_tp = false" in nearest_legal(model, train, layout)
    assert broken(model, train, Layout.parse(SEQUENCE)) is None


@pytest.mark.parametrize(
    ("device", "gpus", "label", "words", "told"),
    [
        ("cpu", None, SEQUENCE, (), "needs GPUs of NVIDIA"),
        ("cuda", Gpus("AMD", 8, 8), SEQUENCE, (), "needs GPUs of NVIDIA"),
        ("cuda", NVIDIA, SEQUENCE, ("train.compile=false",), "train.compile = false"),
        ("cuda", NVIDIA, "tp2 sp pp2 zbv v2 mb1", (), "layout.schedule = zbv leaves matmuls"),
        ("cuda", Gpus("NVIDIA", 2, 2), "tp4 sp mb2", (), "on one node, which has 2 GPUs"),
        ("cuda", NVIDIA, SEQUENCE, (), None),
    ],
)
def test_what_it_needs_is_told_before_a_process_starts(device, gpus, label, words, told):
    config = load_config(None, ["train.async_tp=true", "train.compile=true", *words])
    if told is None:
        check_async_tp(config, Layout.parse(label), device, gpus)
        return
    with pytest.raises(ConfigError) as error:
        check_async_tp(config, Layout.parse(label), device, gpus)
    assert told in str(error.value)
    assert "nearest legal: train.async_tp = false" in str(error.value)


def test_a_start_on_a_cpu_is_refused(config):
    words = ("train.async_tp=true", "layout.tp=2", "layout.sp=true", "model.n_kv_heads=2")
    with pytest.raises(ConfigError, match=r"train\.async_tp = true: it needs GPUs of NVIDIA"):
        prepare_job(config(*words), clean_environ())


def test_a_rank_enables_it_for_its_group(monkeypatch):
    enabled = []
    monkeypatch.setattr(symmetric, "enable_symm_mem_for_group", enabled.append)
    monkeypatch.setattr(torch.version, "hip", None)
    link = Link(SimpleNamespace(group_name="tp of two"), (0, 1), 0)
    groups = build.Groups({}, None, *[link] * 7)
    taken = take_async_tp(groups, CUDA)
    assert enabled == ["tp of two"]
    assert taken.tp.in_pieces
    assert not groups.tp.in_pieces
    with pytest.raises(MeshwrightError, match="needs GPUs of NVIDIA"):
        take_async_tp(groups, torch.device("cpu"))
    monkeypatch.delattr(symmetric, "enable_symm_mem_for_group")
    with pytest.raises(MeshwrightError, match="has no symmetric memory"):
        take_async_tp(groups, CUDA)
    torch.compile(torch.sin, options=OPTIONS)  # which this compiler knows


def found_in(monkeypatch, label):
    """What the compiler's pass puts into forwards and backwards of a block, of a layout."""
    found = {"fw": set(), "bw": set()}

    def look(kind):
        def compile_graph(graph, examples):
            copy = deepcopy(graph)
            aten = torch.ops.aten
            for node in copy.graph.nodes:
                if node.target in (aten.view.default, aten._unsafe_view.default):
                    node.target = aten.reshape.default  # as later passes have it
            micro_pipeline_tp.micro_pipeline_tp_pass(copy.graph)
            names = [str(node.target) for node in copy.graph.nodes]
            found[kind].add(tuple(name for name in names if "symm_mem" in name))
            return nop(graph, examples)

        return compile_graph

    backend = aot_autograd(fw_compiler=look("fw"), bw_compiler=look("bw"))
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: backend)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(symmetric, "is_symm_mem_enabled_for_group", lambda _: True)
    compiled(label, Target("gpu"))
    return found


@pytest.mark.slow
def test_the_compiler_finds_gathers_and_sums(monkeypatch):
    found = found_in(monkeypatch, SEQUENCE)
    gathers = "symm_mem.fused_all_gather_matmul.default"
    sums = "symm_mem.fused_matmul_reduce_scatter.default"
    assert found["fw"] == {(gathers, sums, gathers, sums)}
    # torch 2.11 finds one gather of the two, later ones find both.
    assert all(set(names) == {gathers} for names in found["bw"])
