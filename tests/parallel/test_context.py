"""Context parallelism: the ring and Ulysses against attention over the whole sequence."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.errors import ConfigError
from meshwright.kernels import block_attention
from meshwright.parallel.context_parallel import ring as rounds
from meshwright.parallel.context_parallel.context import Ring, Ulysses, positions
from ranks import on_ranks, ranks

KINDS = {"ring": Ring, "ulysses": Ulysses}
NAMES = ("out", "grad q", "grad k", "grad v")


def draw(seed, *, batch=2, heads=8, kv_heads=4, seq=64, head_dim=16, dtype=torch.float32):
    """q, k, v and the result's gradient, whole, as views of [batch, seq, heads, head_dim]."""
    make = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, seq, n, head_dim, generator=make, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def of_lengths(*rows):
    """Segments whose documents have these lengths, a list of them for each row."""
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in rows]
    )


def whole(q, k, v, grad, segments=None):
    """The result and the gradients of one device's attention over the whole sequence."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    mask = None
    if segments is not None:
        mask = (segments[:, None, :, None] == segments[:, None, None, :]).tril()
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def shared(core, at, q, k, v, grad, segments=None):
    """The same of `core`, where this rank holds the positions `at`."""
    q, k, v = (x[:, :, at].requires_grad_() for x in (q, k, v))
    out = core(q, k, v, segments)
    out.backward(grad[:, :, at])
    return [out.detach(), q.grad, k.grad, v.grad]


def errors(core, kind, tensors, segments=None, expected=None, group=None):
    """max|a - b| / max|b| over all ranks, of the result and the three gradients."""
    group = group or dist.group.WORLD
    at = positions(kind, tensors[0].shape[2], dist.get_world_size(group), dist.get_rank(group))
    found = shared(core, at, *tensors, segments)
    expected = expected or whole(*tensors, segments)
    worst = torch.stack(
        [
            (a.double() - b[:, :, at].double()).abs().max()
            for a, b in zip(found, expected, strict=True)
        ]
    )
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return [(w / b.double().abs().max()).item() for w, b in zip(worst, expected, strict=True)]


def of_one_device(tensors, segments=None):
    """The exact result and gradients, and what one device's in the tensors' dtype are off by."""
    exact = whole(*(x.double() for x in tensors), segments)
    alone = whole(*tensors, segments)
    off = [(a - b).abs().max() / b.abs().max() for a, b in zip(alone, exact, strict=True)]
    return exact, [x.item() for x in off]


def check(core, kind, tensors, segments=None, group=None):
    """In fp32 about as far from the exact values as one device, in fp64 next to nothing.

    A rank adds up other partial sums than one device: which of the two is farther off differs by
    processor.
    """
    exact, alone = of_one_device(tensors, segments)
    found = errors(core, kind, tensors, segments, exact, group)
    is_exact = tensors[0].dtype == torch.float64
    few = 1e-12 if is_exact else 8 * torch.finfo(tensors[0].dtype).eps
    for name, error, one in zip(NAMES, found, alone, strict=True):
        assert error < one + few, f"{name} is off by {error:.2e}, one device's by {one:.2e}"


# Documents of a row of 64 tokens. With 4 ranks the chunks are of 8 and 16 tokens, with 2 of 16 and
# 32: here are documents inside one, over a border, over many, of one token, and one over all.
PACKED = of_lengths([5, 1, 40, 1, 1, 16], [64], [16, 16, 32], [1] * 30 + [3, 31])


def test_positions():
    assert [positions("ring", 8, 2, r).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions("ulysses", 8, 2, r).tolist() for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for kind in KINDS:
        found = [positions(kind, 48, 4, r) for r in range(4)]
        assert torch.equal(torch.cat(found).sort().values, torch.arange(48))
        assert all(x.dtype == torch.int64 and (x.diff() > 0).all() for x in found)


def test_the_ring_balances_the_causal_mask():
    work = [(positions("ring", 64, 4, r) + 1).sum().item() for r in range(4)]
    assert len(set(work)) == 1
    assert len({(positions("ulysses", 64, 4, r) + 1).sum().item() for r in range(4)}) == 4


def test_uneven_sequences_are_refused():
    with pytest.raises(ConfigError, match=r"8 equal chunks \(cp = 4\), and 20 .* 16 or 24"):
        positions("ring", 20, 4, 0)
    assert len(positions("ulysses", 20, 4, 0)) == 5


@pytest.mark.often(2)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4)], ids=["mha", "gqa"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4])
def test_equals_whole_attention(n, kind, heads, kv_heads):
    on_ranks(n, equals_whole_attention, kind=kind, heads=heads, kv_heads=kv_heads)


def equals_whole_attention(world, kind, heads, kv_heads):
    core = KINDS[kind](dist.group.WORLD)
    for segments in (None, PACKED, PACKED[3:]):
        tensors = draw(1, batch=4, heads=heads, kv_heads=kv_heads)
        check(core, kind, tensors, segments)
        wide = draw(1, batch=4, heads=heads, kv_heads=kv_heads, dtype=torch.float64)
        check(core, kind, wide, segments)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("n", [2, 4])
def test_plain_block_in_the_ring(n, packed):
    on_ranks(n, plain_block_in_the_ring, packed=packed)


def plain_block_in_the_ring(world, packed):
    core = Ring(dist.group.WORLD, block_attention.plain())
    segments = PACKED if packed else None
    for kv_heads in (1, 2, 8):
        check(core, "ring", draw(2, batch=4, kv_heads=kv_heads), segments)
    check(core, "ring", draw(2, batch=4, dtype=torch.float64), segments)


@pytest.mark.often(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind, dtype):
    on_ranks(2, half_precision, kind=kind, dtype=dtype)


def half_precision(world, kind, dtype):
    """As near to fp32 as one device is in the same dtype."""
    for segments in (None, PACKED):
        tensors = draw(3, batch=4, dtype=dtype)
        exact = whole(*(x.float() for x in tensors), segments)
        alone = whole(*tensors, segments)
        cores = [KINDS[kind](dist.group.WORLD)]
        if kind == "ring":
            cores.append(Ring(dist.group.WORLD, block_attention.plain()))
        for core in cores:
            found = errors(core, kind, tensors, segments, expected=exact)
            for name, error, one, b in zip(NAMES, found, alone, exact, strict=True):
                limit = (one.float() - b).abs().max() / b.abs().max()
                assert error < 1.5 * limit + torch.finfo(dtype).eps / 2, (name, error, limit)


@ranks(4)
def test_random_segments_and_shapes(world):
    """Shapes down to one position a chunk, segments of any lengths; all drawn from a seed."""
    cores = {"ring": Ring(dist.group.WORLD), "ulysses": Ulysses(dist.group.WORLD)}
    plain = Ring(dist.group.WORLD, block_attention.plain())
    for seed in range(10):
        make = torch.Generator().manual_seed(seed)
        batch, chunk, group = (int(torch.randint(1, top, (), generator=make)) for top in (3, 9, 3))
        tensors = draw(seed, batch=batch, heads=4 * group, kv_heads=4, seq=8 * chunk, head_dim=8)
        rate = torch.rand((), generator=make)
        starts = torch.rand(batch, 8 * chunk, generator=make) < rate * rate
        segments = starts.int().cumsum(1)
        for kind, core in (*cores.items(), ("ring", plain)):
            check(core, kind, tensors, segments)


@ranks(2)
def test_equal_segments_need_not_be_adjacent(world):
    segments = torch.arange(64).remainder(5).expand(2, 64)
    for kind, make in KINDS.items():
        check(make(dist.group.WORLD), kind, draw(4), segments)


@ranks(2)
def test_large_scores_merge_stably(world):
    tensors = draw(5, dtype=torch.float64)
    tensors[0] = tensors[0] * 300
    for block in (None, block_attention.plain()):
        check(Ring(dist.group.WORLD, block), "ring", tensors)


def averaged(out, lse, part, part_lse):
    out.add_(part).div_(2)


def unweighted_second(out, lse, part, part_lse):
    torch.logaddexp(lse, part_lse, out=lse)


@ranks(4)
def test_the_comparison_catches_what_is_wrong(world):
    tensors, ring = draw(6), Ring(dist.group.WORLD)
    packed = PACKED[:2]
    expected = whole(*tensors)
    for merge in (averaged, unweighted_second):
        with mock.patch.object(rounds, "_merge", merge):
            assert errors(ring, "ring", tensors, expected=expected)[0] > 1e-2
    # Contiguous positions in the ring, and ring positions in Ulysses.
    assert min(errors(ring, "ulysses", tensors, expected=expected)) > 1e-2
    assert min(errors(Ulysses(dist.group.WORLD), "ring", tensors, expected=expected)) > 1e-2
    # Segments that are a token late, that are in rank order already, and none.
    assert min(errors(ring, "ring", tensors, packed.roll(1, 1), whole(*tensors, packed))) > 1e-2
    order = torch.cat([positions("ring", 64, 4, r) for r in range(4)])
    assert min(errors(ring, "ring", tensors, packed[:, order], whole(*tensors, packed))) > 1e-2
    assert min(errors(ring, "ring", tensors, None, whole(*tensors, packed))) > 1e-2
    # Rows that see nothing of a block.
    with mock.patch.object(block_attention, "MASKED", float("-inf")):
        assert not max(errors(ring, "ring", tensors, packed)) < 1e-2


@ranks(4)
def test_groups_that_are_not_the_first_ranks(world):
    """Ranks 1 and 3 are a ring beside 0 and 2: peers are named by their global ranks."""
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    group = groups[world.rank % 2]
    for kind, make in KINDS.items():
        check(make(group), kind, draw(7 + world.rank % 2), PACKED[:2], group=group)
    for each in groups:
        if each is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(each)


@ranks(2)
def test_microbatches_in_flight_and_recomputation(world):
    """Two forwards before the first backward, the second recomputed, and once without gradients."""
    for kind, make in KINDS.items():
        core, at = make(dist.group.WORLD), positions(kind, 64, 2, world.rank)
        kept = []
        for seed, segments in ((9, None), (10, PACKED[:2])):
            tensors = draw(seed)
            q, k, v = (x[:, :, at].requires_grad_() for x in tensors[:3])
            if segments is None:
                out = core(q, k, v, None)
            else:
                out = checkpoint(core, q, k, v, segments, use_reentrant=False)
            with torch.no_grad():
                assert torch.equal(core(q, k, v, segments), out)
            kept.append((tensors, segments, out, (q, k, v)))
        for tensors, segments, out, leaves in kept:
            out.backward(tensors[3][:, :, at])
            for leaf, full in zip(leaves, whole(*tensors, segments)[1:], strict=True):
                assert (leaf.grad - full[:, :, at]).abs().max() < 1e-6 * full.abs().max()


@ranks(2)
def test_gradients_of_any_layout(world):
    """An expanded gradient, and the layout that attention hands on."""
    for kind, make in KINDS.items():
        core, at = make(dist.group.WORLD), positions(kind, 64, 2, world.rank)
        for block in (None, block_attention.plain()) if kind == "ring" else (None,):
            core = core if block is None else Ring(dist.group.WORLD, block)
            tensors = draw(11)
            ones = torch.ones_like(tensors[3])
            expected = whole(*tensors[:3], ones)
            q, k, v = (x[:, :, at].requires_grad_() for x in tensors[:3])
            core(q, k, v, None).transpose(1, 2).flatten(2).sum().backward()
            for leaf, full in zip((q, k, v), expected[1:], strict=True):
                assert (leaf.grad - full[:, :, at]).abs().max() < 1e-6 * full.abs().max()
            strided = [x.mT.contiguous().mT for x in tensors]
            check(core, kind, strided)


@ranks(4)
def test_what_is_sent_and_kept(world):
    """The exchanges are plain c10d calls; the backward keeps q, k, v, the result and its lse."""
    tensors, kept, sent = draw(12), [], []
    real = dist.batch_isend_irecv

    def counted(ops):
        assert [op.op for op in ops] == [dist.isend, dist.irecv]
        sent.append((tuple(ops[0].tensor.shape), ops[0].tensor.dtype))
        return real(ops)

    def keep(x):
        kept.append(tuple(x.shape))
        return x

    at = positions("ring", 64, 4, world.rank)
    q, k, v = (x[:, :, at].bfloat16().requires_grad_() for x in tensors[:3])
    with mock.patch.object(dist, "batch_isend_irecv", counted):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = Ring(dist.group.WORLD)(q, k, v)
        keys = ((2, *k.shape), torch.bfloat16)
        assert sent == [keys] * 3
        sent.clear()
        out.sum().backward()
    sums = ((2, *k.shape), torch.float32)
    assert sorted(sent, key=str) == sorted([keys] * 3 + [sums] * 3, key=str)
    shapes = [q.shape, k.shape, v.shape, out.shape, out.shape[:3]]
    assert sorted(kept) == sorted(tuple(s) for s in shapes)


@ranks(2)
def test_a_ring_of_one(world):
    groups = [dist.new_group([r]) for r in range(2)]
    alone = groups[world.rank]
    for kind, make in KINDS.items():
        check(make(alone), kind, draw(13), PACKED[:2], group=alone)
    dist.destroy_process_group(alone)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["cpu_flash", "plain"])
def test_blocks_give_the_log_sum_exp(name, causal):
    q, k, v, _ = draw(14, dtype=torch.float64)
    k, v = (x if causal else x[:, :, :40] for x in (k, v))
    out, lse = getattr(block_attention, name)().forward(q, k, v, None, causal)
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    if causal:
        scores = scores.masked_fill(~torch.ones(64, 64).bool().tril(), float("-inf"))
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=1e-12)
    assert torch.allclose(out, scores.softmax(-1) @ v.repeat_interleave(2, 1), rtol=1e-11)


@pytest.mark.parametrize("name", ["cpu_flash", "plain"])
def test_a_query_without_keys_weighs_nothing(name):
    q, k, v, grad = draw(15)
    block = getattr(block_attention, name)()
    mask = torch.zeros(2, 1, 64, 64).bool()
    out, lse = block.forward(q, k, v, mask, False)
    assert out.isfinite().all()
    assert (lse < -9e29).all()
    real = torch.zeros_like(lse)
    assert all((x == 0).all() for x in block.backward(grad, q, k, v, out, real, mask, False))


def test_the_block_of_a_device():
    chosen = {
        (dtype, masked): block_attention.choose(torch.empty(1, 1, 2, 8, dtype=dtype), masked)
        for dtype in (torch.float32, torch.float16)
        for masked in (False, True)
    }
    plain, flash = block_attention.plain(), block_attention.cpu_flash()
    assert chosen.pop((torch.float16, True)) == plain
    assert set(chosen.values()) == {flash}
    meta = torch.empty(1, 1, 2, 8, device="meta")
    assert block_attention.choose(meta, masked=False) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_block_of_a_gpu(dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain, flash = block_attention.plain(), block_attention.cuda_flash()
    with FakeTensorMode():
        q, odd = (torch.empty(2, 8, 32, d, dtype=dtype, device="cuda") for d in (64, 36))
        for capability in ((7, 5), (9, 0)):
            with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
                half = dtype != torch.float32 and capability == (9, 0)
                assert block_attention.choose(q, masked=False) == (flash if half else plain)
                assert block_attention.choose(q, masked=True) == plain
                assert block_attention.choose(odd, masked=False) == plain
        if dtype != torch.float32:
            # No GPU here: the operations exist, take these arguments and give these shapes.
            k = torch.empty(2, 4, 64, 64, dtype=dtype, device="cuda")
            out, lse = flash.forward(q, k, k, None, False)
            assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
            shapes = [x.shape for x in flash.backward(out, q, k, k, out, lse, None, False)]
            assert shapes == [q.shape, k.shape, k.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True])
def test_flash_on_a_gpu_equals_plain(causal):
    tensors = [x.cuda() for x in draw(16, seq=256, head_dim=64, dtype=torch.bfloat16)]
    q, k, v, grad = tensors
    expected = block_attention.plain().forward(q.float(), k.float(), v.float(), None, causal)
    found = block_attention.cuda_flash().forward(q, k, v, None, causal)
    wide = [x.float() for x in (grad, q, k, v, expected[0])]
    expected += block_attention.plain().backward(*wide, expected[1], None, causal)
    found += block_attention.cuda_flash().backward(grad, q, k, v, found[0], found[1], None, causal)
    for a, b in zip(found, expected, strict=True):
        assert (a.float() - b).abs().max() < 2e-2 * b.abs().max()
