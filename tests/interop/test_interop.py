"""Configs of other systems: every key has its verdict, every number its arithmetic."""

import json

import pytest

from meshwright.errors import ConfigError
from meshwright.interop.flat import read_arguments
from meshwright.interop.import_report import VERDICTS
from meshwright.interop.importing import detect_system, import_files
from meshwright.interop.table import load_table
from meshwright.spec.loading import KEYS, build_config, load_config

BATCH = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
DS = {
    **BATCH,
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
ARGS = """#!/bin/bash
GPUS=4   # a comment
MODEL_ARGS=(
    --num-layers 2
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --ffn-hidden-size 96 --vocab-size 300
)
MODEL_ARGS+=("--group-query-attention --num-query-groups 2")
torchrun --nproc_per_node $GPUS pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size 2 --use-distributed-optimizer --bf16 --lr 3e-4 --min-lr 3e-5 \\
    --global-batch-size 16 --micro-batch-size 2 --train-samples 1600 --lr-warmup-samples 160
"""


def imported(tmp_path, content, name="ds.json", **options):
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return import_files([file], **options)


def config_of(found):
    assert not found.report.refused, [(e.key, e.note) for e in found.report.refused]
    return build_config({section: dict(values) for section, values in found.given.items()})


def entry(found, key):
    return next(e for e in found.report.entries if e.key == key)


def leaves(content):
    for value in content.values():
        yield from leaves(value) if isinstance(value, dict) else [value]


def test_deepspeed(tmp_path):
    found = imported(tmp_path, DS, devices=4, is_fixed=True)
    config = config_of(found)
    assert (config.train.batch, config.layout.microbatch) == (32, 4)
    assert (config.layout.zero, config.layout.dp_shard, config.layout.dp_replicate) == (2, 4, 1)
    assert config.layout.offload == "optimizer"
    assert (config.train.precision, config.train.clip_norm) == ("bf16", 0.5)
    # What the file leaves out is DeepSpeed's default, not Meshwright's
    assert config.optimizer.betas == (0.9, 0.999)
    assert (config.optimizer.schedule, config.optimizer.min_lr_ratio) == ("cosine", 0.0001)
    assert (config.train.steps, config.optimizer.warmup_steps) == (50, 5)
    assert config.log.wandb == "deepspeed"
    assert entry(found, "fp16.hysteresis").verdict == "ignored"
    assert config.origins["train.clip_norm"] == "ds.json: gradient_clipping"


def test_every_key_has_one_verdict(tmp_path):
    found = imported(tmp_path, DS, devices=4, is_fixed=True)
    assert len(found.report.entries) == len(list(leaves(DS))) == found.report.keys
    assert sum(found.report.count(verdict) for verdict in VERDICTS) == found.report.keys
    assert all(e.to or e.note for e in found.report.entries)


ARITHMETIC = {
    # total, micro, accumulation, devices -> batch, microbatch, ranks; None: contradictory
    (32, 4, 2, 4): (32, 4, 4),
    (32, 4, None, 4): (32, 4, 4),
    (32, None, 2, 4): (32, 4, 4),
    (None, 4, 2, 4): (32, 4, 4),
    (None, 4, None, 4): (16, 4, 4),
    (32, None, None, 4): (32, 8, 4),
    (32, 4, 2, 2): None,
    (30, 4, None, 2): None,
    (2, None, None, 4): None,
}


@pytest.mark.parametrize("sizes", ARITHMETIC)
def test_batch_arithmetic(tmp_path, sizes):
    names = [*BATCH, "gradient_accumulation_steps"]
    content = {name: n for name, n in zip(names, sizes, strict=False) if n is not None}
    found = imported(tmp_path, content, devices=sizes[3], is_fixed=True)
    wanted = ARITHMETIC[sizes]
    if wanted is None:
        assert {e.verdict for e in found.report.refused} == {"contradictory"}
        assert {e.key for e in found.report.refused} == set(content)
        return
    config = config_of(found)
    layout = config.layout
    assert (config.train.batch, layout.microbatch, layout.dp_replicate) == wanted


def test_contradiction_shows_all_numbers(tmp_path):
    content = {**BATCH, "gradient_accumulation_steps": 2}
    found = imported(tmp_path, content, devices=2, is_fixed=True)
    assert found.report.refused[0].note == (
        "train_batch_size = 32 is not train_micro_batch_size_per_gpu = 4 x "
        "gradient_accumulation_steps = 2 x 2 data-parallel ranks (2 devices / (pp 1 x cp 1 x tp 1))"
        " = 16; nearest: train_batch_size = 16"
    )
    # Unless devices are given, the three sizes say how many ranks there are
    found = imported(tmp_path, content, devices=2)
    assert config_of(found).layout.dp_replicate == 4
    # and a batch that is given has the last word
    overrides = ["train.batch=8", "layout.microbatch=4"]
    found = imported(tmp_path, content, devices=2, is_fixed=True, overrides=overrides)
    assert config_of(found).train.batch == 8


def test_auto_comes_from_the_base(tmp_path):
    base = tmp_path / "base.toml"
    base.write_text("[train]\nbatch = 24\nclip_norm = 0.3\n[optimizer]\nlr = 0.01\n")
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "fp16": {"enabled": "auto"},
    }
    found = imported(tmp_path, content, base=base, devices=2)
    config = config_of(found)
    assert (config.train.batch, config.train.clip_norm, config.optimizer.lr) == (24, 0.3, 0.01)
    assert entry(found, "gradient_clipping").note.endswith("train.clip_norm = 0.3")
    assert {entry(found, key).verdict for key in ("train_batch_size", "fp16.enabled")} == {
        "honoured"
    }


