"""Conversations with stored models and with adapters, and how long a fine-tuning run trains."""

import io
import math
import shutil
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.adapters import merge, write_adapter
from meshwright.checkpoint.weights import load_model, write_weights
from meshwright.cli import main
from meshwright.data import open_data
from meshwright.errors import ConfigError
from meshwright.evaluate.talk import Sampling, TextModel
from meshwright.models import build_model, init_model
from meshwright.runtime.checks.epochs import fine_tuning_words, samples_of_epoch
from meshwright.runtime.session import prepare_job
from meshwright.spec.dump import to_toml
from meshwright.spec.loading import load_config
from meshwright.training.run_folder import create
from runs import TINY, clean_environ

TOKENIZER = Path(__file__).parents[2] / "examples" / "chat" / "tokenizer"
GREEDY = ["--temperature", "0", "--max-tokens", "5"]
SIZES = ["model.dim=32", "model.n_layers=2", "model.n_heads=2", f"data.tokenizer={TOKENIZER}"]


def stored(root, *words):
    """Write a random model with the tokenizer of the chat example; return it and its folder."""
    spec = load_config(None, [*SIZES, *words]).model
    model = init_model(build_model(spec, device="cpu"), spec, seed=0)
    folder = write_weights(root, spec, model.state_dict(), {})
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    return model, folder


def talk(monkeypatch, capsys, folder, *lines, options=()):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", str(folder), *GREEDY, *options]) == 0
    return capsys.readouterr()


def expected(folder, *messages):
    generation = TextModel(folder).answer(messages, Sampling(max_tokens=5, temperature=0))
    assert "".join(generation) == generation.text.rstrip("\ufffd")
    return generation.text


def user(text):
    return {"role": "user", "content": text}


def test_each_answer_follows_the_whole_conversation(tmp_path, monkeypatch, capsys):
    _, folder = stored(tmp_path)
    lines = ("hi", "", "and then?", "/new", "hi", "/quit", "never read")
    said = talk(monkeypatch, capsys, folder, *lines).out
    first = expected(folder, user("hi"))
    answer = {"role": "assistant", "content": first}
    second = expected(folder, user("hi"), answer, user("and then?"))
    shown = [text.rstrip("\ufffd") for text in (first, second, first)]
    assert said == "".join(f"{text}\n" for text in shown)


def test_a_system_message_comes_first(tmp_path, monkeypatch, capsys):
    _, folder = stored(tmp_path)
    said = talk(monkeypatch, capsys, folder, "hi", options=["--system", "Be kind."]).out
    system = {"role": "system", "content": "Be kind."}
    assert said.rstrip("\n") == expected(folder, system, user("hi")).rstrip("\ufffd")


def test_the_oldest_turns_leave_a_conversation_that_is_too_long(tmp_path, monkeypatch, capsys):
    _, folder = stored(tmp_path, "model.context=120")
    said = talk(monkeypatch, capsys, folder, *["what colour is snow?"] * 6)
    assert said.out.count("\n") >= 6
    assert "note: the oldest turn is left out" in said.err


def test_adapters_are_merged_into_the_model_that_they_name(tmp_path, monkeypatch, capsys):
    _, base = stored(tmp_path / "base")
    spec = load_config(None, [*SIZES, "lora.rank=2"]).model
    model = init_model(build_model(spec, device="cpu"), spec, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith((".lora_a", ".lora_b")):
            parameter.data.normal_(generator=generator)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_adapter(model, adapter, str(base), torch.float32)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_model(adapter)(ids), merge(model)(ids))
    assert TextModel(adapter).tokenizer.vocab_size == TextModel(base).tokenizer.vocab_size
    assert talk(monkeypatch, capsys, adapter, "hi").out.endswith("\n")
    words = ["generate", str(adapter), "--prompt", "a", "--max-tokens", "3"]
    assert main(words) == 0
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "some/model" in said  # an id of the Hub, which tests don't reach
    assert "HF_HUB_OFFLINE is set" in said


@pytest.fixture
def untimed(corpus, tmp_path):
    """Make a config of the tiny model that does not say how long to train."""

    def make(*overrides):
        words = [word for word in TINY if not word.startswith("train.steps")]
        where = [f"data.cache={tmp_path / 'cache'}", f"log.dir={tmp_path / 'runs'}"]
        return load_config(None, [*words, f"data.source={corpus}", *where, *overrides])

    return make


def test_epochs_are_as_many_steps_as_read_the_data_so_often(untimed):
    job = prepare_job(untimed("train.epochs=2.5"), clean_environ())
    data = open_data(job.config.data, job.cache)
    samples = samples_of_epoch(job.config, data)
    train = job.config.train
    assert train.steps == math.ceil(2.5 * samples / train.batch)
    assert job.config.optimizer.warmup_steps == min(100, train.steps // 10)
    create(job)  # which states both
    again = load_config(job.folder.config)
    assert (again.train.steps, again.train.epochs) == (train.steps, 2.5)
    longer = load_config(job.folder.config, ["train.epochs=5"])
    assert longer.train.epochs == 5
    shorter = load_config(job.folder.config, ["train.steps=30"])
    assert (shorter.train.steps, shorter.train.epochs) == (30, None)
    assert shorter.optimizer.warmup_steps == 3


def test_an_override_of_steps_takes_the_place_of_epochs(tmp_path):
    both, file = load_config({"train": {"steps": 3, "epochs": 2.0}}), tmp_path / "run.toml"
    file.write_text(to_toml(both))
    assert load_config(file).train == both.train
    given = load_config({"train": {"epochs": 2.0}}, {"train.steps": 3})
    assert (given.train.steps, given.train.epochs) == (3, None)
    with pytest.raises(ConfigError, match="both say how long to train"):
        load_config(None, ["train.steps=3", "train.epochs=2"])


def test_a_blend_has_no_epochs(untimed, corpus):
    blend = [f"data.source=['{corpus}', '{corpus}']", "data.weights=[0.5, 0.5]"]
    with pytest.raises(ConfigError, match="a blend of sources by weight has no epochs"):
        prepare_job(untimed(*blend, "train.epochs=1"), clean_environ())


def test_a_fine_tuning_run_says_what_it_trains_and_how_often_it_reads_its_data(config, capsys):
    job = prepare_job(config("lora.rank=2", "train.steps=30"), clean_environ())
    said = " ".join(capsys.readouterr().err.split())
    told = fine_tuning_words(job.config, open_data(job.config.data, job.cache))
    assert told in said
    assert "parameters trainable" in told
    assert "epochs in 30 steps" in told
    prepare_job(config("train.steps=30", "log.name=other"), clean_environ())
    assert "trainable" not in capsys.readouterr().err
