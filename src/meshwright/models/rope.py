"""The rotary tables: cosines and sines of every position, computed once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.spec.model import ModelSpec, RopeScaling


class Rope:
    """The tables of one model, shared by its blocks; they grow when a longer sequence comes.

    Deliberately neither a module nor buffers: `to_empty`, `to(bfloat16)` and the input cast of
    FSDP's mixed precision would empty or round them, and positions do not survive bf16.
    """

    def __init__(self, spec: ModelSpec, length: int = 0) -> None:
        self.spec = spec
        self.length = length
        self._tables: tuple[Tensor, Tensor] | None = None

    def build(self, device: torch.device, length: int) -> None:
        """Compute the tables of positions 0 to `length` on a device."""
        # A table made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(length, dtype=torch.float32, device="cpu")
            half = torch.outer(positions, inverse_frequencies(self.spec))
            angles = torch.cat((half, half), dim=-1)
            self._tables = (angles.cos().to(device), angles.sin().to(device))
        self.length = length

    def reach(self, stop: int, device: torch.device) -> None:
        """Make sure that the tables are on `device` and hold the positions below `stop`."""
        have = self._tables
        if have is not None and have[0].device == device and have[0].shape[0] >= stop:
            return
        # Twice what there was, so that growing token by token is not quadratic.
        grown = 2 * have[0].shape[0] if have is not None and have[0].shape[0] < stop else 0
        self.build(device, max(stop, self.length, grown))

    def tables(
        self, start: int, stop: int, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[seq, rotary_dim]`, fp32, of positions `start` to `stop`.

        With `positions` (int64 `[seq]`) of those instead. They must be within `reach`: blocks only
        look up, so that they can be compiled.
        """
        assert self._tables is not None, "reach() comes first"
        cos, sin = self._tables
        if positions is not None:
            return cos[positions], sin[positions]
        return cos[start:stop], sin[start:stop]


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Return the angle per position of each rotated pair, fp32 `[rotary_dim / 2]`, in radians.

    `theta^(-2i / rotary_dim)`: arXiv:2104.09864, section 3.2.2; then the scaling of the spec.
    """
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device="cpu")
    plain = 1.0 / (spec.rope_theta ** (exponents / max(spec.rotary_dim, 1)))
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow down long wavelengths, keep short ones, blend between: Llama 3.1's `apply_scaling`."""
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_context / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    slowed = torch.where(wavelength > scaling.original_context / low, plain / scaling.factor, plain)
    between = (wavelength >= scaling.original_context / high) & (
        wavelength <= scaling.original_context / low
    )
    return torch.where(between, blended, slowed)
