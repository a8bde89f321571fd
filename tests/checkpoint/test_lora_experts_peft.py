"""Adapters of experts in PEFT's format, and runs with them beside transformers and PEFT."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.adapters import AdapterSource, merge, write_adapter
from meshwright.checkpoint.weights import load_model, write_weights
from meshwright.cli import main
from meshwright.layout import Layout
from meshwright.models.hf import load_hf
from meshwright.program.shards import whole
from meshwright.prove.case import Case
from meshwright.spec.loading import load_config
from meshwright.spec.peft import ADAPTER_WEIGHTS
from meshwright.spec.stored import ADAPTER_CONFIG
from ranks import on_ranks
from test_lora import MIXTURE, SHARED, model
from test_lora_experts import APART, JOINT, LATENT, OF_LATENT, OSS
from test_lora_peft import (
    IDS,
    TRAIN,
    base_of,
    close,
    computes_with_ours,
    losses,
    plain_losses,
    telling,
)

AT = "base_model.model.model.layers"
MIXTRAL = {"family": "mixtral", "experts": 4, "top_k": 2}
FORMS = {
    "apart": {"targets": ("q_proj", *APART), **MIXTURE},
    "joint": {"targets": ("q_proj", *JOINT), **MIXTURE},
    "gate and up": {"targets": JOINT[:1], **MIXTURE},
    "down": {"targets": ("down_proj",), **MIXTURE},
    "gpt-oss": {"targets": ("o_proj", "gate_up_proj", "down_proj"), **OSS},
    "mixtral": {"targets": ("v_proj", "w1", "w2", "w3"), **MIXTRAL},
    "mixtral, joint": {"targets": JOINT, **MIXTRAL},
    "shared": {"targets": ("shared_expert.*", *JOINT), **SHARED},
    "latent": {"targets": (*OF_LATENT, "experts.*_proj"), **LATENT},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_adapters_is_read_again(form, tmp_path):
    made = telling(model(**FORMS[form]))
    write_adapter(made, tmp_path, "base")
    stated = load_config(None, [f"lora.init_from={tmp_path}", *_model(made.spec)]).model
    assert stated.adapted == made.spec.adapted
    source = AdapterSource(tmp_path, made.spec)
    for name, parameter in made.named_parameters():
        if "lora" in name:
            shape = tuple(parameter.shape)
            assert torch.equal(source(name, shape, whole(shape)), parameter)
            some = ((1, 2), *((1, size) for size in shape[1:]))
            assert torch.equal(
                source(name, shape, some),
                parameter[(slice(1, 2),) + (slice(1, None),) * (len(shape) - 1)],
            )
            none = ((0, 0), *((0, size) for size in shape[1:]))
            assert source(name, shape, none).shape == (0, *shape[1:])


def _model(spec):
    """The keys of a model that a config needs for its adapters."""
    keys = ("family", "experts", "top_k", "shared_ffn_dim", "q_lora_rank", "expert_groups")
    found = [f"model.{one}={getattr(spec, one)}" for one in keys if getattr(spec, one)]
    return [*found, "model.top_groups=1"] if spec.is_latent else found


def test_experts_lie_as_peft_has_them(tmp_path):
    write_adapter(telling(model(**FORMS["joint"])), tmp_path / "joint", None)
    tensors = load_file(tmp_path / "joint" / ADAPTER_WEIGHTS)
    shapes = {
        n.removeprefix(f"{AT}.0.mlp."): tuple(t.shape) for n, t in tensors.items() if ".0.mlp" in n
    }
    assert shapes == {
        "experts.base_layer.lora_A.weight": (16, 32),
        "experts.base_layer.lora_B.weight": (96, 16),
        "experts.lora_A.weight": (16, 48),
        "experts.lora_B.weight": (32, 16),
    }
    stated = json.loads((tmp_path / "joint" / ADAPTER_CONFIG).read_text())
    assert (stated["target_modules"], stated["target_parameters"]) == (["q_proj"], list(JOINT))
    write_adapter(telling(model(**FORMS["apart"])), tmp_path / "apart", None)
    tensors = load_file(tmp_path / "apart" / ADAPTER_WEIGHTS)
    assert tensors[f"{AT}.1.mlp.experts.3.gate_proj.lora_B.weight"].shape == (48, 4)
    stated = json.loads((tmp_path / "apart" / ADAPTER_CONFIG).read_text())
    assert stated["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    assert "target_parameters" not in stated


@pytest.mark.often(4)
@pytest.mark.parametrize("form", FORMS)
def test_merged_weights_compute_what_adapters_do(form, tmp_path):
    made = telling(model(**FORMS[form]))
    one = merge(made)
    assert close(one(IDS), made(IDS))
    assert not close(telling(one.spec)(IDS), made(IDS))


@pytest.mark.parametrize("form", ["joint", "gpt-oss"])
def test_a_run_is_exported_merged(form, tmp_path):
    made = telling(model(**FORMS[form]))
    write_weights(tmp_path / "run", made.spec, dict(made.named_parameters()), {})
    assert torch.equal(load_model(tmp_path / "run")(IDS), made(IDS))
    words = ["checkpoint", "export-hf", str(tmp_path / "run"), str(tmp_path / "merged")]
    assert main([*words, "--tokenizer", "none"]) == 0
    assert close(load_hf(tmp_path / "merged", torch.float32)(IDS), made(IDS))


@pytest.mark.parametrize("form", FORMS)
def test_peft_computes_with_our_adapters(form, tmp_path):
    """Also with experts one by one, whose gate and up it makes one adapter of twice the rank."""
    computes_with_ours(telling(model(**FORMS[form])), tmp_path)


@pytest.mark.parametrize("form", ["joint", "gpt-oss"])
def test_twenty_steps_are_those_of_transformers_and_peft(form, tmp_path):
    """Also: an adapter of PEFT's is where a run begins."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    spec = model(**FORMS[form], alpha=8.0)
    base_of(spec, tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    asked = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[spec.lora.targets[0]],
        target_parameters=list(JOINT),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    theirs = peft.get_peft_model(theirs, asked)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = plain_losses(theirs, Case(spec, TRAIN, Layout()))
    assert expected[-1] != pytest.approx(expected[0], rel=0.01)
    for label in ("tp2 sp", "shard2 zero3", "dp2 ep2"):
        found = on_ranks(2, losses, label=label, spec=spec, folder=tmp_path)[0]
        assert found == pytest.approx(expected, rel=1e-5)


def test_one_parameter_of_pefts_is_read(tmp_path):
    """One of down alone has no wrapper around it; our own files have experts one by one."""
    made = telling(model(**FORMS["down"]))
    write_adapter(made, tmp_path, None)
    tensors, held = {}, dict(made.named_parameters())
    for layer in range(2):
        at = f"layers.{layer}.mlp.experts.down"
        a, b = held[f"{at}.lora_a"].detach(), held[f"{at}.lora_b"].detach()
        tensors[f"{AT}.{layer}.mlp.experts.lora_A.weight"] = a.reshape(16, 48).clone()
        tensors[f"{AT}.{layer}.mlp.experts.lora_B.weight"] = b.permute(1, 2, 0).reshape(32, 16)
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    file = tmp_path / ADAPTER_CONFIG
    stated = json.loads(file.read_text())
    stated |= {"target_modules": [], "target_parameters": ["down_proj"]}
    file.write_text(json.dumps(stated))
    config = load_config(None, [f"lora.init_from={tmp_path}", *_model(made.spec)])
    assert config.model.adapted == {"mlp.experts.down"}
    source = AdapterSource(tmp_path, made.spec)
    for name, parameter in held.items():
        if "lora" in name:
            assert torch.equal(
                source(name, tuple(parameter.shape), whole(parameter.shape)), parameter
            )
