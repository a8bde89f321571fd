"""Models and tokenizers by ids of the Hub, from a server on this machine."""

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import constants

from hf_folders import model_of
from hub_server import HubServer
from meshwright.cli import main
from meshwright.data import load_tokenizer, train_bpe
from meshwright.errors import ConfigError
from meshwright.models.hf import save_hf
from meshwright.spec.dump import to_toml
from meshwright.spec.hub import HubId, folder_of, folder_with_weights, hub_id, pinned
from meshwright.spec.loading import load_config
from meshwright.spec.lora import Lora
from meshwright.spec.peft import adapter_config
from meshwright.spec.stored import base_of_adapter, stored_spec
from runs import torchrun

CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
WEIGHTS = b"weights " * 1000
NAME = "lab/tiny"
PLAN = ("cluster.preset=h100-sxm", "train.seq_len=32", "train.batch=8")


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    return train_bpe(["some text of a corpus"], 300, tmp_path_factory.mktemp("bpe")).read_bytes()


@pytest.fixture
def hub(monkeypatch, tmp_path, tokenizer_json):
    server = HubServer()
    server.commit(
        NAME,
        {
            "config.json": json.dumps(CONFIG),
            "tokenizer.json": tokenizer_json,
            "model.safetensors": WEIGHTS,
            "README.md": "a card",
        },
    )
    monkeypatch.chdir(tmp_path)
    server.serve(monkeypatch, tmp_path / "cache")
    yield server
    server.shutdown()
    server.server_close()


def newest(hub, name=NAME):
    return list(hub.commits[name])[-1]


def test_a_text_is_an_id_only_if_no_path_is_meant(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert hub_id("lab/tiny") == HubId("lab/tiny", "main")
    assert hub_id("lab/tiny@v1.0") == HubId("lab/tiny", "v1.0")
    for path in ("tiny", "/lab/tiny", "./lab/tiny", "lab/tiny/best", "lab/tokenizer.json", "a b/c"):
        assert hub_id(path) is None
    (tmp_path / "lab").mkdir()  # a folder of runs, say, and a name with a typing error
    assert hub_id("lab/tiny") is None
    assert hub_id("lab/tiny@main") is not None
    (tmp_path / "lab" / "tiny").mkdir()
    assert hub_id("lab/tiny") is None


def test_a_local_folder_wins(hub, tmp_path):
    folder = tmp_path / "lab" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64}))
    config = load_config({"model.init_from": NAME, "data.tokenizer": "bytes"})
    assert (config.model.dim, config.model.init_from) == (64, NAME)
    assert hub.requests == []


def test_a_config_keeps_the_commit_whatever_comes_after(hub):
    config = load_config({"model.init_from": NAME})
    first = newest(hub)
    assert config.model.init_from == config.data.tokenizer == f"{NAME}@{first}"
    assert config.model.dim == 32
    files = {"config.json": json.dumps(CONFIG | {"hidden_size": 64}), "model.safetensors": b""}
    hub.commit(NAME, files)
    hub.requests.clear()
    again = load_config(config.model_dump(exclude={"lora": {"adapters"}, "model": {"lora"}}))
    assert (again.model.dim, again.model.init_from) == (32, f"{NAME}@{first}")
    assert hub.requests == []  # all of a commit is in the cache
    assert load_config({"model.init_from": NAME, "data.tokenizer": "bytes"}).model.dim == 64
    assert load_config({"model.init_from": f"{NAME}@{first}"}).model.dim == 32
    assert first in to_toml(config)


def test_a_plan_downloads_no_weights(hub, capsys):
    for words in ([NAME], [f"model={NAME}"], [f"model.init_from={NAME}"]):
        assert main(["plan", *words, *PLAN]) == 0
    assert hub.fetched("config.json")
    assert hub.fetched(".safetensors") == hub.fetched(".md") == []
    assert "downloading" not in capsys.readouterr().out


def test_weights_are_downloaded_once_and_their_size_is_told_before(hub, tmp_path):
    said = []
    folder = folder_with_weights(NAME, said.append)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    commit = newest(hub)[:7]
    assert said == [
        f"downloading {NAME} at {commit}: 7.81 KiB, of which 0 B are in the cache {tmp_path}/cache"
    ]
    assert folder_with_weights(pinned(NAME), said.append) == folder
    assert len(said) == len(hub.fetched(".safetensors")) == 1


def test_only_the_files_of_an_index_are_downloaded(hub):
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    files = dict.fromkeys([*names, "consolidated.safetensors"], WEIGHTS)
    files |= {"model.safetensors.index.json": json.dumps(index), "config.json": json.dumps(CONFIG)}
    hub.commit("lab/large", files)
    folder = folder_with_weights("lab/large")
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names


