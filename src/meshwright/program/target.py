"""`Target`: the properties of devices, kernels and data that change what operations need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from meshwright.layout import Layout

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
    """A CPU's vendor string and family."""

    vendor: str = ""
    family: int = 0


class Route(NamedTuple):
    """Which fp32 matmuls on a CPU go through oneDNN, by the memory order of the first operand.

    `rows`: matmuls with a contiguous first operand, in forwards and input gradients; `columns`:
    those with a transposed one, in weight gradients.
    """

    rows: bool = False
    columns: bool = False

    @property
    def label(self) -> str:
        """The library that computes each kind of matmul, in words."""
        if not self.rows:
            return "torch's own"
        return "oneDNN" if self.columns else "oneDNN, gradients of weights torch's own"

    def takes(self, rows: int, inner: int, outer: int, *, columns: bool) -> bool:
        """Whether a matmul `[rows, inner] x [inner, outer]` goes through oneDNN.

        `columns` says that its first operand is the transpose of a contiguous one.
        """
        return (self.columns if columns else self.rows) and rows * inner * outer >= _WORTH

    def room(self, rows: int, inner: int, outer: int, *, adds: bool = False) -> int:
        """Return the workspace in bytes of a matmul whose first operand is transposed.

        oneDNN's operator copies such an operand. With `adds`, the result is added to a sum, which
        the operator cannot do, so each piece is computed first.
        """
        if not self.takes(rows, inner, outer, columns=True):
            return 0
        if not adds:
            return rows * inner * _FP32
        return min(self.piece(rows, inner, outer), rows) * (inner + outer) * _FP32

    @staticmethod
    def piece(rows: int, inner: int, outer: int) -> int:
        """Return how many rows of a matmul's result are added to a sum at a time."""
        count = -(-rows * (inner + outer) * _FP32 // _PIECE)
        return -(-rows // count)


Device = Literal["cpu", "gpu"]


class DeviceTraits(NamedTuple):
    """How execution on CPUs and on GPUs differs, where that changes memory, messages or time.

    `has_fsdp2`: FSDP2 handles ZeRO. `has_masked_attention`: attention kernels skip scores that a
    window or another document hides, and can cap scores; others are given blocks or a mask.
    `repeats_kv_heads`: the fp32 attention kernel needs a copy of each key head for each query head.
    `has_grouped_matmul`: one kernel multiplies the groups of all experts in half precision.
    `emulates_float8`: float8 operands are rounded, and multiplied in another dtype.
    `reduces_copies`: collectives work on a copy of their input, as gloo's do. `runs_ahead`: the
    host launches kernels and copies, which run while it continues. `compiles_unmeasured`:
    `train.compile = "auto"` compiles before anyone has measured the gain. `measures_tensors`: peak
    memory is measured as that of tensors, not of processes. `least_loss_tokens`: tokens whose
    logits keep the device busy.
    """

    has_fsdp2: bool
    has_masked_attention: bool
    repeats_kv_heads: bool
    has_grouped_matmul: bool
    emulates_float8: bool
    reduces_copies: bool
    runs_ahead: bool
    compiles_unmeasured: bool
    measures_tensors: bool
    least_loss_tokens: int


TRAITS: Final[Mapping[Device, DeviceTraits]] = {
    "cpu": DeviceTraits(
        # It copies what it gathers and reduces more than once, and gloo's reduce-scatter is an
        # all-reduce: see `parallel.data_parallel.replicas`.
        has_fsdp2=False,
        has_masked_attention=False,
        repeats_kv_heads=False,
        has_grouped_matmul=False,
        emulates_float8=True,
        reduces_copies=True,
        runs_ahead=False,
        compiles_unmeasured=False,
        measures_tensors=False,
        least_loss_tokens=256,
    ),
    "gpu": DeviceTraits(
        has_fsdp2=True,
        has_masked_attention=True,
        repeats_kv_heads=True,
        has_grouped_matmul=True,
        emulates_float8=False,
        reduces_copies=False,
        runs_ahead=True,
        compiles_unmeasured=True,
        measures_tensors=True,
        least_loss_tokens=1024,
    ),
}


class Target(NamedTuple):
    """The devices on which a program runs, their kernels, and whether sequences are packed.

    `device` is where ranks compute; on CPUs, gloo sends their messages. `products` is the route of
    fp32 matmuls on a CPU, `tf32` whether GPUs compute them in TF32. `packed`: sequences hold
    several documents, which attention keeps separate. `fsdp2`: FSDP2 handles ZeRO on CPUs, too, as
    on GPUs. `imbalance`: the tokens of the busiest rank of `ep` relative to the mean. `compiled`: a
    GPU's blocks and loss are compiled, and save less; not set for CPUs, where that is not
    predicted.
    """

    device: Device = "cpu"
    products: Route = Route()
    packed: bool = False
    tf32: bool = False
    fsdp2: bool = False
    imbalance: float = 1.0
    compiled: bool = False

    @property
    def traits(self) -> DeviceTraits:
        """How execution on this device differs from others."""
        return TRAITS[self.device]

    def uses_fsdp2(self, layout: Layout) -> bool:
        """Whether FSDP2 shards, gathers and reduces.

        Otherwise, and always without ZeRO, Meshwright's own replicas keep weights whole and sum
        gradients.
        """
        is_there = self.traits.has_fsdp2 or self.fsdp2 or layout.offload == "params"
        return layout.zero > 0 and is_there


def takes_tf32(matmul: Matmul) -> bool:
    """Whether GPUs compute fp32 matmuls in TF32: 10 bits of mantissa, several times as fast."""
    return matmul != "torch"


def route(matmul: Matmul, processor: Processor) -> Route:
    """Return the route of fp32 matmuls on a processor; the same in every run, so that resumed runs
    agree."""
    if matmul == "torch":
        return Route()
    if matmul == "onednn":
        return Route(rows=True, columns=True)
    is_amd = processor.vendor in _AMD
    return Route(is_amd, is_amd and processor.family >= _WIDE_FAMILY)
