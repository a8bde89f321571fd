"""`config import` and `train --deepspeed`, as commands."""

import json
import tomllib

from meshwright.cli import main
from meshwright.interop.import_report import VERDICTS
from meshwright.spec.loading import load_config

DS = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 50, "warmup_num_steps": 5, "warmup_type": "linear"},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "hysteresis": 2},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
    "wandb": {"enabled": True},
}


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    words = ["config", "import", "ds.json", "train.seed=3", "--devices", "4"]
    assert main([*words, "--out", "run.toml"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "15 of the 18 keys take effect" in shown
    config = load_config(tmp_path / "run.toml")
    assert (config.train.batch, config.train.seed, config.layout.zero) == (32, 3, 2)
    assert main(words) == 0  # without --out, the TOML alone is on stdout
    assert tomllib.loads(capsys.readouterr().out)["train"]["batch"] == 32
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["verdict"] for row in report["keys"]} <= set(VERDICTS)
    (tmp_path / "ds.json").write_text(json.dumps({**DS, "train_batch_size": 33}))
    assert main([*words, "--out", "other.toml"]) == 2
    assert "nearest: train_batch_size = 32 or train_batch_size = 48" in capsys.readouterr().err
    assert not (tmp_path / "other.toml").exists()


def test_train_takes_a_deepspeed_config(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("def f(x):\n    return x\n" * 400)
    (tmp_path / "run.toml").write_text(
        "[model]\ndim = 32\nn_layers = 1\nn_heads = 4\n[train]\nseq_len = 32\n"
        '[data]\nsource = "corpus"\nvalidation = 0.0\n[cluster]\ndevice = "cpu"\n'
        "devices_per_node = 1\n"
    )
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": "auto"}},
                "fp16": {"enabled": False},
                "hybrid_engine": {"enabled": True},
            }
        )
    )
    words = ["train", "--deepspeed", "ds.json", "--json", "run.toml", "train.steps=2"]
    assert main(words) == 0
    shown = capsys.readouterr()
    for told in (
        "hybrid_engine.enabled = True: no generation inside of training",
        "optimizer.params.eps = auto: the default: optimizer.eps = 1e-08",
        "train.clip_norm = 0.0: DeepSpeed's default of gradient_clipping",
        "optimizer.betas = [0.9, 0.999]: DeepSpeed's default of optimizer.params.betas",
    ):
        assert told in shown.err
    config = load_config(next((tmp_path / "runs").glob("run-*/config.toml")))
    assert (config.train.batch, config.layout.microbatch, config.train.clip_norm) == (4, 2, 0.0)
    assert main(["train", "--deepspeed", "none.json", "run.toml"]) == 2
    assert main(["train", "run.toml", "--accept", "x"]) == 2


def test_an_unknown_model_ends_with_no_toml(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 64}))
    words = ["config", "import", str(tmp_path / "config.json"), "--devices", "1"]
    for accept in ("model_type", "all"):
        assert main([*words, "--accept", accept, "--out", str(tmp_path / "run.toml")]) == 2
        assert "model_type = 'mamba' is not supported" in capsys.readouterr().err
    assert not (tmp_path / "run.toml").exists()


def test_the_table_breaks_keys_between_words(tmp_path, capsys):
    key = "zero_optimization.offload_optimizer.pipeline_read"
    content = {"zero_optimization": {"offload_optimizer": {"pipeline_read": "x" * 30}}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    words = ["config", "import", str(tmp_path / "ds.json"), "--devices", "1"]
    assert main([*words, "--out", str(tmp_path / "run.toml")]) == 0
    rows = capsys.readouterr().out.splitlines()[1:4]
    keys = [part for row in rows if (part := row[:26].rstrip())]
    assert "".join(keys) == key
    assert all(part[-1] in "_." for part in keys[:-1])
    assert "".join(row[27:39].rstrip() for row in rows) == f'"{"x" * 30}"'
