"""Weights in four bits beside those of bitsandbytes and torchao, of which CI has both."""

import pytest
import torch

from meshwright.models.nf4 import NF4_BLOCK, dequantise, quantise


def halves(packed):
    """Return the numbers of a packed weight, two in a byte, and its scales."""
    inner = packed.shape[1] * NF4_BLOCK // 36
    return packed[:, : inner // 2], packed[:, inner // 2 :].view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_numbers_are_those_of_bitsandbytes(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(96, 256).to(dtype)
    found, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
    packed = quantise(weight)
    codes, scales = halves(packed)
    assert torch.equal(found.view(torch.uint8).view_as(codes), codes)
    torch.testing.assert_close(state.absmax.view_as(scales), scales, rtol=0, atol=0)
    theirs = functional.dequantize_4bit(found, state)
    torch.testing.assert_close(dequantise(packed, dtype), theirs, rtol=0, atol=0)


def test_the_numbers_are_those_of_torchao():
    """But for its levels of four decimals, and scales that it keeps in 8 bits."""
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    theirs = quantization.NF4Tensor.from_tensor(weight, NF4_BLOCK, 256)
    codes, scales = halves(quantise(weight))
    same = theirs.quantized_data.view_as(codes) == codes
    assert same.float().mean() > 0.999
    ours = dequantise(quantise(weight), torch.float32)
    off = (theirs.get_original_weight() - ours).abs() * same.repeat_interleave(2, 1)
    assert off.max() / scales.max() < 0.02  # of bytes that are the same
