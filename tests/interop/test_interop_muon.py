"""Muon and states in 8 bits under the names of other systems."""

import pytest

from meshwright.errors import ConfigError
from meshwright.interop.export import read_back, written
from meshwright.interop.importing import import_files
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.trainers import trainer_named
from meshwright.layout import Layout
from meshwright.spec.loading import load_config

MODEL = (
    "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 64 --normalization RMSNorm "
    "--swiglu --position-embedding-type rope --disable-bias-linear --vocab-size 300 "
    "--untie-embeddings-and-output-weights --ffn-hidden-size 96 --bf16 --lr 3e-4 --train-iters 10 "
    "--global-batch-size 16 --micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0"
)
MOONSHOT = "--optimizer muon --muon-extra-scale-factor 0.2 --muon-coefficient-type simple"


def of_megatron(tmp_path, words):
    file = tmp_path / "run.sh"
    file.write_text(f"{MODEL} {words}\n")
    return import_files([file])


def refused(imported):
    return {entry.key for entry in imported.report.refused}


def optimizer_of(imported):
    return {name: origin.value for name, origin in imported.given["optimizer"].items()}


def test_megatron_s_muon_has_its_own_defaults(tmp_path):
    imported = of_megatron(tmp_path, MOONSHOT)
    assert refused(imported) == set()
    optimizer = optimizer_of(imported)
    assert (optimizer["name"], optimizer["scale"]) == ("muon", "match_rms_adamw")
    assert (optimizer["momentum"], optimizer["ns_steps"]) == (0.95, 5)
    assert optimizer["nesterov"] is False  # without the flag
    assert optimizer["ns_precision"] == "bf16"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--muon-nesterov", "nesterov", True),
        ("--muon-use-nesterov", "nesterov", True),
        ("--muon-momentum 0.9", "momentum", 0.9),
        ("--muon-num-ns-steps 8", "ns_steps", 8),
        ("--muon-fp32-matmul-prec highest", "ns_precision", "fp32"),
    ],
)
def test_megatron_s_arguments_of_muon_set_ours(tmp_path, words, key, value):
    imported = of_megatron(tmp_path, f"{MOONSHOT} {words}")
    assert refused(imported) == set()
    assert optimizer_of(imported)[key] == value


def test_the_scale_of_keller_jordan_has_another_name_there(tmp_path):
    words = "--optimizer muon --muon-coefficient-type simple --muon-scale-mode shape_scaling"
    imported = of_megatron(tmp_path, words)
    assert refused(imported) == set()
    assert optimizer_of(imported)["scale"] == "original"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--optimizer muon --muon-coefficient-type simple", "muon-extra-scale-factor"),
        ("--optimizer muon --muon-extra-scale-factor 0.2", "muon-coefficient-type"),
        (f"{MOONSHOT} --muon-scale-mode unit_rms_norm", "muon-scale-mode"),
        (f"{MOONSHOT} --muon-fp32-matmul-prec high", "muon-fp32-matmul-prec"),
        (f"{MOONSHOT} --muon-scalar-optimizer lion", "muon-scalar-optimizer"),
        (f"{MOONSHOT} --tensor-model-parallel-size 2", "muon-tp-mode"),
        (f"{MOONSHOT} --muon-no-split-qkv", "muon-no-split-qkv"),
        (f"{MOONSHOT} --muon-of-tomorrow 3", "muon-of-tomorrow"),
        ("--optimizer adaptive_muon", "optimizer"),
    ],
)
def test_megatron_s_other_muons_are_refused(tmp_path, words, key):
    assert refused(of_megatron(tmp_path, words)) == {key}


def test_whole_matrices_are_ours_on_every_layout(tmp_path):
    words = f"{MOONSHOT} --tensor-model-parallel-size 2 --muon-tp-mode duplicated"
    assert refused(of_megatron(tmp_path, words)) == set()


def test_arguments_of_muon_have_no_effect_on_adam(tmp_path):
    words = "--optimizer adam --muon-momentum 0.5 --muon-scale-mode unit_rms_norm"
    imported = of_megatron(tmp_path, words)
    assert refused(imported) == set()
    assert "momentum" not in optimizer_of(imported)


def test_dist_muon_shards_states(tmp_path):
    words = MOONSHOT.replace("muon --", "dist_muon --")
    imported = of_megatron(tmp_path, words)
    assert refused(imported) == set()
    assert optimizer_of(imported)["name"] == "muon"
    assert imported.given["layout"]["zero"].value == 1


