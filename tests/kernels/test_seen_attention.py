"""Rings on a GPU that documents, windows or caps bound: FlexAttention, here without its compiler.

Its public function refuses gradients on a CPU, though its operations have them: it is asked here to
leave that check out. Everything else is what a GPU runs.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention as of_torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshwright.kernels import flex_blocks, varlen
from meshwright.kernels.recompute import _policy
from meshwright.models.plain_attention import plainly
from meshwright.parallel.context_parallel.context import Ring, positions
from meshwright.program.attention import ScoreBounds
from ranks import on_ranks
from syncs import Syncs
from test_context import PACKED, draw

BOUNDS = {
    "documents": (True, ScoreBounds()),
    "window": (False, ScoreBounds(window=11)),
    "cap": (False, ScoreBounds(cap=2.0)),
    "causal": (False, ScoreBounds()),
    "all": (True, ScoreBounds(window=19, cap=1.5, sinks=True)),
}


@contextmanager
def as_on_a_gpu(size=8):
    """Have rings go the way of a GPU, by blocks of a few tokens."""
    with ExitStack() as stack:
        for module, name, value in (
            (flex_blocks, "takes", lambda *_: True),
            (flex_blocks, "_compiled", lambda: of_torch.flex_attention),
            (flex_blocks, "_SIZE", size),
            (of_torch, "_validate_device", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def seen_by(segments, seq, window):
    """The mask of whole rows, bool `[batch or 1, 1, seq, seq]`."""
    back = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = (back >= 0) & (back < (window or seq))
    if segments is None:
        return seen[None, None]
    return (segments[:, None, :, None] == segments[:, None, None, :]) & seen


def gradients(attend, tensors, at=slice(None)):
    """The result and the gradients of q, k, v and sinks."""
    *given, sinks, grad = tensors
    given = [x[:, :, at].detach().clone().requires_grad_() for x in given]
    if sinks is not None:
        given.append(sinks.detach().clone().requires_grad_())
    out = attend(*given)
    out.backward(grad[:, :, at])
    return [out.detach(), *(x.grad for x in given)]


def compared(world, kind, recomputes=False, dtype=torch.float64):
    packed, scores = BOUNDS[kind]
    segments = PACKED if packed else None
    q, k, v, grad = draw(7, batch=4, dtype=dtype)
    make = torch.Generator().manual_seed(1)
    sinks = torch.randn(q.shape[1], generator=make).to(dtype) if scores.sinks else None
    tensors = (q, k, v, sinks, grad)
    mask = seen_by(segments, q.shape[2], scores.window)

    def whole(q, k, v, sinks=None):
        return plainly(q, k, v, mask, scores.cap, sinks)

    ring = Ring(dist.group.WORLD)

    def shared(q, k, v, sinks=None):
        def run(*given):
            return ring(*given, segments, scores, sinks)

        if not recomputes:
            return run(q, k, v)
        contexts = lambda: create_selective_checkpoint_contexts(_policy)  # noqa: E731
        return checkpoint(run, q, k, v, use_reentrant=False, context_fn=contexts)

    at = positions("ring", q.shape[2], world.size, world.rank)
    expected = gradients(whole, tensors)
    with as_on_a_gpu():
        found = gradients(shared, tensors, at)
    if sinks is not None:
        dist.all_reduce(found[-1])
    worst = []
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        mine = b if place == 4 else b[:, :, at]
        worst.append(((a - mine).abs().max() / b.abs().max()).item())
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", BOUNDS)
def test_result_and_gradients_are_those_of_plain_attention(n, kind):
    for found in on_ranks(n, compared, kind=kind):
        assert max(found) < 1e-6, found


@pytest.mark.slow
def test_selective_recomputation_keeps_what_it_gives():
    for found in on_ranks(2, compared, kind="all", recomputes=True):
        assert max(found) < 1e-6, found


@pytest.mark.slow
def test_half_precision_is_as_near_as_plain_operations():
    for found in on_ranks(2, compared, kind="all", dtype=torch.bfloat16):
        assert max(found) < 0.02, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, (packed, _) in BOUNDS.items() if packed])
def test_documents_are_those_of_a_cpu(kind):
    """Operators of documents on a GPU and on a CPU, forward and backward."""
    scores = BOUNDS[kind][1]
    q, k, v, grad = draw(7, batch=4, dtype=torch.float64)
    sinks = torch.linspace(-1, 1, q.shape[1], dtype=q.dtype) if scores.sinks else None
    bounds, bounded = varlen.bounds_of(PACKED), (scores.window, scores.cap)
    op, back = torch.ops.meshwright.attend_varlen, torch.ops.meshwright.attend_varlen_backward
    expected = op(q, k, v, bounds, *bounded, sinks)
    to_expected = back(grad, q, k, v, *expected, bounds, *bounded)
    with as_on_a_gpu():
        found = varlen._forward_by_flex(q, k, v, bounds, *bounded, sinks)
        to_found = varlen._backward_by_flex(grad, q, k, v, *expected, bounds, *bounded)
    for one, other in zip((*found, *to_found), (*expected, *to_expected), strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-6, atol=1e-6)


def test_the_host_does_not_wait_for_documents():
    bounds = varlen.bounds_of(PACKED)
    with Syncs() as syncs:
        varlen._seen(bounds, PACKED.shape[1], 5)
    assert syncs == []


@pytest.mark.parametrize("size", [1, 3, 8, 128])
def test_blocks_hold_every_pair_that_is_seen_and_full_ones_no_other(size):
    """Segments in any order, blocks that do not divide the rows."""
    make = torch.Generator().manual_seed(size)
    for window in (None, 1, 5, 30):
        of = tuple(torch.randint(0, 4, (3, n), generator=make) for n in (26, 40))
        at = tuple(torch.randperm(64, generator=make)[:n].sort().values for n in (26, 40))
        with as_on_a_gpu(size):
            found = flex_blocks.seen(at, of, window)
        back = at[0][:, None] - at[1]
        exact = (back >= 0) & (back < (window or 64)) & (of[0][:, :, None] == of[1][:, None])
        counts, places, full_counts, full_places = found.blocks
        held, full = (torch.zeros_like(exact) for _ in range(2))
        for into, numbers, order in ((held, counts, places), (full, full_counts, full_places)):
            for row, block in torch.cartesian_prod(*map(torch.arange, (3, numbers.shape[2]))):
                for key in order[row, 0, block, : numbers[row, 0, block]]:
                    queries, keys = (
                        slice(int(n) * size, int(n) * size + size) for n in (block, key)
                    )
                    into[row, queries, keys] = True
        assert not (held & full).any()
        assert (full <= exact).all()
        assert (exact <= held | full).all()


def test_few_kernels_serve_all_calls():
    """What is compiled takes other documents, positions and layers as they come."""
    frames = []

    def backend(graph, examples):
        frames.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(of_torch.flex_attention, backend=backend)
    with as_on_a_gpu(), mock.patch.object(flex_blocks, "_compiled", return_value=compiled):
        for call in range(6):
            make = torch.Generator().manual_seed(call)
            q, k, v = (torch.randn(2, heads, 32, 8, generator=make) for heads in (4, 2, 2))
            of = tuple(torch.randint(0, 3, (2, 32), generator=make).sort().values for _ in "qk")
            at = tuple(torch.arange(32, dtype=torch.int32) + call for _ in "qk")
            flex_blocks.flex_block_attention().forward(
                q, k, v, flex_blocks.seen(at, of, None), True
            )
    assert len(frames) == 1


@pytest.mark.often(1)
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_gets_contiguous_tables(packed):
    """It takes the batch's stride for the number of the blocks in a row of the table."""
    tables = []

    def stand_in(q, k, v, *, block_mask, **more):
        rows = block_mask.kv_num_blocks, block_mask.kv_indices
        tables.extend((*rows, block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
        return of_torch.flex_attention(q, k, v, block_mask=block_mask, **more)

    q, k, v = torch.randn(3, 2, 4, 32, 8).unbind()
    at = torch.arange(32, dtype=torch.int32)
    of = torch.randint(0, 3, (2, 32)).sort().values if packed else None
    with as_on_a_gpu(), mock.patch.object(flex_blocks, "_compiled", return_value=stand_in):
        seen = flex_blocks.seen((at, at), of if of is None else (of, of), 11)
        flex_blocks.flex_block_attention().forward(q, k, v, seen, True)
    assert len(tables) == 4
    for one in tables:
        assert one.is_contiguous()
        assert one.shape[:2] == (2 if packed else 1, 1)


@pytest.mark.slow
def test_gradients_of_documents_have_the_strides_that_compiled_code_checks():
    q, k, v, grad = torch.randn(4, 2, 4, 32, 8).unbind()
    bounds = varlen.bounds_of(torch.randint(0, 3, (2, 32)).sort().values)
    with as_on_a_gpu():
        out, sums = varlen._forward_by_flex(q, k, v, bounds)
        found = varlen._backward_by_flex(grad, q, k, v, out, sums, bounds)
    wanted = varlen._backward._opoverload(grad, q, k, v, out, sums, bounds)
    told = varlen._empty_grads(grad, q, k, v, out, sums, bounds)
    assert [x.stride() for x in found] == [x.stride() for x in told]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert out.stride() == varlen._empty(q, k, v, bounds)[0].stride()


def test_it_serves_where_flash_attention_alone_does_not():
    class Queries:
        device, dtype, shape = torch.device("cuda"), torch.bfloat16, (1, 4, 8, 16)

    free, segments = ScoreBounds(), torch.zeros(1, 8)
    with (
        mock.patch.object(flex_blocks.flex, "HAS_TRITON", True),
        mock.patch.object(flex_blocks, "has_cuda_flash", return_value=True),
    ):
        takes = flex_blocks.takes
        assert not takes(Queries, None, free)
        for bounded in (
            (segments, free),
            (None, ScoreBounds(window=4)),
            (None, ScoreBounds(cap=1.0)),
        ):
            assert takes(Queries, *bounded)
            with mock.patch.object(flex_blocks.flex, "HAS_TRITON", False):
                assert not takes(Queries, *bounded)
    assert not flex_blocks.takes(torch.zeros(1, 4, 8, 16), segments, free)


@pytest.mark.slow
def test_a_comparison_sees_a_window_that_is_off_by_one():
    (found, _) = on_ranks(2, off_by_one)
    assert max(found) > 1e-3


def off_by_one(world):
    real = flex_blocks.seen
    with mock.patch.object(flex_blocks, "seen", lambda at, of, window: real(at, of, window + 1)):
        return compared(world, "window")
