"""The rotary tables: cosines and sines of every position, computed once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.spec.model import ModelSpec
from meshwright.spec.rotary import RopeScaling, RotaryBase

# Of one base: cosines and sines `[positions, rotary_dim]`, fp32.
_Table = tuple[Tensor, Tensor]


class Rope:
    """The rotary tables of a model, shared by its blocks; they are extended for longer sequences.

    There is one for each of `ModelSpec.rotary_bases`, the rotary bases of the layers.

    `longrope` rotates documents of more than `original_context` tokens by other frequencies. In
    sequences of several documents, the length of each document decides: `is_long`. Otherwise, as in
    transformers, the last position of a forward decides, including cached ones. A forward with a
    part of each sequence can't know that: in a model that was built for a sequence length, this
    length decides, equally on every rank. A cache cannot cross the boundary, because its keys are
    already rotated: `starts_anew` says where the sequence has to be recomputed.

    Deliberately neither a module nor buffers: `to_empty`, `to(bfloat16)` and the input cast of
    FSDP's mixed precision would empty or round them, and positions do not survive bf16.
    """

    def __init__(self, spec: ModelSpec, length: int = 0) -> None:
        self.spec = spec
        self.length = length
        self.row = length
        bases = spec.rotary_bases or (RotaryBase(spec.rope_theta, spec.rope_scaling is not None),)
        self.bases: tuple[RotaryBase, ...] = bases
        # By whether they are of long documents, and those of the rows at hand: a look-up by a flag
        # would have blocks compiled for both of its values.
        self._tables: dict[bool, Sequence[_Table]] = {}
        self._current: Sequence[_Table] | None = None

    def index(self, layer: int) -> int | None:
        """Return the number of the table that a layer uses, or None if the layer has no rotary
        embedding.
        """
        base = self.spec.rotary_base(self.spec.layer(layer))
        return None if base is None else self.bases.index(base)

    def build(self, device: torch.device, length: int) -> None:
        """Compute the tables of positions 0 to `length - 1` on a device, for sequences of that
        length.
        """
        self.row, is_long = length, self._long(length)
        self._compute(device, length, is_long)
        self._current = self._tables[is_long]

    def is_long(self, lengths: Tensor | None) -> Tensor | None:
        """Return which documents, of these token counts, longrope rotates by its long factors.

        The result is bool, of the shape of `lengths`; None for models without longrope, or if
        `lengths` is None.
        """
        scaling = self.spec.rope_scaling
        if lengths is None or scaling is None or scaling.kind != "longrope":
            return None
        return lengths > scaling.original_context

    def reach(
        self, stop: int, device: torch.device, cached: int = 0, *, mixed_lengths: bool = False
    ) -> None:
        """Build the tables for positions below `stop` on `device`, unless they exist.

        `mixed_lengths` builds both tables of longrope, for short and long documents. Raises
        `ConfigError` where the `cached` positions before were rotated by another table.
        """
        if cached and self.starts_anew(cached, stop):
            assert self.spec.rope_scaling is not None
            bound = self.spec.rope_scaling.original_context
            raise ConfigError(
                f"longrope rotates rows of more than {bound} tokens by other frequencies: a cache "
                f"of {cached} positions cannot grow to {stop}; start over with an empty one"
            )
        of_rows = self._long(stop)
        for is_long in (False, True) if mixed_lengths else (of_rows,):
            have = self._tables.get(is_long)
            built = 0 if have is None else have[0][0].shape[0]
            if have is not None and have[0][0].device == device and built >= stop:
                continue
            # Twice what there was, so that growing token by token is not quadratic.
            grown = 2 * built if 0 < built < stop else 0
            self._compute(device, max(stop, self.length, grown), is_long)
        self._current = self._tables[of_rows]

    def starts_anew(self, cached: int, stop: int) -> bool:
        """Whether a forward up to position `stop` needs a table other than that of the cached
        positions.
        """
        return self._long(cached) != self._long(stop)

    def tables(
        self,
        start: int,
        stop: int,
        positions: Tensor | None = None,
        index: int = 0,
        is_long: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[seq, rotary_dim]`, fp32, of positions `start` to `stop - 1`.

        `positions` (int64 `[seq]`) replaces this range. Positions must be below the `stop` of the
        last `reach`: blocks only look up, so that they can be compiled. `index` is the number of
        the table, from the method `index`. With `is_long` (bool `[batch, seq]`), which chooses
        longrope's table per token, the results are `[batch, 1, seq, rotary_dim]`.
        """
        assert self._current is not None, "reach() comes first"
        if is_long is None:
            return _at(self._current[index], start, stop, positions)
        pairs = (_at(self._tables[kind][index], start, stop, positions) for kind in (True, False))
        which = is_long[:, None, :, None]
        cos, sin = (torch.where(which, long, short) for long, short in zip(*pairs, strict=True))
        return cos, sin

    def held(self) -> Iterator[Tensor]:
        """Yield all tensors of cosines and sines."""
        for tables in self._tables.values():
            for table in tables:
                yield from table

    def _long(self, stop: int) -> bool:
        scaling = self.spec.rope_scaling
        if scaling is None or scaling.kind != "longrope":
            return False
        return max(stop, self.row) > scaling.original_context

    def _compute(self, device: torch.device, length: int, is_long: bool) -> None:
        # A table made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(length, dtype=torch.float32, device="cpu")
            tables = []
            for base in self.bases:
                half = torch.outer(positions, inverse_frequencies(self.spec, base, is_long))
                angles = torch.cat((half, half), dim=-1)
                scaling = self.spec.rope_scaling if base.scaled else None
                factor = 1.0 if scaling is None else scaling.cos_sin_factor
                cos, sin = angles.cos().mul_(factor), angles.sin().mul_(factor)
                tables.append((cos.to(device), sin.to(device)))
        self._tables[is_long], self.length = tables, length


