"""Whole weights of a foreign model that meet what tp has cut get the gradient of all ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.spec.training import Recompute
from ranks import ranks

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
PLAN = {
    "model.layers.*.self_attn.q_proj": "column",
    "model.layers.*.self_attn.k_proj": "column",
    "model.layers.*.self_attn.v_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
}


def foreign(kind, **sizes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms that are all ones would hide what each one does
            torch.manual_seed(len(name))
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def loss_of(model, ids):
    logits = model(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def gradients_agree(model, alone, within=1e-5):
    from meshwright.parallel.gather import full_tensor

    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        found, wanted = full_tensor(parameter.grad), expected[name].grad
        scale = wanted.abs().max()
        assert torch.allclose(found, wanted, rtol=0, atol=within * scale), name


@pytest.mark.often(1)
@pytest.mark.parametrize("plan", [PLAN, None], ids=["by hand", "of transformers"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3Text"])
@ranks(2)
def test_norms_of_each_head_get_the_gradient_of_all_heads(world, kind, recompute: Recompute, plan):
    ids = torch.arange(40).view(2, 20) % 64
    alone, layout = foreign(kind), mw.Layout(tp=2, recompute=recompute)
    loss_of(alone, ids).backward()
    model = mw.parallelize(foreign(kind), layout, mw.make_mesh(layout), plan=plan)
    loss_of(model, ids).backward()
    gradients_agree(model, alone)


@pytest.mark.slow
@ranks(4)
def test_sums_of_parts_meet_those_over_data(world):
    ids = torch.arange(80).view(4, 20) % 64
    alone, layout = foreign("Qwen3"), mw.Layout(tp=2, dp_shard=2, zero=3)
    loss_of(alone, ids).backward()
    model = mw.parallelize(foreign("Qwen3"), layout, mw.make_mesh(layout), plan=PLAN)
    place = layout.mesh.data_rank(world.rank)
    loss_of(model, ids[2 * place : 2 * place + 2]).backward()
    gradients_agree(model, alone)


@ranks(2)
def test_a_norm_over_all_heads_is_refused(world):
    layout = mw.Layout(tp=2)
    model = mw.parallelize(foreign("Olmo2"), layout, mw.make_mesh(layout), plan=PLAN)
    with pytest.raises(ConfigError, match=r"32 features meets the 16 that layout\.tp = 2 leaves"):
        model(torch.arange(8)[None])


class Scale(torch.autograd.Function):
    """A kernel that no operator of torch shows."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


