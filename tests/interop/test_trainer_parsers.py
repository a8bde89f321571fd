"""The trainers' own parsers take the files that `plan --for` writes: three plans for each.

Without a trainer's package its tests are skipped; `python -m ci.extras trainers` has them all.
"""

import ast
import dataclasses
import importlib.util
import json
import typing
from pathlib import Path

import pytest
import yaml

from meshwright.interop.export import nest, written
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.trainers import trainer_named
from meshwright.layout import Layout
from meshwright.spec.loading import load_config

CONFIG = load_config(
    None,
    [
        *("model.preset=llama-3-8b", "train.batch=64", "train.seq_len=4096"),
        *("train.precision=bf16", "train.steps=100", "optimizer.lr=1e-4"),
        *("optimizer.betas=[0.9,0.95]", "optimizer.schedule=cosine", "optimizer.warmup_steps=10"),
    ],
)
ON_CORE = (
    "shard8 zero1 tp2 sp mb1 recompute-selective",
    "shard2 zero1 pp4 interleaved_1f1b v2 tp2 sp mb1",
    "dp4 tp2 sp mb1 recompute-full",
)
ON_FSDP2 = ("shard8 zero3 mb1 recompute-full", "dp2 shard2 zero3 tp2 mb1", "dp8 mb1")
PLANS = {
    "torchtitan": (
        *("shard8 zero3 tp2 sp mb2 recompute-full", "dp8 mb1"),
        "shard4 zero3 pp2 interleaved_1f1b v2 mb1",
    ),
    "megatron": ON_CORE,
    "nemo": ON_CORE,
    "ms-swift": ON_CORE,
    "deepspeed": ("shard8 zero3 mb1 offload-params", "shard4 zero2 tp2 mb2", "dp8 mb1"),
    "accelerate": ON_FSDP2,
    "axolotl": ON_FSDP2,
    "transformers": ON_FSDP2,
}


def files(name, tmp_path):
    """Return each plan of a trainer as a file, with its layout and its keys."""
    trainer, found = trainer_named(name), []
    for at, label in enumerate(PLANS[name]):
        layout = Layout.parse(label)
        file = tmp_path / f"plan{at}{trainer.suffix}"
        result = written(trainer, PlanSource(CONFIG, layout, 1, layout.world), str(file))
        file.write_text(result.text)
        found.append((file, layout, result.keys))
    return found


def source_of(package):
    """Return the folder of a package that is installed, which is not imported; or skip."""
    top, _, rest = package.partition(".")
    spec = importlib.util.find_spec(top)
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        path = Path(folder).joinpath(*rest.split("."))
        if path.exists():
            return path
    pytest.skip(f"{package} is not installed: python -m ci.extras trainers")


