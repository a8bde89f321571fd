"""Models and folders of Hugging Face's kind, to export and import."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend

from meshwright.checkpoint.weights import write_weights
from meshwright.cli import main
from meshwright.data import train_bpe
from meshwright.models import build_model, init_model
from meshwright.models.hf import save_hf
from meshwright.spec.resolve import model_spec

SIZES = {"vocab_size": 320, "dim": 32, "n_layers": 2, "n_heads": 4, "context": 64, "init_std": 0.1}
MODELS = {
    "llama": {"n_kv_heads": 2, "rope_theta": 500.0},
    "llama tied": {"tie_embeddings": True},
    "llama scaled": {
        "rope_scaling": {"kind": "llama3", "factor": 4.0, "original_context": 16},
        "attention_bias": True,
    },
    "neox": {"family": "neox", "rotary_pct": 0.5, "parallel_residual": True},
    "neox tied": {"family": "neox", "tie_embeddings": True},
}
# Layers with a window of seven tokens and without one, caps, norms after the sublayers.
WINDOWED = {
    "gemma2": {
        "family": "gemma2",
        "n_kv_heads": 2,
        "layer_pattern": [{"window": 7}, {}],
        "attention_softcap": 2.0,
        "logits_softcap": 4.0,
    },
    "olmo3": {"family": "olmo3", "n_kv_heads": 2, "layer_pattern": [{"window": 7}, {}]},
}
TEXTS = ["def f(x):\n    return x + 1\n" * 20, "the quick brown fox, naïve 日本語 🙂\n" * 20]
each_model = pytest.mark.parametrize("kind", MODELS)


def model_of(kind="llama"):
    spec = model_spec(**SIZES, **{**MODELS, **WINDOWED}[kind])
    model = init_model(build_model(spec, device="cpu"), spec, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def write_run(folder):
    """Write a run folder as far as an export looks at it."""
    model = model_of()
    write_weights(folder / "checkpoints", model.spec, dict(model.named_parameters()), {})
    record = {"name": "bytes", "eos": "", "file": None}
    (folder / "plan.json").write_text(json.dumps({"tokenizer": record}))
    return folder


def stored(folder):
    """Return all tensors of a Hugging Face folder."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def export(source, out, *words):
    return main(["checkpoint", "export-hf", str(source), str(out), *words])


def nothing_but(folder, *names):
    return {path.name for path in folder.iterdir()} == set(names)


def hf_folder(tmp_path, kind="llama"):
    """A Hugging Face folder with a tokenizer and all that may lie beside it."""
    folder = tmp_path / "hf"
    save_hf(model_of(kind), folder)
    train_bpe(TEXTS, 300, folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "<|turn|>"])
    backend.save(str(folder / "tokenizer.json"))
    ends = [backend.token_to_id(token) for token in ("<|endoftext|>", "<|turn|>")]
    start = backend.token_to_id("<s>")
    config = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}})
    )
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    generation = {"temperature": 0.6, "do_sample": True, "bos_token_id": start}
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": ends}))
    return folder
