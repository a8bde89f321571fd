"""Recurrences by chunks beside token by token: the gated delta rule and Mamba-2's state space."""

import pytest
import torch
from torch.nn import functional as F

from meshwright.models.delta_rule import DELTA_RULE, delta_rule
from meshwright.models.short_conv import short_conv
from meshwright.models.state_space import STATE_SPACE, state_space

PIECES = {delta_rule: DELTA_RULE, state_space: STATE_SPACE}
RULES = {"delta rule": delta_rule, "state space": state_space}
EPS = 1e-6
# rows, heads of keys, heads, key dim, value dim
SHAPES = [(2, 2, 6, 8, 5), (1, 1, 3, 3, 7), (3, 4, 4, 4, 4)]
LENGTHS = [1, 7, 64, 65, 150]


@pytest.fixture(params=sorted(RULES))
def rule(request):
    return RULES[request.param]


def arguments(rule, shape, length, dtype=torch.float64):
    """Return query, key, value, decay and strength or step, `[rows, length, ...]`; then skips."""
    rows, key_heads, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(length)

    def drawn(*sizes):
        return torch.randn(rows, length, *sizes, generator=generator, dtype=torch.float64)

    q, k, v = drawn(key_heads, key_dim), drawn(key_heads, key_dim), drawn(heads, value_dim)
    decay, factor = -drawn(heads).abs(), drawn(heads)
    if rule is delta_rule:
        leaves = [q, k, v, decay, factor.sigmoid()]
    else:
        skip = torch.randn(heads, generator=generator, dtype=torch.float64)
        leaves = [q, k, v, decay, F.softplus(factor), skip]
    return [x.to(dtype).requires_grad_() for x in leaves]


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


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()


def by_token(rule, q, k, v, decay, factor, *skip, segments=None, state=None):
    """Return what is read, and the last state: one token after the other."""
    shared = v.shape[2] // k.shape[2]
    if rule is delta_rule:
        q, k = unit(q) / q.shape[-1] ** 0.5, unit(k)
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
        written = v[:, at]
        if rule is delta_rule:
            written = written - torch.einsum("bhkv,bhk->bhv", memory, k[:, at])
        written = written * factor[:, at, :, None]
        memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, at], written)
        out = torch.einsum("bhkv,bhk->bhv", memory, q[:, at])
        read.append(out + sum(weight[:, None] * v[:, at] for weight in skip))
    return torch.stack(read, 1), memory.unflatten(1, (-1, shared)).transpose(2, 3)


def gradients(results, leaves):
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    total = sum((x * weight.to(x.dtype)).sum() for x, weight in zip(results, weights, strict=True))
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_compute_the_recurrence_and_its_gradients(rule, shape, length, packed):
    leaves, state = arguments(rule, shape, length), first_state(shape)
    segments = documents(shape[0], length) if packed else None
    out, _, last = rule(*leaves, segments, state)
    expected = by_token(rule, *leaves, segments=segments, state=state)
    for result, wanted in zip((out, last), expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-11, rtol=1e-11)
    leaves = [*leaves, state]
    pairs = zip(gradients((out, last), leaves), gradients(expected, leaves), strict=True)
    for grad, wanted in pairs:
        torch.testing.assert_close(grad, wanted, atol=1e-10, rtol=1e-11)


def test_strong_decays_do_not_overflow(rule):
    """Within a chunk, the decay from a later token to an earlier one would be e^1000s."""
    leaves = arguments(rule, SHAPES[0], 70, torch.float32)
    leaves[3] = (leaves[3].detach() * 100).requires_grad_()
    out, _, last = rule(*leaves)
    assert all(torch.isfinite(x).all() for x in (*gradients((out, last), leaves), out, last))


