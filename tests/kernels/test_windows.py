"""Windows and caps of scores, over the ranks of cp and in packed documents, against plain fp64."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import varlen as torch_varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshwright.comm.wire import WorkCounter
from meshwright.kernels import block_attention, recompute, varlen
from meshwright.kernels.varlen import attend_varlen, bounds_of, takes_bounds
from meshwright.parallel.context_parallel import ring as rounds
from meshwright.parallel.context_parallel.context import Ring, Ulysses, positions
from meshwright.program import ring
from meshwright.program.attention import UNBOUNDED, ScoreBounds
from meshwright.program.ring import ring_pairs
from ranks import on_ranks, ranks
from test_context import draw, of_lengths
from test_documents import by_loop

NAMES = ("out", "grad q", "grad k", "grad v")


def plain(tensors, scores, segments=None):
    """The result and gradients in fp64, by the whole matrix of scores."""
    *qkv, grad = (x.detach().double() for x in tensors)
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    shared, at = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
    found = q @ k.repeat_interleave(shared, 1).mT / q.shape[3] ** 0.5
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    back = at[:, None] - at
    seen = (back >= 0) & (back < (scores.window or len(at)))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    out = found.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(shared, 1)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def off(a, b, whole):
    """max|a - b| / max|whole|; gradients of a query that sees one key are 0, as those of its key.

    Else results and gradients of what `draw` gives are about 1.
    """
    return (a.double() - b).abs().max() / whole.abs().max().clamp(min=0.1)


def errors(core, at, tensors, documents, scores, expected):
    """How far off results are over all ranks, where this one holds the positions `at`."""
    q, k, v, grad = (x.detach()[:, :, at] for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = core(q, k, v, documents, scores)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))
    worst = [off(a, b[:, :, at], b) for a, b in zip(found, expected, strict=True)]
    over_ranks = torch.stack(worst)
    dist.all_reduce(over_ranks, dist.ReduceOp.MAX)
    return over_ranks.tolist()


def documents_of(seq):
    """Two rows: documents with ends beside and on the seams of chunks, and one document."""
    third = seq // 3
    return of_lengths([1, third - 1, 2, seq - third - 3, 1], [seq])


CHUNK = 8
# By tokens: itself, less than a chunk, one exactly and beside it, several, the seams of two and
# three, all, more than all.
WINDOWS = (1, 5, 7, 8, 9, 16, 17, 19, 23, 25, 40, 1000)


@pytest.mark.often(1)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("cap", [None, 2.0], ids=["bare", "capped"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_ring_equals_plain_attention(n, cap, packed):
    on_ranks(n, ring_equals_plain, cap=cap, packed=packed)


def ring_equals_plain(world, cap, packed):
    seq = 2 * world.size * CHUNK
    at = positions("ring", seq, world.size, world.rank)
    segments = documents_of(seq) if packed else None
    core = Ring(dist.group.WORLD)
    # Chunks whole, and cut unevenly.
    shortest, kv_heads = (ring.SHORTEST_BLOCK, 1) if packed else (3, 2)
    tensors = draw(1, heads=4, kv_heads=kv_heads, seq=seq, head_dim=8, dtype=torch.float64)
    for window in (*WINDOWS, seq - 1, seq, None):
        scores = ScoreBounds(window, cap)
        expected = plain(tensors, scores, segments)
        with mock.patch.object(ring, "SHORTEST_BLOCK", shortest):
            found = errors(core, at, tensors, segments, scores, expected)
        assert max(found) < 1e-13, (scores, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_ring_in_less_precision(dtype):
    on_ranks(2, in_less_precision, dtype=dtype)


def in_less_precision(world, dtype):
    """As many roundings of the dtype as a result has without a window, and its dtype."""
    at = positions("ring", 64, 2, world.rank)
    tensors = draw(3, dtype=dtype)
    core = Ring(dist.group.WORLD)
    for segments in (None, documents_of(64)):
        bare = errors(core, at, tensors, segments, UNBOUNDED, plain(tensors, UNBOUNDED, segments))
        for scores in (ScoreBounds(11), ScoreBounds(30, 2.0), ScoreBounds(None, 2.0)):
            found = errors(core, at, tensors, segments, scores, plain(tensors, scores, segments))
            for name, one, other in zip(NAMES, found, bare, strict=True):
                assert one < 2 * other + 2 * torch.finfo(dtype).eps, (name, scores)
        q, k, v = (x[:, :, at] for x in tensors[:3])
        assert core(q, k, v, segments, ScoreBounds(11, 2.0)).dtype == dtype


@ranks(3)
def test_the_comparison_catches_what_is_wrong(world):
    """A window that is off by one, in what is computed or in its masks; and a lost cap."""
    at = positions("ring", 48, 3, world.rank)
    tensors = draw(5, heads=4, seq=48, head_dim=8, dtype=torch.float64)
    core, right = Ring(dist.group.WORLD), ring.ring_pieces
    see = block_attention.visible
    for window in (1, 7, 8, 9, 17, 24):
        expected = plain(tensors, ScoreBounds(window))
        assert max(errors(core, at, tensors, None, ScoreBounds(window), expected)) < 1e-13
        for more in (-1, 1) if window > 1 else (1,):
            wrong = ScoreBounds(window + more)
            assert min(errors(core, at, tensors, None, wrong, expected)) > 1e-3
            off_pieces = mock.patch.object(
                rounds, "ring_pieces", lambda *place, w=wrong: right(*place[:-1], w)
            )
            off_masks = mock.patch.object(
                rounds, "visible", lambda piece, w, device, o=more: see(piece, w + o, device)
            )
            # Of a chunk exactly, own chunks have no mask, nor has what a wider window skips.
            with off_masks:
                assert max(errors(core, at, tensors, None, ScoreBounds(window), expected)) > 1e-3
            if more < 0:
                with off_pieces:
                    assert (
                        max(errors(core, at, tensors, None, ScoreBounds(window), expected)) > 1e-3
                    )
    expected = plain(tensors, ScoreBounds(9, 1.0))
    assert min(errors(core, at, tensors, None, ScoreBounds(9), expected)) > 1e-3
    assert min(errors(core, at, tensors, None, ScoreBounds(9, 1.05), expected)) > 1e-3


class Calls(TorchDispatchMode):
    """The queries and keys of each call of a block's forward."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.endswith(("flash_attention_for_cpu", "capped_attention")):
            self.shapes.append((args[0].shape[2], args[1].shape[2]))
        return func(*args, **(kwargs or {}))


