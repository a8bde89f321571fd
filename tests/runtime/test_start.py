"""What is refused or said before a process starts."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright.cli import main
from meshwright.cost.price import memory
from meshwright.data import train_bpe
from meshwright.errors import ConfigError, DataError
from meshwright.runtime.checks import start as checks
from meshwright.runtime.checks.notes import config_notes, resume_notes, run_notes
from meshwright.runtime.doctor import examine_config
from meshwright.runtime.pricing.planned import cost_inputs_on
from meshwright.runtime.session import prepare_job
from meshwright.spec.hf import hf_config
from meshwright.spec.learning_rate import learning_rate
from meshwright.spec.loading import load_config
from meshwright.spec.parts import parameter_count
from meshwright.spec.presets import PRESETS
from meshwright.spec.resolve import model_spec, rate_for
from meshwright.training.run_folder import create
from meshwright.units import format_count
from runs import TINY, clean_environ

SIZES = {"vocab_size": 320, "dim": 32, "n_layers": 2, "n_heads": 4, "context": 64}


def hf_folder(folder, *, tokenizer=True, **sizes):
    """A Hugging Face folder as far as a config looks at it."""
    folder.mkdir()
    spec = model_spec(**{**SIZES, **sizes})
    (folder / "config.json").write_text(json.dumps(hf_config(spec)))
    if tokenizer:
        train_bpe(["the quick brown fox jumps over the lazy dog\n" * 9], 300, folder)
    return folder


@pytest.fixture
def here(corpus, tmp_path):
    """Overrides of a tiny run on the machine at hand, but for its model."""
    own = [word for word in TINY if not word.startswith("model.")]
    return [*own, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]


def test_a_stored_model_brings_its_tokenizer(tmp_path, here):
    folder = hf_folder(tmp_path / "hf")
    config = load_config(None, [f"model.init_from={folder}"])
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    assert config.origins["data.tokenizer"] == f"model.init_from {folder}"
    assert any("as model.init_from has it" in text for text in config_notes(config))
    where = f"log.dir={tmp_path / 'runs'}"
    config = load_config(None, [f"model.init_from={folder}", where, *here])
    job = prepare_job(config, clean_environ())
    assert job.tokenizer.file == str(folder / "tokenizer.json")


def test_another_tokenizer_than_the_models_is_noted_by_train_and_doctor(tmp_path, here):
    folder = hf_folder(tmp_path / "hf")
    words = [f"model.init_from={folder}", "data.tokenizer=bytes", f"log.dir={tmp_path}", *here]
    config = load_config(None, words)
    (told,) = [text for text in config_notes(config) if "other texts" in text]
    assert "data.tokenizer = 'bytes'" in told
    found = list(examine_config(config, clean_environ()))
    assert told in [one.text for one in found if one.state == "note"]
    copy = shutil.copy(folder / "tokenizer.json", tmp_path / "copy.json")
    for same in (folder, folder / "tokenizer.json", copy):
        own = load_config(None, [f"model.init_from={folder}", f"data.tokenizer={same}"])
        assert not any("other texts" in text for text in config_notes(own))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["warmup_steps=101"], "warmup_steps = 101 is more than the 100 steps"),
        (["warmup_steps=50", "schedule_steps=40"], "warmup_steps = 50 is more than the 40 steps"),
        (["schedule=wsd", "warmup_steps=50", "decay_steps=51"], "drops below optimizer.lr"),
        (["schedule=wsd", "warmup_steps=81"], "decay_steps = 20 and warmup_steps = 81"),
        (["schedule=wsd", "warmup_steps=50", "decay_steps=50"], None),
        (["warmup_steps=100"], None),
    ],
)
def test_a_schedule_that_does_not_reach_its_rate_is_told_of(words, told):
    config = load_config(None, ["train.steps=100", *(f"optimizer.{word}" for word in words)])
    found = [text for text in config_notes(config) if "of the schedule" in text]
    assert len(found) == (told is not None)
    assert all(told in text for text in found)


def test_sizes_that_change_a_preset_are_noted_by_train_and_plan(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("[model]\ndim = 64\nn_layers = 2\n")
    config = load_config(tmp_path / "run.toml", ["model.preset=llama-3-8b"])
    told = (
        "not the whole of model.preset = llama-3-8b: "
        "model.dim = 64 (run.toml:2), model.n_layers = 2 (run.toml:3)"
    )
    assert told in list(config_notes(config))
    words = ["model.preset=llama-3-8b", "cluster.preset=h100-sxm", "--top", "1"]
    assert main(["plan", str(tmp_path / "run.toml"), *words]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    plain = load_config(None, ["model.preset=llama-3-8b"])
    assert not any("not the whole" in text for text in config_notes(plain))


def test_a_stored_model_without_a_tokenizer_is_not_trained_on_bytes(tmp_path, here):
    folder = hf_folder(tmp_path / "hf", tokenizer=False)
    config = load_config(None, [f"model.init_from={folder}", f"log.dir={tmp_path / 'runs'}", *here])
    with pytest.raises(ConfigError, match="does not say which tokenizer it was trained with"):
        prepare_job(config, clean_environ())
    assert not (tmp_path / "runs").exists()
    states = {one.name: one for one in examine_config(config, clean_environ())}
    assert states["data"].state == "bad"
    assert "does not say which tokenizer" in states["data"].text


def test_a_run_folder_brings_the_tokenizer_of_the_run(tmp_path, config):
    job = prepare_job(config(), clean_environ())
    create(job)
    step = job.folder.path / "checkpoints" / "step-00000004"
    step.mkdir(parents=True)
    (step / "model.json").write_text(job.config.model.model_dump_json())
    again = load_config(None, [f"model.init_from={step}"])
    assert again.data.tokenizer == "bytes"
    assert again.origins["data.tokenizer"].startswith("model.init_from")


def test_the_default_rate_follows_the_model():
    published = {1.25e8: 6e-4, 1.3e9: 2e-4, 6.7e9: 1.2e-4, 1.75e11: 6e-5, 1e12: 6e-5}
    for size, rate in published.items():
        assert rate_for(size) == rate
    assert rate_for(5e6) == 3e-3
    rates = [rate_for(10 ** (at / 10)) for at in range(60, 125)]
    assert rates == sorted(rates, reverse=True)
    small = load_config(None, [])
    assert (small.optimizer.lr, small.origins["optimizer.lr"]) == (3e-3, "default")
    large = load_config(None, ["model.preset=llama-3-8b"])
    assert 1e-4 < large.optimizer.lr < 1.3e-4
    assert "8.03B parameters" in large.origins["optimizer.lr"]
    assert any(text.startswith("optimizer.lr = 0.00011") for text in config_notes(large))
    given = load_config(None, ["model.preset=llama-3-8b", "optimizer.lr=0.003"])
    assert given.optimizer.lr == 3e-3


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"demo"}))
def test_defaults_follow_from_the_models_own_number_of_parameters(preset):
    config = load_config(None, [f"model.preset={preset}", "cluster.preset=h100-sxm"])
    exact = parameter_count(config.model)
    count = f"{format_count(exact)} parameters"
    assert config.optimizer.lr == rate_for(exact)
    assert config.origins["optimizer.lr"] == f"derived: for {count}"
    assert config.origins["train.batch"].endswith(f" tokens for {count}")


def test_a_trained_model_gets_a_tenth_of_the_rate(tmp_path):
    config = load_config(None, [f"model.init_from={hf_folder(tmp_path / 'hf')}"])
    assert config.optimizer.lr == pytest.approx(3e-4)
    (told,) = [text for text in config_notes(config) if text.startswith("optimizer.lr")]
    assert "a tenth" in told


def test_sequences_beyond_the_context_are_noted(tmp_path):
    words = [f"model.init_from={hf_folder(tmp_path / 'hf')}", "train.seq_len=128"]
    (told,) = [text for text in config_notes(load_config(None, words)) if "context" in text]
    assert told.startswith("train.seq_len = 128 is beyond model.context = 64")
    assert not any("context" in text for text in config_notes(load_config(None, [])))


def runs_of(tmp_path):
    folder = tmp_path / "runs"
    return list(folder.iterdir()) if folder.exists() else []


def test_a_cluster_of_other_devices_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match=r"cluster.preset = 'h100-sxm', but this machine has CPU"):
        prepare_job(config("cluster.preset=h100-sxm"), clean_environ())
    assert runs_of(tmp_path) == []
    states = [one for one in examine_config(config("cluster.preset=a40"), {}) if one.state == "bad"]
    assert any("cluster.preset = 'a40'" in one.text for one in states)


def test_a_plan_for_other_devices_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.json"
    words = [*TINY, "cluster.preset=h100-sxm"]
    assert main(["plan", *words, "--top", "1", "--save", str(path)]) == 0
    (tmp_path / "run.toml").write_text("[train]\nlog_every = 1\n")
    for command in (
        ["train", "--plan", str(path)],
        ["train", "--plan", str(path), "run.toml", *TINY],
    ):
        capsys.readouterr()
        assert main(command) == 2
        assert "cluster.preset = 'h100-sxm', but this machine has CPU" in capsys.readouterr().err
    assert runs_of(tmp_path) == []


@pytest.mark.parametrize(
    ("preset", "gpu", "refused"),
    [
        ("h100-sxm", "NVIDIA H100 80GB HBM3", False),
        ("a100-80gb", "NVIDIA H100 80GB HBM3", True),
        ("h100-sxm", "NVIDIA Graphics Device", False),  # nobody knows what it is
        ("cpu", "NVIDIA H100 80GB HBM3", True),
        ("local", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_gpus_are_known_by_their_drivers_name(monkeypatch, preset, gpu, refused):
    from meshwright.layout import Machine

    monkeypatch.setattr(checks, "gpu_name", lambda: gpu)
    config = load_config(None, [f"cluster.preset={preset}"])
    machine = Machine("cuda", 8, 64, "CUDA GPU", is_fixed=True)
    if refused:
        with pytest.raises(ConfigError, match=f"but this machine has {gpu}"):
            checks.check_device(config, machine, clean_environ())
    else:
        checks.check_device(config, machine, clean_environ())


def test_what_is_predicted_not_to_fit_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "memory_of_machine", lambda: (2**30, 2**20))
    own = config("model.n_layers=8", "model.dim=256")
    with pytest.raises(ConfigError, match=r"does not fit: predicted .* 1.00 MiB are free"):
        prepare_job(own, clean_environ())
    assert runs_of(tmp_path) == []
    peak = {one.name: one for one in examine_config(own, clean_environ())}["peak"]
    assert peak.state == "bad"
    monkeypatch.setattr(checks, "memory_of_machine", lambda: (0, 0))  # not known
    prepare_job(own, clean_environ())


def test_ranks_of_a_pipeline_need_what_each_of_them_needs(config, monkeypatch):
    """Not as much as the worst of them, times their number."""
    own = config("layout.pp=2", "layout.dp_replicate=1", "layout.microbatch=1", "model.dim=256")
    job = prepare_job(own, clean_environ())
    setting = cost_inputs_on(own, job.machine, job.layout)
    first, last = (memory(setting, job.layout, place).allocated for place in (0, 1))
    assert abs(first - last) > 1000
    monkeypatch.setattr(checks, "memory_of_machine", lambda: (0, first + last + 1))
    prepare_job(own, clean_environ())
    monkeypatch.setattr(checks, "memory_of_machine", lambda: (0, first + last - 1))
    with pytest.raises(ConfigError, match=r"on all ranks of this machine; .* are free"):
        prepare_job(own, clean_environ())


def test_a_refusal_leaves_no_run_folder(config, tmp_path):
    with pytest.raises(DataError):
        prepare_job(config("data.source=nowhere.txt"), clean_environ())
    assert runs_of(tmp_path) == []


def resumed(config, *overrides, before=()):
    """The job of a run of 20 steps, of which it has done ten, that goes on."""
    job = prepare_job(config("train.steps=20", *before), clean_environ())
    create(job)
    step = job.folder.path / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    return replace(job, config=load_config(job.folder.config, overrides), resume=True)


def test_a_run_that_goes_on_for_longer_says_how_its_rate_changes(config):
    job = resumed(config, "train.steps=40")
    told = next(resume_notes(job))
    then = learning_rate(10, 20, load_config(job.folder.config).optimizer)
    now = learning_rate(11, 40, job.config.optimizer)
    assert told == (
        "train.steps was 20, is 40, optimizer.warmup_steps was 2, is 4: the learning rate was "
        f"{then:.2e} at step 10, and is {now:.2e} next. optimizer.schedule_steps=20 keeps the "
        "schedule"
    )
    assert told in list(run_notes(job, clean_environ()))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), None),
        (("train.steps=40", "optimizer.schedule_steps=20"), None),
        (("optimizer.lr=0.1",), "optimizer.lr was 0.003, is 0.1: the learning rate was"),
        (("train.steps=15",), "train.steps was 20, is 15"),
        (("train.log_every=2",), None),
    ],
)
def test_only_what_changes_the_rate_is_said(config, overrides, said):
    told = next(resume_notes(resumed(config, *overrides)), None)
    assert told is None if said is None else told.startswith(said)


def test_a_run_that_ends_sooner_derives_its_warm_up_again(config):
    job = resumed(config, "train.steps=120", before=("train.steps=400",))
    assert job.config.optimizer.warmup_steps == 12  # not the 40 of 400 steps
    assert job.config.origins["optimizer.warmup_steps"].startswith("derived: train.steps")
    assert "optimizer.warmup_steps was 40, is 12" in next(resume_notes(job))
    again = replace(job, config=load_config(job.folder.config))
    assert again.config.optimizer.warmup_steps == 40


def test_a_warm_up_that_was_given_stays_and_is_said_not_to_fit(config):
    given = ("train.steps=400", "optimizer.warmup_steps=40")
    job = resumed(config, "train.steps=15", before=given)
    assert job.config.optimizer.warmup_steps == 40
    assert any("does not reach optimizer.lr" in told for told in resume_notes(job))


def test_what_follows_from_a_time_limit_follows_from_a_new_one(config):
    job = resumed(config, "cluster.timeout=60")
    assert job.config.cluster.hang == 30
    job = resumed(config, "cluster.timeout=60", before=("cluster.timeout=300", "log.name=other"))
    assert job.config.cluster.hang == 30


def test_a_constant_rate_goes_on_without_a_word(config):
    job = resumed(config, "train.steps=40", before=("optimizer.schedule=constant",))
    assert not list(resume_notes(job))


def test_the_lowest_rate_stays_after_the_schedule():
    spec = load_config(None, ["optimizer.schedule_steps=20", "train.steps=40"]).optimizer
    rates = [learning_rate(step, 40, spec) for step in range(1, 41)]
    assert rates[19:] == [pytest.approx(spec.lr * spec.min_lr_ratio)] * 21
    assert rates[18] > rates[19]


def test_more_ranks_than_cores_are_noted(config):
    cores = len(os.sched_getaffinity(0))
    own = config(f"layout.dp_replicate={2 * cores}", f"train.batch={2 * cores}")
    job = prepare_job(own, clean_environ())
    (told,) = [text for text in run_notes(job, clean_environ()) if "cores" in text]
    assert told.endswith(f"has {2 * cores} ranks on this machine, which share {cores} cores")


@pytest.mark.parametrize(
    ("hard", "code"),
    [pytest.param(None, 0, marks=pytest.mark.slow), (36, 2)],  # a whole run
    ids=["raised", "too low"],
)
def test_open_files_are_counted_before_the_start(tmp_path, hard, code):
    """Ranks whose connections find no file otherwise fail one after the other, in gloo's words."""

    def limit():
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (36, most if hard is None else hard))

    words = [*TINY, "layout.dp_replicate=2", "train.steps=1", f"data.cache={tmp_path / 'cache'}"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", *words],
        cwd=tmp_path,
        env=clean_environ(),
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert "needs about 48 open files and connections a rank" in done.stderr
        assert "but the limit is 36. ulimit -n 48" in done.stderr
        assert not (tmp_path / "runs").exists()
