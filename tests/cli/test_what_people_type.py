"""Words that people type: accepted where they are clear, and else refused with what is meant."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter

from meshwright.cli import main
from meshwright.data.tokenizers import load_tokenizer
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.layout import resolve_layout
from meshwright.runtime.machines.machine import detect
from meshwright.spec.kinds import kind_of
from meshwright.spec.loading import SECTIONS, load_config
from meshwright.spec.presets import PRESETS, catalogue_rows, full_device_name, preset_of
from runs import clean_environ

ROOT = Path(__file__).parents[2]
OF_THE_HUB = {
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "meta-llama/Llama-3.1-405B": "llama-3-405b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "google/gemma-2-9b-it": "gemma-2-9b",
    "allenai/OLMo-2-1124-7B": "olmo-2-7b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
}


@pytest.mark.parametrize("name", [*OF_THE_HUB, *PRESETS])
def test_a_model_by_its_name_has_its_preset(name):
    expected = OF_THE_HUB.get(name, name)
    assert preset_of(name) == expected
    for key in ("model", "model.preset"):
        assert load_config(None, [f"{key}={name}"]).model.preset == expected


def test_a_model_may_be_a_word_of_its_own(capsys):
    words = ["config", "show", "meta-llama/Llama-3.1-8B", "cluster.preset=h100"]
    assert main(words) == 0
    assert "llama-3.1-8b" in capsys.readouterr().out


def test_a_folder_is_a_stored_model_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3-8b").mkdir()
    with pytest.raises(CheckpointError, match="not a Hugging Face model folder"):
        load_config(None, ["model=llama-3-8b"])


def test_an_unknown_model_of_the_hub_names_what_loads_it():
    with pytest.raises(ConfigError, match=r"is not known; .* model.init_from=someone/Llama-4-9B, "):
        load_config(None, ["model.preset=someone/Llama-4-9B"])


@pytest.mark.parametrize(
    ("name", "device"),
    [
        (4090, "rtx4090"),
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("h100", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("A100", "a100-80gb"),
        ("a100_40gb", "a100-40gb"),
        ("mi300", "mi300x"),
        *((name, name) for name in catalogue_rows()["devices"]),
        ("local", "local"),
        ("z100", "z100"),
        (4.5, 4.5),
    ],
)
def test_a_device_by_its_short_name(name, device):
    assert full_device_name(name) == device


def test_a_short_name_of_a_device_plans(capsys):
    for name in ("h100", "4090"):
        assert main(["plan", f"cluster.preset={name}", "--top", "1"]) == 0
    assert "8 x rtx4090" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "zero"),
    [("no", 0), ("NO_SHARD", 0), ("no_shard", 0), ("full", 3), ("full_shard", 3), ("grad_op", 2)],
)
def test_the_words_of_tutorials_for_sharding(word, zero):
    assert load_config(None, [f"shard_strategy={word}"]).layout.zero == zero


def test_aliases_of_tutorials_together_are_a_layout():
    words = ["fsdp=True", "shard_strategy=no", "tensor_parallel_size=2", "cluster.device=cpu"]
    config = load_config(None, words)
    layout = resolve_layout(config, detect(config.cluster, clean_environ()))
    assert (layout.tp, layout.zero, layout.world) == (2, 0, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.seq_len=128k"], "train.seq_len=131072 or train.seq_len=128000"),
        (["train.seq_len=1.5k"], "train.seq_len=1536 or train.seq_len=1500"),
        (["train.seq_len=1e3"], "nearest legal: train.seq_len=1000"),
        (["train.steps=2M"], "train.steps=2097152 or train.steps=2000000"),
        (["precision=fp8"], "train.fp8=true beside train.precision=bf16"),
        (["train.precision=fp8"], "train.fp8=true beside train.precision=bf16"),
        (["train.precision=bfloat16"], "nearest legal: train.precision=bf16"),
        (["layout.tp=8"], "n_heads = 4 and model.n_kv_heads = 2; nearest legal: layout.tp = 2"),
        (["train.steps=1,000"], "nearest legal: train.steps=1000"),
        (["train.steps='100'"], "nearest legal: train.steps=100"),
        (["train.steps=-1"], "nearest legal: train.steps=1"),
        (["train.steps=-1e3"], "nearest legal: train.steps=200, its default"),
        (["layout.tp=0"], "nearest legal: layout.tp=1"),
        (["model.n_heads=six"], "nearest legal: model.n_heads=6"),
        (["optimizer.lr=fast"], "nearest legal: optimizer.lr=0.003, its default"),
        (["layout.sp=yes"], "nearest legal: layout.sp=true"),
        (["gpus=8"], "nearest legal: cluster.devices_per_node"),
        (["--gpus", "8"], "a config's keys have no dashes: cluster.devices_per_node=8"),
        (["--nnodes=2"], "a config's keys have no dashes: cluster.nodes=2"),
        (["--model", "llama-3-8b"], "a config's keys have no dashes: model=llama-3-8b"),
        (["--tpo", "3"], "unrecognized arguments: --tpo; nearest: --top"),
        (["--layout.tp=2"], "a config's keys have no dashes: layout.tp=2"),
        (["--layout.tp", "2"], "a config's keys have no dashes: layout.tp=2"),
        (["--layout.tp"], "a config's keys have no dashes: layout.tp=VALUE"),
        (["layout.tp", "2"], "a key and its value are one word; nearest legal: layout.tp=2"),
        (["layout.tp"], "nearest legal: layout.tp=VALUE"),
        (["./layout.tp"], "config file layout.tp cannot be read"),
        (["llama-3-8b", "qwen3-8b"], "one model at most, but there are 2: llama-3-8b qwen3-8b"),
        (["shard_strategy=hybrid"], "nearest legal: NO_SHARD, SHARD_GRAD_OP"),
    ],
)
def test_what_was_meant_is_said(words, said, capsys):
    try:
        code = main(["plan", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_config_that_does_not_exist_names_the_nearest_beside_it(tmp_path):
    (tmp_path / "run.toml").touch()
    for name in ("run.tom", "rum.toml"):
        with pytest.raises(ConfigError) as refused:
            load_config(tmp_path / name)
        assert str(refused.value).endswith(f"nearest legal: {tmp_path / 'run.toml'}")
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "missing" / "run.toml")
    assert "nearest" not in str(refused.value)


NUMBERS = {
    f"{section}.{key}": field
    for section, spec in SECTIONS.items()
    for key, field in spec.model_fields.items()
    if kind_of(field.annotation) in ("an integer", "a number")
}


@pytest.mark.parametrize("value", ["-1000000", "1e12", "'many'", "0.5", "'1,000'", "nan"])
@pytest.mark.parametrize("name", NUMBERS)
def test_the_value_that_a_refusal_names_is_legal(name, value):
    try:
        load_config(None, [f"{name}={value}"])
    except ConfigError as error:
        rule, _, legal = str(error).partition("; nearest legal: ")
        if f"must be a{'n integer' if 'integer' in rule else ' number'}" not in rule or not legal:
            return
        field = NUMBERS[name]
        for override in legal.removesuffix(", its default").split(" or "):
            key, _, text = override.partition("=")
            assert key == name
            TypeAdapter(Annotated[field.annotation, field]).validate_python(json.loads(text))


@pytest.mark.parametrize(
    ("word", "nearest"), [("trian", "train"), ("plna", "plan"), ("evaluate", "eval")]
)
def test_a_command_in_another_spelling(word, nearest, capsys):
    with pytest.raises(SystemExit) as end:
        main([word])
    assert end.value.code == 2
    assert f"unknown command '{word}'; nearest: {nearest}" in capsys.readouterr().err


def test_a_folder_with_another_tokenizer_says_what_it_has(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    said = "has no tokenizer.json, only tokenizer.model"
    with pytest.raises(ConfigError, match=said):
        load_config(None, [f"data.tokenizer={tmp_path}"])
    with pytest.raises(DataError, match=said):
        load_tokenizer(str(tmp_path))


def test_a_file_of_conversations_is_no_store_and_becomes_one(capsys):
    rows = ROOT / "examples" / "chat" / "conversations.jsonl"
    assert main(["data", "inspect", str(rows)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is a file, and an indexed store is a folder" in said
    assert f"meshwright data prepare OUT --source {rows}" in said


@pytest.mark.slow
def test_too_few_processes_for_tp_in_your_own_loop():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_loop.py"), "--tp", "2"],
        capture_output=True,
        text=True,
        env=clean_environ(),
        check=False,
    )
    assert done.returncode == 1
    assert "--tp 2 --cp 1: 1 processes are not a multiple of 2" in done.stderr
    assert "pydantic" not in done.stderr


def test_generate_without_a_text_names_what_is_missing(tmp_path, capsys):
    """The parser's usage said that `--prompt` is required, and nothing of conversations."""
    assert main(["generate", str(tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert "usage" not in refused
    assert "add --prompt TEXT" in refused
    assert f"meshwright chat {tmp_path}" in refused
