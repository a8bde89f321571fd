"""A rule that takes a whole axis out of a plan is told first."""

import json

import pytest

from meshwright.cli import main
from meshwright.planner.plan import plan
from meshwright.spec.loading import load_config

GPT3 = ["model.preset=gpt3-175b", "cluster.preset=a100-80gb", "cluster.nodes=8"]

THREE = [
    *("cluster.preset=h100-sxm", "cluster.devices_per_node=3", "train.batch=12"),
    *("model.dim=384", "model.n_heads=6", "model.n_kv_heads=3"),
    "model.ffn_dim=768",
]


def removed(*words):
    return {one.axis: one for one in plan(load_config(None, [*words])).removed}


@pytest.mark.slow
def test_an_odd_number_of_heads_removes_tensor_parallelism_and_is_told_first(capsys):
    words = ["plan", *GPT3, "train.precision=bf16", "model.n_heads=97", "model.n_kv_heads=97"]
    words += ["model.head_dim=128", "--top", "1"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert next(iter(shown)) == "removed_axes"
    (told,) = shown["removed_axes"]
    assert told["axis"] == "tp"
    assert told["rule"] == "layout.tp = 2 must divide model.n_heads = 97"
    assert main(words) == 0
    _, first, *_ = [line for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert first.startswith("note: no tensor parallelism: layout.tp = 2 must divide")


@pytest.mark.often(4)
@pytest.mark.parametrize(
    ("words", "axes"),
    [
        (["cluster.preset=h100-sxm"], set()),
        (["cluster.preset=h100-sxm", "cluster.devices_per_node=1"], set()),
        (["cluster.preset=h100-sxm", "train.batch=1", "train.seq_len=256"], {"dp_replicate", "pp"}),
        (["cluster.preset=h100-sxm", "train.seq_len=255"], {"cp"}),
        (["cluster.preset=h100-sxm", "model.n_layers=1"], set()),
        (["cluster.preset=h100-sxm", "model.vocab_size=333"], set()),
        (["cluster.preset=h100-sxm", "model.n_layers=7"], set()),
        (["cluster.preset=h100-sxm", "model.ffn_dim=333"], {"tp"}),
        # Three ranks divide the heads, though two would not; no three divide 256 tokens.
        (THREE, {"cp"}),
        (["cluster.preset=h100-sxm", "model.ffn_dim=333", "layout.tp=1"], set()),
    ],
)
def test_axes_that_no_degree_is_left_of(words, axes):
    assert removed(*words).keys() == axes
