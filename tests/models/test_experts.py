"""Mixtures of experts: the written-out backward, empty experts, products by groups, refusals."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshwright.comm.wire import WorkCounter
from meshwright.errors import ConfigError
from meshwright.kernels.recompute import _policy
from meshwright.models import build_model, grouped, init_model
from meshwright.models.experts import ExpertMLP
from meshwright.spec.hf import hf_config, spec_from_hf
from meshwright.spec.loading import load_config
from meshwright.spec.parts import active_parameter_count, parameter_count
from meshwright.spec.resolve import model_spec

SIZES = {"n_layers": 2, "dim": 24, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "ffn_dim": 40}
KINDS = {
    "two of five": {"family": "mixtral", "experts": 5, "top_k": 2},
    "one of nine, not renormalised": {
        "family": "qwen3_moe",
        "experts": 9,
        "top_k": 1,
        "expert_ffn_dim": 16,
        "norm_top_k": False,
    },
    "all, a shared one, gelu": {
        "family": "qwen2_moe",
        "experts": 3,
        "top_k": 3,
        "expert_ffn_dim": 8,
        "shared_ffn_dim": 12,
        "norm_top_k": True,
        "activation": "gelu",
    },
    "three of five, biases, bounded": {
        "family": "gpt_oss",
        "experts": 5,
        "top_k": 3,
        "swiglu_limit": 0.7,
        "swiglu_alpha": 1.3,
    },
}


NONE = ("experts=0", "top_k=0")


def spec_of(kind, **more):
    return model_spec(vocab_size=64, **{**SIZES, **KINDS[kind], **more})


def mixture(spec, dtype=torch.float64):
    """Return the experts of a layer with weights that tell them apart."""
    torch.manual_seed(0)
    mlp = ExpertMLP(spec).to(dtype)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return mlp


def plainly(spec, mlp, x):
    """Return the same in torch's own operations, expert by expert."""
    scores = x @ mlp.router.weight.t()
    every = torch.softmax(scores if mlp.router.bias is None else scores + mlp.router.bias, -1)
    shares, ids = every.topk(spec.top_k)
    if spec.norm_top_k:
        shares = shares / shares.sum(-1, keepdim=True)
    act = {"silu": F.silu, "gelu": F.gelu}[spec.activation]
    total = torch.zeros_like(x)

    def project(name, one, x):
        module = getattr(mlp.experts, name)
        found = module.weight[one] @ x
        return found if module.bias is None else found + module.bias[one]

    def between(gate, up):
        limit = spec.swiglu_limit
        if limit is None:
            return act(gate) * up
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(spec.swiglu_alpha * gate)

    for token, place in ((t, p) for t in range(len(x)) for p in range(spec.top_k)):
        one = ids[token, place]
        hidden = between(*(project(name, one, x[token]) for name in ("gate", "up")))
        total[token] = total[token] + shares[token, place] * project("down", one, hidden)
    if mlp.shared is not None:
        shared = mlp.shared
        beside = (act(x @ shared.gate.weight.t()) * (x @ shared.up.weight.t())) @ (
            shared.down.weight.t()
        )
        total = total + torch.sigmoid(x @ mlp.shared_gate.weight.t()) * beside
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_is_that_of_plain_operations(kind):
    spec = spec_of(kind)
    mlp, x = mixture(spec), torch.randn(7, spec.dim, dtype=torch.float64, requires_grad=True)
    names = ["x", *dict(mlp.named_parameters())]
    found, wanted = [], []
    for out, grads in ((mlp(x), found), (plainly(spec, mlp, x), wanted)):
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        grads += torch.autograd.grad((out * weight).sum(), [x, *mlp.parameters()])
        grads.append(out.detach())
    for name, one, other in zip([*names, "out"], found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10, msg=name)


def test_experts_without_a_token_get_a_gradient_of_zero():
    spec = spec_of("one of nine, not renormalised")
    mlp = mixture(spec)
    mlp(torch.randn(3, spec.dim, dtype=torch.float64)).sum().backward()
    for name in ("gate", "up", "down"):
        grad = getattr(mlp.experts, name).weight.grad
        busy = [one for one in grad if one.any()]
        assert 1 <= len(busy) <= 3
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("counts", [[3, 0, 5, 8], [0, 0, 16, 0]])
def test_one_kernel_for_all_groups_computes_what_the_loop_does(counts, monkeypatch):
    torch.manual_seed(0)
    rows, weight = torch.randn(16, 32).bfloat16(), torch.randn(4, 48, 32).bfloat16()
    grads, sizes = torch.randn(16, 48).bfloat16(), torch.tensor(counts)

    def everything():
        return (
            grouped.products(rows, weight, sizes),
            grouped.products(grads, weight, sizes, transposed=True),
            grouped.weight_grads(grads, rows, sizes),
        )

    loop = everything()
    monkeypatch.setattr(grouped, "takes_one_kernel", lambda rows, others: True)
    for one, other in zip(everything(), loop, strict=True):
        torch.testing.assert_close(one, other, atol=0.06, rtol=0.02)