@ranks(3)
def test_what_is_computed_is_what_is_counted(world):
    """Steps that see nothing compute nothing; selective recomputation computes no step again."""
    seq = 6 * 100
    at = positions("ring", seq, 3, world.rank)
    tensors = draw(7, batch=1, heads=2, kv_heads=1, seq=seq, head_dim=8, dtype=torch.float64)
    core = Ring(dist.group.WORLD)
    for scores in (UNBOUNDED, ScoreBounds(30), ScoreBounds(250), ScoreBounds(30, 2.0)):
        steps = ring_pairs(seq, 3, world.rank, scores)
        q, k, v = (x.detach()[:, :, at].requires_grad_() for x in tensors[:3])

        def selective(scores=scores):
            return create_selective_checkpoint_contexts(recompute._policy)

        with Calls() as calls:
            more = {"use_reentrant": False, "context_fn": selective}
            out = checkpoint(core, q, k, v, None, scores, **more)
        assert calls.shapes == [(p.rows, p.columns) for pieces in steps for p in pieces]
        with Calls() as again:
            found = torch.autograd.grad(out, (q, k, v), tensors[3][:, :, at])
        assert again.shapes == []
        for one, other in zip((out, *found), plain(tensors, scores), strict=True):
            assert off(one, other[:, :, at], other) < 1e-13
        with WorkCounter() as work:
            torch.autograd.grad(core(q, k, v, None, scores).sum(), (q, k, v))
        pairs = sum(p.pairs(scores.cap is not None) for pieces in steps for p in pieces)
        assert work.attention == 2 * (2 + 5) * q.shape[1] * q.shape[3] * pairs


@ranks(4)
def test_the_keys_travel_past_ranks_that_see_none(world):
    """The same messages with a window of one token as without one."""
    at, sent = positions("ring", 64, 4, world.rank), []
    real = dist.batch_isend_irecv

    def counted(ops):
        sent[-1].append([(tuple(op.tensor.shape), op.tensor.dtype, op.tag) for op in ops])
        return real(ops)

    for scores in (UNBOUNDED, ScoreBounds(1), ScoreBounds(9, 2.0)):
        sent.append([])
        q, k, v = (x.detach()[:, :, at].requires_grad_() for x in draw(12)[:3])
        with mock.patch.object(dist, "batch_isend_irecv", counted):
            Ring(dist.group.WORLD)(q, k, v, None, scores).sum().backward()
    assert len(sent[0]) == 9
    assert sent[0] == sent[1] == sent[2]


