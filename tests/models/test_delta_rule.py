"""The gated delta rule by chunks, beside the recurrence token by token, and what is around it."""

import pytest
import torch
from torch.nn import functional as F

from meshwright.models.delta_net import _GatedNorm, gates
from meshwright.models.delta_rule import delta_rule
from meshwright.models.short_conv import short_conv

EPS = 1e-6
# rows, heads of keys, heads, key dim, value dim
SHAPES = [(2, 2, 6, 8, 5), (1, 1, 1, 3, 7), (3, 4, 4, 4, 4)]
LENGTHS = [1, 7, 64, 65, 150]


def arguments(shape, length, dtype=torch.float64):
    rows, key_heads, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(length)

    def drawn(*sizes):
        return torch.randn(rows, length, *sizes, generator=generator, dtype=torch.float64)

    q, k, v = drawn(key_heads, key_dim), drawn(key_heads, key_dim), drawn(heads, value_dim)
    decay, strength = -drawn(heads).abs(), drawn(heads).sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, decay, strength)]


def first_state(shape):
    rows, key_heads, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(3)
    sizes = rows, key_heads, key_dim, heads // key_heads, value_dim
    return torch.randn(sizes, generator=generator, dtype=torch.float64).requires_grad_()


def documents(rows, length):
    """Rows of several documents, whose borders lie within chunks and between them."""
    borders = torch.tensor([3, 5, 64, 100, 128])
    segments = (torch.arange(length)[:, None] >= borders).sum(1).expand(rows, length).clone()
    segments[0] = (torch.arange(length) >= 11).long()
    return segments


def recurrence(q, k, v, decay, strength, segments=None, state=None):
    """Return what is read, and the last state: one token after the other."""
    shared = v.shape[2] // k.shape[2]

    def unit(x):
        return x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()

    q = unit(q).repeat_interleave(shared, 2) / q.shape[-1] ** 0.5
    k = unit(k).repeat_interleave(shared, 2)
    memory = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    if state is not None:
        memory = state.transpose(2, 3).flatten(1, 2)
    read = []
    for at in range(v.shape[1]):
        if segments is not None and at:
            same = segments[:, at] == segments[:, at - 1]
            memory = memory * same[:, None, None, None]
        memory = memory * decay[:, at, :, None, None].exp()
        told = torch.einsum("bhkv,bhk->bhv", memory, k[:, at])
        new = (v[:, at] - told) * strength[:, at, :, None]
        memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, at], new)
        read.append(torch.einsum("bhkv,bhk->bhv", memory, q[:, at]))
    last = memory.unflatten(1, (-1, shared)).transpose(2, 3)
    return torch.stack(read, 1), last


def gradients(results, leaves):
    generator = torch.Generator().manual_seed(5)
    total = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in results
    )
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_compute_the_recurrence_and_its_gradients(shape, length, packed):
    leaves, state = arguments(shape, length), first_state(shape)
    segments = documents(shape[0], length) if packed else None
    leaves = [*leaves, state]
    out, _, last = delta_rule(*leaves[:5], segments, state)
    expected = recurrence(*leaves[:5], segments, state)
    for result, wanted in zip((out, last), expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-12, rtol=1e-12)
    pairs = zip(gradients((out, last), leaves), gradients(expected, leaves), strict=True)
    for grad, wanted in pairs:
        torch.testing.assert_close(grad, wanted, atol=1e-11, rtol=1e-11)


def test_strong_decays_do_not_overflow():
    """Within a chunk, the decay from a later token to an earlier one would be e^1000s."""
    leaves = arguments(SHAPES[0], 70, torch.float32)
    leaves[3] = (leaves[3].detach() * 100).requires_grad_()
    out, _, last = delta_rule(*leaves)
    assert all(torch.isfinite(x).all() for x in (*gradients((out, last), leaves), out, last))


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_state_continues_a_row(cut):
    leaves = [x.detach() for x in arguments(SHAPES[0], 130)]
    whole, _, last = delta_rule(*leaves)
    first, _, state = delta_rule(*(x[:, :cut] for x in leaves))
    second, _, end = delta_rule(*(x[:, cut:] for x in leaves), None, state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(end, last, atol=1e-12, rtol=0)


def test_half_precision_rounds_the_result_only():
    leaves = [x.detach().to(torch.bfloat16) for x in arguments(SHAPES[0], 100)]
    out, states, _ = delta_rule(*leaves)
    exact, _, _ = delta_rule(*(x.double() for x in leaves))
    assert (out.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_the_convolution_is_torchs_within_documents(kernel, length, packed):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, length, 3), (3, 1, kernel))
    )
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3], [0] * 9])[:, :length]
    out = short_conv(x, weight, segments if packed else None)
    rows = []
    for row, ids in zip(x, segments, strict=True):
        runs = [row[ids == document] for document in ids.unique()] if packed else [row]
        padded = [F.pad(run.T, (kernel - 1, 0)) for run in runs]
        rows.append(torch.cat([F.conv1d(run, weight, groups=3).T for run in padded]))
    expected = F.silu(torch.stack(rows))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    pairs = zip(gradients([out], (x, weight)), gradients([expected], (x, weight)), strict=True)
    for grad, wanted in pairs:
        torch.testing.assert_close(grad, wanted, atol=1e-12, rtol=0)


def test_the_convolution_goes_on_after_earlier_tokens():
    x, weight = torch.randn(2, 9, 3), torch.randn(3, 1, 4)
    later = short_conv(x[:, 5:], weight, None, x[:, 2:5])
    torch.testing.assert_close(later, short_conv(x, weight)[:, 5:])


def test_the_gated_norm_and_the_gates_have_autograds_gradients():
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 4, 5), (2, 3, 4, 5), (5,))
    )
    assert torch.autograd.gradcheck(
        lambda *leaves: _GatedNorm.apply(*leaves, 1e-3), (x, gate, weight)
    )
    norm = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight * F.silu(gate)
    torch.testing.assert_close(_GatedNorm.apply(x, gate, weight, 1e-3), norm)
    ba, a_log, dt_bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 12), (6,), (6,))
    )
    assert torch.autograd.gradcheck(lambda *leaves: gates(*leaves, 2), (ba, a_log, dt_bias))
    strength, decay = gates(ba, a_log, dt_bias, 2)
    b, a = (part.flatten(2) for part in ba.view(2, 3, 3, 4).split(2, -1))
    torch.testing.assert_close(strength, b.sigmoid())
    torch.testing.assert_close(decay, -a_log.exp() * F.softplus(a + dt_bias))