def test_auto_is_the_default_here_where_the_base_says_nothing(tmp_path):
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    warms = dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "cos_min_ratio"), "auto")
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, **warms}},
        "steps_per_print": 2000,
    }
    found = imported(tmp_path, content, devices=2)
    config, ours = config_of(found), load_config(None, ["train.steps=50"])
    assert config.optimizer == ours.optimizer
    assert config.train == ours.train
    filled = {one.key for one in found.report.filled}
    assert not any(key.startswith("optimizer.") for key in filled - {"optimizer.momentum"})
    assert "train.clip_norm" not in filled
    note = entry(found, "optimizer.params.betas").note
    assert note == "the default: optimizer.betas = (0.9, 0.95)"
    assert entry(found, "steps_per_print").verdict == "ignored"
    # What is left out is DeepSpeed's default, as before.
    left = imported(tmp_path, {"optimizer": {"type": "AdamW"}}, devices=2)
    assert config_of(left).optimizer.betas == (0.9, 0.999)
    assert config_of(left).train.clip_norm == 0


def test_zero_shards_over_the_data_ranks_of_the_base(tmp_path):
    base = tmp_path / "base.toml"
    base.write_text("[layout]\ndp_replicate = 2\n")
    zero = {"zero_optimization": {"stage": 2}}
    for content in (zero, {**zero, **BATCH}):
        layout = config_of(imported(tmp_path, content, base=base, devices=2)).layout
        assert (layout.dp_replicate, layout.dp_shard, layout.zero) == (1, 2, 2)
    # --devices counts more than the base, an override more than both
    options = {"base": base, "devices": 8, "is_fixed": True}
    layout = config_of(imported(tmp_path, {**zero, **BATCH}, **options)).layout
    assert (layout.dp_replicate, layout.dp_shard) == (1, 8)
    options["overrides"] = ["layout.dp_shard=4", "layout.dp_replicate=1"]
    layout = config_of(imported(tmp_path, {**zero, **BATCH}, **options)).layout
    assert (layout.dp_replicate, layout.dp_shard) == (1, 4)


