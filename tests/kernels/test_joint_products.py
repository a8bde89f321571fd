"""Linear layers of one input under tp: what is computed while a message travels."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm import shared
from meshwright.comm.groups import open_groups
from meshwright.layout import Layout
from meshwright.parallel.tensor_parallel.deferred import Deferral, linears
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion
from ranks import ranks

NAMES = {
    "aten::mm": "product",
    "_c10d_functional::all_reduce_": "sum",
    "_c10d_functional::all_gather_into_tensor": "gather",
    "_c10d_functional::reduce_scatter_tensor": "scatter",
    "_c10d_functional::wait_tensor": "wait",
}
OUTS, IN, LINK = (6, 2, 4), 4, 2


class Order(TorchDispatchMode):
    """Lists products and messages as they begin, and waits."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.replace(f"{shared.SPACE}::", "_c10d_functional::")
        self.found += [NAMES[name]] if name in NAMES else []
        return func(*args, **(kwargs or {}))


def made(world, sp, gathers_again=False, deferral=None):
    """Inputs, weights and outputs of three layers, this rank's share of the input where it is cut.

    The whole input is the same on all ranks, the weights are not.
    """
    tp_region = TPRegion(
        open_groups(Layout(tp=LINK, sp=sp), world).tp, sp, gathers_again=gathers_again
    )
    whole = torch.randn(2, 8, IN, generator=torch.Generator().manual_seed(0))
    x = (whole.chunk(LINK, 1)[world.rank] if sp else whole).clone().requires_grad_()
    weights = [weight.requires_grad_() for weight in all_weights()[world.rank]]
    outs = linears(x, weights, [None] * len(OUTS), deferral or Deferral(), tp_region)
    return whole, x, weights, outs


def all_weights():
    """The weights of each rank."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(out, IN, generator=generator) for out in OUTS] for _ in range(LINK)]


def loss(outs):
    return sum(out.square().sum() for out in outs)


@pytest.mark.parametrize(
    ("sp", "again", "order"),
    [
        (False, False, "product product product sum product product product wait"),
        (True, False, "product product product scatter product product product wait"),
        (
            True,
            True,
            "gather product product product wait scatter product product product wait",
        ),
    ],
)
@ranks(2)
def test_messages_travel_beside_products(world, sp, again, order):
    whole, x, weights, outs = made(world, sp, again)
    with Order() as seen:
        loss(outs).backward()
    assert " ".join(seen.found) == order
    # The same by plain products, with the weights of all ranks.
    alone = whole.clone().requires_grad_()
    everyones = all_weights()
    mine = [weight.requires_grad_() for weight in everyones[world.rank]]
    loss(alone @ weight.t() for row in everyones for weight in row).backward()
    assert alone.grad is not None
    expected = alone.grad.chunk(LINK, 1)[world.rank] if sp else alone.grad
    torch.testing.assert_close(x.grad, expected)
    for weight, plain in zip(weights, mine, strict=True):
        torch.testing.assert_close(weight.grad, plain.grad)


@ranks(2)
def test_deferred_products_come_later(world):
    """With a split backward the first half has no weight's product, and the second no message."""
    _, x, weights, outs = made(world, sp=True, gathers_again=True)
    loss(outs).backward()
    expected = [weight.grad for weight in weights]
    deferral = Deferral()
    _, again, weights, outs = made(world, sp=True, gathers_again=True, deferral=deferral)
    deferral.pending = []
    with Order() as first:
        loss(outs).backward()
    assert first.found == ["gather", "product", "product", "product", "wait", "scatter", "wait"]
    torch.testing.assert_close(again.grad, x.grad)
    assert [weight.grad for weight in weights] == [None] * 3
    with Order() as second:
        for work in deferral.pending:
            work()
    assert second.found == ["product"] * 3
    torch.testing.assert_close([weight.grad for weight in weights], expected)


@pytest.mark.parametrize("again", [False, True])
@ranks(2)
def test_what_is_gathered_again_is_not_kept(world, again):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        made(world, sp=True, gathers_again=again)
    assert kept[0] == ((2, 4, IN) if again else (2, 8, IN))
    assert kept[1:] == [(out, IN) for out in OUTS]
