"""What a layer's operations need in their backward besides saved tensors, in bytes.

These are gradients in flight, and results of an operation while its inputs still exist. The order
is autograd's: the last operation of the forward comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from meshwright.cost.expert_workspace import expert_workspaces
from meshwright.cost.forward_workspace import forward_workspace
from meshwright.program.attention import Cut, ScoreBounds, by_blocks
from meshwright.program.layers import delta, mixers, mlp
from meshwright.program.layers.linears import column_workspaces, row_workspaces
from meshwright.program.layers.workspace import Workspace, frozen, mask_bytes
from meshwright.program.lower import Program
from meshwright.program.operations import (
    Operation,
    latent_widths,
    operations,
)
from meshwright.program.scores import is_ring
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec

_WIDE: Final = 4


Size = tuple[str, int]
"""A category of what is held, and bytes of it."""


class LayerBytes(NamedTuple):
    """What a layer of one kind saves of a microbatch, and releases during its backward.

    `kept` exists after the forward, `anew` at the start of the backward. `backward` has the
    released sizes for each need; `left` is what none of them releases. `room` is the forward's
    temporary memory.
    """

    kept: tuple[Size, ...]
    anew: tuple[Size, ...]
    backward: tuple[tuple[Workspace, tuple[Size, ...]], ...]
    left: tuple[Size, ...]
    room: int


def layer_bytes(
    program: Program, sizes: Sizes, stage: Stage, kind: LayerSpec, cp_rank: int
) -> LayerBytes:
    """Return the bytes of a layer of one kind in the stage."""
    first, anew = (
        [
            op
            for op in operations(program, stage, cp_rank=cp_rank, recomputed=recomputed)
            if op.layer == kind
        ]
        for recomputed in (False, True)
    )
    backward, alive = [], anew
    for need in backward_workspaces(program, sizes, kind):
        matching = [op for op in alive if op.name.removeprefix("layers.*.") == need.op]
        backward.append((need, kept(matching)))
        alive = [op for op in alive if op not in matching]
    room = forward_workspace(program, sizes, kind)
    return LayerBytes(kept(first), kept(anew), tuple(backward), kept(alive), room)


def kept(ops: Iterable[Operation]) -> tuple[Size, ...]:
    """Return what operations save, by category."""
    sums: dict[str, int] = {}
    for op in ops:
        category = f"activations: {op.kind}"
        sums[category] = sums.get(category, 0) + op.saved_bytes
    return tuple((category, size) for category, size in sums.items() if size)


def backward_workspaces(program: Program, sizes: Sizes, kind: LayerSpec) -> tuple[Workspace, ...]:
    """Return the needs of the operations of a kind of layer, in backward order.

    Excludes the gradient of the residual stream. Products of one input that are computed together
    have two needs, the second under the name of the first product: while they compute the input
    gradient, and while it is sent and they compute weight gradients.
    """
    return (*_feed_forward(program, sizes, kind), *_mixing(program, sizes, kind))


def _feed_forward(program: Program, sizes: Sizes, kind: LayerSpec) -> Iterator[Workspace]:
    if not kind.feeds:
        return
    has_experts = program.model.has_experts(kind)
    feed_forward = expert_workspaces if has_experts else mlp.backward_workspaces
    yield from _dropout(program, sizes, "mlp_drop")
    yield from _after(program, sizes, "mlp_post_norm")
    yield from feed_forward(program, sizes)
    yield from _before(program, sizes, "mlp_norm")


def _mixing(program: Program, sizes: Sizes, kind: LayerSpec) -> Iterator[Workspace]:
    if not kind.mixes:
        return
    yield from _dropout(program, sizes, "attn_drop")
    yield from _after(program, sizes, "attn_post_norm")
    if kind.mixer is not None:
        yield from mixers.backward_workspaces(program, sizes, kind.mixer)
    if kind.delta:
        yield from delta.backward_workspaces(program, sizes)
    if kind.attends:
        yield from _attention(program, sizes, kind, _blocks(program, sizes, kind))
    yield from _before(program, sizes, "attn_norm")


def _dropout(program: Program, sizes: Sizes, name: str) -> Iterator[Workspace]:
    """Yield the need of the dropout of what a sublayer adds: its mask is made again."""
    if program.model.dropout:
        yield Workspace(name, mask_bytes(sizes.stream * sizes.dim))


def _before(program: Program, sizes: Sizes, name: str) -> Iterator[Workspace]:
    """Yield the need of a norm before a sublayer, where there is one."""
    if program.model.norms_before:
        yield Workspace(name, _norm(program, sizes), (f"{name}.weight",))


def _after(program: Program, sizes: Sizes, name: str) -> Iterator[Workspace]:
    """Yield the need of a norm of what a sublayer adds, where there is one."""
    if program.model.norms_after:
        yield Workspace(name, _norm(program, sizes) - sizes.stream_bytes, (f"{name}.weight",))


def _blocks(program: Program, sizes: Sizes, kind: LayerSpec) -> int:
    """Return what attention by blocks needs beside gradients."""
    model, train, target = program.model, program.train, program.target
    if is_ring(program) or target.packed or target.traits.has_masked_attention:
        return 0
    # Ulysses attends over whole rows, with its share of the heads.
    cp = program.layout.cp
    heads, kv_heads = sizes.heads // cp, sizes.kv_heads // cp
    length = cp * sizes.tokens // sizes.rows
    sees = ScoreBounds.of(model, kind)
    if not by_blocks(heads, kv_heads, length, train.precision, sees):
        return 0
    cut = Cut.of(sizes.rows, heads, kv_heads, length, model.core_dim, sees)
    return cut.backward_bytes(sizes.element)


def inside_kernels(program: Program) -> int:
    """Return the most bytes that a kernel of attention allocates, and its caller does not see."""
    sizes = Sizes.of(program)
    return max(_blocks(program, sizes, kind) for kind in program.model.layer_kinds)


def _attention(program: Program, sizes: Sizes, kind: LayerSpec, blocks: int) -> Iterator[Workspace]:
    of_heads = sizes.tokens * sizes.heads * sizes.head_dim * sizes.element
    of_kv = sizes.tokens * sizes.kv_heads * sizes.head_dim * sizes.element
    of_values = sizes.tokens * sizes.heads * program.model.value_dim * sizes.element
    biases = program.model.attention_bias
    # Attention keeps its result, which is the input of that product.
    has_bias = program.model.has_output_bias
    yield from row_workspaces(program, sizes, "attn.o", of_values, has_bias, waits=of_values)
    of_gate = of_heads if program.model.attention_gate else 0
    if of_gate:  # of what entered the product, of the result and of the gate
        yield Workspace("attn.gated", 4 * of_gate)
    sinks = ("attn.sinks",) if program.model.attention_sinks else ()
    yield Workspace("attn.core", of_gate + 2 * of_heads + 2 * of_kv + blocks, sinks)
    if program.model.rotary_dim and kind.rotary:
        yield Workspace("attn.rope", of_gate + 2 * of_heads + 2 * of_kv)
    if program.model.is_latent:
        yield from _latent_heads(program, sizes, 2 * of_heads + of_kv)
        return
    if program.model.qk_norm == "all" and program.layout.tp > 1:
        # Both at once: what came, and of each what a norm makes.
        made_bytes = sum(
            normed + 3 * normed // sizes.element * _WIDE for normed in (of_heads, of_kv)
        )
        names = ("attn.q_norm", "attn.k_norm")
        yield Workspace(
            names[0], of_heads + 2 * of_kv + made_bytes, tuple(f"{norm}.weight" for norm in names)
        )
    elif program.model.qk_norm != "none":
        # The gradients of all three that came, and what an RMSNorm makes of one.
        for name, normed in (("attn.k_norm", of_kv), ("attn.q_norm", of_heads)):
            made_bytes = normed + 3 * normed // sizes.element * _WIDE
            held_bytes = of_gate + of_heads + 2 * of_kv
            yield Workspace(name, held_bytes + made_bytes, (f"{name}.weight",))
    results = {"attn.q": of_heads, "attn.k": of_kv, "attn.v": of_kv}
    results |= {"attn.gate": of_gate} if of_gate else {}
    yield from column_workspaces(program, sizes, results, biases)


def _latent_heads(program: Program, sizes: Sizes, of_core: int) -> Iterator[Workspace]:
    """Yield the needs of what latent attention makes queries, keys and values by.

    The gradients of all three in the core's size are there until keys have been taken apart; that
    of a latent vector's norm is made in fp32.
    """
    model, line = program.model, sizes.tokens * sizes.element
    of_q = line * sizes.heads * model.head_dim
    made_bytes = line * sizes.heads * latent_widths(model)["attn.kv"]
    joined, part = line * (model.kv_lora_rank + model.qk_rope_head_dim), line * model.kv_lora_rank

    def normed(size: int) -> int:
        return size + 3 * size // sizes.element * _WIDE

    def second(name: str, held_bytes: int, result: int, inputs: int) -> Iterator[Workspace]:
        if model.lora is not None:
            yield from frozen(program, sizes, name, held_bytes, result, inputs)
        else:
            yield Workspace(name, held_bytes + result + inputs, (f"{name}.weight",), result)

    # Keys and values together, beside what they are put together of.
    yield Workspace("attn.kv: heads", of_core + made_bytes)
    yield from second("attn.kv_b", of_q, made_bytes, part)
    yield Workspace("attn.kv_a_norm", of_q + normed(part), ("attn.kv_a_norm.weight",))
    results = {"attn.q": of_q, "attn.kv_a": joined}
    if low := line * model.q_lora_rank:
        yield from second("attn.q_b", joined, of_q, low)
        yield Workspace("attn.q_a_norm", joined + normed(low), ("attn.q_a_norm.weight",))
        results = {"attn.q_a": low, "attn.kv_a": joined}
    yield from column_workspaces(program, sizes, results, model.attention_bias)


def _norm(program: Program, sizes: Sizes) -> int:
    """Return a norm's: the gradient that came, three tensors in fp32 and the result."""
    wide = sizes.stream * sizes.dim * _WIDE
    if program.model.norm == "rms":
        return sizes.stream_bytes + 3 * wide
    return 2 * sizes.stream_bytes
