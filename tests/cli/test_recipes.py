"""The recipes of examples/: complete, planned for GPUs, and trained at a small size."""

import json
import statistics
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.spec.loading import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ["tinystories", "fineweb"]
SMALL = [
    *("model.dim=32", "model.n_layers=1", "model.n_heads=4", "model.n_kv_heads=4"),
    *("train.steps=2", "train.batch=4", "train.seq_len=32", "train.eval_every=2"),
    *("train.log_every=1", "data.tokenizer=bytes", "cluster.device=cpu"),
    *("cluster.devices_per_node=1", "layout.auto=false", "layout.dp_replicate=1"),
]


def events(folder, kind):
    found = map(json.loads, (folder / "events.jsonl").open())
    return [event for event in found if event["event"] == kind]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_shown_and_planned(name, capsys):
    path = str(EXAMPLES / f"{name}.toml")
    assert main(["config", "show", path]) == 0
    assert "gpt2" in capsys.readouterr().out
    config = load_config(path)
    assert config.model.vocab_size >= 50257
    assert config.train.seq_len <= config.model.context
    devices = ["cluster.preset=h100-sxm", "cluster.devices_per_node=8", "cluster.nodes=1"]
    assert main(["plan", path, *devices, "--top", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert best["ranked"][0]["mfu"] > 0.1


@pytest.mark.often(1)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_local_data(name, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    rows = (json.dumps({"text": f"once upon a time {n} " * 5}) for n in range(200))
    corpus.write_text("\n".join(rows))
    path = EXAMPLES / f"{name}.toml"
    source = f"hf:{corpus}" if load_config(str(path)).data.streaming else str(corpus)
    where = [f"data.source={source}", f"data.cache={tmp_path}", f"log.dir={tmp_path}", "log.name=r"]
    assert main(["train", str(path), *SMALL, *where]) == 0
    assert [event["step"] for event in events(tmp_path / "r", "step")] == [1, 2]
    assert len(events(tmp_path / "r", "eval")) == 1
    assert (tmp_path / "stores").exists() == (name == "tinystories")


@pytest.mark.perf
def test_the_demo_hardly_waits_for_its_data(tmp_path):
    words = ["train.steps=8", "train.eval_every=0", "train.log_every=1", "layout.dp_replicate=1"]
    where = [f"data.cache={tmp_path}", f"log.dir={tmp_path}", "log.name=r"]
    assert main(["train", str(EXAMPLES / "demo.toml"), *words, *where]) == 0
    shares = [event["data_time_share"] for event in events(tmp_path / "r", "step")]
    assert len(shares) == 8
    assert statistics.median(shares) < 0.01
