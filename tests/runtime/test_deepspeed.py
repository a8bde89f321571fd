"""The engine of DeepSpeed: it trains as ours does, and what it does not do is refused."""

import importlib.util
import json

import pytest

from meshwright.checkpoint.weights import load_model
from meshwright.errors import ConfigError
from meshwright.runtime.session import train
from runs import clean_environ

REFUSED = [
    (["layout.tp=1", "layout.pp=2"], "layout.pp = 2; nearest legal: layout.pp = 1 or"),
    (["layout.cp=2"], "layout.cp = 2"),
    (["layout.tp=2", "model.n_kv_heads=2"], "layout.tp = 2"),
    (["layout.dp_shard=2", "layout.zero=3"], "layout.zero = 3; nearest legal: layout.zero = 2 or"),
    (["layout.dp_replicate=2", "layout.offload=optimizer"], "layout.offload = optimizer"),
    (["layout.dp_replicate=2", "train.precision=fp16"], "train.precision = fp16; nearest .* bf16"),
    (["layout.dp_replicate=2", "train.compile=true"], "train.compile = True"),
    (["layout.dp_replicate=2"], r"pip install 'meshwright\[deepspeed\]'"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_it_does_not_do_is_refused(words, message, config, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    with pytest.raises(ConfigError, match=message):
        train(config("train.engine=deepspeed", *words), clean_environ())


@pytest.mark.timeout(900)  # DeepSpeed compiles its exchange of a machine's ranks as it starts
@pytest.mark.parametrize("zero", [1, 2])
def test_it_trains_as_our_engine_does(zero, config):
    """Two ranks, two microbatches each, documents apart, clipping: loss and norm of every step."""
    pytest.importorskip(
        "deepspeed", reason="deepspeed is not installed: pip install '.[deepspeed]'"
    )
    words = ["layout.dp_shard=2", f"layout.zero={zero}", "layout.microbatch=1", "train.steps=3"]
    words += ["train.clip_norm=0.5", "data.packing=documents", "train.eval_every=3"]
    runs = [
        train(config(*words, f"train.engine={engine}", f"log.name={engine}"), clean_environ())
        for engine in ("native", "deepspeed")
    ]
    for kind, keys in {"step": ("loss", "grad_norm", "lr"), "eval": ("loss",)}.items():
        ours, theirs = (list(run.events(kind)) for run in runs)
        assert len(ours) == len(theirs) == (3 if kind == "step" else 1)
        for a, b in zip(ours, theirs, strict=True):
            assert [a[key] for key in keys] == pytest.approx([b[key] for key in keys], rel=1e-5)
    ours, theirs = (dict(load_model(run.folder).named_parameters()) for run in runs)
    for name, parameter in ours.items():
        assert parameter.detach().numpy() == pytest.approx(theirs[name].detach().numpy(), abs=1e-4)
    assert (runs[1].folder / "report/index.html").is_file()
    for run, engine in zip(runs, ("native", "deepspeed"), strict=True):
        recorded = json.loads((run.folder / "plan.json").read_text())
        assert recorded["config"]["train"]["engine"] == engine