@pytest.mark.parametrize("one_kernel", [False, True])
def test_selective_recomputation_keeps_the_products_of_experts(one_kernel, monkeypatch):
    monkeypatch.setattr(grouped, "takes_one_kernel", lambda rows, others: one_kernel)
    mlp = ExpertMLP(spec_of("two of five", dim=32, ffn_dim=32, head_dim=8)).bfloat16()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 16, 32).bfloat16().requires_grad_()

    def work(wrap):
        with WorkCounter() as counter:
            wrap(x).sum().backward()
        return counter.products

    selective = partial(create_selective_checkpoint_contexts, _policy)
    again = partial(checkpoint, mlp, use_reentrant=False, context_fn=selective)
    assert work(again) == work(mlp)
    whole = partial(checkpoint, mlp, use_reentrant=False)
    assert work(whole) > work(mlp)


@pytest.mark.parametrize("counts", [[3, 0, 5, 8], [0, 0, 16, 0]])
def test_sums_of_groups_are_no_products_of_a_layer_on_a_gpu_either(counts, monkeypatch):
    torch.manual_seed(0)
    rows, factors, sizes = torch.randn(16, 32), torch.randn(16), torch.tensor(counts)
    by_host = grouped.sums(rows, factors, sizes)
    monkeypatch.setattr(grouped, "counts_are_on_device", lambda rows: True)
    with WorkCounter() as counter:
        found = grouped.sums(rows, factors, sizes)
    torch.testing.assert_close(found, by_host)
    assert counter.products == 0
    torch.library.opcheck(torch.ops.meshwright.sums_by_picks.default, (rows, factors, sizes))


def test_parameters_are_counted_whole_and_as_a_token_meets_them():
    spec = spec_of("two of five")
    model = build_model(spec)
    assert parameter_count(spec) == sum(one.numel() for one in model.parameters())
    of_one = 3 * spec.dim * spec.ffn_dim
    assert parameter_count(spec) - active_parameter_count(spec) == spec.n_layers * 3 * of_one


def test_a_dense_layer_has_one_mlp():
    spec = spec_of("two of five", family="qwen3_moe", layer_pattern=[{"dense": True}, {}])
    model = init_model(build_model(spec, "cpu"), spec, 0)
    assert [isinstance(block.mlp, ExpertMLP) for block in model.blocks] == [False, True]
    assert torch.isfinite(model(torch.arange(12)[None])).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.experts=4"], "model.experts = 4 is not of the llama family"),
        (["model.family=mixtral", "model.top_k=9"], "model.top_k = 9 must be from 1 to"),
        (["model.family=qwen3_moe", "model.experts=0"], "model.top_k = 8 needs experts"),
        (
            [f"model.{one}" for one in (*NONE, "family=mixtral", "layer_pattern=[{dense=true}]")],
            "model.layer_pattern need model.experts > 0",
        ),
        (
            ["model.family=qwen2_moe", "model.shared_ffn_dim=0"],
            "model.shared_gate = true needs a shared expert",
        ),
    ],
)
def test_what_is_no_mixture_is_refused(words, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, words)
    assert message in str(error.value)


def test_both_spellings_of_the_number_of_experts_are_read():
    spec = spec_of("one of nine, not renormalised")
    config = hf_config(spec)
    assert config["num_experts"] == 9
    renamed = {"num_local_experts" if k == "num_experts" else k: v for k, v in config.items()}
    assert spec_from_hf(renamed) == spec_from_hf(config) == spec.model_copy(update={"preset": None})
    with pytest.raises(ConfigError, match="num_experts = 9 and num_local_experts = 8 must agree"):
        spec_from_hf({**config, "num_local_experts": 8})


def test_dense_layers_are_read_by_both_of_their_keys():
    config = hf_config(spec_of("one of nine, not renormalised", n_layers=4))
    assert config["mlp_only_layers"] == []
    every = spec_from_hf({**config, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [every.layer(at).dense for at in range(4)] == [True, False, True, True]
    assert hf_config(every)["mlp_only_layers"] == [0, 2, 3]
    for key, value in (("decoder_sparse_step", 0), ("mlp_only_layers", "all")):
        with pytest.raises(ConfigError, match=key):
            spec_from_hf({**config, key: value})