REFUSED = {
    "optimizer.type": ({"optimizer": {"type": "Lamb"}}, "optimizer.name=adamw"),
    "scheduler.type": ({"scheduler": {"type": "OneCycle"}}, "optimizer.schedule=cosine"),
    "amp.enabled": ({"amp": {"enabled": True}}, None),
    "sparse_attention.mode": ({"sparse_attention": {"mode": "fixed"}}, None),
    "gradient_cliping": ({"gradient_cliping": 1.0}, None),
    "elasticity.enabled": ({"elasticity": {"enabled": True}}, None),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_train_something_else_is_refused(tmp_path, key):
    content, override = REFUSED[key]
    assert [e.key for e in imported(tmp_path, content).report.refused] == [key]
    assert not imported(tmp_path, content, accepted=[key]).report.refused
    if override:
        assert not imported(tmp_path, content, overrides=[override]).report.refused


def test_unknown_key_names_the_nearest(tmp_path):
    found = imported(tmp_path, {"gradient_cliping": 1.0})
    assert entry(found, "gradient_cliping").note.endswith("nearest known: gradient_clipping")


def test_both_precisions_contradict(tmp_path):
    content = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    found = imported(tmp_path, content)
    assert [e.verdict for e in found.report.refused] == ["contradictory"] * 2


@pytest.mark.parametrize("section", ["fp16", "bf16", "torch_autocast", "wandb"])
@pytest.mark.parametrize("value", ["yes", 1])
def test_a_switch_is_true_or_false(tmp_path, section, value):
    found = imported(tmp_path, {**BATCH, section: {"enabled": value}})
    (one,) = found.report.refused
    assert (one.key, one.verdict) == (f"{section}.enabled", "contradictory")
    assert one.note == f"{value!r} must be true or false"


def test_sections_that_are_off_do_not_matter(tmp_path):
    content = {
        "elasticity": {"enabled": False, "max_train_batch_size": 9},
        "curriculum_learning": {"curriculum_type": "seqlen"},
    }
    report = imported(tmp_path, content).report
    assert not report.refused
    assert report.count("ignored") == 2


def test_overrides_take_the_place_of_what_the_report_says(tmp_path):
    """A key that an override settles is ignored, and nothing follows from what it leaves out."""
    over = ["train.batch=64", "train.clip_norm=1", "optimizer.lr=0.1", "optimizer.betas=[0.8,0.9]"]
    auto = {"type": "Adam", "params": {"lr": "auto"}}
    content = {**BATCH, "gradient_clipping": 0.5, "optimizer": auto}
    found = imported(tmp_path, content, devices=4, is_fixed=True, overrides=over)
    told = {key: entry(found, key) for key in ("train_batch_size", "gradient_clipping")}
    assert {one.verdict for one in told.values()} == {"ignored"}
    assert told["train_batch_size"].note == "given: train.batch = 64"
    assert told["gradient_clipping"].note == "given: train.clip_norm = 1"
    assert entry(found, "train_micro_batch_size_per_gpu").verdict == "honoured"
    assert entry(found, "optimizer.params.lr").note == "given: optimizer.lr = 0.1"
    filled = {one.key for one in found.report.filled}
    assert "optimizer.eps" in filled
    assert "optimizer.betas" not in filled
    lamb = {"optimizer": {"type": "Lamb"}}
    found = imported(tmp_path, lamb, overrides=["optimizer.name=sgd"])
    assert entry(found, "optimizer.type").note == 'given: optimizer.name = "sgd"'


def test_megatron(tmp_path):
    config = config_of(imported(tmp_path, ARGS, "run.sh"))
    model, layout = config.model, config.layout
    assert (model.family, model.n_kv_heads, model.ffn_dim) == ("llama", 2, 96)
    assert (model.vocab_size, model.pad_vocab_to_multiple_of) == (300, 256)  # 128 x tp 2
    assert (layout.tp, layout.zero, layout.dp_shard) == (2, 1, 2)
    assert (config.train.batch, layout.microbatch, config.train.steps) == (16, 2, 100)
    assert (config.optimizer.warmup_steps, config.optimizer.schedule) == (10, "linear")
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.cluster.devices_per_node == 4


def test_megatron_defaults_that_meshwright_lacks(tmp_path):
    text = ARGS.replace(" --attention-dropout 0", "").replace("--position-embedding-type rope", "")
    refused = {e.key: e for e in imported(tmp_path, text, "run.sh").report.refused}
    assert set(refused) == {"attention-dropout", "position-embedding-type"}
    assert all(e.is_default for e in refused.values())


@pytest.mark.parametrize(
    ("words", "activation"),
    [("", "gelu_tanh"), ("--no-bias-gelu-fusion", "gelu"), ("--disable-bias-linear", "gelu")],
)
def test_megatron_s_gelu_is_that_of_its_kernel(tmp_path, words, activation):
    text = ARGS.replace("--normalization RMSNorm --swiglu", words)
    if "--disable" not in words:
        text = text.replace(" --disable-bias-linear", "")
    text = text.replace("--num-query-groups 2", "--num-query-groups 4")
    given = imported(tmp_path, text, "run.sh").given
    assert given["model"]["activation"].value == activation


@pytest.mark.parametrize(
    ("old", "new", "family"),
    [
        ("--swiglu", "--squared-relu", "arcee"),
        ("--swiglu", "--swiglu --rotary-interleaved", "ernie4_5"),
    ],
)
def test_megatron_models_of_other_families_come_back(tmp_path, old, new, family):
    config = imported(tmp_path, ARGS.replace(old, new), "run.sh", devices=16)
    assert config.report.refused == ()
    model = config.given["model"]
    assert model["family"].value == family
    if family == "arcee":
        assert model["activation"].value == "relu2"


def test_megatron_defaults_of_sgd_and_of_wsd(tmp_path):
    given = imported(tmp_path, f"{ARGS} --optimizer sgd", "run.sh").given
    assert given["optimizer"]["momentum"].value == 0.9
    text = f"{ARGS} --lr-decay-style WSD --lr-wsd-decay-iters 20"
    (refused,) = imported(tmp_path, text, "run.sh").report.refused
    assert (refused.key, refused.value) == ("lr-wsd-decay-style", "exponential")
    config_of(imported(tmp_path, f"{text} --lr-wsd-decay-style linear", "run.sh"))


@pytest.mark.parametrize(
    "words",
    [
        "--train-iters 50",  # 1600 samples are 100 steps
        "--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16",
        "--recompute-activations --recompute-granularity full --recompute-method uniform",
        "--lr-warmup-iters 5",
    ],
)
def test_keys_that_set_one_thing_to_two_values_contradict(tmp_path, words):
    found = imported(tmp_path, f"{ARGS} {words}", "run.sh").report.refused
    assert len(found) >= 2
    assert {one.verdict for one in found} == {"contradictory"}
    assert "cannot be both" in found[0].note


def test_deepspeed_s_keys_that_set_one_thing_to_two_values_contradict(tmp_path):
    parallel = {"tensor_parallel": {"autotp_size": 2, "tp_size": 1}}
    keys = {one.key for one in imported(tmp_path, DS | parallel).report.refused}
    assert keys >= {"tensor_parallel.autotp_size", "tensor_parallel.tp_size"}


def test_deepspeed_s_peak_rate_is_the_schedule_s_default(tmp_path):
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}}
    found = imported(tmp_path, DS | {"scheduler": schedule})
    assert found.given["optimizer"]["lr"].value == 0.001
    assert entry(found, "optimizer.params.lr").verdict == "ignored"


