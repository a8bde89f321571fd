"""`checkpoint push`: a run on the Hub, of which a server on this machine speaks the API."""

import json

import pytest

from hf_folders import write_run
from hub_server import HubServer
from meshwright.checkpoint.weights import write_weights
from meshwright.cli import main
from meshwright.runtime.session import train
from meshwright.spec.hub import folder_with_weights
from meshwright.spec.loading import load_config
from meshwright.spec.stored import stored_spec
from runs import clean_environ
from test_lora import model
from test_lora_peft import telling

REPOSITORY = "lab/new"
SMALL = [
    *("model.dim=32", "model.n_layers=1", "model.n_heads=4", "model.n_kv_heads=4"),
    *("train.batch=4", "train.seq_len=32", "train.steps=4", "train.log_every=1"),
    *("train.eval_every=2", "train.eval_batches=1", "checkpoint.every=2", "checkpoint.keep=2"),
    *("cluster.device=cpu", "cluster.devices_per_node=1", "layout.auto=false"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one rank, on a text in a folder whose name is nobody else's business."""
    folder = tmp_path_factory.mktemp("secret-customer")
    (folder / "letters.txt").write_text("Some text of a corpus. " * 2000)
    words = [f"data.source={folder / 'letters.txt'}", f"data.cache={folder / 'cache'}"]
    config = load_config(None, [*SMALL, *words, f"log.dir={folder}", "log.name=run"])
    return train(config, clean_environ())


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = HubServer()
    server.serve(monkeypatch, tmp_path / "hub")
    monkeypatch.setenv("HF_TOKEN", server.token)
    yield server
    server.shutdown()
    server.server_close()


def files_of(hub, name=REPOSITORY):
    return list(hub.commits[name].values())[-1]


def push(source, *words, name=REPOSITORY):
    return main(["checkpoint", "push", str(source), name, *words])


def test_a_pushed_run_is_private_and_can_be_loaded_by_its_id(trained, hub, capsys):
    assert push(trained.folder) == 0
    assert f"{hub.url}/{REPOSITORY}, private" in capsys.readouterr().out
    assert hub.private == {REPOSITORY}
    assert len(hub.uploads) == 1
    loaded = folder_with_weights(REPOSITORY)
    assert stored_spec(loaded)[0].dim == 32
    assert (loaded / "model.safetensors").read_bytes() == files_of(hub)["model.safetensors"]


def test_the_card_states_the_run_and_no_folder_of_it(trained, hub):
    assert push(trained.folder) == 0
    card = files_of(hub)["README.md"].decode()
    losses = {kind: [e["loss"] for e in trained.events(kind)][-1] for kind in ("step", "eval")}
    for text in (
        *("letters.txt", "`bytes`", "| Step | 4 of 4, 512 tokens |", "`mb4` on 1 ranks"),
        *(f"{loss:.4f} nats per token at step 4" for loss in losses.values()),
        *("was not compared with one device", "passed: tensors are the model's, stored in fp32"),
    ):
        assert text in card
    assert "secret-customer" not in card
    assert "license:" not in card.split("---")[1]


def test_an_earlier_step_has_its_own_losses(trained, hub):
    assert push(trained.folder / "checkpoints" / "step-00000002", "--dtype", "bf16") == 0
    card = files_of(hub)["README.md"].decode()
    loss = {event["step"]: event["loss"] for event in trained.events("eval")}[2]
    assert f"| Held-out loss | {loss:.4f} nats per token at step 2 |" in card
    assert "bf16 weights" in card


def test_a_dry_run_tells_files_and_sizes_and_sends_nothing(trained, hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    assert push(trained.folder, "--dry-run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert push(trained.folder) == 0
    assert told["files"] == {name: len(data) for name, data in files_of(hub).items()}
    assert told["card"].encode() == files_of(hub)["README.md"]


def test_a_push_that_broke_sends_only_what_is_missing(trained, hub, capsys):
    words = ["--max-shard-size", "30KB"]
    hub.most_uploads = 1
    assert push(trained.folder, *words) == 2
    assert "files that arrived are not sent again" in capsys.readouterr().err
    assert files_of(hub) == {}  # all of a commit or nothing
    hub.most_uploads, first = 100, dict(hub.uploads)
    assert push(trained.folder, *words) == 0
    weights = {n: data for n, data in files_of(hub).items() if n.endswith(".safetensors")}
    assert len(weights) == len(hub.uploads) > 2
    sent = [path for method, path in hub.requests if method == "PUT"]
    assert sum(path.endswith(next(iter(first))) for path in sent) == 1


def test_weights_in_more_files_do_not_stay_beside_new_ones(trained, hub):
    assert push(trained.folder, "--max-shard-size", "30KB") == 0
    assert "model.safetensors.index.json" in files_of(hub)
    assert push(trained.folder) == 0
    names = {name for name in files_of(hub) if "safetensors" in name}
    assert names == {"model.safetensors"}


def test_a_card_of_the_user_stays_unless_asked(trained, hub, capsys):
    hub.commit(REPOSITORY, {"README.md": "license: mit"})
    hub.private.add(REPOSITORY)
    assert push(trained.folder) == 0
    assert files_of(hub)["README.md"] == b"license: mit"
    assert "--replace-card" in capsys.readouterr().out
    assert push(trained.folder, "--replace-card") == 0
    assert b"Held-out loss" in files_of(hub)["README.md"]


def test_a_public_repository_is_written_only_if_asked(trained, hub, capsys):
    hub.commit(REPOSITORY, {})
    assert push(trained.folder) == 2
    assert "is public" in capsys.readouterr().err
    assert (len(hub.commits[REPOSITORY]), hub.uploads) == (1, {})
    assert push(trained.folder, "--public") == 0
    assert hub.private == set()


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("new", "hf_secret", "two parts: owner/name"),
        ("lab/new@main", "hf_secret", "two parts: owner/name"),
        (REPOSITORY, None, "a push needs a token"),
        (REPOSITORY, "hf_other", "needs write access to lab"),
        ("others/new", "hf_secret", "needs write access to others"),
    ],
)
def test_a_push_without_a_name_or_a_right_is_refused(
    name, token, message, trained, hub, monkeypatch, capsys
):
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    assert push(trained.folder, name=name) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert hub.commits == {}


def proof_file(tmp_path, layout):
    verdict = {"claim": "gradients", "layout": {}, "expected": 0.0, "observed": 1e-7}
    verdict |= {"tolerance": 1e-6, "passed": True, "first_divergence": None, "case": "small"}
    path = tmp_path / "proof.json"
    path.write_text(json.dumps({"asked": {"layout": layout}, "verdicts": [verdict]}))
    return ["--proof", str(path)]


def test_the_verdicts_of_a_proof_are_stated(trained, hub, tmp_path, capsys):
    assert push(trained.folder, *proof_file(tmp_path, "mb4")) == 0
    card = files_of(hub)["README.md"].decode()
    assert "passed: gradients (error 1.0e-07, tolerance 1e-06)" in card
    assert push(trained.folder, *proof_file(tmp_path, "dp2 mb4")) == 2
    assert "is about dp2 mb4" in capsys.readouterr().err
    (tmp_path / "proof.json").write_text("{}")
    assert push(trained.folder, "--proof", str(tmp_path / "proof.json")) == 2


def test_a_step_without_a_record_of_its_run_is_pushed(hub, tmp_path):
    assert push(write_run(tmp_path / "run")) == 0
    assert b"Held-out" not in files_of(hub)["README.md"]


def test_adapters_are_pushed_for_their_base(hub, tmp_path):
    adapted = telling(model(targets=("q_proj",)))
    write_weights(tmp_path / "run", adapted.spec, dict(adapted.named_parameters()), {})
    assert push(tmp_path / "run", "--adapter", "--base", "lab/base") == 0
    files = files_of(hub)
    assert "adapter_model.safetensors" in files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "lab/base"
    assert b"library_name: peft" in files["README.md"]
    assert b"base_model: lab/base" in files["README.md"]


def test_adapters_name_a_base_that_others_can_load(hub, tmp_path, capsys):
    assert push(write_run(tmp_path / "run"), "--adapter") == 2
    assert "--base owner/name" in capsys.readouterr().err
    assert hub.requests == []