def test_weak_decays_after_strong_ones_keep_their_digits(rule):
    """Sums of decays from the start of a chunk would lose the last ones' digits in fp32."""
    leaves = arguments(rule, SHAPES[0], 64)
    decay = leaves[3].detach().clone()
    decay[:, :40] *= 100
    decay[:, 40:] *= 1e-3
    leaves[3] = decay
    rounded = [x.detach().float().requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    results = rule(*rounded)[0], rule(*exact)[0]
    grads = gradients(results[:1], rounded), gradients(results[1:], exact)
    for near, true in zip((results[0], grads[0][3]), (results[1], grads[1][3]), strict=True):
        error = (near[:, 40:].double() - true[:, 40:]).abs().max()
        assert error < 3e-6 * true[:, 40:].abs().max()


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_state_continues_a_row(rule, cut):
    leaves = [x.detach() for x in arguments(rule, SHAPES[0], 130)]
    tokens, skip = leaves[:5], leaves[5:]
    whole, _, last = rule(*tokens, *skip)
    first, _, state = rule(*(x[:, :cut] for x in tokens), *skip)
    second, _, end = rule(*(x[:, cut:] for x in tokens), *skip, None, state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(end, last, atol=1e-12, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_piece_passes_states_and_their_gradients_on(rule, shape, length, packed):
    """What follows a piece is its transition of what was before, and what it ends with."""
    leaves, state = arguments(rule, shape, length), first_state(shape)
    segments = documents(shape[0], length) if packed else None
    passed = PIECES[rule].passed
    transition, ended = PIECES[rule].ends(*leaves, segments)
    out, _, last = rule(*leaves, segments, state)
    reached = passed(transition, state, False) + ended
    torch.testing.assert_close(reached, last, atol=1e-11, rtol=1e-11)
    to_out, to_last = torch.randn_like(out), torch.randn_like(last)
    (expected,) = torch.autograd.grad((out, last), state, (to_out, to_last))
    started = PIECES[rule].starts(to_out, *leaves, segments)
    grad = passed(transition, to_last, True) + started
    torch.testing.assert_close(grad, expected, atol=1e-10, rtol=1e-11)


def test_half_precision_rounds_the_result_only(rule):
    leaves = [x.detach().to(torch.bfloat16) for x in arguments(rule, SHAPES[0], 100)]
    out, states, _ = rule(*leaves)
    exact, _, _ = rule(*(x.double() for x in leaves))
    assert (out.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_the_convolution_is_torchs_within_documents(kernel, length, packed, has_bias):
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, length, 3), (3, 1, kernel), (3,))[: 2 + has_bias]
    ]
    x, weight, *bias = leaves
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3], [0] * 9])[:, :length]
    out = short_conv(x, weight, segments if packed else None, None, *bias)
    rows = []
    for row, ids in zip(x, segments, strict=True):
        runs = [row[ids == document] for document in ids.unique()] if packed else [row]
        padded = [F.pad(run.T, (kernel - 1, 0)) for run in runs]
        rows.append(torch.cat([F.conv1d(run, weight, *bias, groups=3).T for run in padded]))
    expected = F.silu(torch.stack(rows))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    for grad, wanted in zip(gradients([out], leaves), gradients([expected], leaves), strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_the_convolution_goes_on_after_earlier_tokens(cut, packed):
    """With as many tokens before as it sees, or fewer tokens after them than that."""
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 9, 3), (3, 1, 4), (3,))
    )
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3], [0] * 9]) if packed else None
    padded = F.pad(x, (0, 0, 3, 0))
    ids = None if segments is None else F.pad(segments, (3, 0), value=-1)[:, cut:]
    second = short_conv(x[:, cut:], weight, ids, padded[:, cut : cut + 3], bias)
    first = short_conv(
        x[:, :cut], weight, None if segments is None else segments[:, :cut], None, bias
    )
    whole = short_conv(x, weight, segments, None, bias)
    results = torch.cat((first, second), 1)
    torch.testing.assert_close(results, whole, atol=1e-12, rtol=0)
    leaves = [x, weight, bias]
    grads = gradients([results], leaves), gradients([whole], leaves)
    for grad, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-12, rtol=0)
