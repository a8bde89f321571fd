"""Fine-tuning on conversations is that of transformers and PEFT, on many layouts.

Losses, norms and gradients of ten steps against a loop of one process. What a rank and a
microbatch have of trained tokens is as unequal as conversations are.
"""

import pytest
import torch

from loops import OPTIMIZER, STEPS, TRAIN, own_steps, plain_steps, sampled, worst
from meshwright.checkpoint.peft_files import peft_name
from meshwright.data import IGNORE
from meshwright.layout import Layout
from meshwright.models.hf_names import hf_name
from meshwright.spec.loading import load_config
from ranks import on_ranks

LIMIT = 1e-5
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
QUICK = ("shard2 zero2 mb1",)
SLOW = (
    "tp2 sp mb1",
    "dp1 mb1",
    "dp1 recompute-full mb4",
    "dp2 mb1",
    "shard2 zero1 mb2",
    "pp2 1f1b mb1",
    "shard2 zero3 mb1",
    "shard2 zero3 offload-params mb2",
    "tp2 mb8",
    "cp2-ring mb2",
    "cp2-ulysses mb4",
    "pp2 gpipe mb2",
    "pp2 v2 interleaved_1f1b mb1",
    "pp2 v2 zbv mb1",
    "pp2 v2 interleaved_zero_bubble mb2",
    "dp2 shard2 zero3 mb1",
    "dp4 mb2",
    "tp4 sp recompute-selective mb2",
    "cp4-ring mb4",
    "pp4 1f1b mb1",
    "dp2 tp2 sp mb1",
    "shard2 tp2 zero2 mb2",
    "dp2 cp2-ring mb2",
    "cp2-ulysses tp2 sp mb4",
    "cp2-ring shard2 zero3 mb1",
    "pp2 tp2 sp 1f1b mb2",
    "pp2 shard2 zero1 1f1b mb1",
    "pp2 v2 dp2 dualpipev mb1",
)
LAYOUTS = [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
# Of models with experts, whose experts stay frozen.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 8}
EXPERTS |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
MIXED = ("tp2 sp mb2", "dp2 ep2 mb1", "shard2 zero3 ep2 mb2", "cp2-ring mb2", "pp2 1f1b mb1")
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def model_of(folder, has_experts=False):
    """Write a model of transformers and return it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if has_experts:
        sizes = {**SIZES, **EXPERTS, "initializer_range": 0.1}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    else:
        config = transformers.LlamaConfig(**SIZES, initializer_range=0.1)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    return model


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The loop of transformers, all weights trained."""
    folder = tmp_path_factory.mktemp("full")
    model = model_of(folder)
    spec = load_config(None, [f"model.init_from={folder / 'base'}"]).model
    return folder, spec, plain_steps(model, sampled(folder))


def adapters_of(folder, has_experts=False, **more):
    """Return the loop of transformers and PEFT, from adapters of which no matrix is 0."""
    peft = pytest.importorskip("peft")
    asked = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), **more}
    config = peft.LoraConfig(**asked, task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(model_of(folder, has_experts), config)
    model.save_pretrained(folder / "adapter")
    words = [f"model.init_from={folder / 'base'}", f"lora.init_from={folder / 'adapter'}"]
    spec = load_config(None, words).model
    assert spec.lora.rslora is more.get("use_rslora", False)
    return folder, spec, plain_steps(model, sampled(folder))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    return adapters_of(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def adapted_mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    return adapters_of(folder, has_experts=True, target_modules=["q_proj", "o_proj"])


@pytest.fixture(scope="module")
def scaled_by_the_root(tmp_path_factory):
    return adapters_of(tmp_path_factory.mktemp("rslora"), use_rslora=True)


def check(label, folder, spec, expected, renamed, capsys):
    found = on_ranks(Layout.parse(label).world, own_steps, label=label, spec=spec, folder=folder)
    off = worst(found, expected, renamed)
    with capsys.disabled():
        figures = ", ".join(f"{name} {one:.1e}" for name, one in off._asdict().items())
        print(f"\n{label}: {figures}")
    assert max(off) < LIMIT


@pytest.mark.slow
def test_what_is_trained_is_unequal_and_the_loops_learn(full):
    folder, _, expected = full
    sampler = sampled(folder)
    for step in range(STEPS):
        counts = (sampler.rows(step).targets != IGNORE).sum(1)
        assert len(set(counts.tolist())) > 4
        for ranks in (2, 4):
            assert len(set(counts.reshape(ranks, -1).sum(1).tolist())) > 1
    assert expected.losses[-1] < expected.losses[0] - 0.05
    assert max(expected.norms) > TRAIN.clip_norm
    assert OPTIMIZER.weight_decay > 0
    assert len({*QUICK, *SLOW}) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("label", LAYOUTS)
def test_all_weights_train_as_in_transformers(full, label, capsys):
    check(label, *full, lambda name: hf_name("llama", name), capsys)


def adapter_name(name):
    return peft_name("llama", name).replace(".weight", ".default.weight")


@pytest.mark.parametrize("label", LAYOUTS)
def test_adapters_train_as_in_peft(adapted, label, capsys):
    check(label, *adapted, adapter_name, capsys)


@pytest.mark.parametrize(
    "label", [*MIXED[:1], *(pytest.param(one, marks=pytest.mark.slow) for one in MIXED[1:])]
)
def test_adapters_of_a_mixture_train_as_in_peft(adapted_mixture, label, capsys):
    def renamed(name):
        return peft_name("qwen3_moe", name).replace(".weight", ".default.weight")

    check(label, *adapted_mixture, renamed, capsys)


def test_adapters_scaled_by_the_root_of_their_rank(scaled_by_the_root, capsys):
    check("tp2 sp mb1", *scaled_by_the_root, adapter_name, capsys)
