"""Configs of trainers on PyTorch: whose a file is, and the layout that it means."""

import json

import pytest

from meshwright.errors import ConfigError
from meshwright.interop.export import layout_of
from meshwright.interop.import_report import VERDICTS
from meshwright.interop.importing import detect_system, import_files
from meshwright.interop.names import model_names
from meshwright.spec.presets import PRESETS

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 4
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[metrics]
log_freq = 10
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 2
"""
AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
max_steps: 100
warmup_ratio: 0.1
context_parallel_size: 2
fsdp_version: 2
fsdp_config:
  reshard_after_forward: false
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
max_length: 2048
bf16: true
max_steps: 50
output_dir: output
fsdp: full_shard auto_wrap
"""
SWIFT = """
NPROC_PER_NODE=8 megatron sft \\
    --model Qwen/Qwen3-30B-A3B \\
    --tensor_model_parallel_size 2 \\
    --expert_model_parallel_size 4 \\
    --micro_batch_size 1 \\
    --global_batch_size 16 \\
    --sequence_parallel true \\
    --recompute_granularity full \\
    --recompute_method uniform \\
    --recompute_num_layers 1 \\
    --max_length 4096 \\
    --lr 1e-5 \\
    --save output
"""
BRIDGE = """
recipe: llama3_70b_pretrain_config
model:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 5
  sequence_parallel: true
  seq_length: 8192
train:
  global_batch_size: 32
  micro_batch_size: 1
ddp:
  use_distributed_optimizer: true
mixed_precision: bf16_mixed
"""
PRIME = """
max_steps = 100
[model]
name = "Qwen/Qwen3-0.6B"
dp_replicate = 2
cp = 2
[model.ac]
mode = "full"
[data]
seq_len = 4096
batch_size = 32
micro_batch_size = 2
[optim]
lr = 2e-5
"""
NATIVE = json.dumps(
    {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "distributed_config": {"tp_size": 2, "fsdp_size": 4, "dp_replicate_size": 2},
    }
)
COMMAND = (
    "torchrun --nproc_per_node 8 sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --bf16 True "
    "--per_device_train_batch_size 4 --gradient_checkpointing True --max_length 1024"
)
# The file, its text, whose it is, and the label of its layout on 16 devices (8 for a command line).
CASES = {
    "run.toml": (
        TITAN,
        "torchtitan",
        "dp2 shard2 zero2 tp2 sp pp2 interleaved_1f1b v2 recompute-selective",
    ),
    "accelerate.yaml": (ACCELERATE, "accelerate", "dp2 shard4 zero3 tp2 recompute-full"),
    "axolotl.yml": (AXOLOTL, "axolotl", "shard8 zero2 cp2-ring mb2 recompute-full"),
    "trl.yaml": (TRL, "transformers", "shard16 zero3 mb2 recompute-full"),
    "swift.sh": (SWIFT, "ms-swift", "shard8 zero1 tp2 sp ep4 recompute-full"),
    "bridge.yaml": (BRIDGE, "nemo", "shard2 zero1 tp4 sp pp2 interleaved_1f1b v5"),
    "sft.toml": (
        PRIME,
        "prime-rl",
        "dp2 shard4 zero3 cp2-ring mb2 recompute-full offload-optimizer",
    ),
    "arguments.json": (NATIVE, "transformers", "dp2 shard4 zero3 tp2 mb2"),
    "train.sh": (COMMAND, "transformers", "dp8 mb4 recompute-full"),
}
GIVEN = {
    "accelerate.yaml": ["model.preset=llama-3-8b", "train.batch=32", "layout.microbatch=1"],
    "arguments.json": ["model.preset=llama-3-8b"],
}


def imported(tmp_path, name, text, *, devices=16, overrides=(), accepted=()):
    file = tmp_path / name
    file.write_text(text)
    return import_files(
        [file], devices=devices, is_fixed=True, overrides=overrides, accepted=accepted
    )


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_detected_and_means_a_layout(tmp_path, name):
    text, system, label = CASES[name]
    devices = 8 if name == "train.sh" else 16
    found = imported(tmp_path, name, text, devices=devices, overrides=GIVEN.get(name, ()))
    assert detect_system(tmp_path / name) == system == found.report.system
    assert not found.report.refused, [(e.key, e.note) for e in found.report.refused]
    assert {entry.verdict for entry in found.report.entries} <= set(VERDICTS)
    layout = layout_of(found, devices)
    shown = f"{label} mb1" if "mb" not in label and layout.microbatch == 1 else label
    assert set(shown.split()) == set(layout.label.split()) | ({"mb1"} & set(shown.split()))


