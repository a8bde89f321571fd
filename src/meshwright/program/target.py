"""`Target`: what a program runs on, as far as that changes what its operations need."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Matmul = Literal["auto", "torch", "onednn"]

# The first family of AMD's with 512-bit units (Zen 5). Before it MKL keeps up at products of two
# transposed factors, the gradients of weights: 97 beside 92 GFLOP/s on Zen 4, and loses elsewhere.
_WIDE_FAMILY: Final = 26
_AMD: Final = ("AuthenticAMD", "HygonGenuine")
# Multiplications below which the detour through Python is not worth it.
_WORTH: Final = 1 << 20
# Bytes of the pieces in which a product is added to a sum. Smaller ones were measured to be slower.
_PIECE: Final = 32 << 20
_FP32: Final = 4


class Processor(NamedTuple):
    """A CPU's vendor, as it calls itself, and its family."""

    vendor: str = ""
    family: int = 0


class Route(NamedTuple):
    """Which fp32 products of a CPU go through oneDNN: by how their first factor lies in memory.

    `rows`: those of rows of a matrix, which are forwards and the gradients of inputs; `columns`:
    those of its columns, the gradients of weights.
    """

    rows: bool = False
    columns: bool = False

    @property
    def label(self) -> str:
        """What takes it, in words."""
        if not self.rows:
            return "torch's own"
        return "oneDNN" if self.columns else "oneDNN, gradients of weights torch's own"

    def takes(self, rows: int, inner: int, outer: int, *, columns: bool) -> bool:
        """Whether a product `[rows, inner] x [inner, outer]` goes through oneDNN.

        `columns`: its first factor is the transpose of one that is contiguous.
        """
        return (self.columns if columns else self.rows) and rows * inner * outer >= _WORTH

    def room(self, rows: int, inner: int, outer: int, *, adds: bool = False) -> int:
        """Return the bytes that a product of columns needs beside its factors and its result.

        oneDNN's operator copies such a factor. With `adds` the product is added to a sum, which the
        operator cannot: it makes each piece first.
        """
        if not self.takes(rows, inner, outer, columns=True):
            return 0
        if not adds:
            return rows * inner * _FP32
        return min(self.piece(rows, inner, outer), rows) * (inner + outer) * _FP32

    @staticmethod
    def piece(rows: int, inner: int, outer: int) -> int:
        """Return how many rows of a product are added to a sum at a time."""
        count = -(-rows * (inner + outer) * _FP32 // _PIECE)
        return -(-rows // count)


Device = Literal["cpu", "gpu"]


class Target(NamedTuple):
    """What a program runs on, and the rows that it gets.

    `device` is where ranks compute; on CPUs gloo carries their messages. `products` is the way of
    fp32 products on a CPU, `tf32` whether GPUs compute them in TF32. `packed`: rows hold several
    documents, which attention tells apart. `fsdp2`: ZeRO is FSDP2's on CPUs, too, as on GPUs.
    `imbalance`: how many times the mean come of a token's experts to the busiest rank of `ep`.
    """

    device: Device = "cpu"
    products: Route = Route()
    packed: bool = False
    tf32: bool = False
    fsdp2: bool = False
    imbalance: float = 1.0

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks are processes on CPUs."""
        return self.device == "cpu"


def takes_tf32(matmul: Matmul) -> bool:
    """Whether GPUs compute fp32 products in TF32: 10 bits of mantissa, several times as fast."""
    return matmul != "torch"


def route(matmul: Matmul, processor: Processor) -> Route:
    """Return the way of fp32 products on a processor; the same one each time, for resumed runs."""
    if matmul == "torch":
        return Route()
    if matmul == "onednn":
        return Route(rows=True, columns=True)
    is_amd = processor.vendor in _AMD
    return Route(is_amd, is_amd and processor.family >= _WIDE_FAMILY)
