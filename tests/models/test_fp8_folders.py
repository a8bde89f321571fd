"""Published folders whose matrices are in fp8, with a scale for each block of 128 x 128."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.errors import CheckpointError, ConfigError
from meshwright.models import build_model, fp8_blocks, init_model
from meshwright.models.files import open_safetensors
from meshwright.models.hf import hf_source, load_hf, save_hf
from meshwright.spec.resolve import model_spec

BLOCK = 128
SIZES = {"vocab_size": 99, "n_layers": 2, "n_heads": 4, "context": 64, "init_std": 0.3}
# Matrices that blocks do not divide, of several blocks in both dims.
QWEN3 = {"family": "qwen3", "dim": 160, "n_kv_heads": 2, "head_dim": 34, "ffn_dim": 300}
DEEPSEEK = {
    "family": "deepseek_v3",
    "dim": 160,
    "n_kv_heads": 4,
    "ffn_dim": 200,
    "experts": 4,
    "top_k": 2,
    "dense_layers": 1,
    "expert_ffn_dim": 140,
    "shared_ffn_dim": 140,
    "expert_groups": 1,
    "top_groups": 1,
    "q_lora_rank": 130,
    "kv_lora_rank": 24,
    "v_head_dim": 40,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 6,
}
MINIMAX = {
    "family": "minimax_m2",
    "dim": 160,
    "n_kv_heads": 2,
    "head_dim": 34,
    "ffn_dim": 140,
    "experts": 4,
    "top_k": 2,
}


def is_quantised(name):
    return name.endswith("proj.weight") or ".experts." in name


def spread(scales, shape):
    """Return scales of blocks as one for each number of a matrix."""
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[: shape[0], : shape[1]]


def quantised(weight):
    """Return a matrix in fp8, and the scale of each block: the largest number there is 448."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scales[row, column] = block.abs().max() / 448
    return (weight / spread(scales, weight.shape)).to(torch.float8_e4m3fn), scales


def published(fields, folder):
    """Write a model as a folder in fp8; return its weights as they are meant, by stored names."""
    spec = model_spec(**SIZES, **fields)
    save_hf(init_model(build_model(spec, "cpu"), spec, seed=0).bfloat16(), folder)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored, meant = {}, {}
    for name, weight in load_file(path).items():
        if not is_quantised(name):
            stored[name] = meant[name] = weight
            continue
        stored[name], scales = quantised(weight.float())
        stored[f"{name}_scale_inv"] = scales
        meant[name] = (stored[name].float() * spread(scales, weight.shape)).bfloat16()
    save_file(stored, path, metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    config["quantization_config"] = {**settings, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    return spec, stored, meant


@pytest.mark.parametrize("fields", [QWEN3, DEEPSEEK, MINIMAX], ids=lambda fields: fields["family"])
def test_a_folder_in_fp8_is_read_as_the_numbers_that_it_means(fields, tmp_path):
    spec, stored, meant = published(fields, tmp_path / "a")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) > 8
    model = load_hf(tmp_path / "a")
    assert model.spec == spec
    save_hf(model, tmp_path / "b")
    exported = load_file(tmp_path / "b" / "model.safetensors")
    assert exported.keys() == meant.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in meant.items())
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


def test_a_rank_reads_only_its_region(tmp_path):
    spec, _, _ = published(DEEPSEEK, tmp_path)
    source, state = hf_source(tmp_path, spec), load_hf(tmp_path).state_dict()
    for name, region in (
        ("layers.0.mlp.up.weight", ((127, 129), (0, 160))),
        ("layers.0.mlp.down.weight", ((0, 160), (100, 200))),
        ("layers.0.mlp.down.weight", ((130, 131), (128, 129))),
        ("layers.0.mlp.down.weight", ((160, 160), (0, 200))),
        ("layers.1.mlp.experts.gate.weight", ((1, 3), (70, 140), (0, 160))),
    ):
        whole = state[name]
        part = source(name, tuple(whole.shape), region)
        assert torch.equal(part, whole[tuple(slice(*bounds) for bounds in region)]), name


def test_scales_of_other_blocks_are_refused(tmp_path):
    spec, stored, _ = published(QWEN3, tmp_path)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    stored[name] = stored[name][:1].contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv is stored as \[1, 2\]"):
        hf_source(tmp_path, spec)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 128]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"quantization_config = .*weight_block_size.*is not supp"
    ):
        load_hf(tmp_path)


def test_the_scales_of_a_layer_that_predicts_ahead_are_left_out_with_it(tmp_path):
    spec, stored, _ = published(DEEPSEEK, tmp_path)
    ahead = f"model.layers.{spec.n_layers}"
    weight, scales = quantised(torch.randn(160, 320))
    stored |= {f"{ahead}.eh_proj.weight": weight, f"{ahead}.eh_proj.weight_scale_inv": scales}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="layer 2 predicts tokens after the next one"):
        hf_source(tmp_path, spec)


def test_transformers_dequantises_to_the_same_bits(tmp_path):
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scales = quantised(torch.randn(256, 384, generator=torch.Generator().manual_seed(0)))
    path, name = tmp_path / "model.safetensors", "x.weight"
    save_file({name: weight, f"{name}_scale_inv": scales}, path)
    opened = open_safetensors(path)
    files = {name: opened, f"{name}_scale_inv": opened}
    expected = theirs.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
    assert torch.equal(fp8_blocks.read(files, fp8_blocks.scales_of(files), name, None), expected)