def test_every_key_of_a_file_is_reported_once_in_its_own_words(tmp_path):
    found = imported(tmp_path, "bridge.yaml", BRIDGE)
    keys = [entry.key for entry in found.report.entries if not entry.is_default]
    assert len(keys) == len(set(keys)) == 10
    assert "model.virtual_pipeline_model_parallel_size" in keys
    assert "train.global_batch_size" in keys


def test_a_key_that_changes_memory_is_refused_until_it_is_settled(tmp_path):
    text = TITAN.replace('selective_ac_option = "op"', 'selective_ac_option = "2"')
    found = imported(tmp_path, "run.toml", text)
    assert [e.key for e in found.report.refused] == ["activation_checkpoint.selective_ac_option"]
    settled = imported(tmp_path, "run.toml", text, overrides=["layout.recompute=full"])
    assert not settled.report.refused


@pytest.mark.parametrize(
    ("name", "old", "new", "key"),
    [
        ("run.toml", "= -1", "= 3", "training.local_batch_size"),
        ("run.toml", '"Interleaved1F1B"', '"1F2B"', "parallelism.pipeline_parallel_schedule"),
        ("axolotl.yml", "context_parallel_size: 2", "context_parallel_size: 3", "dp_shard_size"),
        ("trl.yaml", "bf16: true", "bf16: true\nfp16: true", "fp16"),
        ("trl.yaml", "max_length: 2048", "load_in_4bit: true", "load_in_4bit"),
        ("trl.yaml", "max_length", "max_lengths", "max_lengths"),
        ("sft.toml", '"Qwen/Qwen3-0.6B"', '"nobody/knows"', "model.name"),
        ("swift.sh", "--lr 1e-5", "--optimizer adaptive_muon", "optimizer"),
    ],
)
def test_contradictions_and_unknown_keys_are_refused(tmp_path, name, old, new, key):
    text = CASES[name][0]
    assert old in text
    found = imported(tmp_path, name, text.replace(old, new))
    if key == "training.local_batch_size":  # 2 x 3 x 2 x 2 ranks are not 16
        with pytest.raises(ConfigError, match="needs a multiple of 24 ranks"):
            layout_of(found, 16)
        return
    assert key in [entry.key for entry in found.report.refused]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adamw_torch_fused", "fp32"),
        ("paged_adamw_32bit", "fp32"),
        ("adamw_8bit", "int8"),
        ("paged_adamw_8bit", "int8"),
        ("adamw_bnb_8bit", "int8"),
        ("adamw_torch_8bit", "int8"),
        ("ademamix_8bit", None),
    ],
)
def test_names_of_transformers_say_the_bits_of_states(tmp_path, name, dtype):
    text = AXOLOTL.replace("optimizer: adamw_torch", f"optimizer: {name}")
    found = imported(tmp_path, "axolotl.yml", text)
    reasons = {entry.key: entry.note for entry in found.report.refused}
    if dtype is None:
        assert "no other optimizer; nearest: adamw_torch" in reasons["optimizer"]
    else:
        assert "optimizer" not in reasons
        assert found.given["optimizer"]["name"].value == "adamw"
        stated = found.given["optimizer"].get("state_dtype")
        assert ("fp32" if stated is None else stated.value) == dtype


def test_torchtitan_s_implementation_says_the_dtype_of_states(tmp_path):
    for implementation, dtype in (("fused", None), ("fused_opt_states_bf16", "bf16")):
        line = f'name = "AdamW"\nimplementation = "{implementation}"'
        found = imported(tmp_path, "run.toml", TITAN.replace('name = "AdamW"', line))
        dtypes = found.given["optimizer"].get("state_dtype")
        assert (dtypes.value if dtypes else None) == dtype


def test_a_model_that_a_file_names_is_found_or_asked_for(tmp_path):
    text = AXOLOTL.replace("NousResearch/Meta-Llama-3-8B", str(tmp_path / "model"))
    refused = imported(tmp_path, "axolotl.yml", text).report.refused
    assert [entry.key for entry in refused] == ["base_model"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    found = imported(tmp_path, "axolotl.yml", text)
    assert found.given["model"]["init_from"].value == str(tmp_path / "model")
    bare = imported(tmp_path, "accelerate.yaml", ACCELERATE, overrides=["train.batch=32"])
    assert "(model)" in [entry.key for entry in bare.report.refused]


def test_names_of_models_are_of_presets_and_unique():
    names = model_names()
    assert names.keys() <= PRESETS.keys()
    repositories = [name.lower() for each in names.values() for name in each.hub]
    assert len(repositories) == len(set(repositories))
    flavors = [each.torchtitan for each in names.values() if each.torchtitan]
    assert len(flavors) == len(set(flavors))


def test_a_file_of_nobody_is_refused_with_the_names(tmp_path):
    (tmp_path / "x.toml").write_text("[tool]\nname = 1\n")
    with pytest.raises(ConfigError, match="--from torchtitan"):
        detect_system(tmp_path / "x.toml")