def test_a_download_that_is_cut_goes_on_where_it_was(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut.add("model.safetensors")
    folder = folder_with_weights(NAME)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges == [("model.safetensors", len(WEIGHTS) // 2)]


def test_without_a_network_the_cache_serves(hub, monkeypatch):
    folder = folder_with_weights(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert folder_with_weights(NAME) == folder_of(pinned(NAME)) == folder
    assert load_config({"model.init_from": NAME}).model.dim == 32
    assert hub.requests == []


@pytest.mark.parametrize("is_told", [True, False])
def test_without_a_network_and_cache_the_refusal_says_what_helps(hub, monkeypatch, is_told):
    if is_told:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        hub.shutdown()
        hub.server_close()
    with pytest.raises(ConfigError) as refused:
        load_config({"model.init_from": "HuggingFaceTB/SmolLM2-135M"})
    text = str(refused.value)
    assert text.startswith("model.init_from = 'HuggingFaceTB/SmolLM2-135M' (config): ")
    assert ("HF_HUB_OFFLINE is set" in text) == is_told
    assert "hf download HuggingFaceTB/SmolLM2-135M" in text
    assert "model.preset=smollm2-135m" in text


def test_repositories_that_cannot_be_read_are_refused_without_the_token(hub, monkeypatch):
    hub.commit("lab/closed", {"config.json": json.dumps(CONFIG)})
    hub.gated.add("lab/closed")
    hub.commit("lab/own", {"config.json": json.dumps(CONFIG)})
    hub.private.add("lab/own")
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    for name, words in {
        "lab/closed": "lab/closed is gated: accept its conditions at",
        "lab/own": "no such repository: check the name. For a private one, set HF_TOKEN",
        "lab/missing": "there is no folder lab/missing here, and",
        f"{NAME}@v9": f"{NAME} has no revision 'v9'",
    }.items():
        with pytest.raises(ConfigError) as refused:
            load_config({"model.init_from": name})
        assert words in str(refused.value)
        assert "hf_of_somebody_else" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for name in ("lab/closed", "lab/own"):
        config = load_config({"model.init_from": name, "data.tokenizer": "bytes"})
        assert hub.token not in to_toml(config) + json.dumps(config.origins)


def test_a_repository_of_pickles_is_refused_before_any_is_downloaded(hub):
    hub.commit("lab/old", {"config.json": json.dumps(CONFIG), "pytorch_model.bin": b"pickle"})
    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin, a pickle, which could run"):
        folder_with_weights("lab/old")
    hub.commit("lab/empty", {"config.json": json.dumps(CONFIG)})
    with pytest.raises(ConfigError, match=r"lab/empty at \w{7} has no model\.safetensors$"):
        folder_with_weights("lab/empty")
    assert hub.fetched(".bin") == []


def test_a_tokenizer_by_its_id(hub, tokenizer_json):
    hub.commit("lab/words", {"tokenizer.json": tokenizer_json})
    config = load_config({"data.tokenizer": "lab/words"})
    assert config.data.tokenizer == f"lab/words@{newest(hub, 'lab/words')}"
    assert load_tokenizer(config.data.tokenizer).to_json() == tokenizer_json
    hub.commit("lab/none", {"tokenizer.model": b""})
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'lab/none' .* no config\.json"):
        load_config({"data.tokenizer": "lab/none"})


def test_adapters_by_their_id_and_a_base_model_by_its(hub):
    base = f"{NAME}@{newest(hub)}"
    blocks = stored_spec(folder_of(base))[0].blocks
    adapters = adapter_config(Lora(rank=4, alpha=4.0), blocks, base=base)
    assert (adapters["base_model_name_or_path"], adapters["revision"]) == (NAME, newest(hub))
    hub.commit("lab/adapters", {"adapter_config.json": json.dumps(adapters)})
    hub.commit(NAME, {"config.json": "{}"})
    assert base_of_adapter(folder_of("lab/adapters")) == folder_of(base)
    assert stored_spec(folder_of("lab/adapters"))[0].dim == 32
    config = load_config({"lora.init_from": "lab/adapters"})
    assert config.lora.rank == 4
    assert config.lora.init_from == f"lab/adapters@{newest(hub, 'lab/adapters')}"


@pytest.mark.parametrize("name", ["lab/chat", "HuggingFaceTB/SmolLM2-135M"])
def test_a_plan_for_another_trainer_names_the_repository(hub, name, capsys):
    hub.commit(name, {"config.json": json.dumps(CONFIG)})
    words = (f"model.init_from={name}", "data.tokenizer=bytes", *PLAN)
    assert main(["plan", *words, "--for", "axolotl"]) == 0
    assert f"base_model: {name}\n" in capsys.readouterr().out


def environ_of(hub, folder):
    """Variables that have processes ask a server, with a cache of their own."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}


def test_processes_that_ask_at_once_download_once(hub, tmp_path):
    environ = os.environ | environ_of(hub, tmp_path)
    code = f"from meshwright.spec.hub import *; print(folder_with_weights({NAME!r}, print))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    folders = {process.communicate(timeout=120)[0].splitlines()[-1] for process in processes}
    assert len(folders) == 1
    assert len(hub.fetched(".safetensors")) == 1


@pytest.mark.slow
def test_ranks_of_torchrun_train_one_commit_that_is_downloaded_once(hub, tmp_path):
    model = model_of("llama")
    save_hf(model, tmp_path / "model")
    sha = hub.commit_folder("lab/small", tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text of a corpus. " * 1000)
    torchrun(
        *("train", "model.init_from=lab/small", "data.tokenizer=bytes", "data.source=text.txt"),
        *("train.steps=2", "train.batch=4", "train.seq_len=32", "train.eval_every=0"),
        *("layout.dp_replicate=2", "cluster.device=cpu", "log.name=joined", "data.cache=cache"),
        **environ_of(hub, tmp_path),
    )
    assert len(hub.fetched(".safetensors")) == 1
    assert sha in (tmp_path / "runs" / "joined" / "config.toml").read_text()
