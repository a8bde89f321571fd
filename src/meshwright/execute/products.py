"""fp32 products on a CPU: through oneDNN, where it is faster than the library that torch takes.

torch computes them with MKL, which takes a slower path on processors that are not Intel's: on AMD's
it was measured at 0.87 of what oneDNN does (Zen 4) down to less than half (Zen 5). Both compute in
true fp32. The kernels of `aten::mm` and `aten::addmm`, in place too, are replaced, below autograd:
linear layers, their backwards, recomputation and what counts FLOPs see the operators that they
know.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

Matmul = Literal["auto", "torch", "onednn"]

# The first family of AMD's with 512-bit units (Zen 5). Before it MKL keeps up at products of two
# transposed factors, the gradients of weights: 97 beside 92 GFLOP/s on Zen 4, and loses elsewhere.
_WIDE_FAMILY: Final = 26
# Multiplications below which the detour through Python is not worth it.
_WORTH: Final = 1 << 20


class Processor(NamedTuple):
    """A CPU's vendor, as it calls itself, and its family."""

    vendor: str
    family: int

    @classmethod
    def here(cls, file: Path = Path("/proc/cpuinfo")) -> Processor:
        """Return this machine's, or nameless ones where the system doesn't tell."""
        found: dict[str, str] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                name, _, value = line.partition(":")
                found.setdefault(name.strip(), value.strip())
        family = found.get("cpu family", "")
        return cls(found.get("vendor_id", ""), int(family) if family.isdecimal() else 0)


class Route(NamedTuple):
    """Which products go through oneDNN: those with rows of a matrix, those with its columns."""

    rows: bool
    columns: bool

    @property
    def label(self) -> str:
        """What takes it, in words."""
        if not self.rows:
            return "torch's own"
        return "oneDNN" if self.columns else "oneDNN, gradients of weights torch's own"


def route(matmul: Matmul, processor: Processor) -> Route:
    """Return the way of fp32 products on a processor; the same one each time, for resumed runs."""
    if matmul == "torch" or not _has_onednn():
        return Route(False, False)
    if matmul == "onednn":
        return Route(True, True)
    is_amd = processor.vendor in ("AuthenticAMD", "HygonGenuine")
    return Route(is_amd, is_amd and processor.family >= _WIDE_FAMILY)


def take_route(matmul: Matmul, device: torch.device) -> Route:
    """Have this process compute the fp32 products of a device so, from now on."""
    if device.type != "cpu":
        return Route(False, False)
    found = route(matmul, Processor.here())
    if found.rows or _router.cache_info().currsize:
        _router().route = found
    return found


def _has_onednn() -> bool:
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class _Router:
    """The kernels, registered as long as this lives."""

    def __init__(self) -> None:
        self.route = Route(False, False)
        library: Any = torch.library  # its functions have no types
        self._library = library.Library("aten", "IMPL")
        self._onednn = torch.ops.mkldnn._linear_pointwise.default
        self._mm, self._addmm = torch.ops.aten.mm.out, torch.ops.aten.addmm.out
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*overrid", category=UserWarning)
            self._library.impl("mm", self.mm, "CPU")
            self._library.impl("addmm", self.addmm, "CPU")
            self._library.impl("addmm_", self.addmm_, "CPU")

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a @ b`."""
        if self._takes(a, b):
            return self._product(a, b, None)
        out: Tensor = self._mm(a, b, out=a.new_empty(0))
        return out

    def addmm(
        self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        """Return `beta * bias + alpha * a @ b`."""
        if beta == alpha == 1 and bias.shape == b.shape[1:] and self._takes(a, b):
            return self._product(a, b, bias)
        out: Tensor = self._addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))
        return out

    def addmm_(
        self, total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        """Make `total` be `beta * total + alpha * a @ b`; returns it."""
        fits = total.shape == (*a.shape[:1], *b.shape[1:]) and total.dtype == torch.float32
        if beta == alpha == 1 and fits and self._takes(a, b):
            return total.add_(self._product(a, b, None))
        if total.shape != (*a.shape[:1], *b.shape[1:]):  # `out` would be resized
            raise RuntimeError(f"{tuple(total.shape)} is not the shape of the product it gets")
        out: Tensor = self._addmm(total, a, b, beta=beta, alpha=alpha, out=total)
        return out

    def _product(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = self._onednn(a, b.t(), bias, "none", [], "")
        return out

    def _takes(self, a: Tensor, b: Tensor) -> bool:
        if a.dtype != torch.float32 or b.dtype != torch.float32 or a.dim() != 2 or b.dim() != 2:
            return False  # the operator itself says what is wrong
        if a.shape[1] != b.shape[0] or a.shape[0] * b.numel() < _WORTH:
            return False
        if not (_is_dense(a) and _is_dense(b)):
            return False
        return self.route.rows if a.stride(1) == 1 else self.route.columns


def _is_dense(x: Tensor) -> bool:
    """Whether one dim of a matrix is contiguous, and no element is there twice."""
    rows, columns = x.stride()
    return (columns == 1 and rows >= x.shape[1]) or (rows == 1 and columns >= x.shape[0])


@cache
def _router() -> _Router:
    """Return this process's one; kernels are the process's, whoever asks for them."""
    return _Router()
