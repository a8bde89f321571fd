"""Folders whose experts lie as transformers has them in memory: a layer's in two tensors."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.errors import CheckpointError
from meshwright.models.hf import HFWeights, load_hf, read_spec

SIZES = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = {
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "Olmoe": {"num_experts": 3, "num_experts_per_tok": 1},
}


@pytest.fixture(params=KINDS)
def fused(request, tmp_path):
    """A model of transformers, and a folder that has its experts as memory does."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **KINDS[request.param])
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    model.save_pretrained(tmp_path / "apart")
    return model, tmp_path


def test_they_open_and_give_the_same_logits(fused):
    model, folder = fused
    names = load_file(folder / "fused/model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.mlp.experts.gate_up_proj" not in load_file(
        folder / "apart/model.safetensors"
    )
    ids = torch.randint(0, 72, (2, 16))
    with torch.no_grad():
        found = load_hf(folder / "fused")(ids)
        torch.testing.assert_close(found, model(ids).logits, atol=1e-5, rtol=0)
        assert torch.equal(found, load_hf(folder / "apart")(ids))


def test_any_region_is_that_of_experts_stored_apart(fused):
    _, folder = fused
    spec = read_spec(folder / "fused")
    one, other = (HFWeights(folder / kind, spec) for kind in ("fused", "apart"))
    wide, dim = spec.expert_width, spec.dim
    for which, shape in {"gate": (wide, dim), "up": (wide, dim), "down": (dim, wide)}.items():
        asked = f"layers.1.mlp.experts.{which}.weight", (spec.experts, *shape)
        for region in (((0, spec.experts), (0, shape[0])), ((1, 3), (5, 9)), ((2, 2), (0, 4))):
            cut = (*region, (3, shape[1]))
            assert torch.equal(one(*asked, cut), other(*asked, cut))


def test_what_does_not_fit_is_refused_by_its_name(fused):
    _, folder = fused
    path = folder / "fused/model.safetensors"
    stored = load_file(path)
    key = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({**stored, key: stored[key][:, 2:].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{key} is stored as"):
        load_hf(folder / "fused")
    del stored[key]
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lacks model"):
        load_hf(folder / "fused")
