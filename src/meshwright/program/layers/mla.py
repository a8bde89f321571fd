"""The projections of multi-head latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1.

Each tp rank computes the latent vectors whole, and its own heads from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshwright.program.layers.linears import Inputs, column_workspaces, shard_size
from meshwright.program.layers.norms import rms_norm_bytes
from meshwright.program.layers.workspace import Workspace, separate
from meshwright.program.lower import Program
from meshwright.program.saved import Op
from meshwright.program.sizes import Sizes
from meshwright.spec.parts import Linear, attention_linears

_WIDE: Final = 4  # bytes of a norm's scale: fp32 in any precision


def operations(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield the projections and their norms.

    A norm saves the tensor from which the latent vector is sliced; that of keys includes the rotary
    part.
    """
    line, stream, made_bytes = sizes.tokens * sizes.element, Inputs.of_stream(program, sizes), 0
    *linears, _ = attention_linears(program.model)
    for linear in linears:
        inputs = stream
        if linear.norm is not None:
            normed = line * linear.inner[0]
            saved = made_bytes, sizes.tokens * _WIDE
            yield Op(linear.norm, "norm", saved=saved, normed=normed)
            inputs = Inputs(program, sizes, normed)
        yield from inputs.operations(linear)
        made_bytes = line * shard_size(program, linear.outer)


def backward_workspaces(program: Program, sizes: Sizes, core_bytes: int) -> Iterator[Workspace]:
    """Yield the workspaces of the projections' backward, the last operation first.

    `core_bytes` are the gradients of queries, keys and values as attention takes them; they exist
    until keys and values are split.
    """
    line = sizes.tokens * sizes.element
    *linears, _ = attention_linears(program.model)
    by_name = {linear.name: linear for linear in linears}
    grads = {linear.name: line * shard_size(program, linear.outer) for linear in linears}
    has_low_queries = "attn.q_b" in by_name
    queries, joined = "attn.q_b" if has_low_queries else "attn.q", grads["attn.kv_a"]

    def second(linear: Linear, held_bytes: int) -> Iterator[Workspace]:
        """Yield the workspaces of a layer whose input is a latent vector, and of the vector's
        norm."""
        grad, inputs = grads[linear.name], line * linear.inner[0]
        yield from separate(program, sizes, linear, held_bytes, grad, inputs)
        if linear.norm is not None:
            made_bytes = held_bytes + rms_norm_bytes(sizes, inputs)
            yield Workspace(linear.norm, made_bytes, (f"{linear.norm}.weight",))

    # Keys and values together, beside what they are put together of.
    yield Workspace("attn.kv: heads", core_bytes + grads["attn.kv_b"])
    yield from second(by_name["attn.kv_b"], grads[queries])
    if has_low_queries:
        yield from second(by_name["attn.q_b"], joined)
    firsts = [linear for linear in linears if linear.norm is None]
    yield from column_workspaces(program, sizes, firsts)