def test_a_plan_with_muon_comes_back_from_megatron():
    keys = ["model.preset=llama-3-8b", "train.batch=64", "train.precision=bf16"]
    keys += ["optimizer.name=muon", "optimizer.momentum=0.9", "optimizer.scale=original"]
    config = load_config(None, [*keys, "optimizer.ns_steps=6", "optimizer.ns_precision=fp32"])
    megatron = trainer_named("megatron")

    def source_of(label):
        return PlanSource(config, Layout.parse(label), 1, 8)

    source = source_of("shard4 zero1 tp2 mb1")
    imported = read_back(megatron, written(megatron, source, "x").keys, source)
    assert refused(imported) == set()
    optimizer = optimizer_of(imported)
    for name in ("name", "momentum", "nesterov", "ns_steps", "ns_precision", "scale"):
        assert optimizer[name] == getattr(config.optimizer, name)
    with pytest.raises(ConfigError, match="Megatron's Muon shards optimizer states only"):
        written(megatron, source_of("shard8 zero3 mb1"), "x")


@pytest.mark.parametrize("name", ["nemo", "ms-swift", "torchtitan", "transformers"])
def test_a_trainer_without_our_muon_gets_no_plan_of_it(name):
    keys = ["model.preset=llama-3-8b", "train.batch=64", "train.precision=bf16"]
    config = load_config(None, [*keys, "optimizer.name=muon"])
    label = "shard8 zero3 mb1" if name in ("torchtitan", "transformers") else "shard8 zero1 mb1"
    with pytest.raises(ConfigError, match=r"optimizer\.name"):
        written(trainer_named(name), PlanSource(config, Layout.parse(label), 1, 8), "x")


def of_deepspeed(tmp_path, **params):
    file = tmp_path / "ds.json"
    content = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    content["optimizer"] = {"type": "Muon", "params": params}
    file.write_text(str(content).replace("'", '"'))
    return import_files([file])


def test_deepspeed_s_adam_beside_muon_has_other_defaults(tmp_path):
    imported = of_deepspeed(tmp_path, lr=0.01, ns_method="gram")
    assert refused(imported) == set()
    optimizer = optimizer_of(imported)
    assert (optimizer["scale"], optimizer["lr"]) == ("original", 0.01)
    assert (list(optimizer["betas"]), optimizer["eps"]) == ([0.9, 0.95], 1e-10)
    given = optimizer_of(of_deepspeed(tmp_path, lr=0.01, betas=[0.8, 0.9], eps=1e-7))
    assert (list(given["betas"]), given["eps"]) == ([0.8, 0.9], 1e-7)


@pytest.mark.parametrize(
    ("params", "rate"),
    [
        ({"muon_lr": 0.01, "adam_lr": 0.01}, 0.01),
        ({"muon_lr": 0.01, "adam_lr": 0.01, "lr": 0.5}, 0.01),
        ({"muon_lr": 0.01, "lr": 0.01}, 0.01),
        ({"muon_lr": 0.02, "lr": 0.01}, None),
        ({"muon_lr": 0.02, "adam_lr": 0.01}, None),
        ({"momentum": 0.9}, None),  # 0.02 of Muon, 3e-4 of Adam
    ],
)
def test_two_rates_of_deepspeed_s_muon_are_one_or_refused(tmp_path, params, rate):
    imported = of_deepspeed(tmp_path, **params)
    if rate is None:
        assert refused(imported) & {f"optimizer.params.{name}" for name in ("lr", "muon_lr")}
    else:
        assert refused(imported) == set()
        assert optimizer_of(imported)["lr"] == rate


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("lion_8bit", "lion_32bit"),
        ("paged_lion_8bit", "lion_32bit"),
        ("adamw_torch_4bit", "adamw_torch_8bit"),
        ("muon", "adamw_torch"),
    ],
)
def test_optimizers_in_a_form_that_is_not_there_name_the_nearest(tmp_path, name, nearest):
    file = tmp_path / "axolotl.yml"
    file.write_text(
        "base_model: meta-llama/Meta-Llama-3-8B\nsequence_len: 2048\nmicro_batch_size: 2\n"
        f"gradient_accumulation_steps: 2\nmax_steps: 10\nbf16: true\noptimizer: {name}\n"
        "learning_rate: 1e-4\n"
    )
    notes = {entry.key: entry.note for entry in import_files([file]).report.refused}
    assert f"nearest: {nearest}" in notes["optimizer"]
