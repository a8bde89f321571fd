"""What a layer's operations need in their backward besides saved tensors, in bytes.

These are gradients in flight, and results of an operation while its inputs still exist. The order
is autograd's: the last operation of the forward comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from meshwright.program.attention import Cut, ScoreBounds, by_blocks
from meshwright.program.four_bits import dequantised
from meshwright.program.lower import Program
from meshwright.program.operations import (
    Operation,
    gathers_again,
    is_joint,
    latent_widths,
    operations,
)
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.model import LayerSpec

_WIDE: Final = 4


class Need(NamedTuple):
    """An operation's backward: its bytes besides saved ones, and the gradients that it computes.

    `deferred` is the gradient of a product's result, which a deferred weight gradient holds in
    addition to the input. `room` is temporary memory while a weight gradient is computed at once,
    `added` while a deferred one is added to a sum.
    """

    op: str
    bytes: int
    weights: tuple[str, ...] = ()
    deferred: int = 0
    room: int = 0
    added: int = 0


Size = tuple[str, int]
"""A category of what is held, and bytes of it."""


class LayerBytes(NamedTuple):
    """What a layer of one kind saves of a microbatch, and releases during its backward.

    `kept` exists after the forward, `anew` at the start of the backward. `backward` has the
    released sizes for each need; `left` is what none of them releases.
    """

    kept: tuple[Size, ...]
    anew: tuple[Size, ...]
    backward: tuple[tuple[Need, tuple[Size, ...]], ...]
    left: tuple[Size, ...]


def layer_bytes(
    program: Program, sizes: Sizes, stage: Stage, kind: LayerSpec, cp_rank: int
) -> LayerBytes:
    """Return the bytes of a layer of one kind in the stage."""
    first, anew = (
        [
            op
            for op in operations(program, stage, cp_rank=cp_rank, recomputed=again)
            if op.layer == kind
        ]
        for again in (False, True)
    )
    backward, alive = [], anew
    for need in backward_needs(program, sizes, kind):
        own = [op for op in alive if op.name.removeprefix("layers.*.") == need.op]
        backward.append((need, kept(own)))
        alive = [op for op in alive if op not in own]
    return LayerBytes(kept(first), kept(anew), tuple(backward), kept(alive))


def kept(ops: Iterable[Operation]) -> tuple[Size, ...]:
    """Return what operations save, by category."""
    sums: dict[str, int] = {}
    for op in ops:
        category = f"activations: {op.kind}"
        sums[category] = sums.get(category, 0) + op.saved_bytes
    return tuple((category, size) for category, size in sums.items() if size)


def backward_needs(program: Program, sizes: Sizes, kind: LayerSpec) -> tuple[Need, ...]:
    """Return the needs of the operations of a kind of layer, in backward order.

    Excludes the gradient of the residual stream. Products of one input that are computed together
    have two needs, the second under the name of the first product: while they compute the input
    gradient, and while it is sent and they compute weight gradients.
    """
    target = program.target
    blocks = 0 if target.packed or not target.on_cpu else _blocks(program, sizes, kind)
    feed_forward = expert_needs if program.model.has_experts(kind) else _mlp
    return (
        *_after(program, sizes, "mlp_post_norm"),
        *feed_forward(program, sizes),
        *_before(program, sizes, "mlp_norm"),
        *_attention(program, sizes, kind, blocks),
    )


def _mlp(program: Program, sizes: Sizes) -> Iterator[Need]:
    hidden = sizes.tokens * sizes.ffn * sizes.element
    gathered = sizes.whole_bytes if program.layout.sp and program.layout.tp > 1 else 0
    biases = program.model.mlp_bias
    came = _of_result(program, sizes) + gathered
    if program.model.lora is not None:
        yield from _frozen(program, sizes, "mlp.down", came, 0, hidden)
    else:
        yield Need(
            "mlp.down",
            came + hidden,
            _of("mlp.down", biases),
            sizes.whole_bytes,
            *_room(program, sizes, sizes.dim, sizes.ffn, hidden),
        )
    if program.model.gated_mlp:
        # The gradient that came, and those of both factors.
        yield Need("mlp.act", 3 * hidden)
        yield from _columns(program, sizes, {"mlp.gate": hidden, "mlp.up": hidden}, biases)
    else:
        yield Need("mlp.act", 2 * hidden)
        yield from _columns(program, sizes, {"mlp.up": hidden}, biases)


def expert_needs(program: Program, sizes: Sizes) -> Iterator[Need]:
    """Yield the needs of the routed experts, their router and the shared expert.

    The experts' backward is one function. It holds the gradient of each pair's result, then those
    of its hidden values, then those of its input, each twice while groups are concatenated.
    """
    model, el = program.model, sizes.element
    whole, pairs = sizes.whole_bytes, sizes.received * sizes.dim * el
    hidden = sizes.received * sizes.expert_ffn * el
    is_cut = program.layout.sp and program.layout.tp > 1
    came = _of_result(program, sizes) + (whole if is_cut else 0)
    router_came = came
    if program.layout.ep > 1:  # the gradient of what was sent back, as it came
        came += pairs
    wide = hidden // el * _WIDE
    # The gradient of a share is a sum over what is widened to fp32.
    weighing = wide if el == _WIDE else 3 * wide
    yield Need("mlp.experts.weigh", came + pairs + 3 * hidden + weighing)

    of = partial(_trained, program)
    down, *both = (of(f"mlp.experts.{one}", model.expert_bias) for one in ("down", "gate", "up"))
    yield Need("mlp.experts.down", came + pairs + 3 * hidden, down, pairs + hidden)
    columns = tuple(name for one in both for name in one)
    yield Need("mlp.experts.gate", came + pairs + 2 * hidden, columns, pairs + 2 * hidden)
    yield Need("mlp.experts.act", came + 2 * hidden + 3 * pairs)
    # Gradients of what had come travel back, to as many pairs as a rank's tokens make.
    back = sizes.pairs * sizes.dim * el if program.layout.ep > 1 else 0
    waits = back and model.shared_ffn_dim  # their sum by token
    yield Need("mlp.experts.order", came + 2 * pairs + back + (0 if waits else whole))
    came = router_came
    if model.shared_ffn_dim:  # meanwhile those gradients travel: what leaves, and what comes
        yield from _shared_needs(program, sizes, came + whole if not back else came + pairs + back)
    scores = sizes.tokens * model.experts * _WIDE
    widened = 0 if el == _WIDE else sizes.tokens * sizes.dim * _WIDE
    router = came + 2 * whole + 2 * scores + widened
    arrived = came + back + 2 * whole if back else 0  # they have come, and are summed by token
    names = _trained(program, "mlp.router", model.expert_bias)
    yield Need("mlp.router", max(router, arrived), names, scores)


def _shared_needs(program: Program, sizes: Sizes, held: int) -> Iterator[Need]:
    """Yield the needs of the shared expert, beside what is `held` while it computes."""
    model, el, whole = program.model, sizes.element, sizes.whole_bytes
    of = partial(_trained, program)
    if model.shared_gate:
        line = sizes.tokens * el
        yield Need("mlp.shared_gate.act", held + 2 * whole)
        yield Need("mlp.shared_gate", held + 2 * whole, of("mlp.shared_gate"), line)
        held += whole
    beside = sizes.tokens * sizes.shared_ffn * el
    names = [f"mlp.shared.{one}" for one in ("down", "gate", "up")]
    yield Need(names[0], held + whole + beside, of(names[0]), whole)
    yield Need("mlp.shared.act", held + 3 * beside)
    yield Need(names[2], held + 2 * beside + whole, of(names[2]), beside)
    yield Need(names[1], held + beside + 2 * whole, of(names[1]), beside)


def _trained(program: Program, name: str, biases: bool = False) -> tuple[str, ...]:
    """Return the weights of an operation that get gradients: frozen ones do not."""
    return () if program.model.lora is not None else _of(name, biases)


def _before(program: Program, sizes: Sizes, name: str) -> Iterator[Need]:
    """Yield the need of a norm before a sublayer, where there is one."""
    if program.model.norms_before:
        yield Need(name, _norm(program, sizes), (f"{name}.weight",))


def _after(program: Program, sizes: Sizes, name: str) -> Iterator[Need]:
    """Yield the need of a norm of what a sublayer adds, where there is one."""
    if program.model.norms_after:
        yield Need(name, _norm(program, sizes) - sizes.stream_bytes, (f"{name}.weight",))


def _of_result(program: Program, sizes: Sizes) -> int:
    """Return the bytes of the gradient of a sublayer's result where it is not the stream's own."""
    model = program.model
    return sizes.stream_bytes if model.dropout or model.norms_after else 0


def _blocks(program: Program, sizes: Sizes, kind: LayerSpec) -> int:
    """Return what attention by blocks needs beside gradients."""
    model, train = program.model, program.train
    length = sizes.tokens // sizes.rows
    is_whole = program.layout.cp == 1
    sees = ScoreBounds.of(model, kind)
    if not (is_whole and by_blocks(sizes.heads, sizes.kv_heads, length, train.precision, sees)):
        return 0
    cut = Cut.of(sizes.rows, sizes.heads, sizes.kv_heads, length, model.core_dim, sees)
    return cut.backward_bytes(sizes.element)


def _attention(program: Program, sizes: Sizes, kind: LayerSpec, blocks: int) -> Iterator[Need]:
    of_heads = sizes.tokens * sizes.heads * sizes.head_dim * sizes.element
    of_kv = sizes.tokens * sizes.kv_heads * sizes.head_dim * sizes.element
    of_values = sizes.tokens * sizes.heads * program.model.value_dim * sizes.element
    gathered = sizes.whole_bytes if program.layout.sp and program.layout.tp > 1 else 0
    biases = program.model.attention_bias
    yield from _after(program, sizes, "attn_post_norm")
    came = _of_result(program, sizes) + gathered
    if program.model.lora is not None:
        yield from _frozen(program, sizes, "attn.o", came, 0, of_values)
    else:
        yield Need(
            "attn.o",
            came + of_values,
            _of("attn.o", program.model.has_output_bias),
            sizes.whole_bytes + of_values,
            *_room(program, sizes, sizes.dim, sizes.heads * program.model.value_dim, of_values),
        )
    # Attention keeps its result, which is the input of that product.
    sinks = ("attn.sinks",) if program.model.attention_sinks else ()
    yield Need("attn.core", 2 * of_heads + 2 * of_kv + blocks, sinks)
    if program.model.rotary_dim and kind.rotary:
        yield Need("attn.rope", 2 * of_heads + 2 * of_kv)
    if program.model.is_latent:
        yield from _latent_heads(program, sizes, 2 * of_heads + of_kv)
        yield from _before(program, sizes, "attn_norm")
        return
    if program.model.qk_norm == "all" and program.layout.tp > 1:
        # Both at once: what came, and of each what a norm makes.
        made = sum(normed + 3 * normed // sizes.element * _WIDE for normed in (of_heads, of_kv))
        names = ("attn.q_norm", "attn.k_norm")
        yield Need(names[0], of_heads + 2 * of_kv + made, tuple(f"{one}.weight" for one in names))
    elif program.model.qk_norm != "none":
        # The gradients of all three that came, and what an RMSNorm makes of one.
        for name, normed in (("attn.k_norm", of_kv), ("attn.q_norm", of_heads)):
            made = normed + 3 * normed // sizes.element * _WIDE
            yield Need(name, of_heads + 2 * of_kv + made, (f"{name}.weight",))
    results = {"attn.q": of_heads, "attn.k": of_kv, "attn.v": of_kv}
    yield from _columns(program, sizes, results, biases)
    yield from _before(program, sizes, "attn_norm")


def _latent_heads(program: Program, sizes: Sizes, of_core: int) -> Iterator[Need]:
    """Yield the needs of what latent attention makes queries, keys and values by.

    The gradients of all three in the core's size are there until keys have been taken apart; that
    of a latent vector's norm is made in fp32.
    """
    model, line = program.model, sizes.tokens * sizes.element
    of_q = line * sizes.heads * model.head_dim
    made = line * sizes.heads * latent_widths(model)["attn.kv"]
    whole, part = line * (model.kv_lora_rank + model.qk_rope_head_dim), line * model.kv_lora_rank

    def normed(size: int) -> int:
        return size + 3 * size // sizes.element * _WIDE

    # Keys and values together, beside what they are put together of.
    yield Need("attn.kv_b", max(of_core + made, of_q + made + part), ("attn.kv_b.weight",), made)
    yield Need("attn.kv_a_norm", of_q + normed(part), ("attn.kv_a_norm.weight",))
    results = {"attn.q": of_q, "attn.kv_a": whole}
    if low := line * model.q_lora_rank:
        yield Need("attn.q_b", of_q + whole + low, ("attn.q_b.weight",), of_q)
        yield Need("attn.q_a_norm", whole + normed(low), ("attn.q_a_norm.weight",))
        results = {"attn.q_a": low, "attn.kv_a": whole}
    yield from _columns(program, sizes, results, model.attention_bias)


def _columns(
    program: Program, sizes: Sizes, results: Mapping[str, int], biases: bool
) -> Iterator[Need]:
    """Yield the needs of products of one input, of whose results the bytes are given."""
    whole, names = sizes.whole_bytes, list(results)
    if program.model.lora is not None:
        yield from _frozen_columns(program, sizes, results)
        return
    line = sizes.tokens * sizes.element  # a number of each token
    if not is_joint(program):
        while names:  # one after the other: what the last one made is added to
            held = sum(results[name] for name in names)
            last = names.pop()
            made = whole if len(names) == len(results) - 1 else 2 * whole
            room = _room(program, sizes, results[last] // line, sizes.dim, whole)
            yield Need(last, held + made, _of(last, biases), results[last], *room)
        return
    first, grads = names[0], sum(results.values())
    again = gathers_again(program)
    made, travelling = of_input(program, sizes, len(names), gathers=again)
    yield Need(f"{first}: input", grads + made)
    weights = tuple(of for name in names for of in _of(name, biases))
    waits = whole - sizes.stream_bytes if again else 0
    rooms = [_room(program, sizes, size // line, sizes.dim) for size in results.values()]
    yield Need(
        first, grads + travelling, weights, grads + waits, *map(max, zip(*rooms, strict=True))
    )


def _frozen_columns(program: Program, sizes: Sizes, results: Mapping[str, int]) -> Iterator[Need]:
    """Yield the needs of products of one input with frozen weights, and of their adapters."""
    held, made = sum(results.values()), 0
    for name, size in reversed(list(results.items())):
        yield from _frozen(program, sizes, name, held + made - size, size, sizes.whole_bytes)
        held, made = held - size, sizes.whole_bytes
    if program.layout.tp > 1:
        sent, _ = of_input(program, sizes, gathers=False)
        yield Need(f"{next(iter(results))}: input", sent)


def _frozen(
    program: Program, sizes: Sizes, name: str, held: int, result: int, inputs: int
) -> Iterator[Need]:
    """Yield the needs of a product with a frozen weight, and of its adapter before it.

    `result` and `inputs` are the bytes of their gradients, `held` is there beside them; where that
    has the result's, `result` is 0. The adapter's gradient is one of the result that is scaled.
    """
    lora = program.model.lora
    # In four bits the weight is there as products take it, at first beside what makes it.
    weight, room = dequantised(program, sizes, f"layers.*.{name}.weight")
    made = weight + max(room, inputs)
    if lora is None or name not in program.model.adapted:
        yield Need(name, held + result + made)
        return
    low = sizes.tokens * lora.rank * sizes.element
    scaled = result or sizes.whole_bytes
    yield Need(f"{name}.lora_b", held + result + scaled + low, (f"{name}.lora_b",))
    yield Need(f"{name}.lora_a", held + result + low + inputs, (f"{name}.lora_a",))
    yield Need(name, held + result + inputs + made)


def of_input(
    program: Program, sizes: Sizes, summands: int = 1, *, gathers: bool
) -> tuple[int, int]:
    """Return what the input gradient of products needs while computed, and while sent.

    `summands` are its products; with `gathers`, the input itself is gathered for them. The sum over
    tp uses its own memory. With sp, the gradient is split, which copies several rows, and becomes
    the rank's shard; gloo reduces a copy.
    """
    whole = sizes.whole_bytes
    if not (program.layout.sp and program.layout.tp > 1):
        return min(summands, 2) * whole, whole
    gathered = whole if gathers else 0
    sent = whole + (whole if sizes.rows > 1 else 0)
    made = gathered + sent + sizes.stream_bytes + (whole if program.target.on_cpu else 0)
    # Of what was sent, the copy that is cut is kept until it has arrived.
    return made, gathered + whole + sizes.stream_bytes


def _room(program: Program, sizes: Sizes, outer: int, inner: int, made: int = 0) -> tuple[int, int]:
    """Return `Need.room` and `Need.added` of the product for the gradient of `[outer, inner]`.

    Autograd computes it before the gradient of the input, of `made` bytes, which count already:
    only what exceeds them is added. Our own function computes it after that gradient.
    """
    if sizes.element != _WIDE:
        return 0, 0
    products, shape = program.target.products, (outer, sizes.tokens, inner)
    room = products.room(*shape)
    return room if is_joint(program) else max(room - made, 0), products.room(*shape, adds=True)


def _norm(program: Program, sizes: Sizes) -> int:
    """Return a norm's: the gradient that came, three tensors in fp32 and the result."""
    wide = sizes.stream * sizes.dim * _WIDE
    if program.model.norm == "rms":
        return sizes.stream_bytes + 3 * wide
    return 2 * sizes.stream_bytes


def _of(name: str, has_bias: bool) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if has_bias else (f"{name}.weight",)
