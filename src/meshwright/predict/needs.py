"""What the operations of a layer need in their backward beside what they keep, in bytes.

The gradients that are on their way, and an operation's results while its inputs are still there.
In the order of autograd: the last of the forward first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from meshwright.program.lower import Program
from meshwright.program.operations import Sizes

_WIDE: Final = 4


class Need(NamedTuple):
    """An operation's backward: bytes beside the kept ones, and whose gradients it makes.

    `deferred` are the bytes that a product's weight gradient waits with beside its input: the
    gradient of its result.
    """

    op: str
    bytes: int
    weights: tuple[str, ...] = ()
    deferred: int = 0


def backward_needs(program: Program, sizes: Sizes) -> tuple[Need, ...]:
    """Return the needs of a layer's operations in the order of the backward.

    The gradient of the stream itself is not among them.
    """
    return (*_mlp(program, sizes), *_attention(program, sizes))


def _mlp(program: Program, sizes: Sizes) -> Iterator[Need]:
    hidden = sizes.tokens * sizes.ffn * sizes.element
    gathered = sizes.whole_bytes if program.layout.sp and program.layout.tp > 1 else 0
    masked = sizes.stream_bytes if program.model.dropout else 0
    biases = program.model.family == "neox" or program.model.mlp_bias
    yield Need("mlp.down", masked + gathered + hidden, _of("mlp.down", biases), sizes.whole_bytes)
    if program.model.family == "llama":
        # Of the product: the gradients of both factors; then of the activation.
        yield Need("mlp.act", 3 * hidden)
        # What is kept of the gate waits with the activation's gradient.
        yield Need("mlp.up", 3 * hidden + sizes.whole_bytes, _of("mlp.up", biases), hidden)
        yield Need("mlp.gate", hidden + 2 * sizes.whole_bytes, _of("mlp.gate", biases), hidden)
    else:
        yield Need("mlp.act", 2 * hidden)
        yield Need("mlp.up", hidden + sizes.whole_bytes, _of("mlp.up", biases), hidden)
    yield Need("mlp_norm", _entered(program, sizes) + _norm(program, sizes), ("mlp_norm.weight",))


def _attention(program: Program, sizes: Sizes) -> Iterator[Need]:
    of_heads = sizes.tokens * sizes.heads * sizes.head_dim * sizes.element
    of_kv = sizes.tokens * sizes.kv_heads * sizes.head_dim * sizes.element
    gathered = sizes.whole_bytes if program.layout.sp and program.layout.tp > 1 else 0
    masked = sizes.stream_bytes if program.model.dropout else 0
    biases = program.model.attention_bias
    yield Need(
        "attn.o", masked + gathered + of_heads, _of("attn.o", biases), sizes.whole_bytes + of_heads
    )
    # Attention keeps its result, which is the input of that product.
    yield Need("attn.core", 2 * of_heads + 2 * of_kv)
    if program.model.rotary_dim:
        yield Need("attn.rope", 2 * of_heads + 2 * of_kv)
    yield Need("attn.v", of_heads + 2 * of_kv + sizes.whole_bytes, _of("attn.v", biases), of_kv)
    yield Need("attn.k", of_heads + of_kv + 2 * sizes.whole_bytes, _of("attn.k", biases), of_kv)
    yield Need("attn.q", of_heads + 2 * sizes.whole_bytes, _of("attn.q", biases), of_heads)
    yield Need("attn_norm", _entered(program, sizes) + _norm(program, sizes), ("attn_norm.weight",))


def _entered(program: Program, sizes: Sizes) -> int:
    """Return what the border over tp makes of the gradient of what entered."""
    return sizes.whole_bytes if program.layout.tp > 1 else 0


def _norm(program: Program, sizes: Sizes) -> int:
    """Return a norm's: the gradient that came, three tensors in fp32 and the result."""
    wide = sizes.stream * sizes.dim * _WIDE
    if program.model.family == "llama":
        return sizes.stream_bytes + 3 * wide
    return 2 * sizes.stream_bytes


def _of(name: str, has_bias: bool) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if has_bias else (f"{name}.weight",)
