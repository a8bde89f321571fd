"""Causal attention by blocks of products, beside PyTorch's, in bf16 and fp32."""

import math
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from meshwright.models import attention as models_attention
from meshwright.models import blockwise
from meshwright.program import attention as program_attention
from meshwright.program.attention import LONGEST, Cut

# rows, heads, heads of keys, length, dim of a head
SHAPES = [
    (2, 4, 4, 64, 16),
    (3, 4, 2, 100, 8),
    (1, 6, 1, 200, 16),
    (2, 2, 2, 1, 8),
    (1, 2, 1, 65, 4),
]


def inputs(shape, dtype):
    """q, k, v token by token in memory, as projections give them, and a gradient."""
    rows, heads, kv_heads, length, dim = shape
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(rows, length, count, dim).to(dtype).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad


def exact(leaves, grad):
    """The result and the gradients in fp64, and the log-sum-exp in powers of two."""
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    shared = wide[0].shape[1] // wide[1].shape[1]
    scores = wide[0] @ wide[1].repeat_interleave(shared, 1).mT / wide[0].shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
    sums = scores.masked_fill(later, -torch.inf).logsumexp(-1) / math.log(2)
    return (out.detach(), *torch.autograd.grad(out, wide, grad.double())), sums.detach()


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-9)).item()


@pytest.mark.parametrize("scores", [1 << 20, 1 << 14, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_exact_in_fp32_however_it_is_cut(shape, scores):
    leaves, grad = inputs(shape, torch.float32)
    before = [x.detach().clone() for x in leaves]
    expected, sums = exact(leaves, grad)
    with mock.patch.object(program_attention, "SCORES", scores):
        out, lse = blockwise.attention(*leaves)
        found = (out, *torch.autograd.grad(out, leaves, grad))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert error(one, other) < 2e-6
    assert torch.allclose(lse.double(), sums, atol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))


def roundings(found, expected, dtype, scores=1.0):
    """The largest error of the results in roundings of a dtype, of scores of this size.

    How many there are does not depend on the processor, unlike the error of another kernel.
    """
    each = torch.finfo(dtype).eps / 2 * scores
    return max(error(one, other) for one, other in zip(found, expected, strict=True)) / each


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[3] > 1])
def test_in_bf16_it_errs_by_two_roundings_at_most(shape):
    """PyTorch's own kernel by up to 1.7."""
    leaves, grad = inputs(shape, torch.bfloat16)
    expected, _ = exact(leaves, grad)
    out, _ = blockwise.attention(*leaves)
    found = (out, *torch.autograd.grad(out, leaves, grad))
    assert roundings(found, expected, torch.bfloat16) < 2


def test_large_scores_neither_overflow_nor_vanish():
    """A score's own rounding is the error of its exponential."""
    leaves, grad = inputs((1, 2, 2, 70, 8), torch.float32)
    large = [(50 * x.detach()).requires_grad_() for x in leaves]
    expected, sums = exact(large, grad)
    largest = (large[0] @ large[1].mT).abs().max().item() / 8**0.5
    assert largest > 10_000
    out, lse = blockwise.attention(*large)
    assert torch.allclose(lse.double(), sums, rtol=1e-5)
    found = (out, *torch.autograd.grad(out, large, grad))
    assert all(one.isfinite().all() for one in found)
    assert roundings(found, expected, torch.float32, largest) < 2


@pytest.mark.slow
def test_the_operators_keep_torchs_rules():
    """Schemas, fake tensors, autograd: what compiling and rehearsing rest on."""
    leaves, grad = inputs((2, 4, 2, 70, 8), torch.bfloat16)
    torch.library.opcheck(blockwise.attention, leaves)
    out, lse = blockwise.attention(*(x.detach() for x in leaves))
    arguments = (grad, *(x.detach() for x in leaves), out, lse)
    torch.library.opcheck(blockwise.attention_backward, arguments)


def test_attention_takes_it_where_it_is_faster():
    def taken(dtype, mask=None, queries=256, length=256):
        (q, k, v), _ = inputs((1, 2, 1, length, 8), dtype)
        with mock.patch.object(blockwise, "attention", wraps=blockwise.attention) as seen:
            models_attention.attend(q[:, :, -queries:], k, v, mask)
        return seen.call_count == 1

    mask = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril_()
    for dtype in (torch.bfloat16, torch.float32):
        assert taken(dtype)
        assert not taken(dtype, mask)
        assert not taken(dtype, queries=1)  # generation, beside kept keys
        assert not taken(dtype, queries=200)
    assert taken(torch.bfloat16, queries=16, length=16)
    assert not taken(torch.float32, queries=16, length=16)
    assert not taken(torch.float16)
    long = torch.empty(1, 8, LONGEST + 1, 8)
    assert not blockwise.takes(long, long)
    # Eight heads that share one of keys: a block of their scores is eight times as large.
    assert blockwise.takes(long[:, :, :1024], long[:, :, :1024])
    assert not blockwise.takes(long[:, :, :1024], long[:, :1, :1024])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 2, 128, 32), (3, 8, 8, 256, 64), (1, 8, 1, 500, 80)])
def test_what_the_backward_takes_for_itself_is_predicted(shape, dtype):
    batch, heads, kv_heads, length, dim = shape
    q = torch.randn(batch, heads, length, dim, dtype=dtype)
    k = torch.randn(batch, kv_heads, length, dim, dtype=dtype)
    out, lse = blockwise.attention(q, k, k)
    made, empty = [], torch.empty

    def counted(*args, **kwargs):
        made.append(empty(*args, **kwargs))
        return made[-1]

    with mock.patch.object(torch, "empty", counted):
        blockwise.attention_backward(out, q, k, k, out, lse)
    expected = Cut.of(*shape).backward_bytes(dtype.itemsize)
    assert sum(x.numel() * x.element_size() for x in made) == expected
