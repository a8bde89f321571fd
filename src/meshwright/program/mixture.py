"""The operations of a layer with experts: its router, the experts, the shared one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from meshwright.program.layers import mlp
from meshwright.program.layers.linears import Inputs
from meshwright.program.lower import Program
from meshwright.program.saved import FROZEN_BACKWARD, PRODUCT_BACKWARD, Op
from meshwright.program.sizes import Sizes
from meshwright.spec.lora import DOWN, matrices
from meshwright.spec.parts import expert_columns

_WIDE: Final = 4  # bytes of a share and of the softmax: fp32 in any precision
_INT64: Final = 8


def expert_operations(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield the operations of a router, of the experts and of the shared one.

    All are inside the tensor-parallel region, and process the tokens of all its ranks. If the
    layout folds, only the shared expert is: a rank routes its own tokens.
    """
    model, el = program.model, sizes.element
    scores = sizes.routed * model.experts * _WIDE
    is_folded = program.layout.folds > 1
    is_frozen = model.lora is not None
    product = partial(
        Op, kind="product", backward=FROZEN_BACKWARD if is_frozen else PRODUCT_BACKWARD
    )
    # The tokens, their softmax and the experts that were picked; how large a token's scores are.
    sums = sizes.routed * _WIDE if program.train.router_z_loss else 0
    saved = sizes.routed_bytes, scores, sums
    flops, picked = 2.0 * sizes.routed * sizes.dim * model.experts, sizes.pairs * _INT64
    yield product("mlp.router", flops=flops, saved=saved, kept=scores, indices=picked)
    if model.shared_ffn_dim:  # the router may keep the input; dropout would make another of it
        whole_bytes = sizes.whole_bytes
        inputs = Inputs(program, sizes, whole_bytes if is_folded else 0, whole_bytes)
        yield from mlp.gated_operations(program, sizes, "mlp.shared", inputs, whole_bytes)
    if model.shared_gate:
        gate_bytes = sizes.tokens * el  # a number of each token
        # Its sigmoid, and what that multiplies.
        yield product("mlp.shared_gate", flops=sizes.product(sizes.dim, 1), kept=gate_bytes)
        gated, io_bytes = (gate_bytes, sizes.whole_bytes), 3 * sizes.whole_bytes
        yield Op("mlp.shared_gate.act", "activation", saved=gated, io_bytes=io_bytes)
    # The pairs' shares, their tokens and places, and how many an expert has.
    order = sizes.received * 2 * _INT64 + model.experts * _INT64
    shares, come = sizes.received * _WIDE, 0
    hidden = sizes.received * sizes.expert_ffn * el
    results = sizes.received * sizes.dim * el
    if program.layout.ep > 1:  # what has come is kept with it, and once more how it is sent back
        come = results
        order += sizes.pairs * 2 * _INT64 + model.experts // program.layout.ep * _INT64
    # Into the experts' order and back: read and written, then summed.
    yield Op(
        "mlp.experts.order",
        "routing",
        saved=(shares, come),
        indices=order,
        io_bytes=5 * results,
    )
    columns = expert_columns(model)
    for name in columns:
        yield product(name, flops=sizes.expert_product, kept=hidden)
        yield from _adapter(program, sizes, name, sizes.dim, sizes.expert_ffn)
    acts = (hidden,) * len(columns)
    yield Op("mlp.experts.act", "activation", saved=acts, io_bytes=(len(columns) + 1) * hidden)
    # Under tp the sum over the ranks is kept too.
    is_summed = program.layout.tp > 1 and (model.shared_ffn_dim or not is_folded)
    summed = sizes.stream_bytes if is_summed else 0
    yield product(DOWN, flops=sizes.expert_product, kept=(results, summed))
    yield from _adapter(program, sizes, DOWN, sizes.expert_ffn, sizes.dim)


def _adapter(program: Program, sizes: Sizes, name: str, inner: int, outer: int) -> Iterator[Op]:
    """Yield the products of experts' adapters: those with A are kept, their input already is."""
    lora = program.model.lora
    adapters = matrices(program.model.adapted, name)
    if lora is None or not adapters:
        return
    low, column_flops = sizes.received * lora.rank * sizes.element, 2.0 * sizes.received * lora.rank
    if "lora_a" in adapters:
        yield Op(f"{name}.lora_a", "product", column_flops * inner, low, low)
    result = sizes.received * outer * sizes.element
    yield Op(f"{name}.lora_b", "product", column_flops * outer, 0, result)
