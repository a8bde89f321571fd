"""fp32 products through oneDNN: which processors take it, and that the numbers are the same."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.execute.compiled import compile_block
from meshwright.execute.products import Processor, Route, _has_onednn, route, take_route
from ranks import ranks

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not _has_onednn(), reason="this torch has no oneDNN")


def test_the_way_depends_on_the_processor_alone(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n\nprocessor\t: 1\n"
        "vendor_id\t: other\ncpu family\t: 6\n"
    )
    zen4 = Processor.here(file)
    assert zen4 == ("AuthenticAMD", 25)
    assert Processor.here(tmp_path / "none") == ("", 0)
    assert route("torch", zen4) == Route(False, False)
    assert route("auto", Processor("GenuineIntel", 6)) == Route(False, False)
    assert route("auto", Processor("", 0)) == Route(False, False)
    if _has_onednn():
        assert route("auto", zen4) == Route(True, False)
        assert route("auto", Processor("AuthenticAMD", 26)) == Route(True, True)
        assert route("onednn", Processor("GenuineIntel", 6)) == Route(True, True)


@pytest.fixture
def through_onednn():
    yield take_route("onednn", CPU)
    take_route("torch", CPU)


def called(work):
    """Return the names of the operators that a piece of work calls, with its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out = work()
    return {event.key for event in seen.key_averages()}, out


def passes(x, weight, bias, grad):
    x, weight, bias = (None if t is None else t.clone().requires_grad_() for t in (x, weight, bias))
    out = F.linear(x, weight, bias)
    out.backward(grad)
    return [out.detach(), x.grad, weight.grad, *([] if bias is None else [bias.grad])]


@needs_onednn
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.usefixtures("through_onednn")
def test_forward_and_both_gradients_are_true_fp32(biased):
    torch.manual_seed(0)
    x, weight, grad = torch.randn(2, 128, 96), torch.randn(160, 96), torch.randn(2, 128, 160)
    bias = torch.randn(160) if biased else None
    names, found = called(lambda: passes(x, weight, bias, grad))
    assert "mkldnn::_linear_pointwise" in names
    exact = passes(*(None if t is None else t.double() for t in (x, weight, bias)), grad.double())
    take_route("torch", CPU)
    names, plain = called(lambda: passes(x, weight, bias, grad))
    assert "mkldnn::_linear_pointwise" not in names
    for mine, torchs, true in zip(found, plain, exact, strict=True):
        error, usual = ((t.double() - true).abs().max().item() for t in (mine, torchs))
        assert error < 2 * usual + 1e-6  # bf16 or TF32 would be a thousand times off
        assert mine.stride() == torchs.stride()


@needs_onednn
@pytest.mark.usefixtures("through_onednn")
def test_what_onednn_does_not_take_is_torchs():
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    twice = torch.randn(1, 256).expand(256, 256)  # rows that are one
    for left, right in (
        (a.double(), b.double()),
        (a.bfloat16(), b.bfloat16()),
        (twice, b),
        (a[::2, ::2], b[::2]),
        (a[:4, :4], b[:4]),
        (a[:0], b),
        (a[:, :0], b[:0]),
    ):
        names, out = called(lambda left=left, right=right: left @ right)
        assert "mkldnn::_linear_pointwise" not in names
        expected = (left[:, :, None].double() * right.double()).sum(1)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=1e-1)
    found = torch.addmm(b, a, b, beta=2)
    torch.testing.assert_close(found, 2 * b + a @ b, rtol=1e-4, atol=1e-3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        a @ b[:5]
    with pytest.raises(RuntimeError, match="dtype"):
        a @ b.double()
    with pytest.raises(RuntimeError, match="is not the shape of the product"):
        torch.ones(1, 256).addmm_(a, b)


@needs_onednn
@ranks(1)
def test_other_routes_only_where_one_was_taken(world):
    """In a process of its own: nothing is replaced until a route asks for it."""
    take_route("torch", CPU)
    assert "mkldnn" not in str(torch._C._dispatch_dump("aten::mm"))
    a = torch.randn(256, 256)
    before = called(lambda: a @ a)
    take_route("onednn", CPU)
    after = called(lambda: a @ a)
    assert "mkldnn::_linear_pointwise" not in before[0]
    assert "mkldnn::_linear_pointwise" in after[0]
    torch.testing.assert_close(before[1], after[1], rtol=1e-5, atol=1e-4)


class Two(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


@needs_onednn
@pytest.mark.usefixtures("through_onednn")
def test_what_is_not_compiled_has_its_products_as_ever():
    """Torch compiles none of its own containers, but what they call: the route is not to be."""
    x, module = torch.randn(160, 96), nn.Sequential(nn.Linear(96, 96))
    expected = module(x)
    compile_block(module, Route(True, True))
    names, out = called(lambda: module(x))
    assert "mkldnn::_linear_pointwise" in names
    assert torch.equal(out, expected)


@needs_onednn
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
@pytest.mark.usefixtures("through_onednn")
@pytest.mark.parametrize("biased", [False, True])
def test_the_products_of_compiled_modules_go_the_same_way(biased, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    x, grad = torch.randn(160, 96, requires_grad=True), torch.randn(160, 128)
    linears = [nn.Linear(96, 96, bias=biased), nn.Linear(96, 128, bias=biased)]
    for linear in linears if biased else ():
        linear.bias.requires_grad_(False)  # its gradient is a sum, which would want C++ compiled

    def step(module):
        x.grad = None
        module.zero_grad()
        out = module(x)
        out.backward(grad)
        return [out.detach(), x.grad, *(linear.weight.grad for linear in linears)]

    def counted(module):
        step(module)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            found = step(module)
        counts = {event.key: event.count for event in seen.key_averages()}
        return found, [counts.get(name, 0) for name in ("mkldnn::_linear_pointwise", "aten::copy_")]

    plain, calls = counted(Two(*linears))
    compiled = Two(*linears)
    compile_block(compiled, Route(True, True))
    found, compiled_calls = counted(compiled)
    assert compiled_calls == calls  # and nothing is copied that was not before
    assert calls[0] == 6
    others = Two(*linears)
    compile_block(others, take_route("torch", CPU))
    torchs, torchs_calls = counted(others)
    assert torchs_calls[0] == 0
    for mine, own, theirs in zip(found, plain, torchs, strict=True):
        assert torch.equal(mine, own)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
