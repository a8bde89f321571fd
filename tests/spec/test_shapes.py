"""Models of types without modules here are planned from the shapes in their config.json."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
import transformers

from meshwright.cli import main
from meshwright.cost.price import price, worst_estimate, worst_memory
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken
from meshwright.planner.plan import plan
from meshwright.program.collectives import collectives
from meshwright.program.layers.block import backward_workspaces
from meshwright.program.lower import lower
from meshwright.program.model_flops import flops_per_token, layer_flops
from meshwright.program.operations import operations
from meshwright.program.sizes import Sizes
from meshwright.serve.answer import model_words
from meshwright.spec.hf import hf_config, spec_from_hf
from meshwright.spec.hf_shapes import KNOWN, planned_from_hf
from meshwright.spec.loading import load_config
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import active_parameter_count, parameter_count, parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from planned_shapes import LATER, SHAPES, config_of
from test_search import setting

LAYOUTS = ["mb1", "tp2 sp", "shard2 zero3 recompute-full", "dp2 pp2 mb1", "shard2 zero2 tp2"]
TRAIN = TrainSpec(batch=4, seq_len=128, precision="bf16")
# What the published configs have, and transformers 5.23 counts on the meta device.
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def shapes(name):
    return planned_from_hf(config_of(name)[0])


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_transformers(name):
    config, count = config_of(name)
    assert parameter_count(planned_from_hf(config)) == count


@pytest.mark.parametrize("name", SHAPES)
def test_what_transformers_writes_is_read_as_the_sizes_that_were_given(name):
    model_type, sizes, count = SHAPES[name]
    written = transformers.AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(written)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert parameter_count(planned_from_hf(json.loads(written.to_json_string()))) == count


def test_each_known_type_has_a_count_and_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs/commands/plan.md").read_text("utf-8")
    assert {model_type for model_type, *_ in SHAPES.values()} == KNOWN.keys()
    for model_type in KNOWN:
        assert f"`{model_type.removesuffix('_text')}`" in page


def test_published_sizes_have_the_published_parameters():
    spec = planned_from_hf(QWEN3_NEXT_80B)
    assert parameter_count(spec) == 79_674_391_296
    assert active_parameter_count(spec) == pytest.approx(3.9e9, rel=0.02)


def legal(words):
    """Return each model with each of the layouts that its numbers of heads allow."""
    return [
        (name, label)
        for name in SHAPES
        for label in words
        if broken(shapes(name), TRAIN, Layout.parse(label)) is None
    ]


@pytest.mark.parametrize(("name", "words"), legal(LAYOUTS))
def test_a_program_has_each_weight_once(name, words):
    """Products multiply by every matrix, and the backward of each layer has every gradient."""
    model, layout = shapes(name), Layout.parse(words)
    program = lower(model, TRAIN, OptimizerSpec(), layout)
    sizes = Sizes.of(program)
    for kind in model.layer_kinds:
        single = model.alike(kind, n_layers=1)
        inside = [part for part in parts(single) if part.name.startswith("layers.")]
        gradients = [w for need in backward_workspaces(program, sizes, kind) for w in need.weights]
        assert sorted(gradients) == sorted(part.name.removeprefix("layers.0.") for part in inside)
    for stage in program.stages:
        ops = [op for op in operations(program, stage) if op.name.startswith("layers.")]
        flops = sum(op.flops * op.count for op in ops if op.kind == "product")
        held = [
            program.shardings[part.name]
            for part in parts(model)
            if part.name.startswith("layers.") and stage.holds(part, tied=False) and part.is_matmul
        ]
        active = sum(
            sharding.part.active(model) // (layout.tp if sharding.tp_dim is not None else 1)
            for sharding in held
        )
        assert flops == pytest.approx(2 * sizes.tokens * active)


@pytest.mark.parametrize("words", ["shard2 zero3", "shard2 zero1 tp2 sp recompute-full", "pp2 mb1"])
@pytest.mark.parametrize(
    "name", ["kimi_linear", "nemotron_h", "gemma4", "falcon_h1", "deepseek_v32"]
)
def test_the_estimate_is_near_the_walked_peak(name, words):
    model, layout = shapes(name), Layout.parse(words)
    one = setting(model, layout.world, "h100-sxm", batch=8, seq_len=256)
    exact = worst_memory(one, layout)
    assert worst_estimate(one, layout).total == pytest.approx(exact.total, rel=0.15)
    assert price(one, layout).time.total > 0


def test_a_recurrence_costs_as_much_for_each_token_of_any_length():
    model = planned_from_hf(LATER)
    recurrent, full = 0, 3
    short, long = layer_flops(model, 128), layer_flops(model, 512)
    assert short[recurrent] == long[recurrent]
    assert short[full] < long[full]
    mixer = model.layer(recurrent).mixer
    assert mixer is not None
    heads, keys, values, chunk, kernel = 4, 16, 24, 64, 4
    through = 2 * 2 * keys + heads * values
    delta = heads * (chunk * (6 * keys + 4 * values) + 6 * keys * values)
    assert mixer.flops == delta + 2 * through * kernel


def test_an_index_scores_all_keys_and_attention_the_picked_ones():
    model, length = shapes("deepseek_v32"), 256
    kind = model.layer(3)
    assert kind.window == 64
    whole = length * (length / 2)
    picked = 64 * (length - 32)
    index, attention = 4 * 16 * whole, 4 * (24 + 20) * picked
    inside = parts(model.alike(kind, n_layers=1))
    weights = sum(p.active(model) for p in inside if p.name.startswith("layers.") and p.is_matmul)
    assert layer_flops(model, length)[3] == 2 * weights + 2 * (index + attention) / length


def test_layers_without_an_mlp_or_attention_send_for_one_region():
    model = shapes("nemotron_h")
    program = lower(model, TRAIN, OptimizerSpec(), Layout.parse("tp2 sp mb4"))
    sent = [
        message
        for message in collectives(program, 0)
        if (message.axis, message.kind, message.phase) == ("tp", "all_gather", "forward")
    ]
    layers = [message for message in sent if message.purpose == "layer"]
    assert sum(message.count for message in layers) == model.n_layers


def test_a_config_of_a_planned_model_is_read_back():
    for name in SHAPES:
        model = shapes(name)
        assert ModelSpec(**model.model_dump()) == model
        assert ModelSpec(**json.loads(model.model_dump_json())) == model


@pytest.mark.parametrize("name", SHAPES)
def test_the_page_asks_for_the_same_model(name):
    config, _ = config_of(name)
    asked = load_config(None, model_words(config), plans=True)
    assert asked.model == planned_from_hf(config)


def test_an_unknown_type_is_read_as_llama_and_says_so():
    llama = model_spec(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=256, context=512
    )
    config = {**hf_config(llama), "model_type": "mystery", "state_size": 77}
    spec = planned_from_hf(config)
    assert parameter_count(spec) == parameter_count(llama)
    assert flops_per_token(spec, 128) == flops_per_token(llama, 128)
    assert spec.planned is not None
    first, last = spec.planned.assumed
    assert first.startswith("mystery is not a type that is known: norms, biases and gates as in")
    assert last == "keys that were not read: state_size"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "'falcon_h1': its shapes cannot be read without hidden_size"),
        ({"layer_types": ["wave"] * 4}, "layer_types has 'wave', whose shapes are not known"),
        ({"layer_types": ["attention"]}, "layer_types has 1 layers, but num_hidden_layers = 4"),
        ({"mamba_d_state": None}, "cannot be read without mamba_d_state"),
        ({"vocab_size": "many"}, "vocab_size = 'many' must be a whole number from 1 up to"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_key(change, message):
    config = {**config_of("falcon_h1")[0], **change}
    with pytest.raises(ConfigError, match=message):
        planned_from_hf(config)


JUNK = [None, True, -1, 0, 1.5, 10**12, "x", "", [], ["x"], {}, {"0": 1}, [[]], float("nan")]


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_a_key_has_is_read_or_refused(name):
    """With any key of any kind of value, there is a model or a `ConfigError`."""
    config, _ = config_of(name)
    extra = ["layer_types", "linear_attn_config", "per_layer_config", "hybrid_override_pattern"]
    extra += ["moe_layer_freq", "moe_layers", "no_rope_layers", "sliding_window_pattern"]
    for key in [*config, *extra]:
        for value in JUNK:
            with contextlib.suppress(ConfigError):
                planned_from_hf({**config, key: value})


def test_a_text_model_inside_is_planned_and_told():
    inner, count = config_of("gemma4")
    spec = planned_from_hf({"model_type": "gemma4", "text_config": inner, "vision_config": {}})
    assert parameter_count(spec) == count
    assert spec.planned is not None
    assert spec.planned.assumed[0] == "its text model alone: images and sound are left out"
    llama = hf_config(model_spec(dim=64, n_layers=2, n_heads=4, vocab_size=256))
    spec = planned_from_hf({"model_type": "llava", "text_config": llama})
    assert spec.planned is not None
    assert spec.planned.model_type == "llava"
    assert parameter_count(spec) == parameter_count(spec_from_hf(llama))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LATER))
    return tmp_path


GPUS = ["cluster.preset=h100-sxm", "cluster.devices_per_node=4", "train.batch=8"]
SHORT = [*GPUS, "train.seq_len=256"]


@pytest.mark.parametrize("flag", [[], ["--like"]])
def test_plan_takes_a_folder_and_says_what_it_assumes(folder, capsys, flag):
    assert main(["plan", *flag, str(folder), *SHORT, "--top", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "planned, not trainable here: later is read from the shapes" in text
    assert "assumed: 3 layers with a recurrence" in text
    assert "no context parallelism" in text
    assert "to train the best" not in text


def test_the_document_has_the_assumptions_and_no_command(folder, capsys):
    assert main(["plan", str(folder), *SHORT, "--top", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] is None
    assert document["assumed"][0].startswith("planned, not trainable here: later")
    assert document["config"]["model"]["planned"]["model_type"] == "later"


@pytest.mark.parametrize(
    "command",
    [["train"], ["prove"], ["simulate"], ["launch", "torchrun"], ["bench", "layouts"], ["doctor"]],
)
def test_every_other_command_refuses_it_with_the_reason(folder, capsys, command):
    assert main([*command, f"model.init_from={folder}"]) == 2
    text = capsys.readouterr().err
    assert "model_type = 'later' is not supported" in text
    assert "It is planned only, from its shapes: `meshwright plan`" in text


def test_a_saved_plan_is_not_trained(folder, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    assert main(["plan", str(folder), *SHORT, "--top", "1", "--save", str(saved)]) == 0
    capsys.readouterr()
    assert main(["train", "--plan", str(saved)]) == 2
    assert "It is planned only, from its shapes" in capsys.readouterr().err


def test_it_is_not_written_for_another_trainer(folder, capsys):
    assert main(["plan", "--for", "torchtitan", str(folder), *SHORT]) == 2
    assert "later is planned from its shapes" in capsys.readouterr().err


def test_its_intervals_are_wider(folder):
    words = ["model.preset=llama-2-7b", *SHORT]
    usual = plan(load_config(None, words), 1).best
    wide = plan(load_config(None, [f"model.init_from={folder}", *SHORT], plans=True), 1).best
    assert usual is not None
    assert wide is not None
    assert wide.spread[0] < usual.spread[0]
    assert wide.spread[1] > usual.spread[1]
    assert wide.memory_spread[1] > usual.memory_spread[1]


def test_adapters_of_it_are_refused(folder):
    with pytest.raises(ConfigError, match="adapters of later, which is planned only"):
        load_config(None, [f"model.init_from={folder}", "lora.rank=8"], plans=True)


def test_a_mixer_needs_the_plan_that_it_is_for():
    pattern = [{"mixer": {"heads": 1}}]
    with pytest.raises(ConfigError, match=r"model\.layer_pattern has a mixer"):
        load_config(None, {"model.layer_pattern": pattern})