def fields_in(path):
    """Return the fields of the classes of a file, by class, without importing it."""
    tree = ast.parse(path.read_text())
    return {
        node.name: {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def test_torchtitan(tmp_path):
    manager = pytest.importorskip("torchtitan.config.manager", exc_type=ImportError)
    for file, layout, _ in files("torchtitan", tmp_path):
        config = manager.ConfigManager().parse_args(["--job.config_file", str(file)])
        assert config.parallelism.tensor_parallel_degree == layout.tp
        assert config.parallelism.data_parallel_shard_degree == layout.dp_shard
        assert config.activation_checkpoint.mode == layout.recompute


def test_deepspeed(tmp_path, monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    for file, layout, _ in files("deepspeed", tmp_path):

        class Ranks:
            def get_data_parallel_world_size(self, ranks=layout.dp):
                return ranks

        parsed = config.DeepSpeedConfig(json.loads(file.read_text()), Ranks())
        assert parsed.zero_optimization_stage == layout.zero
        assert parsed.train_batch_size == 64


def test_accelerate(tmp_path, monkeypatch):
    launch = pytest.importorskip("accelerate.commands.launch")
    environ = pytest.importorskip("accelerate.utils.launch")
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    for file, layout, _ in files("accelerate", tmp_path):
        words = ["--config_file", str(file), "script.py"]
        args = launch.launch_command_parser().parse_args(words)
        args, _, _ = launch._validate_launch_command(args)
        assert args.num_processes == layout.world
        for name, value in environ.prepare_multi_gpu_env(args).items():
            if name.startswith(("PARALLELISM_CONFIG", "FSDP", "ACCELERATE")):
                monkeypatch.setenv(name, value)
        if layout.zero:
            degrees = parallelism.ParallelismConfig()
            assert (degrees.dp_shard_size, degrees.tp_size) == (layout.dp_shard, layout.tp)
            assert degrees.dp_replicate_size == layout.dp_replicate


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    distributed = pytest.importorskip("transformers.distributed.configuration_utils")
    for file, layout, _ in files("transformers", tmp_path):
        arguments = json.loads(file.read_text())
        degrees = distributed.DistributedConfig(**arguments.pop("distributed_config", {}))
        assert degrees.tp_size == layout.tp
        parsed = transformers.TrainingArguments(**arguments, use_cpu=True)
        assert parsed.gradient_accumulation_steps == layout.microbatches(64)


def test_axolotl(tmp_path):
    schema = pytest.importorskip("axolotl.utils.schemas.config", exc_type=ImportError)
    for file, layout, _ in files("axolotl", tmp_path):
        datasets = [{"path": "x", "type": "alpaca"}]
        content = {**yaml.safe_load(file.read_text()), "datasets": datasets}
        parsed = schema.AxolotlInputConfig(**content)
        assert (parsed.dp_shard_size or 1) == layout.dp_shard
        assert parsed.tensor_parallel_size == layout.tp


def test_megatron_core_has_the_fields_and_takes_the_values(tmp_path):
    """Megatron-LM makes its arguments from these dataclasses; the wheel has no arguments.py."""
    transformer = pytest.importorskip("megatron.core.transformer.transformer_config")
    names = {field.name for field in dataclasses.fields(transformer.TransformerConfig)}
    renamed = {"norm_epsilon": "layernorm_epsilon"}
    for _, layout, keys in files("megatron", tmp_path):
        values = {key.replace("-", "_"): value for key, value in keys.items()}
        values = {renamed.get(key, key): value for key, value in values.items()}
        given = {key: value for key, value in values.items() if key in names}
        given["params_dtype"] = given["pipeline_dtype"] = __import__("torch").bfloat16
        given["virtual_pipeline_model_parallel_size"] = (
            layout.virtual_stages if layout.virtual_stages > 1 else None
        )
        config = transformer.TransformerConfig(**given)
        assert config.tensor_model_parallel_size == layout.tp
        assert config.recompute_granularity == (
            None if layout.recompute == "none" else layout.recompute
        )


def test_megatron_bridge_has_the_keys(tmp_path):
    """Its package needs Transformer Engine; its dataclasses are read without it."""
    own = fields_in(source_of("megatron.bridge.training") / "config.py")
    core = source_of("megatron.core")
    model = fields_in(core / "transformer" / "transformer_config.py")["TransformerConfig"]
    sections = {
        "model": {
            *model,
            *fields_in(core / "model_parallel_config.py")["ModelParallelConfig"],
            "seq_length",  # of the provider
        },
        "ddp": fields_in(core / "distributed" / "distributed_data_parallel_config.py")[
            "DistributedDataParallelConfig"
        ],
        "optimizer": fields_in(core / "optimizer" / "optimizer_config.py")["OptimizerConfig"],
        "train": own["TrainingConfig"],
        "scheduler": own["SchedulerConfig"],
    }
    for _, _, keys in files("nemo", tmp_path):
        for section, values in nest(keys).items():
            if isinstance(values, dict):
                assert values.keys() <= sections[section], (section, values)
            else:
                assert section in {*own["ConfigContainer"], "recipe"}


def test_ms_swift_has_the_keys(tmp_path):
    """Its package needs Transformer Engine; its dataclass is read without it."""
    folder = source_of("swift.megatron.arguments")
    known = fields_in(folder / "megatron_args.py")
    names = set[str]().union(*known.values()) | {"max_length"}
    for file, _, _ in files("ms-swift", tmp_path):
        content = typing.cast(dict[str, object], yaml.safe_load(file.read_text()))
        assert content.keys() <= names, content.keys() - names
