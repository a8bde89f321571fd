"""The head and its loss against torch's own, whole and cut over ranks, and what they hold."""

import shutil

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from meshwright.comm.groups import Link
from meshwright.data.sampler import IGNORE
from meshwright.parallel import loss
from meshwright.parallel.loss import loss_sum
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion
from meshwright.program.sizes import loss_rows
from meshwright.program.target import Target
from ranks import ranks

ALONE = TPRegion(Link(None, (0,), 0), sp=False)
ROWS, SEQ, DIM, VOCAB = 4, 75, 24, 1026
TOKENS, AT_ONCE = ROWS * SEQ, 64  # the last round has fewer
SCALE = 0.25


def drawn(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, SEQ, DIM).to(dtype)
    weight = torch.randn(VOCAB, DIM).to(dtype)
    targets = torch.randint(0, VOCAB, (ROWS, SEQ))
    targets[:, ::7] = IGNORE
    return hidden, weight, targets


def ours(hidden, weight, targets, tp_region=ALONE, at_once=AT_ONCE, *, fuses=False):
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    loss = loss_sum(*leaves, targets, IGNORE, tp_region, at_once, fuses=fuses)
    (loss * SCALE).backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


def torchs(hidden, weight, targets):
    leaves = [t.double().requires_grad_() for t in (hidden, weight)]
    logits = F.linear(*leaves).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (loss * SCALE).backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_loss_and_gradients_are_torchs(dtype, tolerance):
    given = drawn(dtype)
    found, expected = ours(*given), torchs(*given)
    assert abs(found[0].item() / expected[0].item() - 1) < max(tolerance / 10, 1e-6)
    for mine, exact in zip(found[1:], expected[1:], strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - exact).abs().max() < tolerance * exact.abs().max()
    assert not found[1][:, ::7].any()


def test_a_small_loss_of_large_logits_keeps_its_digits():
    hidden = torch.ones(1, 8, 2)
    weight = torch.stack([torch.full((64,), 400.0), torch.zeros(64)], -1)
    weight[0, 1] = 12  # the target is that far above the others
    found, expected = (
        each(hidden, weight, torch.zeros(1, 8, dtype=torch.int64))[0] for each in (ours, torchs)
    )
    # What is left is the rounding of a sum of exponentials near 1; that of a logit would be 8%.
    assert abs(found.item() / expected.item() - 1) < 2e-3


def test_rounds_change_nothing():
    given = drawn(torch.float32)
    for mine, whole in zip(ours(*given), ours(*given, at_once=TOKENS), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)


def test_the_value_comes_with_the_backward_or_at_once():
    hidden, weight, targets = drawn(torch.float32)
    loss = loss_sum(hidden.requires_grad_(), weight, targets, IGNORE, ALONE, AT_ONCE)
    seen = loss.detach()
    assert seen.isnan()
    loss.backward()
    assert seen.isfinite()
    with torch.no_grad():
        alone = loss_sum(hidden, weight, targets, IGNORE, ALONE, AT_ONCE)
    torch.testing.assert_close(alone, seen)


def test_nothing_but_the_input_is_kept():
    hidden, weight, targets = drawn(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = loss_sum(hidden.requires_grad_(), weight, targets, IGNORE, ALONE, AT_ONCE)
    given = {t.untyped_storage()._cdata for t in (hidden, weight, targets, loss)}
    assert {t.untyped_storage()._cdata for t in saved} == given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [True, False])
def test_all_logits_are_never_there(dtype, trains):
    """By the profiler: the peak is a round's logits, and gradients as large as their inputs."""
    hidden, weight, targets = drawn(dtype)
    width = hidden.element_size()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        if trains:
            ours(hidden, weight, targets)
        else:
            with torch.no_grad():
                loss_sum(hidden, weight, targets, IGNORE, ALONE, AT_ONCE)
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    logits = AT_ONCE * VOCAB * (4 + (width if width < 4 else 0))
    gradients = 2 * (hidden.numel() + weight.numel()) * width if trains else 0  # and the leaves
    assert logits <= peak - gradients < 1.2 * logits
    assert peak - gradients < TOKENS * VOCAB * width


def test_a_batch_without_targets_has_no_loss():
    hidden, weight, targets = drawn(torch.float32)
    found = ours(hidden, weight, torch.full_like(targets, IGNORE))
    assert [t.count_nonzero() for t in found] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_compiler_is_given_computes_the_same(dtype):
    hidden, weight, targets = drawn(dtype)
    logits, targets = (hidden.flatten(0, 1) @ weight.t()), targets.flatten()
    grad = torch.tensor(SCALE)
    found = loss.soften(logits, targets, IGNORE, ALONE.link)
    value, gradient = loss.loss_and_gradient(logits, targets, IGNORE, grad)
    torch.testing.assert_close(value, found.loss)
    torch.testing.assert_close(gradient, found.gradient(grad, dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_fused_loss_and_gradients_are_torchs(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(loss, "_fused", lambda: loss.loss_and_gradient)
    given = drawn(dtype)
    found, expected = ours(*given, fuses=True), torchs(*given)
    assert abs(found[0].item() / expected[0].item() - 1) < tolerance / 10
    for mine, exact in zip(found[1:], expected[1:], strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - exact).abs().max() < tolerance * exact.abs().max()
    nothing = torch.full_like(given[2], IGNORE)
    assert [t.count_nonzero() for t in ours(*given[:2], nothing, fuses=True)] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
def test_compiled_loss_and_gradients_are_torchs():
    given = drawn(torch.bfloat16)
    for mine, exact in zip(ours(*given, fuses=True), torchs(*given), strict=True):
        assert (mine.double() - exact).abs().max() < 2e-2 * exact.abs().max()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_shows(value):
    hidden, weight, targets = drawn(torch.float32)
    hidden[1, 3, 2] = value
    assert not torch.isfinite(ours(hidden, weight, targets)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sp", [False, True])
@ranks(2)
def test_cut_over_ranks_it_is_the_same(world, sp, dtype):
    link = Link(torch.distributed.group.WORLD, (0, 1), world.rank)
    hidden, weight, targets = drawn(dtype)
    hidden, targets = hidden[:, 1:], targets[:, 1:]  # an even number of positions
    loss, *exact = torchs(hidden, weight, targets)
    share = hidden.chunk(2, 1)[world.rank] if sp else hidden
    part = weight.chunk(2)[world.rank]
    found = ours(share, part, targets, TPRegion(link, sp))
    torch.testing.assert_close(
        found[0].double(), loss, rtol=1e-6 if dtype.itemsize > 2 else 1e-3, atol=0
    )
    exact[0] = exact[0].chunk(2, 1)[world.rank] if sp else exact[0]
    exact[1] = exact[1].chunk(2)[world.rank]
    tolerance = 1e-5 if dtype.itemsize > 2 else 4e-3
    for mine, right in zip(found[1:], exact, strict=True):
        assert (mine.double() - right).abs().max() < tolerance * right.abs().max()


def test_rows_at_a_time():
    assert loss_rows(1024, 4, Target("cpu")) == 256
    assert loss_rows(300, 4, Target("cpu")) == 300
    assert loss_rows(700, 2, Target("cpu")) == 350
    assert loss_rows(16384, 4, Target("cpu")) == 1024  # no more than 16 rounds
    assert loss_rows(16384, 2, Target("cpu")) == 4096  # each of which rounds
    assert loss_rows(4096, 2, Target("gpu")) == 1024
    assert loss_rows(1, 2, Target("cpu")) == 1
