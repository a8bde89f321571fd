"""What a check of a converted folder refuses: faults of the folder, and nothing of its own."""

import pytest
import torch

from hf_folders import export
from meshwright.checkpoint.hf_check import CLOSE, Logits, logits_of, same_logits
from meshwright.cli import main
from meshwright.models import build_model, init_model
from meshwright.models.balance import Sequences
from meshwright.models.experts import ExpertMLP
from meshwright.models.hf import save_hf
from meshwright.models.routers import router
from meshwright.spec.resolve import model_spec

SIZES = {"vocab_size": 320, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "context": 64}
LATENT = {
    "n_kv_heads": 4,
    "expert_groups": 2,
    "top_groups": 1,
    "dense_layers": 0,
    "q_lora_rank": 0,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# Widths that transformers' kernel for all experts refuses: no rows of whole 16 bytes.
MIXTURES = {
    "mixtral": {"ffn_dim": 30},
    "qwen3_moe": {"ffn_dim": 48, "expert_ffn_dim": 22},
    "qwen2_moe": {"ffn_dim": 48, "expert_ffn_dim": 26, "shared_ffn_dim": 26},
    "olmoe": {"ffn_dim": 34, "n_kv_heads": 4},
    "gpt_oss": {"ffn_dim": 30, "head_dim": 8},
    "deepseek_v3": {"ffn_dim": 48, "expert_ffn_dim": 18, "shared_ffn_dim": 18, **LATENT},
}


def mixture(family, std=0.3, **more):
    sizes = {**SIZES, "experts": 4, "top_k": 2, **MIXTURES[family], **more}
    spec = model_spec(family=family, init_std=std, **sizes)
    return init_model(build_model(spec, "cpu"), spec, seed=0)


@pytest.mark.often(3)
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_width_that_a_kernel_of_transformers_refuses_is_exported(family, dtype, tmp_path):
    save_hf(mixture(family), tmp_path / "a")
    words = ["--tokenizer", "none", "--dtype", dtype]
    assert export(tmp_path / "a", tmp_path / "b", *words) == 0


def test_such_a_folder_is_imported(tmp_path):
    save_hf(mixture("mixtral"), tmp_path / "a")
    assert main(["checkpoint", "import-hf", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def test_rounding_that_swaps_experts_is_no_fault(tmp_path, capsys):
    """Router rows that bf16 makes equal: tokens meet other experts, and logits move far."""
    model = mixture("mixtral", std=0.5, experts=2, top_k=1)
    with torch.no_grad():
        for block in model.blocks:
            weight = block.mlp.router.weight
            weight[1] = weight[0] * (1 + 1e-4 * torch.randn(weight[0].shape))
    save_hf(model, tmp_path / "a")
    words = ["--tokenizer", "none", "--dtype", "bf16"]
    assert export(tmp_path / "a", tmp_path / "b", *words) == 0
    said = capsys.readouterr().out
    moved = float(said.split("moves logits by up to ")[1].split()[0])
    assert moved > 0.1


def logits(close=()):
    values = torch.linspace(-1, 1, 2 * 4 * 3).view(2, 4, 3)
    marks = torch.zeros(2, 4, dtype=torch.bool)
    for place in close:
        marks[place] = True
    return Logits(values, marks)


def test_a_swapped_expert_is_left_out_with_what_has_seen_it():
    expected = logits(close=[(0, 1)])
    found = expected.values.clone()
    found[0, 1:] += 0.2
    assert same_logits("", found, expected, 1e-4).passed
    assert not same_logits("", found, logits(), 1e-4).passed


@pytest.mark.parametrize("place", [(0, 0), (1, 1), (1, 3)])
def test_a_difference_without_or_before_a_close_choice_is_a_fault(place):
    expected = logits(close=[(0, 1)])
    found = expected.values.clone()
    found[0, 1:] += 0.2
    found[place] += 0.1
    check = same_logits("", found, expected, 1e-4)
    assert not check.passed
    assert check.first_divergence.startswith("row {}, position {}".format(*place))


def test_nothing_is_left_to_compare():
    expected = logits(close=[(0, 0), (1, 0)])
    assert not same_logits("", expected.values + 0.2, expected, 1e-4).passed
    assert not same_logits("", expected.values * float("nan"), expected, 1e-4).passed


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_a_margin_is_what_a_selection_hangs_on(family):
    """A change of scores by less than half of it selects the same experts, one by more may not."""
    spec = mixture(family, experts=8).spec
    torch.manual_seed(0)
    one = router(spec)
    for tensor in (*one.parameters(), *one.buffers()):
        torch.nn.init.normal_(tensor, std=0.3)
    x = torch.randn(64, spec.dim)
    margin, ids = one.margin(x), one(x, Sequences(1)).ids.sort(-1).values
    assert (margin > 0).all()
    moved = one.correction if family == "deepseek_v3" else one.bias
    if moved is None:  # a bias by another input
        x, one.bias = x, torch.nn.Parameter(torch.zeros(spec.experts))
        moved = one.bias
    changed = torch.zeros(64, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(50):
            sign = torch.randn(spec.experts).sign()
            groups = 2 if family == "deepseek_v3" else 1  # a group's score is the sum of two
            moved += sign * margin.min() * 0.49 / groups
            assert torch.equal(one(x, Sequences(1)).ids.sort(-1).values, ids)
            moved -= sign * margin.min() * 0.49 / groups
            moved += sign * margin.min() * 1.5
            changed |= (one(x, Sequences(1)).ids.sort(-1).values != ids).any(-1)
            moved -= sign * margin.min() * 1.5
    assert changed[margin.argmin()]


def test_tokens_with_close_choices_are_noted():
    model = mixture("mixtral", experts=2, top_k=1)
    ids = torch.arange(40).view(2, 20)
    assert not logits_of(model, ids).close.all()
    with torch.no_grad():
        weight = model.blocks[1].mlp.router.weight
        weight[1] = weight[0] * (1 + CLOSE / 1e3)
    found = logits_of(model, ids)
    assert found.close.all()
    assert not any(module._forward_hooks for module in model.modules())
    assert isinstance(model.blocks[1].mlp, ExpertMLP)
    torch.testing.assert_close(found.values, model(ids).detach())