def _at(table: _Table, start: int, stop: int, positions: Tensor | None) -> _Table:
    """Return the rows of a table at `positions`, or from `start` to `stop` if that is None."""
    cos, sin = table
    if positions is not None:
        return cos[positions], sin[positions]
    return cos[start:stop], sin[start:stop]


def lengths_of(segments: Tensor) -> Tensor:
    """Return, for each token, the number of tokens of its document, int64 `[batch, seq]`.

    segments int `[batch, seq]`: adjacent tokens with equal numbers belong to one document.
    """
    begins = torch.ones_like(segments, dtype=torch.int64)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    document = begins.cumsum(1) - 1
    counts = torch.zeros_like(begins).scatter_add_(1, document, torch.ones_like(begins))
    return counts.gather(1, document)


def inverse_frequencies(
    spec: ModelSpec, base: RotaryBase | None = None, is_long: bool = False
) -> Tensor:
    """Return the angle per position of each rotated pair, fp32 `[rotary_dim / 2]`, in radians.

    `theta^(-2i / rotary_dim)`: arXiv:2104.09864, section 3.2.2; then the scaling of the spec. A
    `base` of None is the model's own; `is_long` selects the long factors of longrope.
    """
    theta, is_scaled = (spec.rope_theta, True) if base is None else base
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device="cpu")
    powers = theta ** (exponents / max(spec.rotary_dim, 1))
    scaling = spec.rope_scaling
    if scaling is None or not is_scaled or spec.rotary_dim == 0:
        return 1.0 / powers
    if scaling.kind == "longrope":
        factors = scaling.long_factor if is_long else scaling.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)
    if scaling.kind == "yarn":
        return _yarn(powers, scaling, theta)
    plain = 1.0 / powers
    return plain / scaling.factor if scaling.kind == "linear" else _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend between: Llama 3.1's
    `apply_scaling`.
    """
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_context / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    slowed = torch.where(wavelength > scaling.original_context / low, plain / scaling.factor, plain)
    between = (wavelength >= scaling.original_context / high) & (
        wavelength <= scaling.original_context / low
    )
    return torch.where(between, blended, slowed)


def _yarn(powers: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, blend between: arXiv:2309.00071, 3.2.

    The blend is linear in the index of the pair, as in the authors' code.
    """
    pairs = powers.shape[0]
    # The pair that turns so many times in the context that was trained with, as a real number.
    first, last = (
        pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001  # the authors': no division by zero
    numbers = torch.arange(pairs, dtype=torch.float32, device="cpu")
    unscaled = 1 - ((numbers - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - unscaled) + 1.0 / powers * unscaled
