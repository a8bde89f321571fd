"""Plans for other trainers: out as their config, and in again as the same layout."""

import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.cost.systems import SYSTEMS
from meshwright.errors import ConfigError
from meshwright.interop.export import differing, layout_of, nest, read_back, written
from meshwright.interop.flat import flatten
from meshwright.interop.importing import import_files
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.trainers import TRAINERS, trainer_named
from meshwright.layout import Layout, broken, unsharded
from meshwright.planner.for_trainer import plan_for
from meshwright.spec.loading import load_config

MODELS = ("llama-3-8b", "qwen3-30b-a3b", "qwen3-8b")
TRAIN = ["train.batch=64", "train.seq_len=4096", "train.precision=bf16"]
CLUSTER = ["cluster.preset=h100-sxm"]
CONFIGS = {name: load_config(None, [f"model.preset={name}", *TRAIN, *CLUSTER]) for name in MODELS}
CHOICES = {
    "pp": (1, 1, 2, 4),
    "dp_replicate": (1, 2, 4),
    "dp_shard": (1, 2, 4),
    "cp": (1, 1, 2),
    "tp": (1, 2, 4),
    "ep": (1, 1, 2, 4),
    "etp": (None, 1),
    "zero": (0, 1, 2, 3),
    "sp": (False, True),
    "cp_kind": ("ring", "ulysses"),
    "schedule": ("1f1b", "interleaved_1f1b", "zbv", "gpipe"),
    "virtual_stages": (1, 2, 4),
    "microbatch": (1, 2, 4),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "params"),
}


@st.composite
def cases(draw):
    """Draw a trainer, a config, and a legal layout that the trainer can run."""
    trainer = trainer_named(draw(st.sampled_from(TRAINERS)))
    config = CONFIGS[draw(st.sampled_from(MODELS))]
    space = draw(st.sampled_from(trainer.spaces))
    values = {
        key: draw(st.sampled_from(space.values.get(key, choices)))
        for key, choices in CHOICES.items()
    }
    layout = Layout(**values)
    assume(not (layout.zero and layout.shard_ranks == 1) and unsharded(layout) is None)
    assume(broken(config.model, config.train, layout) is None)
    assume(trainer.refusal(layout, config.model.n_layers) is None)
    return trainer, config, layout


@pytest.mark.slow
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    derandomize=True,
)
@given(cases())
def test_out_and_in_again_is_the_same_layout(tmp_path_factory, case):
    trainer, config, layout = case
    file = tmp_path_factory.mktemp("plan") / f"plan{trainer.suffix}"
    source = PlanSource(config, layout, 1, layout.world)
    file.write_text(written(trainer, source, str(file)).text)
    model = f"model.preset={config.model.preset}"
    more = [f"layout.microbatch={layout.microbatch}", "train.batch=64"]
    overrides = [model, *(more if trainer.beside else []), "train.seq_len=4096"]
    again = import_files(
        [file],
        overrides=overrides if trainer.name != "megatron" else [],
        devices=layout.world,
        is_fixed=True,
        accepted=["all"],
    )
    assert again.report.system == trainer.name
    assert differing(layout, layout_of(again, layout.world), {}) == {}


@pytest.mark.often(3)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_plan_stays_in_what_the_trainer_can_do(name):
    trainer, config = trainer_named(name), CONFIGS["llama-3-8b"]
    made = plan_for(config, trainer, 5)
    assert made.best is not None
    for one in made.found.ranked:
        assert trainer.refusal(one.layout, config.model.n_layers) is None
        assert one.memory.fits
    assert trainer.priced_as in SYSTEMS
    assert made.setting.system.name == trainer.priced_as
    assert trainer.priced_why or trainer.priced_as.startswith(name[:4])


