"""Float8 products: what is refused, and how far off they are."""

import importlib.util

import pytest

from meshwright.errors import ConfigError
from meshwright.launch.machines import engine
from meshwright.launch.session import prepare_job
from meshwright.layout import Layout
from meshwright.layout.rules import broken, nearest_legal
from meshwright.prove.case import Case
from meshwright.prove.suite import Suite
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks
from runs import clean_environ

MODEL = model_spec(vocab_size=128, dim=64, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=128)
TRAIN = TrainSpec(batch=4, seq_len=32, precision="bf16", fp8=True)

REFUSED = [
    ("tp2 mb2", {}, "layout.tp = 2 cuts linear layers", "layout.tp = 1"),
    ("pp2 zbv v2 mb1", {}, "layout.schedule = zbv defers products", "layout.schedule = looped_bfs"),
    ("mb1", {"seq_len": 24}, "tokens of a microbatch = 24 must be", "layout.microbatch = 2"),
    ("mb2", {"precision": "fp32"}, "requires train.precision = bf16", "train.precision = bf16"),
    ("mb2", {"precision": "fp16"}, "requires train.precision = bf16", "train.fp8 = false"),
]


@pytest.mark.parametrize(("label", "changes", "rule", "legal"), REFUSED)
def test_where_it_cannot_work_the_nearest_legal_is_told(label, changes, rule, legal):
    layout, train = Layout.parse(label), TRAIN.model_copy(update=changes)
    assert rule in broken(MODEL, train, layout)
    assert legal in nearest_legal(MODEL, train, layout)


@pytest.mark.parametrize(("key", "size"), [("dim", 72), ("ffn_dim", 100)])
def test_odd_sizes_are_refused(key, size):
    spec = MODEL.model_copy(update={key: size})
    assert f"model.{key} = {size} must be a multiple of 16" in broken(spec, TRAIN, Layout())


def test_what_is_missing_is_refused_before_any_process_starts(config, monkeypatch):
    words = ("train.fp8=true", "train.precision=bf16", "layout.microbatch=2")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else real(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'meshwright\[fp8\]'"):
        prepare_job(config(*words), clean_environ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(engine, "gpu_name", lambda: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ConfigError, match="A100-SXM4-80GB has no products in float8"):
        engine.check_fp8(config(*words), "cuda")
    monkeypatch.setattr(engine, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    engine.check_fp8(config(*words), "cuda")


LABELS = [
    "dp2 mb2 recompute-selective",
    "shard2 zero3 mb2 recompute-full",
    "pp2 1f1b mb2",
    "cp2 mb2",
]


@pytest.mark.parametrize("label", LABELS)
def test_gradients_are_within_the_bound(label):
    pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[fp8]'")
    for verdicts in on_ranks(2, proven, label=label):
        for verdict in verdicts:
            assert verdict.passed, verdict
        gradients = next(one for one in verdicts if one.claim == "gradients")
        # Not that of bf16: something was computed in float8.
        assert gradients.observed > 2.0**-5


def proven(world, label):
    return Suite(world).prove(Case(MODEL, TRAIN, Layout.parse(label)))
