"""Mamba-2's recurrence by chunks, beside the recurrence token by token, and what is around it."""

import pytest
import torch
from torch.nn import functional as F

from meshwright.models.mamba import GroupNorm, steps
from meshwright.models.short_conv import short_conv
from meshwright.models.state_space import state_space

# rows, groups, heads, dim of keys, dim of values
SHAPES = [(2, 2, 6, 8, 5), (1, 1, 3, 3, 7), (3, 4, 4, 4, 4)]
LENGTHS = [1, 7, 64, 65, 150]


def arguments(shape, length, dtype=torch.float64):
    rows, groups, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(length)

    def drawn(*sizes):
        return torch.randn(rows, length, *sizes, generator=generator, dtype=torch.float64)

    q, k, v = drawn(groups, key_dim), drawn(groups, key_dim), drawn(heads, value_dim)
    decay, step = -drawn(heads).abs(), F.softplus(drawn(heads))
    skip = torch.randn(heads, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, decay, step, skip)]


def first_state(shape):
    rows, groups, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(3)
    sizes = rows, groups, key_dim, heads // groups, value_dim
    return torch.randn(sizes, generator=generator, dtype=torch.float64).requires_grad_()


def documents(rows, length):
    """Rows of several documents, whose borders lie within chunks and between them."""
    borders = torch.tensor([3, 5, 64, 100, 128])
    segments = (torch.arange(length)[:, None] >= borders).sum(1).expand(rows, length).clone()
    segments[0] = (torch.arange(length) >= 11).long()
    return segments


def recurrence(q, k, v, decay, step, skip, segments=None, state=None):
    """Return what is read, and the last state: one token after the other."""
    shared = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    memory = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    if state is not None:
        memory = state.transpose(2, 3).flatten(1, 2)
    read = []
    for at in range(v.shape[1]):
        if segments is not None and at:
            same = segments[:, at] == segments[:, at - 1]
            memory = memory * same[:, None, None, None]
        memory = memory * decay[:, at, :, None, None].exp()
        written = v[:, at] * step[:, at, :, None]
        memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, at], written)
        out = torch.einsum("bhkv,bhk->bhv", memory, q[:, at])
        read.append(out + skip[:, None] * v[:, at])
    return torch.stack(read, 1), memory.unflatten(1, (-1, shared)).transpose(2, 3)


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
    out, _, last = state_space(*leaves, segments, state)
    expected = recurrence(*leaves, segments, state)
    for result, wanted in zip((out, last), expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-11, rtol=1e-11)
    leaves = [*leaves, state]
    pairs = zip(gradients((out, last), leaves), gradients(expected, leaves), strict=True)
    for grad, wanted in pairs:
        torch.testing.assert_close(grad, wanted, atol=1e-10, rtol=1e-11)


def test_strong_decays_do_not_overflow():
    """Within a chunk, the decay from a later token to an earlier one would be e^1000s."""
    leaves = arguments(SHAPES[0], 70, torch.float32)
    leaves[3] = (leaves[3].detach() * 100).requires_grad_()
    out, _, last = state_space(*leaves)
    assert all(torch.isfinite(x).all() for x in (*gradients((out, last), leaves), out, last))


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_state_continues_a_row(cut):
    *leaves, skip = (x.detach() for x in arguments(SHAPES[0], 130))
    whole, _, last = state_space(*leaves, skip)
    first, _, state = state_space(*(x[:, :cut] for x in leaves), skip)
    second, _, end = state_space(*(x[:, cut:] for x in leaves), skip, None, state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(end, last, atol=1e-12, rtol=0)


def test_half_precision_rounds_the_result_only():
    leaves = [x.detach().to(torch.bfloat16) for x in arguments(SHAPES[0], 100)]
    out, states, _ = state_space(*leaves)
    exact, _, _ = state_space(*(x.double() for x in leaves))
    assert (out.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.parametrize("packed", [False, True])
def test_a_convolution_may_have_a_bias(packed):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 9, 3), (3, 1, 4), (3,))
    )
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3], [0] * 9])
    out = short_conv(x, weight, segments if packed else None, None, bias)
    rows = []
    for row, ids in zip(x, segments, strict=True):
        runs = [row[ids == document] for document in ids.unique()] if packed else [row]
        padded = [F.pad(run.T, (3, 0)) for run in runs]
        rows.append(torch.cat([F.conv1d(run, weight, bias, groups=3).T for run in padded]))
    expected = F.silu(torch.stack(rows))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    leaves = x, weight, bias
    for grad, wanted in zip(gradients([out], leaves), gradients([expected], leaves), strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("limits", [None, (0.5, 1.1)])
def test_steps_have_autograds_gradients(limits):
    generator = torch.Generator().manual_seed(0)
    dt, a_log, dt_bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 6), (6,), (6,))
    )
    assert torch.autograd.gradcheck(lambda *leaves: steps(*leaves, limits), (dt, a_log, dt_bias))
    step, decay = steps(dt, a_log, dt_bias, limits)
    wanted = F.softplus(dt + dt_bias)
    wanted = wanted if limits is None else wanted.clamp(*limits)
    torch.testing.assert_close(step, wanted)
    torch.testing.assert_close(decay, -a_log.exp() * wanted)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_norm_of_groups_has_autograds_gradients(groups):
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 12), (2, 3, 12), (12,))
    )
    norm = GroupNorm(12, groups, 1e-3)
    assert torch.autograd.gradcheck(norm, (x, gate, weight))
    gated = (x * F.silu(gate)).unflatten(-1, (groups, -1))
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x, gate, weight), normed.flatten(-2) * weight)
