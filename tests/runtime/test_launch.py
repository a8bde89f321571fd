"""Whole runs: what a user sees when all goes well, and when something does not."""

import io
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from meshwright.checkpoint.commit import step_name
from meshwright.checkpoint.weights import load_model
from meshwright.cli import main
from meshwright.data import open_data
from meshwright.runtime.session import summarise, train
from meshwright.spec.loading import load_config
from meshwright.training.run_folder import read_job
from runs import TINY, clean_environ, torchrun


def test_a_run_leaves_what_its_documentation_says(config):
    out = io.StringIO()
    run = train(config("train.eval_every=2", "layout.dp_replicate=2"), clean_environ(), out)
    assert run.exit_code == 0
    for name in (
        "config.toml",
        "provenance.json",
        "plan.json",
        "events.jsonl",
        "checkpoints/latest",
    ):
        assert (run.folder / name).is_file(), name
    assert (run.folder / "logs" / "rank-1.log").is_file()
    assert (run.folder.parent / "latest").resolve() == run.folder.resolve()
    steps = list(run.events("step"))
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    assert set(steps[0]) == {
        "event",
        "step",
        "loss",
        "grad_norm",
        "lr",
        "step_time_s",
        "tokens_per_s",
        "tokens_per_s_per_device",
        "tflops_per_device",
        "mfu",
        "peak_memory_bytes",
        "data_time_share",
    }
    assert set(steps[0]["peak_memory_bytes"]) == {"0", "1"}
    assert steps[0]["mfu"] is None
    assert [e["step"] for e in run.events("eval")] == [2, 4]
    assert [(e["step"], e["batches"] > 0) for e in run.events("evaluating")] == [
        (2, True),
        (4, True),
    ]
    assert summarise(run)["unigram_entropy"] > 1
    assert read_job(run.folder).config == read_job(run.folder).config
    origins = json.loads((run.folder / "provenance.json").read_text())
    assert origins["train.batch"] == "override train.batch=4"
    out = out.getvalue()
    assert "step 4/4 loss" in out
    assert "unigram entropy of the data" in out
    assert "\x1b" not in out  # no colour where there is no terminal


