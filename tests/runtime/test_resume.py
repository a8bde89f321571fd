"""Resume: at the same layout bit for bit, at another one the same tokens and the same curve."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.checkpoint.commit import LOCK, read_manifest, step_name, steps
from meshwright.checkpoint.restore import newest_good
from meshwright.cli.main import main
from meshwright.data import open_data, train_bpe
from meshwright.errors import CheckpointError, ConfigError
from meshwright.layout import Layout
from meshwright.prove.shrink import shrink
from meshwright.runtime.certificate import certify
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.session import prepare_job
from meshwright.runtime.session import train as train_command
from meshwright.runtime.supervise.lock import RunLock
from meshwright.spec.loading import load_config
from meshwright.training.events import append_event
from meshwright.training.loop import train
from meshwright.training.run_folder import create, read_job
from ranks import on_ranks
from runs import clean_environ

pytestmark = pytest.mark.early

# Dropout, accumulation, a learning rate that falls, and a corpus that is passed twice.
HARD = [
    "model.dropout=0.1",
    "layout.microbatch=1",
    "train.batch=8",
    "train.steps=10",
    "model.n_kv_heads=2",
    "checkpoint.every=1",
    "checkpoint.keep=20",
]


@pytest.fixture
def small_corpus(tmp_path):
    file = tmp_path / "small.txt"
    file.write_text("<|endoftext|>".join(f"story {n}: the cat sat on mat {n}. " for n in range(45)))
    return file


@pytest.fixture
def started(config, small_corpus):
    """Return a function that makes the run folder of a config."""

    def start(*overrides):
        own = config(*HARD, f"data.source={small_corpus}", "data.validation=0", *overrides)
        job = prepare_job(own, clean_environ())
        create(job)
        return job

    return start


def run_on(world, folder, resume=False, stop_after=None):
    """The body of a rank: train the job of a folder, and say what the steps were."""
    job = read_job(Path(folder))
    spec = job.config.data
    dataset = open_data(spec, job.cache, vocab_size=job.config.model.vocab_size)
    events = []

    def asked():
        done = sum(event["event"] == "step" for event in events)
        return stop_after is not None and done >= stop_after  # once that step is saved

    summary = train(job, world, dataset, events.append, asked, resume)
    return summary, [event for event in events if event["event"] != "save"]


def go(job, **arguments):
    return on_ranks(job.layout.world, run_on, folder=str(job.folder.path), **arguments)[0]


def losses_of(told):
    return {one["step"]: one["loss"] for one in told if one["event"] == "step"}


def files(job, step):
    """Return the hash of every file of a step, and what its manifest says of the run."""
    manifest = read_manifest(job.checkpoints / step_name(step))
    facts = {key: manifest[key] for key in ("step", "samples", "loss_scale", "scalars", "identity")}
    return manifest["files"], facts


def cut_after(job, step, name):
    """Return a copy of a run as it would be had it ended after a step."""
    folder = job.folder.path.with_name(name)
    shutil.copytree(job.folder.path, folder)
    for path in steps(folder / "checkpoints"):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    return replace(job, folder=type(job.folder)(folder))


@pytest.mark.case(11)
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["layout.dp_replicate=2"],
        ["layout.dp_shard=2", "layout.zero=3", "train.precision=bf16"],
        ["layout.pp=2", "layout.offload=optimizer", "train.precision=fp16"],
        pytest.param(
            ["layout.tp=2", "layout.sp=true", "optimizer.name=sgd", "optimizer.momentum=0.9"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["layout.dp_shard=2", "layout.zero=1", "optimizer.state_dtype=bf16"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_resumed_run_is_the_same_run_bit_for_bit(started, layout, outcome):
    job = started(*layout)
    whole, told = go(job)
    assert whole.steps == 10
    starts = [event for event in told if event["event"] == "start"]
    assert starts[0]["train_samples"] < 80  # the data is passed more than once
    kinds = {name.split("-")[0] for name in files(job, 10)[0]}
    assert kinds == {"weights", "optimizer", "model.json"}
    losses = {e["step"]: (e["loss"], e["lr"], e["grad_norm"]) for e in told if e["event"] == "step"}

    # 5 + 5
    half = cut_after(job, 5, "half")
    began = time.monotonic()
    _, told = go(half, resume=True)
    outcome.add(0, "steps 6 to 10 again, bit for bit", time.monotonic() - began)
    again = {e["step"]: (e["loss"], e["lr"], e["grad_norm"]) for e in told if e["event"] == "step"}
    assert again == {step: losses[step] for step in range(6, 11)}
    assert files(half, 10) == files(job, 10)

    # 3 + 3 + 4: resumed from a step that a resumed run has written
    twice = cut_after(job, 3, "twice")
    stopped, _ = go(twice, resume=True, stop_after=3)
    assert stopped == (6, losses[6][0], True)
    assert files(twice, 6) == files(job, 6)
    go(twice, resume=True)
    assert files(twice, 10) == files(job, 10)
    assert files(twice, 10) != files(job, 9)


@pytest.mark.case(10)
def test_another_layout_goes_on_with_the_same_tokens_and_curve(started, outcome):
    job = started("layout.dp_shard=2", "layout.zero=2", "train.clip_norm=0")
    _, told = go(job)
    losses = losses_of(told)
    for number, change in enumerate(({"tp": 2}, {"pp": 2}, {"cp": 2}, {})):
        other = cut_after(job, 5, f"other{number}")
        layout = type(job.layout)(microbatch=2, **change)
        create(replace(other, layout=layout))
        began = time.monotonic()
        _, told = go(replace(other, layout=layout), resume=True)
        seconds = time.monotonic() - began
        again = losses_of(told)
        assert sorted(again) == [6, 7, 8, 9, 10]
        for step, loss in again.items():
            assert loss == pytest.approx(losses[step], rel=2e-5), (change, step)
        outcome.add(0, f"{job.layout.label} goes on as {layout.label} on the same curve", seconds)


@pytest.mark.slow
def test_adapters_of_experts_go_on_on_another_layout(started):
    experts = ["model.family=qwen3_moe", "model.experts=4", "model.top_k=2", "model.dropout=0"]
    targets = 'lora.targets=["q_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]'
    where = ["layout.dp_shard=2", "layout.zero=3", "layout.ep=2", "train.steps=6"]
    job = started(*experts, "lora.rank=4", targets, *where, "train.clip_norm=0")
    losses = losses_of(go(job)[1])
    for number, change in enumerate(({"tp": 2, "sp": True}, {"pp": 2}, {})):
        other = cut_after(job, 3, f"other{number}")
        layout = type(job.layout)(microbatch=2, **change)
        create(replace(other, layout=layout))
        again = losses_of(go(replace(other, layout=layout), resume=True)[1])
        assert again == pytest.approx({step: losses[step] for step in (4, 5, 6)}, rel=2e-5)


@pytest.mark.slow
def test_a_pipeline_rank_without_trained_weights_saves_the_step_of_the_others(started):
    layers = ["model.family=qwen2_moe", "model.layer_pattern=[{dense=true}, {}]"]
    experts = ["model.experts=4", "model.top_k=2", "model.dropout=0", "model.n_layers=2"]
    adapters = ["lora.rank=4", 'lora.targets=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]']
    job = started(*layers, *experts, *adapters, "layout.pp=2", "train.steps=4", "train.clip_norm=0")
    losses = losses_of(go(job)[1])
    other = replace(cut_after(job, 2, "other"), layout=Layout(microbatch=2, dp_replicate=2))
    create(other)
    rest = {step: losses[step] for step in (3, 4)}
    assert losses_of(go(other, resume=True)[1]) == pytest.approx(rest, rel=2e-5)


@pytest.mark.slow
def test_beside_the_training_the_same_is_written(started):
    job = started("layout.dp_shard=2", "layout.zero=1", "train.steps=4")
    go(job)
    beside = started(
        "layout.dp_shard=2", "layout.zero=1", "train.steps=4", "checkpoint.async=true",
        "log.name=beside",
    )  # fmt: skip
    go(beside)
    for step in (1, 2, 3, 4):
        assert files(beside, step)[0] == files(job, step)[0]


@pytest.mark.case(8)
def test_a_bad_step_is_named_and_the_one_before_it_is_taken(started, outcome):
    job = started("layout.dp_replicate=2", "train.steps=4")
    whole, _ = go(job)
    path = next((job.checkpoints / step_name(4)).glob("optimizer-*"))
    good = files(job, 4)
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    began = time.monotonic()
    again, told = go(job, resume=True)
    seconds = time.monotonic() - began
    problem = next(event["problem"] for event in told if event["event"] == "bad_checkpoint")
    assert str(path) in problem
    assert next(event["step"] for event in told if event["event"] == "resume") == 3
    assert again == whole
    assert files(job, 4) == good
    assert [p.name for p in job.checkpoints.glob("bad-step-00000004-*")]
    outcome.add(0, problem, seconds)


def newest(world, root):
    """Return the newest good step, and the problems of those that are newer."""
    problems = []
    good = newest_good(Path(root), world, problems.append)
    return good.manifest["step"], problems


@pytest.mark.slow
@pytest.mark.case(8, 9)
@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove"])
def test_any_harm_to_any_file_of_a_step_falls_back(started, harm, outcome):
    job = started("layout.dp_shard=2", "layout.zero=1", "train.steps=2")
    go(job)
    names = sorted(path.name for path in (job.checkpoints / step_name(2)).iterdir())
    assert [name.split("-")[0] for name in names] == [
        *("manifest.json", "model.json"),
        *("optimizer", "optimizer", "weights", "weights"),
    ]
    for name in names:
        harmed = cut_after(job, 2, f"{harm}-{name}")
        path = harmed.checkpoints / step_name(2) / name
        data = bytearray(path.read_bytes())
        if harm == "remove":
            path.unlink()
        else:
            data[len(data) // 2] ^= 4
            path.write_bytes({"flip": data, "truncate": data[:-1], "empty": b""}[harm])
        began = time.monotonic()
        step, problems = on_ranks(2, newest, root=str(harmed.checkpoints))[0]
        assert step == 1
        assert len(problems) == 1
        assert str(path) in problems[0]
        outcome.add(None, f"{problems[0]}; step 1 is taken", time.monotonic() - began)


@pytest.mark.case(10, 29)
def test_what_has_changed_is_refused_with_the_flag_that_allows_it(
    config, started, corpus, tmp_path, outcome
):
    job = started("layout.dp_replicate=2", "train.steps=2")
    go(job)
    own = job.config
    resume = Resume(job.folder.path)

    def prepared(allowed=(), **changes):
        changed = own.model_copy(
            update={
                section: getattr(own, section).model_copy(update=values)
                for section, values in changes.items()
            }
        )
        return prepare_job(changed, clean_environ(), resume=Resume(resume.run, allowed))

    append_event(job.folder.events, {"event": "end", "step": 2, "loss": 1.0, "stopped": False})
    with pytest.raises(ConfigError, match=r"the run is at step 2 of train\.steps = 2\. "):
        prepared()
    assert prepared(train={"steps": 3}).resume
    for part, changes in {
        "data": {"data": {"source": str(corpus)}},
        "seed": {"data": {"seed": 5}},
        "model": {"model": {"rope_theta": 500.0}},
        "train.batch": {"train": {"batch": 4, "steps": 3}},
        "train.seq_len": {"train": {"seq_len": 16, "steps": 3}},
        "train.seed": {"train": {"seed": 4, "steps": 3}},
        "optimizer": {"optimizer": {"name": "sgd"}, "train": {"steps": 3}},
    }.items():
        changes = {"train": {"steps": 3}, **changes}
        named = r"model\.rope_theta was 10000\.0, is 500\.0\. " if part == "model" else ""
        with outcome.refused(CheckpointError, rf"{named}To continue.*--allow-changed {part}$"):
            prepared(**changes)
        assert prepared(allowed=(part,), **changes).allowed == (part,)
    # Weights of other shapes fit in no case.
    shape = r"model\.ffn_dim was 128, is 64 \(.* was \[128, 32\], is \[64, 32\]\)$"
    with outcome.refused(CheckpointError, f"do not fit this model: {shape}"):
        prepared(allowed=("model",), model={"ffn_dim": 64}, train={"steps": 3})
    # Another tokenizer gives other tokens, too.
    other = train_bpe([corpus.read_text()], 257, tmp_path / "bpe")
    changes = {"train": {"steps": 3}, "data": {"tokenizer": str(other)}}
    with outcome.refused(CheckpointError, "tokenizer was .*--allow-changed tokenizer"):
        prepared(**changes)
    assert prepared(allowed=("tokenizer", "data"), **changes).allowed == ("tokenizer", "data")
    with pytest.raises(ConfigError, match="--allow-changed datas: no such part"):
        prepared(allowed=("datas",), train={"steps": 3})
    with pytest.raises(ConfigError, match="not a run folder"):
        prepare_job(own, clean_environ(), resume=Resume(corpus.parent))


def test_an_allowed_change_of_optimizer_begins_its_state_anew(started):
    job = started("layout.dp_replicate=2", "train.steps=2")
    go(job)
    sgd = job.config.optimizer.model_copy(update={"name": "sgd", "lr": 0.1})
    longer = job.config.train.model_copy(update={"steps": 3})
    config = job.config.model_copy(update={"optimizer": sgd, "train": longer})
    other = replace(job, config=config, allowed=("optimizer",))
    create(other)
    go(other, resume=True)
    assert not [name for name in files(other, 3)[0] if name.startswith("optimizer")]


def test_a_step_of_weights_only_is_no_run(started):
    job = started("layout.dp_replicate=2", "train.steps=2")
    go(job)
    manifest = json.loads((job.checkpoints / step_name(2) / "manifest.json").read_text())
    assert {"layout", "world", "samples", "tokens", "identity"} <= manifest.keys()
    assert manifest["samples"] == 16
    assert manifest["scalars"] == {"step": 2.0}


@pytest.mark.slow  # the tests above hold runs equal bit for bit
def test_the_certificate_is_issued_and_can_be_refused(config, tmp_path, monkeypatch):
    """A resumed run that begins its data order anew is found out."""
    evaluates = ("train.eval_every=1", "data.validation=0.2")
    own = config("layout.dp_replicate=1", "model.dropout=0.1", *evaluates)
    case = shrink(own.model, own.train, Layout(microbatch=2))[0]
    good = list(certify(own, case, tmp_path / "good", clean_environ()))
    assert [verdict.passed for verdict in good] == [True] * 6, good
    assert "on one rank step 8 is evaluated the same" in [verdict.claim for verdict in good]
    assert good[0].expected == good[0].observed

    def forgetful(config, environ, out, resume=None):
        if resume is not None:
            config = config.model_copy(update={"data": config.data.model_copy(update={"seed": 1})})
            resume = resume._replace(allowed=("seed",))
        return train_command(config, environ, out, resume=resume)

    monkeypatch.setattr("meshwright.runtime.certificate.train", forgetful)
    bad = next(certify(own, case, tmp_path / "bad", clean_environ()))
    assert not bad.passed
    assert "of step 10 differs" in bad.observed


@pytest.mark.slow  # the states of AdamW in fp32 are certified above
@pytest.mark.parametrize("optimizer", ["state_dtype=int8", "name=muon"])
def test_runs_of_other_optimizers_are_certified(optimizer, capsys):
    """Each rank has the states of its rows; another layout reads them as a whole."""
    asked = ("layout.dp_shard=2", "layout.zero=1", "layout.microbatch=2", "train.batch=8")
    words = (*asked, "cluster.devices_per_node=2", f"optimizer.{optimizer}")
    assert main(["prove", "--resume", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_steps_are_listed_verified_and_pruned(started, capsys):
    job = started("layout.dp_replicate=2", "train.steps=3")
    go(job)
    run = str(job.folder.path)
    assert main(["checkpoint", "inspect", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["step 1", "step 2", "step 3"]
    assert "dp2 mb1 on 2 ranks, 768 tokens" in lines[2]
    assert main(["checkpoint", "verify", run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["steps"]
    assert [(one["step"], one["is_verified"], one["problem"]) for one in told] == [
        (1, True, None), (2, True, None), (3, True, None),
    ]  # fmt: skip
    path = next((job.checkpoints / step_name(2)).glob("weights-*"))
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["checkpoint", "inspect", run]) == 0  # looks at manifests alone
    assert main(["checkpoint", "verify", run]) == 1
    assert f"BAD  step 2: {path} is corrupt" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(job.checkpoints / step_name(3))]) == 0
    with RunLock(job.checkpoints / LOCK):
        assert main(["checkpoint", "prune", run, "--keep", "1"]) == 2
    assert f"checkpoint folder {job.checkpoints} is in use" in capsys.readouterr().err
    assert main(["checkpoint", "prune", run, "--keep", "1"]) == 0
    assert "removed 2 steps, kept 1" in capsys.readouterr().out
    assert [p.name for p in steps(job.checkpoints)] == [step_name(3)]
    assert main(["checkpoint", "inspect", str(job.cache)]) == 2


def test_a_new_run_does_not_write_among_the_steps_of_another(started, config):
    job = started("layout.dp_replicate=2", "train.steps=2")
    go(job)
    resume = f"meshwright train --resume {job.folder.path}"
    for count, words in (2, ""), (9, " train.steps=9"):
        there = (f"checkpoint.dir={job.checkpoints}", f"train.steps={count}")
        other = config("log.name=other", *there)
        with pytest.raises(ConfigError, match=f"to resume that one: {resume}{words}$"):
            prepare_job(other, clean_environ())
    other = config(f"checkpoint.dir={job.checkpoints}", f"log.dir={job.folder.path}")
    with pytest.raises(ConfigError, match="train --resume RUN, RUN being its run folder"):
        prepare_job(other, clean_environ())


def test_a_resumed_run_keeps_the_first_origins_of_its_values(started):
    """The report of a resumed run listed each default as a value given by `config.toml`."""
    job = started("train.steps=5")
    first = json.loads((job.folder.path / "provenance.json").read_text())
    again = load_config(job.folder.config, ["train.steps=6"])
    assert again.origins["model.rope_theta"].startswith("config.toml:")
    create(replace(job, config=again))
    second = json.loads((job.folder.path / "provenance.json").read_text())
    changed = {key for key in second if second[key] != first[key]}
    assert second["model.rope_theta"] == "default"
    assert second["train.steps"] == "override train.steps=6"
    assert "train.steps" in changed
    assert {key for key in changed if second[key].startswith("config.toml:")} == set()
