"""Adapters in PEFT's format, and a run with adapters beside a loop of transformers and PEFT."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.adapters import AdapterSource, both, merge, write_adapter
from meshwright.checkpoint.hf_exchange import export_adapter
from meshwright.checkpoint.weights import load_model, weights_from, write_weights
from meshwright.cli import main
from meshwright.comm.groups import open_groups
from meshwright.errors import CheckpointError, ConfigError
from meshwright.layout import Layout
from meshwright.models import build_model
from meshwright.models.hf import load_hf, save_hf
from meshwright.parallel.build import build
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.program.shards import whole
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.weights import telling_weight
from meshwright.spec.loading import load_config
from meshwright.spec.peft import ADAPTER_WEIGHTS
from meshwright.spec.stored import ADAPTER_CONFIG
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update
from ranks import on_ranks
from test_lora import NEOX, model

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
IDS = torch.arange(24).view(2, 12) * 7 % 96


def telling(spec):
    """A model with weights of which none is 0."""
    made = build_model(spec, device="cpu")
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            tensor.copy_(telling_weight(name, tensor.shape, spec, 5))
    made.init_tables("cpu")
    return made.eval()


def base_of(spec, folder):
    """The same without adapters, as a Hugging Face folder."""
    plain = telling(spec.model_copy(update={"lora": None}))
    save_hf(plain, folder)
    return plain


def close(ours, theirs):
    return (ours - theirs).abs().max().item() < 2e-5 * theirs.abs().max().item()


def test_a_folder_of_adapters_is_as_peft_has_it(tmp_path):
    made = telling(model(targets=("q_proj", "down_proj"), alpha=6.0))
    write_adapter(made, tmp_path, "base")
    tensors = load_file(tmp_path / ADAPTER_WEIGHTS)
    at = "base_model.model.model.layers"
    assert {name for name in tensors if ".0." in name} == {
        f"{at}.0.{layer}.lora_{one}.weight"
        for layer in ("self_attn.q_proj", "mlp.down_proj")
        for one in "AB"
    }
    assert tensors[f"{at}.1.mlp.down_proj.lora_A.weight"].shape == (4, 48)
    stated = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert (stated["r"], stated["lora_alpha"], stated["use_rslora"]) == (4, 6, False)
    assert stated["target_modules"] == ["down_proj", "q_proj"]
    config = load_config(None, [f"lora.init_from={tmp_path}"])
    assert config.model.lora == made.spec.lora.model_copy(
        update={"targets": ("down_proj", "q_proj")}
    )
    source = AdapterSource(tmp_path, made.spec)
    for name, parameter in made.named_parameters():
        if "lora" in name:
            rows = ((1, 3), (0, parameter.shape[1]))
            assert torch.equal(source(name, tuple(parameter.shape), rows), parameter[1:3])


@pytest.mark.parametrize("more", [{}, {"family": "neox", **NEOX}, {"tie_embeddings": True}])
def test_merged_weights_compute_what_adapters_do(more, tmp_path):
    made = telling(model(**more))
    one = merge(made)
    assert one.spec.lora is None
    assert close(one(IDS), made(IDS))
    assert not close(telling(one.spec)(IDS), made(IDS))
    # The weights of a run with adapters are the first ones of another run.
    write_weights(tmp_path / "run", made.spec, dict(made.named_parameters()), {})
    source = weights_from(tmp_path / "run", one.spec)
    for name, parameter in one.named_parameters():
        shape = tuple(parameter.shape)
        assert torch.equal(source(name, shape, whole(shape)), parameter)


def test_a_run_is_exported_with_its_adapters_or_merged(tmp_path, capsys):
    made, out = telling(model(targets=("q_proj",))), tmp_path / "out"
    run = tmp_path / "run"
    write_weights(run, made.spec, dict(made.named_parameters()), {})
    assert torch.equal(load_model(run)(IDS), made(IDS))
    words = ["checkpoint", "export-hf", str(run)]
    assert main([*words, str(out / "adapter"), "--adapter", "--base", "theirs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 2 * 4 * (32 + 32)
    stated = json.loads((out / "adapter" / ADAPTER_CONFIG).read_text())
    assert stated["base_model_name_or_path"] == "theirs"
    assert main([*words, str(out / "merged"), "--tokenizer", "none"]) == 0
    assert close(load_hf(out / "merged", torch.float32)(IDS), made(IDS))
    plain = tmp_path / "plain"
    one = merge(made)
    write_weights(plain, one.spec, dict(one.named_parameters()), {})
    with pytest.raises(CheckpointError, match="has no adapters"):
        export_adapter(plain, out / "none", None, "fp32")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ".*q_proj"}, "target_modules"),
        ({"target_modules": ["q_prj"]}, "q_proj"),
        ({"r": "four"}, "r = four"),
        ({"r": -1}, "r = -1 has no adapters"),
        ({"r": 0}, "r = 0 has no adapters"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = pissa is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = olora is not supported"),
        ({"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens = [3, 4]"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ],
)
def test_an_adapter_config_that_says_something_else_is_refused(change, told, tmp_path):
    write_adapter(telling(model(targets=("q_proj",))), tmp_path, None)
    file = tmp_path / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"lora.init_from={tmp_path}"])
    assert told in str(error.value)


def test_names_of_all_layers_are_those_of_any_layer(tmp_path):
    """PEFT writes "all-linear" so for a model of few layers."""
    write_adapter(telling(model(targets=("q_proj", "down_proj"))), tmp_path, None)
    file = tmp_path / ADAPTER_CONFIG
    stated = json.loads(file.read_text())
    parts = ("self_attn.q_proj", "mlp.down_proj")
    names = [f"model.layers.{layer}.{part}" for layer in range(4) for part in parts]
    file.write_text(json.dumps(stated | {"target_modules": names}))
    found = load_config(None, [f"lora.init_from={tmp_path}"]).lora.targets
    assert sorted(found) == ["mlp.down_proj", "self_attn.q_proj"]
    file.write_text(json.dumps(stated | {"target_modules": names[:-1]}))
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj"):
        load_config(None, [f"lora.init_from={tmp_path}"])


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    made = telling(model(targets=("q_proj",)))
    write_adapter(made, tmp_path, None)
    with pytest.raises(ConfigError, match=r"lora\.rank = 8 .*nearest legal: lora\.rank = 4"):
        load_config(None, [f"lora.init_from={tmp_path}", "lora.rank=8"])
    with pytest.raises(CheckpointError, match=r"lacks .*k_proj"):
        AdapterSource(tmp_path, model(targets=("q_proj", "k_proj")))
    with pytest.raises(CheckpointError, match=r"is \[4, 32\], but the model's is \[2, 32\]"):
        AdapterSource(tmp_path, model(targets=("q_proj",), rank=2))
    tensors = load_file(tmp_path / ADAPTER_WEIGHTS)
    save_file(tensors | {"other": torch.zeros(1)}, tmp_path / ADAPTER_WEIGHTS)
    with pytest.raises(CheckpointError, match="holds other"):
        AdapterSource(tmp_path, made.spec)
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        AdapterSource(tmp_path, made.spec)
    (tmp_path / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="pickles are not read"):
        AdapterSource(tmp_path, made.spec)


def computes_with_ours(made, folder):
    """Write a model's adapters, and hold what PEFT computes with them against ours."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base_of(made.spec, folder / "base")
    write_adapter(made, folder / "adapter", str(folder / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, folder / "adapter").eval()
    with torch.no_grad():
        assert close(made(IDS), theirs(IDS).logits)


def test_peft_computes_with_our_adapters(tmp_path):
    computes_with_ours(telling(model(targets=TARGETS)), tmp_path)


# Twenty steps.

TRAIN = TrainSpec(batch=8, seq_len=16, seed=3, clip_norm=0.5)
OPTIMIZER = OptimizerSpec(lr=2e-2, weight_decay=0.05, schedule="constant", warmup_steps=0)
STEPS = 20


def losses(world, label, spec, folder):
    """The losses of steps from stored weights and adapters, on a layout."""
    case = Case(spec, TRAIN, Layout.parse(label), packed=False)
    program = lower(spec, TRAIN, OptimizerSpec(), case.layout)
    source = both(weights_from(folder / "base", spec), AdapterSource(folder / "adapter", spec))
    parallel = build(program, open_groups(case.layout, world), world.device, source)
    shards = Shards(parallel.trained, on_host=False)
    optimizer = build_optimizer(shards.leaves, shards.parts, OPTIMIZER)
    found = []
    for step in range(STEPS):
        rows = mine(make_batch(case, step), program, world)
        scale = LossScale.of(TRAIN)
        done = update(parallel, rows, world, shards, optimizer, scale, TRAIN.clip_norm)
        found.append(world.sum_on_host([done.loss.item()])[0])
    return found


def plain_losses(theirs, case):
    """The same by torch's optimizer on a model of transformers and PEFT."""
    trained = [one for one in theirs.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    found = []
    for step in range(STEPS):
        batch = make_batch(case, step)
        logits = theirs(batch.inputs).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, TRAIN.clip_norm)
        optimizer.step()
        found.append(loss.item())
    return found


def test_twenty_steps_are_those_of_transformers_and_peft(tmp_path):
    """Also: an adapter of PEFT's is where a run begins."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    spec = model(targets=TARGETS, alpha=8.0)
    base_of(spec, tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    asked = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    torch.manual_seed(3)
    theirs = peft.get_peft_model(theirs, asked)
    theirs.save_pretrained(tmp_path / "adapter")
    stated = load_config(None, [f"lora.init_from={tmp_path / 'adapter'}"]).model.lora
    assert stated == spec.lora.model_copy(update={"targets": tuple(sorted(TARGETS))})
    expected = plain_losses(theirs, Case(spec, TRAIN, Layout()))
    assert expected[-1] != pytest.approx(expected[0], rel=0.01)
    for label in ("tp2 sp", "shard2 zero3"):
        found = on_ranks(2, losses, label=label, spec=spec, folder=tmp_path)[0]
        assert found == pytest.approx(expected, rel=1e-5)
