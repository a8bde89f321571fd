"""Attention by documents: bounds, and the same as with a mask, forward and backward."""

from unittest import mock

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen
from torch.nn.functional import scaled_dot_product_attention

from meshwright.data.sampler import Rows
from meshwright.kernels import varlen
from meshwright.kernels.block_attention import has_cuda_flash
from meshwright.kernels.varlen import attend_varlen, bounds_of, takes_bounds
from meshwright.models.attention import attend
from meshwright.models.context import causal_mask
from meshwright.parallel.batch import Batch, Feed
from meshwright.program.attention import ScoreBounds
from syncs import Syncs

SEGMENTS = torch.tensor(
    [
        [0] * 24,
        [0] * 7 + [1] + [2] * 16,
        [3] * 12 + [0] * 12,  # any numbers, as long as neighbours differ
        list(range(24)),
    ]
)


def draw(dtype=torch.float32, kv_heads=2, seed=0):
    """q, k and v as attention has them: views of [batch, seq, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (4, kv_heads, kv_heads)
    found = (torch.randn(4, 24, n, 16, generator=generator, dtype=dtype) for n in sizes)
    return [x.transpose(1, 2).requires_grad_() for x in found]


def run(core, tensors, documents):
    out = core(*tensors, documents)
    weights = torch.linspace(0, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad((out * weights).sum(), tensors)


def test_bounds_are_where_documents_begin_and_end():
    bounds = bounds_of(SEGMENTS)
    assert bounds.dtype == torch.int32
    assert bounds.tolist()[:3] == [
        [0] + [24] * 24,
        [0, 7, 8] + [24] * 22,
        [0, 12] + [24] * 23,
    ]
    assert bounds.tolist()[3] == list(range(25))
    assert bounds_of(SEGMENTS[:3]).shape == (3, 9)  # eight at once: few shapes


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(1, 3)])
def test_it_is_attention_with_a_mask(rows, kv_heads):
    """Rows of one document, of several, and of one token each."""
    tensors = [x[rows] for x in draw(torch.float64, kv_heads)]
    mask = causal_mask(SEGMENTS[rows], SEGMENTS[rows], None)
    wanted = run(attend, tensors, mask)
    found = run(attend_varlen, tensors, bounds_of(SEGMENTS)[rows])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    for one, other in zip(run(attend_varlen, tensors, mask), wanted, strict=True):
        assert torch.equal(one, other)
    if rows != slice(0, 1):
        assert not torch.allclose(found[0], attend(*tensors, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_dtype_is_that_of_the_queries(dtype):
    exact = run(attend_varlen, draw(torch.float64), bounds_of(SEGMENTS))
    tensors = [x.detach().to(dtype).requires_grad_() for x in draw(torch.float64)]
    for one, other in zip(run(attend_varlen, tensors, bounds_of(SEGMENTS)), exact, strict=True):
        assert one.dtype == dtype
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.slow
def test_torch_finds_nothing_wrong_with_the_operation():
    """Schema, fake tensors, strides and autograd as torch's own check wants them."""
    op = torch.ops.meshwright.attend_varlen.default
    torch.library.opcheck(op, (*draw(), bounds_of(SEGMENTS)))


def by_loop(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=None):
    """What FlashAttention's varlen is to compute: rows [tokens, heads, dim], causal by length."""
    is_grouped = q.shape[1] != k.shape[1]
    assert window_size == (-1, 0)
    assert enable_gqa in (None, is_grouped)  # torch 2.11 has no word for it
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype == torch.int32
    lengths = cu_q.diff()
    assert lengths.min() >= 0
    assert lengths.max() <= max_q == max_k
    assert cu_q[-1] == len(q)
    parts = []
    for begin, length in zip(cu_q.tolist(), lengths.tolist(), strict=False):
        some = (x[begin : begin + length].transpose(0, 1) for x in (q, k, v))
        part = scaled_dot_product_attention(*some, is_causal=True, enable_gqa=is_grouped)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


def test_a_gpu_gets_all_documents_in_one_call(monkeypatch):
    """What the kernel is handed, with a stand-in for the kernel: it was not run on a GPU here."""
    monkeypatch.setattr(torch_varlen, "varlen_attn", by_loop)
    tensors = draw(torch.float64)
    found = run(varlen._by_varlen, tensors, bounds_of(SEGMENTS))
    wanted = run(attend_varlen, tensors, bounds_of(SEGMENTS))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    bounds = bounds_of(SEGMENTS)
    monkeypatch.setattr(torch_varlen, "varlen_attn", lambda q, *rest, **more: q)
    with Syncs() as syncs:
        varlen._by_varlen(*tensors, bounds)
    assert syncs == []


def test_which_devices_go_by_documents():
    cpu = torch.device("cpu")
    assert all(takes_bounds(cpu, dtype, 12) for dtype in (torch.float32, torch.float16))
    assert takes_bounds(cpu, torch.bfloat16, 64, ScoreBounds(None, 50.0))
    gpu, plain = torch.device("cuda", 0), ScoreBounds()
    all_kinds = [plain, ScoreBounds(None, 50.0), ScoreBounds(sinks=True)]
    with (
        mock.patch.object(varlen, "has_cuda_flash", lambda _, dtype, __: dtype.itemsize == 2),
        mock.patch.object(varlen.flex, "HAS_TRITON", True),
    ):
        assert all(takes_bounds(gpu, torch.float32, 64, scores) for scores in all_kinds)
        assert all(takes_bounds(gpu, torch.bfloat16, 64, scores) for scores in all_kinds)
        assert not takes_bounds(gpu, torch.float32, 12)  # too narrow for its kernel
        assert not takes_bounds(gpu, torch.float64, 64)
        with mock.patch.object(varlen.flex, "HAS_TRITON", False):
            assert not any(takes_bounds(gpu, torch.float32, 64, scores) for scores in all_kinds)
            found = [takes_bounds(gpu, torch.bfloat16, 64, scores) for scores in all_kinds]
            assert found == [True, False, False]


def test_which_kernel_serves_is_a_constant_of_compiled_code():
    """A GPU's capability comes from its driver, and would end the graph of a block."""

    def attended(x):
        return x + 1 if has_cuda_flash(torch.device("cuda", 0), torch.bfloat16, 64) else x - 1

    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        compiled = torch.compile(attended, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1)) == 1


def test_a_batch_knows_its_documents_and_stays_where_it_is():
    ids = torch.arange(96).view(4, 24)
    rows = Rows(ids.numpy(), ids.add(1).numpy(), SEGMENTS.numpy())
    batch = Feed(torch.device("cpu")).bring(Batch.of(rows))
    assert torch.equal(batch.bounds, bounds_of(SEGMENTS))
    assert batch.inputs.data_ptr() == ids.data_ptr()
    second = batch.split(2)[1]
    assert torch.equal(second.bounds, batch.bounds[2:])
    assert Batch.of(Rows(rows.inputs, rows.targets, None)).bounds is None