@ranks(2)
def test_ulysses_hands_them_on(world):
    tensors = draw(9, heads=4, kv_heads=2, dtype=torch.float64)
    segments = documents_of(64)
    at = positions("ulysses", 64, 2, world.rank)
    core = Ulysses(dist.group.WORLD, attend_varlen)
    for scores in (ScoreBounds(1), ScoreBounds(20), ScoreBounds(None, 2.0), ScoreBounds(33, 2.0)):
        expected = plain(tensors, scores, segments)
        assert max(errors(core, at, tensors, bounds_of(segments), scores, expected)) < 1e-13
        less = plain(tensors, UNBOUNDED, segments)
        assert min(errors(core, at, tensors, bounds_of(segments), scores, less)) > 1e-3


def in_documents(core, tensors, bounds, scores):
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = core(q, k, v, bounds, scores)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])


SEGMENTS = of_lengths([1, 130, 64, 5], [200], [63, 65, 72])


@pytest.mark.often(5)
@pytest.mark.parametrize("rows", [slice(None), slice(1, 2)], ids=["packed", "alone"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("cap", [None, 2.0], ids=["bare", "capped"])
def test_documents_equal_plain_attention(cap, kv_heads, rows):
    tensors = draw(2, batch=3, heads=4, kv_heads=kv_heads, seq=200, dtype=torch.float64)
    tensors, segments = [x[rows] for x in tensors], SEGMENTS[rows]
    for window in (1, 2, 64, 65, 129, 130, 300, None):
        scores = ScoreBounds(window, cap)
        wanted = plain(tensors, scores, segments)
        found = in_documents(attend_varlen, tensors, bounds_of(segments), scores)
        for name, one, other in zip(NAMES, found, wanted, strict=True):
            assert off(one, other, other) < 1e-13, (name, scores)
        if window is not None and window < 129:
            wider = ScoreBounds(window + 1, cap)
            wrong = in_documents(attend_varlen, tensors, bounds_of(segments), wider)
            assert all(off(a, b, b) > 1e-3 for a, b in zip(wrong, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_documents_in_less_precision(dtype):
    tensors = draw(4, batch=3, seq=200, dtype=dtype)
    for scores in (ScoreBounds(30), ScoreBounds(70, 2.0), ScoreBounds(None, 2.0)):
        wanted = plain(tensors, scores, SEGMENTS)
        found = in_documents(attend_varlen, tensors, bounds_of(SEGMENTS), scores)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == dtype
            assert off(one, other, other) < 8 * torch.finfo(dtype).eps


@pytest.mark.slow
def test_torch_finds_nothing_wrong_with_the_operations():
    q, k, v = (x.requires_grad_() for x in draw(6, batch=1, seq=200)[:3])
    op = torch.ops.meshwright.attend_varlen.default
    bounds = bounds_of(SEGMENTS[:1])
    sinks = torch.randn(q.shape[1], requires_grad=True)
    for window, cap in ((3, None), (None, 2.0), (70, 2.0)):
        torch.library.opcheck(op, (q, k, v, bounds, window, cap))
    torch.library.opcheck(op, (q, k, v, bounds, 70, None, sinks))
    mask = torch.ones(200, 200).bool().tril()[None, None]
    capped = torch.ops.meshwright.capped_attention.default
    torch.library.opcheck(capped, (*(x.detach() for x in (q, k, v)), mask, True, 2.0))


def test_a_gpu_gets_the_window_and_no_cap(monkeypatch):
    """What the kernel is handed, with a stand-in for the kernel."""
    seen = []

    def stand_in(*args, window_size, **more):
        seen.append(window_size)
        return by_loop(*args, window_size=(-1, 0), **more)

    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    q, k, v, _ = draw(8, batch=3, seq=200)
    for window in (1, 30, None):
        varlen._by_varlen(q, k, v, bounds_of(SEGMENTS), window)
    assert seen == [(0, 0), (29, 0), (-1, 0)]
    with mock.patch.object(varlen, "has_cuda_flash", return_value=True):
        gpu = torch.device("cuda", 0)
        assert takes_bounds(gpu, torch.bfloat16, 64)


def test_a_cap_is_served_by_plain_operations():
    for dtype in (torch.float32, torch.float16):
        q = torch.empty(1, 1, 2, 8, dtype=dtype)
        for masked in (False, True):
            block = block_attention.choose(q, masked, 2.0)
            assert block.forward.func is block_attention._capped_forward
            assert block.backward.keywords == {"cap": 2.0}