@pytest.mark.often(1)
@pytest.mark.parametrize("name", TRAINERS)
def test_the_command_writes_a_file_that_like_reads(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["model.preset=llama-3-8b", *TRAIN, *CLUSTER, "--top", "1"]
    file = tmp_path / f"theirs{trainer_named(name).suffix}"
    assert main(["plan", "--for", name, *words, "--save-config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert trainer_named(name).version in shown
    assert str(file) in " ".join(shown.split()) or file.name in shown
    beside = ["layout.microbatch=1"] if trainer_named(name).beside else []
    like = ["plan", "--like", str(file), "--accept", "all", "--json", *words, *beside]
    assert main(like) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["for"]["trainer"] == name
    assert found["like"]["faster"] is None
    assert found["like"]["as_given"]["layout"]["tp"] == found["layout"]["tp"]


@pytest.mark.slow
def test_like_says_on_which_rank_it_does_not_fit_and_what_does(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "70B"\n[training]\nlocal_batch_size = 8\n'
        "seq_len = 8192\n[parallelism]\ntensor_parallel_degree = 8\npipeline_parallel_degree = 2\n"
        '[activation_checkpoint]\nmode = "none"\n'
    )
    words = ["cluster.preset=h100-sxm", "cluster.nodes=4", "--top", "1"]
    main(["plan", "--like", str(file), *words])
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit on pipeline rank 0" in shown
    assert "activation_checkpoint.mode: none -> " in shown
    assert "activations" in shown


def test_what_a_trainer_cannot_say_is_refused(tmp_path):
    config = CONFIGS["llama-3-8b"]

    def write(name, layout, config=config):
        layout = Layout.parse(layout)
        return written(trainer_named(name), PlanSource(config, layout, 1, layout.world), "x")

    with pytest.raises(ConfigError, match=r"layout\.zero = 1 \(it has 2, 3\)"):
        write("torchtitan", "shard8 zero1 mb1")
    with pytest.raises(ConfigError, match=r"layout\.pp = 2 \(it has 1\)"):
        write("accelerate", "shard4 zero3 pp2 1f1b mb1")
    with pytest.raises(ConfigError, match="32 layers in 12 equal stages"):
        write("megatron", "pp4 interleaved_1f1b v3 mb1")
    stated = load_config(
        None, ["model.preset=llama-3-8b", *TRAIN, "train.router_z_loss=0.1", "optimizer.lr=1e-4"]
    )
    with pytest.raises(ConfigError, match=r"cannot say train\.router_z_loss = 0\.1; leave it out"):
        write("torchtitan", "shard8 zero3 mb1", stated)
    narrow = load_config(None, ["model.preset=llama-3-8b", *TRAIN, "optimizer.state_dtype=bf16"])
    with pytest.raises(ConfigError, match=r"cannot say optimizer\.state_dtype"):
        write("deepspeed", "shard8 zero3 mb1", narrow)
    for trainer, layout in (("torchtitan", "shard8 zero3 mb1"), ("megatron", "dp8 mb1")):
        keys = write(trainer, layout, narrow).keys
        read = read_back(trainer_named(trainer), keys, PlanSource(narrow, Layout(), 1, 8))
        assert read.given["optimizer"]["state_dtype"].value == "bf16"
    half = load_config(None, ["model.preset=llama-3-8b", *TRAIN, "train.precision=fp16"])
    with pytest.raises(ConfigError, match="fp16"):
        write("torchtitan", "shard8 zero3 mb1", half)
    pythia = load_config(None, ["model.preset=pythia-1b", *TRAIN])
    with pytest.raises(ConfigError, match="no flavor"):
        write("torchtitan", "shard8 zero3 mb1", pythia)
    with pytest.raises(ConfigError, match="parallel_residual"):
        write("megatron", "dp8 mb1", pythia)
    smaller = load_config(None, ["model.preset=llama-3-8b", "model.n_layers=4", *TRAIN])
    with pytest.raises(ConfigError, match=r"does not say model\.n_layers = 4"):
        write("axolotl", "shard8 zero3 mb1", smaller)


@pytest.mark.parametrize(
    ("trainer", "layout", "rule"),
    [
        ("transformers", "shard8 zero3 mb1", None),
        ("axolotl", "shard8 zero3 mb1", None),
        ("torchtitan", "shard8 zero3 mb1", "torchtitan has no .*int8; nearest: bf16"),
        ("megatron", "dp8 mb1", "Megatron-LM has no .*int8; nearest: bf16"),
        ("deepspeed", "shard8 zero3 mb1", r"cannot say optimizer\.state_dtype"),
    ],
)
def test_moments_in_8_bits_are_written_where_a_trainer_has_them(trainer, layout, rule):
    config = load_config(None, ["model.preset=llama-3-8b", *TRAIN, "optimizer.state_dtype=int8"])
    source = PlanSource(config, Layout.parse(layout), 1, 8)
    if rule is not None:
        with pytest.raises(ConfigError, match=rule):
            written(trainer_named(trainer), source, "x")
        return
    keys = written(trainer_named(trainer), source, "x").keys
    read = read_back(trainer_named(trainer), keys, PlanSource(config, Layout(), 1, 8))
    assert read.given["optimizer"]["state_dtype"].value == "int8"


def test_a_fixed_key_is_kept_or_refused():
    config = load_config(None, ["model.preset=llama-3-8b", *TRAIN, *CLUSTER, "layout.tp=2"])
    made = plan_for(config, trainer_named("torchtitan"), 3)
    assert {one.layout.tp for one in made.found.ranked} == {2}
    config = load_config(None, ["model.preset=llama-3-8b", *TRAIN, *CLUSTER, "layout.pp=2"])
    with pytest.raises(ConfigError, match=r"accelerate 1\.15\.0 has no legal layout"):
        plan_for(config, trainer_named("accelerate"))


def test_flags_that_do_not_go_with_a_trainer_are_refused(capsys):
    assert main(["plan", "--for", "nemo", "--fewest"]) == 2
    assert main(["plan", "--save-config", "x.toml"]) == 2
    assert "--for accelerate" in capsys.readouterr().err


def test_flat_keys_nest_and_flatten():
    keys = {"a.b.c": 1, "a.d": [2], "e": "x"}
    assert flatten(nest(keys)) == keys


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        ("adamw", {"hf": "adamw_torch", "megatron": "adam"}),
        ("lion", {"hf": "lion_32bit", "megatron": None}),
        ("muon", {"hf": None, "megatron": "muon"}),
        ("sgd", {"hf": "sgd", "megatron": "sgd"}),
    ],
)
def test_an_optimizer_has_its_name_elsewhere_or_is_refused(optimizer, names):
    config = load_config(None, [f"optimizer.name={optimizer}"])
    source = PlanSource(config, Layout(), 1, 1)
    for system, name in names.items():
        if name is None:
            with pytest.raises(ConfigError, match=f"{system} has no optimizer.name"):
                source.optimizer_name(system)
        else:
            assert source.optimizer_name(system) == name
