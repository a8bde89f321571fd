"""Sums of millions of numbers: right at any length, and however the numbers are cut."""

import pytest
import torch
from torch import nn

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import Link
from meshwright.layout import Layout
from meshwright.parallel.data_parallel.gradients import GatheredParameter, global_norm, norms
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.tensor_parallel.deferred import Deferral
from meshwright.parallel.user_models.parallelize import clip_grad_norm
from meshwright.program.lower import lower
from meshwright.program.schedule import Action
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import ranks

LONG = 5_000_000
MODEL = model_spec(dim=8, n_layers=1, n_heads=1, vocab_size=16, ffn_dim=8)


def long_gradient() -> torch.Tensor:
    return torch.randn(LONG, generator=torch.Generator().manual_seed(0))


def held(*gradients: torch.Tensor) -> list[GatheredParameter]:
    """Parameters that one rank holds whole, with these gradients."""
    program = lower(MODEL, TrainSpec(batch=1, seq_len=8), OptimizerSpec(), Layout())
    name, sharding = next(iter(program.shardings.items()))
    found = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.empty(gradient.shape))
        parameter.grad = gradient
        found.append(GatheredParameter(name, 0, parameter, sharding, 1))
    return found


@pytest.mark.parametrize("shape", [(LONG,), (5, 1000, 1000), (100, 50_000)])
@pytest.mark.parametrize("pieces", [1, 3])
def test_the_norm_of_a_long_gradient_is_that_of_its_pieces(shape, pieces):
    whole = long_gradient()
    exact = whole.double().norm().item()
    parts = whole.view(shape).tensor_split(pieces)
    found = global_norm(held(*parts), 1, torch.device("cpu"))
    assert found.total.item() == pytest.approx(exact, rel=1e-8)
    assert found.first.item() == pieces  # none is not finite


@pytest.mark.parametrize("size", [1, 1023, 4096, 16_384, 16_385, 17_407, 100_001])
def test_norms_at_every_length(size):
    whole = long_gradient()[:size]
    exact = whole.double().norm().item()
    assert norms([whole]).tolist() == [pytest.approx(exact, rel=1e-6)]
    uneven = long_gradient()[: size * 3].view(3, size).t()  # not contiguous
    assert norms([uneven]).item() == pytest.approx(uneven.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, LONG // 2, LONG - 1])
def test_one_number_in_a_long_gradient_that_is_not_finite_is_found(bad, at):
    broken = long_gradient()
    broken[at] = bad
    found = global_norm(held(long_gradient(), broken), 1, torch.device("cpu"))
    assert not torch.isfinite(found.total)
    assert found.first.item() == 1


@ranks(2)
def test_the_norm_of_a_model_of_ones_own(world):
    weight = nn.Parameter(torch.empty(LONG))
    weight.grad = long_gradient()  # the same on both
    exact = weight.grad.double().norm().item()
    assert clip_grad_norm([weight], exact / 2) == pytest.approx(exact, rel=1e-8)
    assert weight.grad.double().norm().item() == pytest.approx(exact / 2, rel=1e-6)


class OneStage:
    """A stage whose every microbatch has the same loss."""

    def __init__(self):
        self.modules, self.stage_ranks = {0: nn.Identity()}, (0,)
        self.deferral, self.recorder, self.zero = Deferral(), FlightRecorder(), 0
        self.device, self.pp = torch.device("cpu"), Link(None, (0,), 0)

    def forward(self, stage, hidden, batch):
        return torch.tensor(0.1)


def test_the_loss_of_many_microbatches_is_their_sum():
    count = 20_000
    table = tuple(Action("F", 0, index) for index in range(count))
    loss = Pipeline(OneStage(), table, [None] * count, None).run()
    assert loss.item() == pytest.approx(torch.tensor(0.1).double().item() * count, rel=1e-12)
