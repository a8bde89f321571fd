"""Attention with a sliding window and a soft cap: by blocks, beside a mask, with kept keys."""

import math
from unittest import mock

import pytest
import torch

from meshwright.models import KVCache, blockwise, build_model, flex, init_model
from meshwright.models import attention as models_attention
from meshwright.models.attention import Attention, attend
from meshwright.program import attention as program_attention
from meshwright.program.attention import (
    BLOCK,
    LONGEST,
    QUERIES,
    SHORTEST,
    UNBOUNDED,
    Cut,
    ScoreBounds,
    by_blocks,
    causal_scores,
)
from meshwright.spec.resolve import model_spec

# rows, heads, heads of keys, length, dim of a head
SHAPES = [(3, 4, 2, 100, 8), (1, 6, 1, 200, 16), (2, 2, 2, 1, 8), (1, 2, 1, 2 * BLOCK + 1, 4)]
WINDOWS = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 100, 1000]
# Of scores that are about 4 in size: one that bounds most of them, one that bends few.
CAPS = [None, 1.5, 30.0]


def inputs(shape, dtype):
    """q, k, v token by token in memory, as projections give them, and a gradient."""
    rows, heads, kv_heads, length, dim = shape
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(rows, length, count, dim).mul_(2).to(dtype).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad


def exact(leaves, grad, scores, same=None):
    """The result and the gradients in fp64, and the log-sum-exp: one formula, one mask.

    `same`, bool `[rows, queries, keys]`, is where a mask lets a query see.
    """
    q, k, v = wide = [x.detach().double().requires_grad_() for x in leaves]
    shared, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    found = q @ k.repeat_interleave(shared, 1).mT / q.shape[-1] ** 0.5
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = (behind >= 0) & (behind < (scores.window or keys))
    seen = seen if same is None else seen & same[:, None]
    found = found.masked_fill(~seen, -torch.inf)
    out = found.softmax(-1) @ v.repeat_interleave(shared, 1)
    grads = torch.autograd.grad(out, wide, grad.double())
    return (out.detach(), *grads), found.logsumexp(-1).detach()


def error(found, expected, least=0.0):
    return ((found.double() - expected).norm() / expected.norm().clamp(min=least)).item()


