"""fp32 products through oneDNN: which processors take it, and that the numbers are the same."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.kernels.compiled import compile_block
from meshwright.kernels.fp32_matmuls import has_onednn, take_route
from meshwright.kernels.processor import processor
from meshwright.parallel.allocations import events_of, pieces_of
from meshwright.program import target
from meshwright.program.target import Processor, Route, route

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


def test_the_way_depends_on_the_processor_alone(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n\nprocessor\t: 1\n"
        "vendor_id\t: other\ncpu family\t: 6\n"
    )
    zen4 = processor(file)
    assert zen4 == ("AuthenticAMD", 25)
    assert processor(tmp_path / "none") == Processor() == ("", 0)
    assert route("torch", Processor("AuthenticAMD", 26)) == Route(False, False)
    assert route("auto", Processor("GenuineIntel", 6)) == Route(False, False)
    assert route("auto", Processor()) == Route(False, False)
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
    scales = passes(*(None if t is None else t.abs() for t in (x, weight, bias)), grad.abs())
    # Libraries sum in different orders, which costs a few roundings; TF32 would cost a thousand.
    rounding = 16 * torch.finfo(torch.float32).eps
    for mine, torchs, true, scale in zip(found, plain, exact, scales, strict=True):
        assert ((mine - true).abs() <= rounding * scale).all()
        assert mine.stride() == torchs.stride()


def others():
    """Products that oneDNN's operator does not take, or takes for another: pairs of factors."""
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    twice = torch.randn(1, 256).expand(256, 256)  # rows that are one
    return {
        "fp64": (a.double(), b.double()),
        "bf16": (a.bfloat16(), b.bfloat16()),
        "rows that are one": (twice, b),
        "gaps": (a[::2, ::2], b[::2]),
        "small": (a[:4, :4], b[:4]),
        "no rows": (a[:0], b),
        "no columns": (a[:, :0], b[:0]),
    }


@pytest.mark.often(3)
@needs_onednn
@pytest.mark.usefixtures("through_onednn")
@pytest.mark.parametrize("kind", list(others()))
def test_what_onednn_does_not_take_is_torchs(kind):
    """The result has the bits of torch's own product, which has those of a sum in fp64."""
    torch.manual_seed(0)
    left, right = others()[kind]
    names, out = called(lambda: left @ right)
    assert "mkldnn::_linear_pointwise" not in names
    take_route("torch", CPU)
    assert torch.equal(out, left @ right)
    expected = (left[:, :, None].double() * right.double()).sum(1)
    rounding = 4 * torch.finfo(out.dtype).eps
    scale = (left[:, :, None].double() * right.double()).abs().sum(1)
    assert out.dtype == left.dtype
    assert ((out.double() - expected).abs() <= rounding * scale).all()


@needs_onednn
@pytest.mark.usefixtures("through_onednn")
def test_what_is_no_product_is_refused_as_ever():
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        a @ b[:5]
    with pytest.raises(RuntimeError, match="dtype"):
        a @ b.double()
    with pytest.raises(RuntimeError, match="is not the shape of the product"):
        torch.ones(1, 256).addmm_(a, b)


@needs_onednn
@pytest.mark.usefixtures("through_onednn")
def test_factors_of_a_sum_are_torchs():
    a, b, c = (torch.randn(256, 256) for _ in range(3))
    names, found = called(lambda: torch.addmm(c, a, b, beta=2))
    assert "mkldnn::_linear_pointwise" not in names
    exact = 2 * c.double() + a.double() @ b.double()
    assert (found.double() - exact).abs().max() < 1e-3


@needs_onednn
@pytest.mark.usefixtures("through_onednn")
@pytest.mark.parametrize("columns", [False, True])
def test_a_sum_gets_its_product_in_pieces(columns, monkeypatch):
    """Pieces of rows that do not divide: each row once, and no more room than was said."""
    torch.manual_seed(0)
    rows, inner, outer = 250, 128, 192
    a = torch.randn(inner, rows).t() if columns else torch.randn(rows, inner)
    b, total = torch.randn(inner, outer), torch.randn(rows, outer)
    before = total.clone()
    monkeypatch.setattr(target, "_PIECE", rows * (inner + outer) * 4 // 3)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        total.addmm_(a, b)
    calls = {event.key: event.count for event in seen.key_averages()}
    assert calls["mkldnn::_linear_pointwise"] == 4
    exact = before.double() + a.double() @ b.double()
    assert (total.double() - exact).abs().max() < 1e-4
    if columns:
        own = [piece for piece in pieces_of(events_of(seen)) if "aten::empty" in piece.maker]
        made = [piece.size for piece in own if piece.size > 1 << 14]
        largest = max(x + y for x, y in zip(made[::2], made[1::2], strict=True))
        assert largest == Route(True, True).room(rows, inner, outer, adds=True)


ALONE = """
import torch
from meshwright.kernels.fp32_matmuls import take_route

def kernel():
    lines = torch._C._dispatch_dump("aten::mm").splitlines()
    return next(line for line in lines if line.startswith("CPU: "))

cpu, a = torch.device("cpu"), torch.randn(256, 256)
own = kernel()
take_route("torch", cpu)
assert kernel() == own, kernel()
before = a @ a
take_route("onednn", cpu)
assert "meshwright/kernels/fp32_matmuls.py" in kernel(), kernel()
torch.testing.assert_close(a @ a, before, rtol=1e-5, atol=1e-4)
take_route("torch", cpu)
assert torch.equal(a @ a, before)
"""


@needs_onednn
def test_nothing_is_replaced_until_a_route_asks_for_it(forks):
    """In a process of its own: what is replaced stays so for all that comes later."""
    with forks.all_python():
        subprocess.run([sys.executable, "-c", ALONE], check=True)


class Two(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.slow
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


@pytest.mark.slow
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