@pytest.mark.often(1)
@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-5), ("bf16", 0.01)])
def test_the_saved_model_is_the_trained_one_and_writes(
    config, corpus, tmp_path, capsys, precision, near
):
    """What is saved after step 2 has the loss that step 3 began with; `generate` writes with it."""
    asked = config(
        *("layout.dp_replicate=1", "train.steps=3", "checkpoint.every=1", "checkpoint.keep=5"),
        *(f"train.precision={precision}", "optimizer.lr=0.02", "optimizer.warmup_steps=0"),
    )
    run = train(asked, clean_environ())
    losses = [event["loss"] for event in run.events("step")]
    data = open_data(asked.data, tmp_path / "cache", asked.model.vocab_size)
    batch = data.sampler("train", asked.train.seq_len, asked.train.batch).rows(2)
    inputs, targets = (torch.from_numpy(one) for one in (batch.inputs, batch.targets))

    def loss_of(step):
        model = load_model(run.folder / "checkpoints" / step_name(step))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        with torch.no_grad():
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()

    assert loss_of(2) == pytest.approx(losses[2], abs=near)
    assert abs(loss_of(1) - losses[2]) > 10 * near

    model = load_model(run.folder)
    ids = torch.tensor([list(b"story")])
    with torch.no_grad():
        for _ in range(5):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    words = ["--prompt", "story", "--max-tokens", "5", "--temperature", "0", "--json"]
    assert main(["generate", str(tmp_path / "runs" / "latest"), *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"].encode() == bytes(ids[0].tolist())
    assert said["tokens"] == 5


@pytest.mark.slow
def test_one_two_and_four_ranks_have_one_loss_curve(config, tmp_path):
    """The whole path, processes and data included: the losses agree to 1e-5 over 20 steps."""
    curves = {}
    for n in (1, 2, 4):
        run = train(
            config(f"layout.dp_replicate={n}", f"log.name=ranks-{n}", "train.steps=20"),
            clean_environ(),
        )
        curves[n] = [event["loss"] for event in run.events("step")]
    assert len(curves[1]) == 20
    assert curves[2] == pytest.approx(curves[1], abs=1e-5)
    assert curves[4] == pytest.approx(curves[1], abs=1e-5)
    assert curves[1][-1] < curves[1][0] - 0.1


@pytest.mark.often(1)
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_packing_and_neox_train(config, packing):
    run = train(
        config(
            f"data.packing={packing}",
            "model.family=neox",
            "model.n_kv_heads=2",
            "model.parallel_residual=true",
            "layout.dp_replicate=2",
            "train.steps=12",
            "optimizer.lr=0.01",
        ),
        clean_environ(),
    )
    losses = [event["loss"] for event in run.events("step")]
    assert losses[-1] < losses[0] - 0.5


def test_training_starts_from_a_hugging_face_folder(config, tmp_path):
    from meshwright.models import build_model, init_model
    from meshwright.models.hf import save_hf
    from meshwright.spec.resolve import model_spec

    spec = model_spec(dim=32, n_layers=2, n_heads=2, n_kv_heads=1)
    save_hf(init_model(build_model(spec, device="cpu"), spec, 5), tmp_path / "hf")
    made = config(f"model.init_from={tmp_path / 'hf'}", "data.tokenizer=bytes")
    assert made.model.n_layers == 2
    words = [o for o in TINY if not o.startswith("model.")]
    words += [f"data.source={made.data.source}", f"data.cache={tmp_path / 'cache'}"]
    fresh = load_config(
        None,
        [
            *words,
            f"log.dir={tmp_path / 'runs'}",
            f"model.init_from={tmp_path / 'hf'}",
            "data.tokenizer=bytes",  # the folder has none of its own
            "optimizer.lr=1e-12",
            "train.steps=1",
        ],
    )
    assert fresh.origins["model.dim"] == f"{tmp_path / 'hf'}/config.json"
    run = train(fresh, clean_environ())
    loaded, saved = load_model(tmp_path / "hf"), load_model(run.folder)
    for name, parameter in loaded.named_parameters():
        assert torch.allclose(parameter, saved.get_parameter(name), atol=1e-6), name


@pytest.mark.slow  # test_docs runs the line of the README
def test_torchrun_is_joined(corpus, tmp_path):
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "log.name=run", "train.steps=2"]
    said = torchrun("train", *words, stderr=subprocess.STDOUT)
    assert said.count("done after 2 steps") == 1
    assert "rofil" not in said  # the step whose memory is recorded says nothing of it
    job = read_job(tmp_path / "runs" / "run")
    assert job.layout.dp_replicate == 2


def cli(*words):
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_command_line_refusals_exit_with_2():
    code, out, err = cli("train", "model.dmi=3")
    assert (code, out) == (2, "")
    assert err == (
        "meshwright train: unknown key model.dmi (override model.dmi=3); nearest legal: model.dim\n"
    )
    assert cli("config", "show", "a.toml", "b.toml")[0] == 2
    assert cli("trian")[0] == 2
    code, out, _ = cli("config", "show", "--json", "train.batch=8")
    assert json.loads(out)["train"]["batch"] == {
        "value": 8,
        "origin": "override train.batch=8",
    }


def test_adapters_are_shown_as_the_keys_that_set_them(capsys):
    for words in ([], ["--json"]):
        assert main(["config", "show", "lora.rank=4", *words]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out[out.index("{") :])
    assert shown["lora"]["rank"] == {"value": 4, "origin": "override lora.rank=4"}
    assert "lora" not in shown["model"]
    assert "override lora.rank=4" in out[: out.index("{")]


def test_overrides_may_stand_on_both_sides_of_an_option(capsys):
    assert main(["config", "show", "train.seq_len=64", "--json", "train.batch=8"]) == 0
    shown = json.loads(capsys.readouterr().out)["train"]
    assert (shown["seq_len"]["value"], shown["batch"]["value"]) == (64, 8)
    with pytest.raises(SystemExit) as ended:
        main(["config", "show", "train.seq_len=64", "--json", "--dtype", "x"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --dtype x" in capsys.readouterr().err


@pytest.mark.perf
@pytest.mark.parametrize("words", [("--help",), ("config", "show"), ("train", "--help")])
def test_start_up_is_quick(words):
    """Half a second of one core."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert cli(*words)[0] == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5


def test_tensorboard_by_switch(config):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    run = train(config("log.tensorboard=true", "train.steps=2"), clean_environ())
    assert list((run.folder / "tensorboard").glob("events.out.tfevents.*"))


def test_a_run_keeps_the_tokenizer_of_its_store(config, corpus, tmp_path):
    """A prepared store brings its own tokenizer; the run samples with it though the store goes."""
    made = tmp_path / "bpe"
    code, _, err = cli(
        *("data", "train-tokenizer", str(made), "--source", str(corpus), "--vocab-size", "300")
    )
    assert code == 0, err
    store = tmp_path / "store"
    words = ("--source", str(corpus), "--tokenizer", str(made / "tokenizer.json"))
    code, _, err = cli("data", "prepare", str(store), *words)
    assert code == 0, err
    fresh = load_config(
        None,
        [*TINY, f"data.source={store}", f"log.dir={tmp_path / 'runs'}", "train.steps=1"],
    )
    assert fresh.origins["model.vocab_size"].startswith(f"store {store}")
    run = train(fresh, clean_environ())
    shutil.rmtree(store)
    shutil.rmtree(made)
    code, out, err = cli(
        "generate", str(run.folder), "--prompt", "the cat", "--max-tokens", "3", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["text"].startswith("the cat")


def demo(tmp_path):
    """One step of the demo, data preparation included."""
    file = Path(__file__).parents[2] / "examples" / "demo.toml"
    words = ("train.steps=1", "train.eval_every=0", f"log.dir={tmp_path}", "log.name=run")
    return cli("train", str(file), *words, f"data.cache={tmp_path / 'cache'}")


@pytest.mark.slow
def test_the_demo_trains(tmp_path):
    code, out, err = demo(tmp_path)
    assert code == 0, err
    assert "done after 1 step:" in out


@pytest.mark.perf
def test_the_demo_reaches_its_first_step_quickly(tmp_path):
    """Ten seconds from the command to the end of the first step."""
    started = time.monotonic()
    assert demo(tmp_path)[0] == 0
    assert time.monotonic() - started < 10


def test_devices_left_over_are_told(config):
    out = io.StringIO()
    run = train(config("train.batch=3", "train.steps=1"), clean_environ(), out)
    assert run.exit_code == 0
    assert "note: 1 of 2 devices are used: train.batch = 3 does not divide" in out.getvalue()


def test_generate_says_when_there_is_no_folder(tmp_path):
    code, _, err = cli("generate", str(tmp_path / "nowhere"), "--prompt", "x")
    assert (code, err) == (2, f"meshwright generate: {tmp_path}/nowhere is not a folder\n")
