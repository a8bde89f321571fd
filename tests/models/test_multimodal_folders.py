"""Folders of models with images: their text model is read, trained and exported as one."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.models.hf import load_hf, save_hf
from meshwright.spec.hf import spec_from_hf

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
SEEN = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 28}
SEEN |= {"num_attention_heads": 2, "patch_size": 14}
WINDOWED = ["sliding_attention", "full_attention"]


def gemma3():
    text = {**TEXT, "head_dim": 12, "sliding_window": 7, "layer_types": WINDOWED, "pad_token_id": 0}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=SEEN, mm_tokens_per_image=4, image_token_index=98
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral3():
    text = {**TEXT, "model_type": "mistral", "head_dim": 12, "sliding_window": None}
    config = transformers.Mistral3Config(
        text_config=text, vision_config={**SEEN, "model_type": "pixtral"}, image_token_index=98
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def qwen2_5_vl():
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]}
    seen = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 14,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={**seen, "out_hidden_size": 48},
        image_token_id=98,
        video_token_id=97,
        vision_start_token_id=96,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 0.1,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}


def qwen3_5(has_experts=False):
    """Its positions have sections that take turns; experts are stored together, as published."""
    rotary = {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    }
    text = {**TEXT, **DELTA, "head_dim": 12, "rope_parameters": rotary}
    seen = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2}
    seen |= {"patch_size": 14, "out_hidden_size": 48}
    kind = "Qwen3_5Moe" if has_experts else "Qwen3_5"
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | (EXPERTS if has_experts else {}),
        vision_config=seen,
        image_token_id=98,
        video_token_id=97,
        vision_start_token_id=96,
        vision_end_token_id=95,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def qwen3_5_moe():
    return qwen3_5(has_experts=True)


MODELS = {
    "gemma3": gemma3,
    "mistral3": mistral3,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}
# How files of other versions call the tensors of the same model.
_V4 = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
SPELLINGS = {
    "as saved": {},
    "of transformers 4": _V4,
    "of Qwen": {"model.language_model.": "model.", "model.visual.": "visual."},
}


def respelled(folder, spelling):
    """Rename the stored tensors whose names begin in some way."""
    stored = load_file(folder / "model.safetensors")
    for start, other in spelling.items():
        stored = {
            other + name.removeprefix(start) if name.startswith(start) else name: tensor
            for name, tensor in stored.items()
        }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=list(SPELLINGS))
@pytest.mark.parametrize("kind", MODELS)
def test_the_text_model_has_the_logits_of_the_whole_model(kind, spelling, tmp_path):
    torch.manual_seed(0)
    reference = MODELS[kind]().eval()
    reference.save_pretrained(tmp_path / "a")
    respelled(tmp_path / "a", spelling)
    with pytest.warns(UserWarning, match="tensors that read images are left out"):
        model = load_hf(tmp_path / "a")
    ids = torch.randint(0, 95, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = reference(input_ids=ids).logits
        torch.testing.assert_close(model(ids), wanted, atol=1e-5, rtol=0)
    save_hf(model, tmp_path / "b")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, wanted, atol=1e-5, rtol=0)


def test_published_configs_name_the_text_model():
    """As google/gemma-3-4b-it, which leaves out defaults, and Qwen2.5-VL, whose keys are flat."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    inner |= {"num_hidden_layers": 34, "sliding_window": 1024}
    inner |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    spec = spec_from_hf({"model_type": "gemma3", "text_config": inner, "vision_config": {}})
    assert (spec.family, spec.n_layers, spec.tie_embeddings) == ("gemma3", 34, True)
    flat = {**TEXT, "model_type": "qwen2_5_vl", "vision_config": {"depth": 32}}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}, "rope_theta": 1e6}
    spec = spec_from_hf(flat)
    assert (spec.family, spec.rope_theta, spec.rope_scaling) == ("qwen2", 1e6, None)


@pytest.mark.parametrize(
    ("kind", "outer", "inner", "tied"),
    [
        ("mistral3", True, False, True),
        ("mistral3", False, True, False),
        ("mistral3", None, None, False),
        ("gemma3", False, True, False),
        ("gemma3", None, None, True),
        ("qwen2_5_vl", False, True, True),
    ],
)
def test_the_outer_key_says_whether_the_embedding_is_tied(kind, outer, inner, tied):
    text = {**TEXT, "tie_word_embeddings": inner}
    config = {"model_type": kind, "text_config": text, "tie_word_embeddings": outer}
    assert spec_from_hf(config).tie_embeddings is tied