class Hidden(nn.Module):
    """A layer whose weight meets the part in a kernel, where nobody can follow."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        wide = self.up(x)
        wide = Scale.apply(wide, self.scale.repeat(wide.shape[-1] // 8))
        return self.down(torch.relu(wide))


@ranks(2)
def test_a_sum_that_is_missing_shows_in_the_first_backward(world):
    torch.manual_seed(0)
    layout, x = mw.Layout(tp=2), torch.randn(2, 4, 8)
    model = mw.parallelize(
        Hidden(), layout, mw.make_mesh(layout), plan={"up": "column", "down": "row"}
    )
    with pytest.raises(ConfigError, match="the gradient of scale differs between the ranks"):
        model(x).square().sum().backward()


@ranks(2)
def test_a_missing_sum_that_a_layer_of_zeros_hides_shows_once_it_is_trained(world):
    torch.manual_seed(0)
    layout, x, hidden = mw.Layout(tp=2), torch.randn(2, 4, 8), Hidden()
    nn.init.zeros_(hidden.down.weight)
    model = mw.parallelize(
        hidden, layout, mw.make_mesh(layout), plan={"up": "column", "down": "row"}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (x + model(x)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="the gradient of scale differs between the ranks"):
        (x + model(x)).square().sum().backward()


class Later(nn.Module):
    """A weight that meets the part only after some steps."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        wide = self.up(x * self.scale)
        if self.steps > 2:
            wide = wide * self.scale.repeat(wide.shape[-1] // 8)
        return self.down(torch.relu(wide))


@ranks(2)
def test_a_sum_that_is_missing_in_a_later_branch_shows(world):
    torch.manual_seed(0)
    layout, x = mw.Layout(tp=2), torch.randn(2, 4, 8)
    model = mw.parallelize(
        Later(), layout, mw.make_mesh(layout), plan={"up": "column", "down": "row"}
    )

    def steps(number):
        for _ in range(number):
            model(x).square().sum().backward()
            model.zero_grad()

    steps(2)
    with pytest.raises(ConfigError, match="the gradient of scale differs between the ranks"):
        steps(3)  # each checks one of three parameters


@ranks(2)
def test_weights_that_are_trained_only_later_get_the_gradient_of_all_heads(world):
    ids = torch.arange(40).view(2, 20) % 64
    alone, layout, model = foreign("Qwen3"), mw.Layout(tp=2), foreign("Qwen3")

    def train_norms(is_on):
        for one in (alone, model):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(is_on or "norm" not in name)

    train_norms(False)
    mw.parallelize(model, layout, mw.make_mesh(layout), plan=PLAN)
    for step in range(3):
        train_norms(step == 2)
        for one in (alone, model):
            one.zero_grad()
            loss_of(one, ids).backward()
    gradients_agree(model, alone)


@ranks(2)
def test_layers_that_compute_more_from_their_weights_are_not_cut(world):
    layout = mw.Layout(tp=2)
    for layer, style, why in (
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False)),
            "column",
            "weight_norm",
        ),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "row", "weight_norm"),
        (nn.Embedding(8, 4, max_norm=1.0), "vocab", "max_norm"),
        (nn.Embedding(8, 4, scale_grad_by_freq=True), "vocab", "scale_grad_by_freq"),
        (nn.Embedding(8, 4, sparse=True), "vocab", "sparse"),
    ):
        model = nn.ModuleDict({"one": layer})
        with pytest.raises(ConfigError, match=f"cuts one, but .*{why}"):
            mw.parallelize(model, layout, mw.make_mesh(layout), plan={"one": style})


@pytest.mark.parametrize("recompute", ["full", "selective"])
@ranks(2)
def test_a_recomputed_block_draws_the_same_dropout(world, recompute: Recompute):
    ids = torch.arange(40).view(2, 20) % 64
    layout = mw.Layout(dp_replicate=2, recompute=recompute)
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.0, "use_cache": False}
    alone, model = foreign("GPTNeoX", **dropout).train(), foreign("GPTNeoX", **dropout).train()
    mw.parallelize(model, layout, mw.make_mesh(layout))
    for one in (alone, model):
        torch.manual_seed(7)
        (loss_of(one, ids) * (1 if one is alone else 0.5)).backward()
    gradients_agree(model, alone)


@ranks(2)
def test_models_without_such_weights_are_no_longer_followed(world):
    layout = mw.Layout(tp=2)
    plain, normed = foreign("Llama"), foreign("Qwen3")
    forward = type(plain).forward
    for model in (plain, normed):
        mw.parallelize(model, layout, mw.make_mesh(layout), plan=PLAN)
        model(torch.arange(8)[None])
    assert plain.forward.__func__ is forward
    assert normed.forward.__wrapped__ is not normed.forward


@ranks(2)
def test_blocks_are_recomputed_in_every_step(world):
    """Also once a model is no longer followed, which a backward may be the first to find."""
    layout = mw.Layout(tp=2, recompute="full")
    model = mw.parallelize(foreign("Llama"), layout, mw.make_mesh(layout), plan=PLAN)
    norms = [layer.post_attention_layernorm for layer in model.model.layers]
    calls = []
    for norm in norms:
        norm.register_forward_pre_hook(lambda module, args: calls.append(module))
    ids = torch.arange(40).view(2, 20) % 64
    for step in (1, 2, 3):
        loss_of(model, ids).backward()
        assert len(calls) == 2 * len(norms) * step
