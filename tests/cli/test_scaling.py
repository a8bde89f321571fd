"""What a run takes on how many devices, what plans differ by, and models by their paths."""

import json

import pytest

from meshwright.cli.main import main

WORDS = [
    *("model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.nodes=2"),
    *("train.batch=128", "train.seq_len=4096", "train.precision=bf16", "--top", "1"),
]


def asked(capsys, *words, code=0):
    assert main(["plan", *WORDS, *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_tokens_are_days_device_hours_and_money(capsys):
    found = asked(capsys, "--tokens", "1T", "--price", "h100-sxm=2.5")
    took = found["answers"]["tokens"]
    seconds = 1e12 / found["ledger"]["tokens_per_s"]
    assert took["days"] == pytest.approx(seconds / 86400)
    assert took["device_hours"] == pytest.approx(16 * seconds / 3600)
    assert took["cost"] == pytest.approx(2.5 * took["device_hours"])
    assert asked(capsys, "--tokens", "1e12")["answers"]["tokens"] == {**took, "cost": None}
    assert main(["plan", *WORDS, "--tokens", "1T"]) == 0
    assert "1T tokens: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_curve_has_each_numbers_own_best_layout(capsys):
    found = asked(capsys, "--devices", "1..24", "--tokens", "15T", "--price", "h100-sxm=2")
    points = {one["devices"]: one for one in found["answers"]["devices"]}
    assert list(points) == [1, 2, 4, 8, 16, 24]
    assert not points[1]["fits"]
    alone = asked(capsys)  # on two nodes
    for key in ("layout", "step_time_s", "peak_memory_bytes"):
        assert points[16][key] == alone["ledger"][key]
    assert points[16]["tokens_per_s"] > points[8]["tokens_per_s"] > points[4]["tokens_per_s"]
    each = points[16]["takes"]
    assert each["cost"] == pytest.approx(2 * 16 * 24 * each["days"])
    pinned = asked(capsys, "--devices", "8..16", "layout.tp=2")["answers"]["devices"]
    assert [one["layout"]["tp"] for one in pinned] == [2, 2]
    assert main(["plan", *WORDS, "--devices", "1..2"]) == 0
    out = capsys.readouterr().out
    assert "no layout fits" in out
    assert "1M tokens take" in out


@pytest.mark.often(3)
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tokens", "many"], "a number such as 300B"),
        (["--tokens", "0"], "a number such as 300B"),
        (["--devices", "64..8"], "1 <= A <= B"),
        (["--devices", "8"], "1 <= A <= B"),
        (["--devices", "1..999999999"], "1 <= A <= B"),
        (["--price", "h100-sxm=2"], "--price is for"),
        (["--compare", "none.json", "none.json"], "none.json cannot be read"),
    ],
)
def test_bad_questions_are_refused(words, why, capsys):
    assert main(["plan", *WORDS, *words]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_two_plans_are_compared_with_causes(tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    before = asked(capsys, "--save", str(paths[0]))
    after = asked(capsys, "--save", str(paths[1]), "layout.tp=8", "train.seq_len=8192")
    assert main(["plan", "--compare", *map(str, paths), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"key": "train.seq_len", "before": 4096, "after": 8192} in found["asked"]
    assert "layout.tp" in [one["key"] for one in found["layout"]]
    assert found["step_time_s"] == {
        "before": before["ledger"]["step_time_s"],
        "after": after["ledger"]["step_time_s"],
    }
    change = after["ledger"]["seconds"]["tp"] - before["ledger"]["seconds"]["tp"]
    assert found["seconds"]["tp"]["after"] - found["seconds"]["tp"]["before"] == change
    assert "slower: " in found["why"][0]
    assert main(["plan", "--compare", str(paths[0]), str(paths[0])]) == 0
    out = capsys.readouterr().out
    assert "asked: the same" in out
    assert "nothing that is predicted differs" in out
    paths[1].write_text('{"config": {}, "layout": {"tp": 1}, "digest": ""}')
    assert main(["plan", "--compare", *map(str, paths)]) == 2


def test_a_model_is_its_folder_or_its_config(tmp_path, capsys):
    sizes = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes))
    words = ["cluster.preset=a40", "train.batch=64", "--top", "1", "--json"]
    for named in (path, tmp_path):
        assert main(["plan", str(named), *words]) == 0
        model = json.loads(capsys.readouterr().out)["config"]["model"]
        assert (model["dim"], model["n_layers"], model["n_kv_heads"]) == (512, 3, 4)


def test_a_run_is_its_config(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[model]\ndim = 96\nn_heads = 4\n")
    assert main(["plan", str(tmp_path), "cluster.preset=a40", "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["model"]["dim"] == 96
