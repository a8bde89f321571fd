"""Norms before and after a sublayer, and the dropout of what it adds to the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from meshwright.program.layers.workspace import Workspace, mask_bytes
from meshwright.program.lower import Program
from meshwright.program.saved import Op
from meshwright.program.sizes import Sizes

_WIDE: Final = 4  # bytes of statistics: fp32 in any precision


def norm(program: Program, sizes: Sizes, name: str, *, shares_input: bool = False) -> Op:
    """Return the operation of a norm; it saves its input and, for each token, the scale (LayerNorm:
    mean and scale).

    LayerNorm has its statistics in the dtype of its input, RMSNorm in fp32.
    """
    is_rms, size = program.model.norm == "rms", sizes.stream_bytes
    statistics = (sizes.stream * _WIDE,) if is_rms else (sizes.stream * sizes.element,) * 2
    return Op(name, "norm", saved=(*statistics, 0 if shares_input else size), normed=size)


def with_norms(
    program: Program, sizes: Sizes, name: str, ops: Iterable[Op], *, shares_input: bool = False
) -> Iterator[Op]:
    """Yield the operations of a sublayer with the norms that the model has before and after it.

    With `shares_input`, another norm already saves the input of the norm before.
    """
    if program.model.norms_before:
        yield norm(program, sizes, f"{name}_norm", shares_input=shares_input)
    yield from ops
    if program.model.norms_after:
        yield norm(program, sizes, f"{name}_post_norm")


def with_norm_workspaces(
    program: Program, sizes: Sizes, name: str, needs: Iterable[Workspace]
) -> Iterator[Workspace]:
    """Yield the workspaces of a sublayer's backward with its norms and dropout, the last operation
    first."""
    model = program.model
    if model.dropout:  # its mask is made again
        yield Workspace(f"{name}_drop", mask_bytes(sizes.stream * sizes.dim))
    if model.norms_after:
        made_bytes = _made_bytes(program, sizes) - sizes.stream_bytes
        yield Workspace(f"{name}_post_norm", made_bytes, (f"{name}_post_norm.weight",))
    yield from needs
    if model.norms_before:
        yield Workspace(f"{name}_norm", _made_bytes(program, sizes), (f"{name}_norm.weight",))


def rms_norm_bytes(sizes: Sizes, size: int) -> int:
    """Return the bytes that the backward of an RMSNorm of `size` bytes allocates: a result, and
    three tensors in fp32."""
    return size + 3 * size // sizes.element * _WIDE


def _made_bytes(program: Program, sizes: Sizes) -> int:
    """Return the bytes that the backward of a norm of the residual stream allocates, with its
    incoming gradient."""
    if program.model.norm == "rms":
        return rms_norm_bytes(sizes, sizes.stream_bytes)
    return 2 * sizes.stream_bytes