def check(found, expected, bound):
    # A query that sees one key has a gradient of 0, rounded: held to the size of the others.
    least = 0.1 * max(x.norm().item() for x in expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert error(one, other, least) < bound


def by_blocks_of(leaves, grad, scores):
    out, lse = blockwise.attention(*leaves, scores.window or 0, scores.cap or 0.0)
    return (out, *torch.autograd.grad(out, leaves, grad)), lse


@pytest.mark.often(28)
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_exact_in_fp32(shape, window, cap):
    leaves, grad = inputs(shape, torch.float32)
    scores = ScoreBounds(window, cap)
    expected, sums = exact(leaves, grad, scores)
    for room in (1 << 20, 1):  # all heads at once, and one
        with mock.patch.object(program_attention, "SCORES", room):
            found, lse = by_blocks_of(leaves, grad, scores)
        check(found, expected, 5e-6)
        assert torch.allclose(lse.double() * math.log(2), sums, atol=1e-5)


@pytest.mark.parametrize("scores", [ScoreBounds(50), ScoreBounds(50, 3.0), ScoreBounds(None, 3.0)])
def test_in_bf16_blocks_err_as_without_bounds(scores):
    """What bf16 costs is the rounding of inputs, results and shares, whatever bounds scores."""
    leaves, grad = inputs((2, 4, 2, 200, 16), torch.bfloat16)
    errors = {}
    for which in (UNBOUNDED, scores):
        found, _ = by_blocks_of(leaves, grad, which)
        expected, _ = exact(leaves, grad, which)
        errors[which] = [error(*both) for both in zip(found, expected, strict=True)]
    plain = errors.pop(UNBOUNDED)
    (bounded,) = errors.values()
    assert all(a < 1.5 * b for a, b in zip(bounded, plain, strict=True)), (bounded, plain)


def test_without_bounds_the_result_is_the_same_to_the_bit():
    """A window as long as the row hides nothing, and is computed as if there were none."""
    leaves, grad = inputs((2, 4, 2, 200, 16), torch.float32)
    plain, _ = by_blocks_of(leaves, grad, UNBOUNDED)
    whole, _ = by_blocks_of(leaves, grad, ScoreBounds(200))
    assert all(torch.equal(x, y) for x, y in zip(plain, whole, strict=True))


@pytest.mark.parametrize(("at", "is_before"), [(BLOCK // 2, True), (BLOCK // 2 + 1, False)])
def test_only_keys_inside_the_window_are_read(at, is_before):
    """A key that is not finite spoils just the blocks of queries whose window reaches it."""
    (q, k, v), _ = inputs((1, 2, 2, 6 * BLOCK, 8), torch.float32)
    window = BLOCK // 2
    with torch.no_grad():
        clean = blockwise.attention(q, k, v, window)[0]
        v[:, :, 2 * BLOCK + at] = math.nan
        found = blockwise.attention(q, k, v, window)[0]
    same = (found == clean).all(-1).all(1)[0].view(-1, BLOCK).all(1)
    # Its own block reads it; the next reads half a block of keys before its own.
    assert same.tolist() == [True, True, False, is_before, True, True]


@pytest.mark.parametrize(("at", "is_after"), [(BLOCK // 2 - 1, True), (BLOCK // 2 - 2, False)])
def test_only_queries_that_see_a_block_of_keys_are_read(at, is_after):
    leaves, grad = inputs((1, 2, 2, 6 * BLOCK, 8), torch.float32)
    out = blockwise.attention(*leaves, BLOCK // 2)[0]
    clean = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    grad[:, :, 3 * BLOCK + at] = math.nan
    found = torch.autograd.grad(out, leaves, grad)
    for one, other in list(zip(found, clean, strict=True))[1:]:  # of keys and values
        same = (one == other).all(-1).all(1)[0].view(-1, BLOCK).all(1)
        assert same.tolist() == [True, True, is_after, False, True, True]


@pytest.mark.parametrize("length", [100, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scores", [ScoreBounds(40), ScoreBounds(None, 3.0), ScoreBounds(40, 3.0)])
def test_attention_is_exact_in_any_precision(scores, dtype, length):
    leaves, grad = inputs((2, 4, 2, length, 16), dtype)
    expected, _ = exact(leaves, grad, scores)
    out = attend(*leaves, None, scores)
    assert out.dtype == dtype
    bound = {torch.float64: 1e-12, torch.float32: 5e-6}.get(dtype, 2e-2)
    check((out, *torch.autograd.grad(out, leaves, grad)), expected, bound)


@pytest.mark.parametrize(
    "scores", [UNBOUNDED, ScoreBounds(40), ScoreBounds(None, 3.0), ScoreBounds(40, 3.0)]
)
def test_a_mask_is_bounded_too(scores):
    """Documents of 120 and 80 tokens, and of 30 and 170, whose mask knows of no window."""
    leaves, grad = inputs((2, 4, 2, 200, 16), torch.float32)
    at = torch.arange(200)
    of = torch.stack((at >= 120, at >= 30))
    same = of[:, :, None] == of[:, None, :]
    expected, _ = exact(leaves, grad, scores, same)
    out = attend(*leaves, same.tril()[:, None], scores)
    check((out, *torch.autograd.grad(out, leaves, grad)), expected, 5e-6)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("queries", [1, 2, 30, 90])
@pytest.mark.parametrize(
    "scores", [UNBOUNDED, ScoreBounds(1), ScoreBounds(40), ScoreBounds(40, 3.0)]
)
def test_fewer_queries_than_keys_are_the_last(scores, queries, masked):
    """As generation has them beside kept keys: those of the whole row, bounded alike."""
    (q, k, v), grad = inputs((2, 4, 2, 100, 16), torch.float32)
    (expected, *_), _ = exact((q, k, v), grad, scores)
    past = torch.ones(queries, 100, dtype=torch.bool).tril_(100 - queries)[None, None]
    found = attend(q[:, :, -queries:], k, v, past if masked else None, scores)
    assert error(found, expected[:, :, -queries:]) < 5e-6


def test_a_models_cached_logits_are_the_uncached():
    sizes = {"vocab_size": 50, "dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2}
    spec = model_spec(**sizes, context=40, init_std=0.3)
    model = init_model(build_model(spec, device="cpu"), spec, seed=0)
    ids = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(ids)
        # Of what layers see, one differs; a cap is the same in all.
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        for at, attention in enumerate(attentions):
            attention.scores = ScoreBounds(4 if at % 2 == 0 else None, 2.0)
        whole = model(ids)
        cache, found, start = KVCache(20), [], 0
        for cut in (7, 1, 1, 2, 9):
            found.append(model(ids[:, start : start + cut], cache=cache))
            start += cut
    assert len(attentions) == 3
    assert not torch.allclose(plain, whole, atol=1e-2)  # the bounds do bound
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-5, rtol=0)


def test_a_kept_key_before_the_window_is_not_read():
    (q, k, v), _ = inputs((1, 2, 2, 100, 8), torch.float32)
    with torch.no_grad():
        expected = attend(q, k, v, None, ScoreBounds(16))
        k[:, :, : 100 - 16 - 3] = v[:, :, : 100 - 16 - 3] = math.nan
        found = attend(q[:, :, -4:], k, v, None, ScoreBounds(16))
    assert error(found, expected[:, :, -4:].double()) < 5e-6


def test_the_operators_keep_torchs_rules():
    leaves, grad = inputs((2, 4, 2, 100, 8), torch.bfloat16)
    torch.library.opcheck(blockwise.attention, (*leaves, 30, 3.0))
    plain = [x.detach() for x in leaves]
    out, lse = blockwise.attention(*plain, 30, 3.0)
    torch.library.opcheck(blockwise.attention_backward, (grad, *plain, out, lse, 30, 3.0))


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("window", [1, 40, BLOCK, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 2, 128, 32), (1, 8, 1, 500, 80), (1, 2, 2, 30, 8)])
def test_what_the_backward_takes_for_itself_is_predicted(shape, dtype, window, cap):
    leaves, _ = inputs(shape, dtype)
    plain, bounds = [x.detach() for x in leaves], (window, cap or 0.0)
    out, lse = blockwise.attention(*plain, *bounds)
    made, empty = [], torch.empty

    def counted(*args, **kwargs):
        made.append(empty(*args, **kwargs))
        return made[-1]

    with mock.patch.object(torch, "empty", counted):
        blockwise.attention_backward(out, *plain, out, lse, *bounds)
    expected = Cut.of(*shape, ScoreBounds(window, cap)).backward_bytes(dtype.itemsize)
    assert sum(x.numel() * x.element_size() for x in made) == expected


def test_memory_of_scores_does_not_grow_with_a_row_beyond_the_window():
    def scores(length, window):
        return Cut.of(1, 8, 8, length, 64, ScoreBounds(window))._replace(heads=1).scores

    assert scores(8192, 256) == scores(1024, 256) < scores(1024, None)
    # A key more for each query of a block with each key of the window.
    assert scores(8192, 257) - scores(8192, 256) == BLOCK


def test_copies_of_queries_do_not_grow_with_heads():
    """All heads of a short window's scores fit in the cache; their queries are still bounded."""
    few, many = (Cut.of(1, heads, heads, 16384, 64, ScoreBounds(8)) for heads in (2, 16))
    assert few == many
    assert many.heads * many.shared * many.length == QUERIES


def test_blocks_serve_where_they_are_faster_or_alone():
    window, cap = ScoreBounds(256), ScoreBounds(None, 50.0)
    for precision in ("bf16", "fp32"):
        assert not by_blocks(8, 8, 4 * LONGEST, precision)
        assert by_blocks(8, 8, 4 * LONGEST, precision, window)
        assert by_blocks(8, 1, 4 * LONGEST, precision, cap)
        # A window that no row exceeds is none.
        assert not by_blocks(8, 8, 4 * LONGEST, precision, ScoreBounds(4 * LONGEST))
    assert by_blocks(8, 8, SHORTEST - 1, "bf16", ScoreBounds(8))
    assert by_blocks(8, 8, SHORTEST - 1, "fp32", ScoreBounds(8))
    assert not by_blocks(8, 8, SHORTEST - 1, "fp32", ScoreBounds(SHORTEST))
    assert by_blocks(8, 8, SHORTEST - 1, "fp32", cap)
    for bounds in (window, cap):
        assert not by_blocks(8, 8, 1024, "fp16", bounds)
        assert not by_blocks(8, 8, 1024, "fp64", bounds)


@pytest.mark.parametrize(
    "scores", [ScoreBounds(256), ScoreBounds(None, 50.0), ScoreBounds(256, 50.0)]
)
def test_attention_takes_blocks_for_long_rows(scores):
    leaves, _ = inputs((1, 1, 1, LONGEST + BLOCK, 4), torch.float32)
    with mock.patch.object(blockwise, "attention", wraps=blockwise.attention) as seen:
        attend(*leaves, None, scores)
        assert seen.call_count == 1
        attend(*leaves, None)
        assert seen.call_count == 1


def test_the_scores_of_a_window_are_counted():
    for length in (1, 2, 5, 70):
        behind = torch.arange(length)[:, None] - torch.arange(length)
        for window in (None, 1, 2, 5, 69, 70, 71):
            seen = (behind >= 0) & (behind < (length if window is None else window))
            # A token's score with itself counts half, of as many as the window has.
            own = min(length, window or length) / 2
            assert causal_scores(length, window) + own == int(seen.sum())


@pytest.mark.often(1)
@pytest.mark.parametrize("scores", [ScoreBounds(50), ScoreBounds(None, 2.0), ScoreBounds(50, 2.0)])
def test_what_a_gpu_is_told_is_the_same_attention(scores):
    """FlexAttention without its compiler computes on a CPU what a GPU compiles."""
    leaves, grad = inputs((2, 4, 2, 200, 16), torch.float32)
    (expected, *_), _ = exact(leaves, grad, scores)
    q, k, v = (x.detach() for x in leaves)
    with (
        torch.no_grad(),
        mock.patch.object(flex, "_compiled_parts", flex._parts),
        mock.patch.object(flex, "takes", return_value=True),
        mock.patch.object(blockwise, "takes", return_value=False),
        mock.patch.object(models_attention, "band", side_effect=AssertionError),
    ):
        assert error(attend(q, k, v, None, scores), expected) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, None])
def test_it_is_compiled_whole(dynamic):
    """Layers that see differently, in rows of two lengths, without a break."""
    kinds = (
        UNBOUNDED,
        ScoreBounds(40),
        ScoreBounds(70),
        ScoreBounds(40, 3.0),
        ScoreBounds(None, 30.0),
    )

    def layers(q, k, v):
        for scores in kinds:
            q = q + attend(q, k, v, None, scores)
        return q

    compiled = torch.compile(layers, fullgraph=True, dynamic=dynamic)
    for length in (100, 200):
        leaves, grad = inputs((2, 4, 2, length, 16), torch.float32)
        both = [f(*leaves) for f in (layers, compiled)]
        one, other = ((x, *torch.autograd.grad(x, leaves, grad)) for x in both)
        check(other, [x.double() for x in one], 5e-6)
