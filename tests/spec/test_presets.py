"""Presets against the published models, and the modules against `spec.parts`."""

import pytest
import torch

from meshwright.models import build_model
from meshwright.spec.parts import active_parameter_count, parameter_count, parts
from meshwright.spec.presets import PRESETS
from meshwright.spec.resolve import model_spec

# Parameters as published: `num_parameters` of the safetensors metadata of the HF repositories
# (meta-llama/*, TinyLlama/TinyLlama_v1.1, HuggingFaceTB/SmolLM2-135M, Qwen/*, mistralai/*,
# ibm-granite/*, microsoft/*, google/gemma-*, allenai/*, HuggingFaceTB/SmolLM3-3B; of Qwen3-0.6B
# without the tied head, which its file has twice),
# the "Total Params" of the model cards of EleutherAI/pythia-*, and arXiv:2204.06745, table 1, for
# GPT-NeoX-20B.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "pythia-14m": 14_067_712,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "phi-4": 14_659_507_200,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "mistral-7b-v0.1": 7_241_732_096,
    "phi-3-mini": 3_821_079_552,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "smollm3-3b": 3_075_098_624,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    # Without the corrections of routers, which are not parameters: 256 in each of 58 layers.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# Ours, one without the learned positions of the paper, and the text models of ones with images.
UNPUBLISHED = {"demo", "gpt3-175b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b"}
UNPUBLISHED |= {"qwen2-57b-a14b"}  # its card has "57B" and "14B"
UNPUBLISHED |= {"moonlight-16b-a3b", "kimi-k2", "glm-4.5", "glm-4.5-air", "glm-4.6"}
UNPUBLISHED |= {"qwen3-next-80b-a3b"}  # counted in test_shapes
# Counted in test_mamba_folders.
UNPUBLISHED |= {f"granite-4.0-h-{size}" for size in ("micro", "tiny", "small")}
UNPUBLISHED |= {"bamba-9b"}
UNPUBLISHED |= {"dots.llm1", "minimax-m2", "seed-oss-36b"}
# As their cards round them, in billions; of Qwen3.5 transformers' own defaults, counted by it.
ROUNDED = {
    "glm-4-9b": 9.4,
    "ernie-4.5-0.3b": 0.36,
    "exaone-4.0-1.2b": 1.28,
    "exaone-4.0-32b": 32.0,
    "afm-4.5b": 4.62,
    "qwen3.5-9b": 8.954,
    "qwen3.5-35b-a3b": 34.66,
}
UNPUBLISHED |= ROUNDED.keys()
# Their papers leave out embedding and head.
WITHOUT_VOCABULARY = {"moonlight-16b-a3b", "glm-4.5", "glm-4.5-air", "minimax-m2"}
# As the papers and cards round them: arXiv:2401.04088, 2505.09388 (table 2), 2409.02060.
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "qwen1.5-moe-a2.7b": 2.7,
    "qwen2-57b-a14b": 14.2,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.2,
    "olmoe-1b-7b": 1.3,
}


def named_shapes(model):
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def test_every_preset_is_in_the_table():
    assert set(PRESETS) == set(PUBLISHED) | UNPUBLISHED


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_count_is_the_published_one(name):
    assert parameter_count(model_spec(preset=name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_count_is_nearly_that_of_the_card(name):
    count = parameter_count(model_spec(preset=name)) / 1e9
    assert count == pytest.approx(ROUNDED[name], rel=0.005)


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_a_token_meets_as_many_parameters_as_published(name):
    active = active_parameter_count(model_spec(preset=name)) / 1e9
    assert active == pytest.approx(ACTIVE[name], abs=0.06)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    # arXiv:2412.19437, 2502.16982 (table 2), 2507.20534, 2508.06471 and 2506.05767, and the card of
    # MiniMax-M2: billions, rounded.
    [
        *(("deepseek-v3", 671, 37), ("moonlight-16b-a3b", 16, 2.24), ("kimi-k2", 1040, 32.6)),
        *(("glm-4.5", 355, 32), ("glm-4.5-air", 106, 12), ("dots.llm1", 142, 14)),
        ("minimax-m2", 230, 10),
    ],
)
def test_sizes_are_nearly_those_of_papers(name, total, active):
    spec = model_spec(preset=name)
    assert parameter_count(spec) / 1e9 == pytest.approx(total, rel=0.015)
    found = active_parameter_count(spec)
    if name in WITHOUT_VOCABULARY:
        found -= 2 * spec.vocab_size * spec.dim
    assert found / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("name", "published"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_a_token_meets_as_many_as_a_card_that_leaves_out_the_embedding(name, published):
    # arXiv:2508.10925, table 1.
    spec = model_spec(preset=name)
    active = active_parameter_count(spec) - spec.vocab_size * spec.dim
    assert active / 1e9 == pytest.approx(published, abs=0.005)


def test_gpt3_is_nearly_the_paper():
    # arXiv:2005.14165, table 2.1, gives 175.0B with 2048 learned positions of 12,288.
    spec = model_spec(preset="gpt3-175b")
    assert abs((parameter_count(spec) + 2048 * 12288) / 175.0e9 - 1) < 0.005


@pytest.mark.often(4)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_modules_have_the_parts_in_order(name):
    spec = model_spec(preset=name)
    assert named_shapes(build_model(spec)) == [(part.name, part.shape) for part in parts(spec)]


BASE = {"vocab_size": 96, "dim": 32, "n_layers": 3, "n_heads": 4, "context": 64}
VARIANTS = {
    "llama": {},
    "llama-tied": {"tie_embeddings": True},
    "llama-gqa": {"n_kv_heads": 2},
    "llama-wide-heads": {"n_kv_heads": 1, "head_dim": 16},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "neox": {"family": "neox"},
    "neox-tied": {"family": "neox", "tie_embeddings": True},
    "neox-parallel": {"family": "neox", "parallel_residual": True, "rotary_pct": 0.25},
    "neox-no-biases": {"family": "neox", "attention_bias": False, "mlp_bias": False},
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_variants_have_the_parts_in_order(variant):
    spec = model_spec(**BASE, **VARIANTS[variant])
    model = build_model(spec)
    assert named_shapes(model) == [(part.name, part.shape) for part in parts(spec)]
    assert all(p.device.type == "meta" for p in model.parameters())
    assert not list(model.buffers())
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in model.parameters())
