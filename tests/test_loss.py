"""The loss against torch's own cross-entropy, whole and cut over ranks, and what it keeps."""

import pytest
import torch
from torch.nn import functional as F

from meshwright.data.sampler import IGNORE
from meshwright.execute.groups import Link
from meshwright.execute.loss import loss_sum
from meshwright.program.operations import loss_rows
from ranks import ranks

ALONE = Link(None, (0,), 0)
TOKENS, VOCAB = 300, 1026


def drawn(dtype):
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, VOCAB).mul_(4).to(dtype)
    targets = torch.randint(0, VOCAB, (TOKENS,))
    targets[::7] = IGNORE
    return logits, targets


def torchs(logits, targets, dtype):
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.to(dtype), targets, ignore_index=IGNORE, reduction="sum")
    (loss * 0.25).backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)]
)
def test_loss_and_gradient_are_torchs(dtype, tolerance):
    logits, targets = drawn(dtype)
    assert loss_rows(TOKENS, VOCAB, on_cpu=True) < TOKENS  # else there are no chunks to get wrong
    leaf = logits.clone().requires_grad_()
    loss = loss_sum(leaf.view_as(leaf), targets, IGNORE, ALONE)
    assert torch.equal(leaf.detach(), logits)  # the forward leaves them, for who looks at them
    (loss * 0.25).backward()
    expected, gradient = torchs(logits.double(), targets, torch.float64)
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    wrong = (leaf.grad.double() - gradient).abs().max() / gradient.abs().max()
    assert wrong < tolerance
    assert leaf.grad.dtype == dtype
    assert not leaf.grad[::7].any()


def test_gradient_takes_the_place_of_the_logits():
    logits, targets = drawn(torch.float32)
    leaf = logits.clone().requires_grad_()
    kept = leaf.view_as(leaf)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = loss_sum(kept, targets, IGNORE, ALONE)
    assert sum(t.untyped_storage().nbytes() for t in saved) == TOKENS * (VOCAB * 4 + 4 + 8 + 2)
    (gradient,) = torch.autograd.grad(loss, kept)
    assert gradient.data_ptr() == kept.data_ptr()
    assert not gradient.requires_grad


def test_a_batch_without_targets_has_no_loss():
    logits, targets = drawn(torch.float32)
    leaf = logits.requires_grad_()
    loss = loss_sum(leaf.view_as(leaf), torch.full_like(targets, IGNORE), IGNORE, ALONE)
    loss.backward()
    assert loss.item() == 0
    assert not leaf.grad.any()


@pytest.mark.parametrize("logit", [float("inf"), float("nan")])
def test_what_is_not_finite_shows(logit):
    logits, targets = drawn(torch.float32)
    logits[5, 3] = logit
    assert not torch.isfinite(loss_sum(logits, targets, IGNORE, ALONE))


@ranks(2)
def test_cut_over_ranks_it_is_the_same(world):
    torch.manual_seed(0)
    link = Link(torch.distributed.group.WORLD, (0, 1), world.rank)
    logits, targets = drawn(torch.float32)
    expected, gradient = torchs(logits, targets, torch.float32)
    shard = logits.chunk(2, -1)[world.rank].contiguous().requires_grad_()
    loss = loss_sum(shard.view_as(shard), targets, IGNORE, link)
    (loss * 0.25).backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    own = gradient.chunk(2, -1)[world.rank]
    torch.testing.assert_close(shard.grad, own, rtol=1e-5, atol=1e-7)


def test_rows_at_a_time():
    assert loss_rows(1024, 8192, on_cpu=True) == 32
    assert loss_rows(8192, 128256, on_cpu=True) == 128  # no more than 64 rounds
    assert loss_rows(8192, 128256, on_cpu=False) == 130
    assert loss_rows(1, 10**9, on_cpu=True) == 1
