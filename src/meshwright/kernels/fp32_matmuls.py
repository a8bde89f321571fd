"""fp32 matmuls: on a CPU through oneDNN, where it is faster than torch's own library.

torch computes them with MKL, which takes a slower path on processors of other vendors: on AMD's, it
reached 0.87 of oneDNN's speed (Zen 4), down to less than half (Zen 5). Both compute in true fp32.
The kernels of `aten::mm` and `aten::addmm`, also in place, are replaced below autograd, so linear
layers, their backwards, recomputation and FLOP counters still see the usual operators. GPUs compute
them in TF32, unless `train.matmul` is "torch".
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.processor import processor
from meshwright.program.target import Matmul, Route, Target, route, takes_tf32
from meshwright.spec.training import TrainSpec


def take_route(matmul: Matmul, device: torch.device) -> Route:
    """Set how this process computes fp32 matmuls on a device, and return the route (none on
    GPUs)."""
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high" if takes_tf32(matmul) else "highest")
        return Route()
    taken = route(matmul, processor()) if has_onednn() else Route()
    if taken.rows or _router.cache_info().currsize:
        _router().route = taken
    return taken


def target_of(
    train: TrainSpec, device: torch.device, *, packed: bool = False, fsdp2: bool = False
) -> Target:
    """Return the target for programs that run in this process; `packed` and `fsdp2` are as in
    `Target`."""
    if device.type != "cpu":
        target = Target("gpu", packed=packed, tf32=takes_tf32(train.matmul))
        return target._replace(compiled=train.is_compiled)
    products = route(train.matmul, processor()) if has_onednn() else Route()
    return Target("cpu", products, packed, fsdp2=fsdp2)


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's linear operator."""
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class _Router:
    """Replaces torch's CPU kernels for matmuls while it exists, and routes fp32 ones to oneDNN."""

    def __init__(self) -> None:
        self.route = Route()
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
        """Set `total` to `beta * total + alpha * a @ b` and return it."""
        fits = total.shape == (*a.shape[:1], *b.shape[1:]) and total.dtype == torch.float32
        if beta == alpha == 1 and fits and self._takes(a, b):
            piece_rows = Route.piece(a.shape[0], a.shape[1], b.shape[1])
            for start in range(0, len(total), piece_rows):
                piece = slice(start, start + piece_rows)
                total[piece].add_(self._product(a[piece], b, None))
            return total
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
        if a.shape[1] != b.shape[0] or not (_is_dense(a) and _is_dense(b)):
            return False
        is_transposed = a.stride(1) != 1
        return self.route.takes(a.shape[0], a.shape[1], b.shape[1], columns=is_transposed)


def _is_dense(x: Tensor) -> bool:
    """Whether one dim of a matrix is contiguous, and its rows (or columns) do not overlap."""
    rows, columns = x.stride()
    return (columns == 1 and rows >= x.shape[1]) or (rows == 1 and columns >= x.shape[0])


@cache
def _router() -> _Router:
    """Return this process's router; creating it registers the kernels once."""
    return _Router()
