"""Compiled blocks in every kind of layout: the gradients of one device that compiles nothing."""

import shutil

import pytest

from meshwright.layout import Layout
from meshwright.prove.shrink import shrink
from meshwright.runtime.proofs.proof import prove_cases
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from runs import clean_environ

SIZES = {"vocab_size": 128, "dim": 64, "n_layers": 4, "n_heads": 4, "ffn_dim": 128}
MODELS = {"llama": {**SIZES, "n_kv_heads": 2}, "neox": {**SIZES, "family": "neox"}}
LABELS = (
    ("llama", "dp2 mb2", "fp32"),
    ("llama", "tp2 mb2", "fp32"),
    ("llama", "tp2 sp mb2", "bf16"),
    ("neox", "tp2 sp mb2", "fp32"),
    ("llama", "pp2 1f1b mb2", "fp32"),
    ("llama", "pp2 zbv v2 mb1", "fp32"),
    ("neox", "shard2 zero1 mb2", "bf16"),
    ("llama", "shard2 zero3 mb2 recompute-selective", "fp32"),
    ("llama", "cp2-ring mb2 recompute-full", "fp32"),
    ("llama", "cp2-ulysses mb2", "fp32"),
)


def holds(model, label, precision, *, compiles):
    """Prove a layout of a model on local ranks, with compiled blocks or without."""
    train = TrainSpec(batch=8, seq_len=32, precision=precision, compile=compiles)
    cases = list(shrink(model_spec(**model), train, Layout.parse(label), packed=False))
    assert all(("compiled" in case.label) == compiles for case in cases)
    for outcome in prove_cases(cases, clean_environ(), lambda outcome: None):
        assert outcome.passed, outcome.lines()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
@pytest.mark.parametrize(("family", "label", "precision"), LABELS)
def test_compiled_blocks_have_the_gradients_of_one_device(family, label, precision):
    holds(MODELS[family], label, precision, compiles=True)
