"""The products of a layer, with those of adapters, and what each keeps for the backward."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.program.float8 import remakes_inputs
from meshwright.program.lower import Program
from meshwright.program.saved import FROZEN_BACKWARD, Bytes, Op
from meshwright.program.sizes import Sizes


class Inputs:
    """What some linear layers take together, of `size` bytes for the first that keeps them.

    `copied` bytes is what dropout makes of them. A product with a frozen weight keeps nothing: it
    has no gradient of the weight to compute; nor does one whose input is made again.
    """

    def __init__(self, program: Program, sizes: Sizes, size: int, copied: int = 0) -> None:
        self._model, self._sizes = program.model, sizes
        self._size, self._copied = size, copied or size
        if remakes_inputs(program.train, program.target):
            self._size = 0

    def product(self, name: str, inner: int, outer: int, kept_bytes: Bytes) -> Iterator[Op]:
        """Yield the product of a layer, and those of its adapter: `kept_bytes` as `Op.kept`."""
        sizes, lora = self._sizes, self._model.lora
        flops = sizes.product(inner, outer)
        if lora is None:
            yield Op(name, "product", flops, self._take(), kept_bytes)
            return
        yield Op(name, "product", flops, 0, kept_bytes, backward=FROZEN_BACKWARD)
        if name not in self._model.adapted:
            return
        low = sizes.tokens * lora.rank * sizes.element
        saved = self._copied if lora.dropout else self._take()
        yield Op(f"{name}.lora_a", "product", sizes.product(inner, lora.rank), saved, low)
        result = sizes.tokens * outer * sizes.element
        yield Op(f"{name}.lora_b", "product", sizes.product(lora.rank, outer), low, result)

    def _take(self) -> int:
        size, self._size = self._size, 0
        return size
