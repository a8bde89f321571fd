"""Weights that transformers keeps in fp32 stay so in half precision, under every data layout."""

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.parallel.user_models.fp32 import kept_in_fp32
from meshwright.spec.training import TrainSpec
from ranks import ranks


class Gate(nn.Linear):
    """A router with a correction, as in DeepSeek-V3's."""

    def __init__(self):
        super().__init__(8, 4, bias=False)
        self.register_buffer("e_score_correction_bias", torch.full((4,), 1 + 2.0**-12))
        self.seen = None

    def forward(self, x):
        self.seen = self.weight.dtype
        scores = nn.functional.linear(x.float(), self.weight) + self.e_score_correction_bias
        return scores.softmax(-1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.norm = Gate(), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + self.up(x) * self.gate(x).sum(-1, keepdim=True).to(x.dtype)


class Model(nn.Module):
    _keep_in_fp32_modules_strict = ("gate.weight",)
    _keep_in_fp32_modules = ("layers.*.norm",)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_lists_are_read_as_transformers_reads_them():
    model = Model()
    gates, norms = ([getattr(one, name) for one in model.layers] for name in ("gate", "norm"))
    assert kept_in_fp32(model, "fp32") == []
    assert kept_in_fp32(model, "bf16") == gates
    assert {*kept_in_fp32(nn.Sequential(model), "fp16")} == {*gates, *norms}
    model._keep_in_fp32_modules_strict = ("layers.1",)
    assert kept_in_fp32(model, "bf16") == [model.layers[1].gate, model.layers[1].up, norms[1]]
    model._keep_in_fp32_modules_strict = ("up.bias",)
    with pytest.raises(ConfigError, match=r"keeps layers\.0\.up\.bias in fp32"):
        kept_in_fp32(model, "bf16")


@ranks(2)
def test_kept_weights_compute_in_fp32(world):
    for layout in (
        Layout(dp_replicate=2),
        Layout(dp_shard=2, zero=1),
        Layout(dp_shard=2, zero=3),
        Layout(dp_shard=2, zero=3, recompute="full"),
    ):
        torch.manual_seed(0)
        model = Model()
        train = TrainSpec(precision="bf16")
        mw.parallelize(model, layout, mw.make_mesh(layout), train=train)
        out = model(torch.ones(2, 3, 8))
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        for layer in model.layers:
            assert layer.gate.seen == torch.float32
            assert layer.gate.e_score_correction_bias.dtype == torch.float32
            assert layer.gate.e_score_correction_bias[0] != 1
            assert layer.gate.weight.grad.dtype == torch.float32