def test_weight_decay_through_momentum_is_refused(tmp_path):
    params = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    sgd = {"optimizer": {"type": "SGD", "params": params}}
    (refused,) = imported(tmp_path, DS | sgd).report.refused
    assert refused.key == "optimizer.params.weight_decay"
    params["momentum"] = 0.0
    assert not imported(tmp_path, DS | sgd).report.refused


def test_lion_keeps_its_own_default_of_betas(tmp_path):
    lion = {"type": "Lion", "params": {"lr": 1e-4}}
    config = config_of(imported(tmp_path, DS | {"optimizer": lion}))
    assert (config.optimizer.name, config.optimizer.betas) == ("lion", (0.9, 0.99))
    lion["params"]["betas"] = [0.95, 0.98]
    config = config_of(imported(tmp_path, DS | {"optimizer": lion}))
    assert config.optimizer.betas == (0.95, 0.98)


def test_states_in_bf16_are_imported(tmp_path):
    narrow = DS | {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
    assert config_of(imported(tmp_path, narrow)).optimizer.state_dtype == "bf16"
    assert config_of(imported(tmp_path, DS)).optimizer.state_dtype == "fp32"
    assert config_of(imported(tmp_path, narrow)).train.master == "fp32"
    masters = {"bf16_master_weights_and_grads": True} | narrow["bf16"]
    config = config_of(imported(tmp_path, DS | {"bf16": masters}))
    assert (config.train.master, config.optimizer.state_dtype) == ("none", "bf16")
    flags = " --use-precision-aware-optimizer --exp-avg-dtype bf16"
    both = ARGS.rstrip() + flags + " --exp-avg-sq-dtype bf16\n"
    given = imported(tmp_path, both, "run.sh").given
    assert given["optimizer"]["state_dtype"].value == "bf16"
    found = imported(tmp_path, ARGS.rstrip() + flags + "\n", "run.sh")
    assert entry(found, "exp-avg-dtype").verdict == "unsupported"


def test_command_lines():
    found, clashes = read_arguments(
        "A=${B:-7}\nC=$(($A*2))\npython train.py --x $A --y $C --z '1 2' --flag --l 1 2\n"
        "if true; then\n  D=(--x 8)\nfi\ntorchrun ${D[@]}\n",
        "run.sh",
    )
    assert found == {"x": 8, "y": 14, "z": "1 2", "flag": True, "l": [1, 2]}
    assert clashes == {"x": "given as 7 and as 8"}
    with pytest.raises(ConfigError, match="no argument of the form --name value"):
        read_arguments("echo hello", "run.sh")


def test_arguments_that_a_script_computes_are_refused(tmp_path):
    found = imported(tmp_path, ARGS.replace("--bf16", "--bf16 --data-path $1"), "run.sh")
    assert [e.key for e in found.report.refused] == ["data-path"]
    overrides = ["data.source=stdlib"]
    found = imported(tmp_path, ARGS + " --data-path $1", "run.sh", overrides=overrides)
    assert config_of(found).data.source == "stdlib"


def test_tables_name_real_keys():
    keys = {f"{name}.{key}" for name, some in KEYS.items() for key in some}
    for name in ("deepspeed", "gpt_neox", "megatron", "hf"):
        table = load_table(name)
        for key, row in table.rows.items():
            assert not row.to or row.to in keys, key
            says = row.same or row.ignored or row.to or row.unsupported or row.by_rule
            assert says, key
        assert all(any(key.startswith(f"{s}.") for key in table.rows) for s in table.switched)


def test_files_are_told_apart(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "neox.json").write_text('{"pipe-parallel-size": 1}')
    assert detect_system(tmp_path / "neox.json") == "gpt-neox"
    (tmp_path / "a.txt").write_text("python x.py --num-layers 3")
    (tmp_path / "b.txt").write_text("nothing")
    names = {name: detect_system(tmp_path / name) for name in ("config.json", "ds.json", "a.txt")}
    assert names == {"config.json": "hf", "ds.json": "deepspeed", "a.txt": "megatron"}
    with pytest.raises(ConfigError, match="--from deepspeed"):
        detect_system(tmp_path / "b.txt")
    (tmp_path / "ds.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(ConfigError, match="the key a twice"):
        import_files([tmp_path / "ds.json"])
