"""A mixture of experts: the router, the routed experts, and a shared expert.

Their operations, with FLOPs and saved bytes, the workspaces of forward and backward, and their
messages: the dispatch and combine of expert parallelism, and what routers sum over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from meshwright.program.layers import mlp
from meshwright.program.layers.linears import Inputs, shard_size
from meshwright.program.layers.workspace import Workspace, of_result, separate, trained
from meshwright.program.lower import Program
from meshwright.program.messages import Axis, Collective, Overlaps, Phase
from meshwright.program.pieces import pieces_of, shared_over
from meshwright.program.saved import FROZEN_BACKWARD, PRODUCT_BACKWARD, Op
from meshwright.program.sizes import Sizes
from meshwright.program.stages import Stage
from meshwright.spec.lora import DOWN, JOINED, matrices
from meshwright.spec.parts import expert_columns, mlp_linears

_WIDE: Final = 4  # bytes of a share and of the softmax: fp32 in any precision
_INT64: Final = 8


def operations(program: Program, sizes: Sizes) -> Iterator[Op]:
    """Yield the operations of router, shared expert and routed experts on a rank.

    All are inside the tensor-parallel region, and process the tokens of all its ranks. If tp ranks
    are among those of `ep`, only the shared expert is: each rank routes its own tokens.
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
    """Yield the matmuls of an expert matrix's adapter; the result of A is saved, the input already
    is."""
    lora = program.model.lora
    adapters = matrices(program.model.adapted, name)
    if lora is None or not adapters:
        return
    low, column_flops = sizes.received * lora.rank * sizes.element, 2.0 * sizes.received * lora.rank
    if "lora_a" in adapters:
        yield Op(f"{name}.lora_a", "product", column_flops * inner, low, low)
    result = sizes.received * outer * sizes.element
    yield Op(f"{name}.lora_b", "product", column_flops * outer, 0, result)


def backward_workspaces(program: Program, sizes: Sizes) -> Iterator[Workspace]:
    """Yield the workspaces of the backward of experts, router and shared expert.

    The experts' backward is one function. It holds the gradient of each pair's result, then those
    of its hidden values, then those of its input, each twice while groups are concatenated.
    """
    model, el = program.model, sizes.element
    whole_bytes, pairs = sizes.whole_bytes, sizes.received * sizes.dim * el
    hidden = sizes.received * sizes.expert_ffn * el
    folds = program.layout.folds > 1
    is_cut = program.layout.sp and program.layout.tp > 1 and (model.shared_ffn_dim or not folds)
    came = of_result(program, sizes) + (whole_bytes if is_cut else 0)
    router_came = came
    if program.layout.ep > 1:  # the gradient of what was sent back, as it came
        came += pairs
    wide = hidden // el * _WIDE
    # The gradient of a share is a sum over what is widened to fp32.
    weighing = wide if el == _WIDE else 3 * wide
    yield Workspace("mlp.experts.weigh", came + pairs + 3 * hidden + weighing)

    first = [product for product in (*JOINED, DOWN) if "lora_a" in matrices(model.adapted, product)]
    rank = 0 if model.lora is None or not first else model.lora.rank
    came += 2 * sizes.received * rank * el  # the gradients of what adapters' A have made
    waits = model.lora is None  # gradients of adapters do not
    yield Workspace("mlp.experts.down", came + pairs + 3 * hidden, (), waits * (pairs + hidden))
    if model.swiglu_limit is not None:  # the sigmoid, its slope, and what was clamped
        yield Workspace("mlp.experts.act: clamp", came + 4 * hidden + hidden // el)
    of_both = waits * 2 * hidden
    products = expert_columns(model)
    yield Workspace(products[0], came + pairs + 2 * hidden, (), waits * pairs + of_both)
    # The function returns all gradients together: those that it has made wait for the last one.
    columns = (trained(program, product, model.expert_bias) for product in (DOWN, *products))
    names = tuple(name for column in columns for name in column)
    held_bytes = came + 2 * hidden + 3 * pairs
    yield Workspace("mlp.experts.act", held_bytes, names, waiting=of_both)
    for product in first:
        yield Workspace(f"{product}.lora_a", held_bytes, waiting=of_both)
    # Gradients of what had come travel back, to as many pairs as a rank's tokens make.
    back = sizes.pairs * sizes.dim * el if program.layout.ep > 1 else 0
    by_token = 0 if back and model.shared_ffn_dim else sizes.routed_bytes
    yield Workspace("mlp.experts.order", came + 2 * pairs + back + by_token)
    came = router_came
    if model.shared_ffn_dim:  # meanwhile those gradients travel: what leaves, and what comes
        held_bytes = came + (pairs + back if back else whole_bytes)
        yield from _shared_workspaces(program, sizes, held_bytes)
    scores = sizes.routed * model.experts * _WIDE
    widened = 0 if el == _WIDE else sizes.routed * sizes.dim * _WIDE
    router = came + 2 * sizes.routed_bytes + 2 * scores + widened
    # They have come, and are summed by token.
    arrived = came + back + 2 * sizes.routed_bytes if back else 0
    names = trained(program, "mlp.router", model.expert_bias)
    yield Workspace("mlp.router", max(router, arrived), names, waits * scores)


def _shared_workspaces(program: Program, sizes: Sizes, held_bytes: int) -> Iterator[Workspace]:
    """Yield the workspaces of the shared expert's backward, during which `held_bytes` more are
    allocated."""
    model, el, whole_bytes = program.model, sizes.element, sizes.whole_bytes
    if model.shared_gate:
        waits, names = sizes.tokens * el * (model.lora is None), trained(program, "mlp.shared_gate")
        yield Workspace("mlp.shared_gate.act", held_bytes + 2 * whole_bytes)
        yield Workspace("mlp.shared_gate", held_bytes + 2 * whole_bytes, names, waits)
        held_bytes += whole_bytes
    *columns, down = mlp_linears(model, "mlp.shared")
    hidden_bytes = sizes.tokens * shard_size(program, down.inner) * el

    product = partial(separate, program, sizes)
    yield from product(down, held_bytes + whole_bytes, 0, hidden_bytes)
    yield Workspace("mlp.shared.act", held_bytes + (len(columns) + 1) * hidden_bytes)
    made_before = [whole_bytes, hidden_bytes][-len(columns) :]  # what the first product has made
    for linear, waiting in zip(reversed(columns), reversed(made_before), strict=True):
        yield from product(linear, held_bytes + waiting, hidden_bytes, whole_bytes)


def forward_workspace(program: Program, sizes: Sizes) -> int:
    """Return the most temporary bytes of the experts' forward.

    At its end, these are the hidden values, the results in the order of their tokens, and their
    sums. Without a grouped matmul, the results of each group exist once more, concatenated;
    selective recomputation saves those of all matmuls. With full recomputation, inputs and result
    of the activation.
    """
    pairs = sizes.received * sizes.dim * sizes.element
    hidden = sizes.received * sizes.expert_ffn * sizes.element
    recompute = program.layout.recompute
    remade = pairs
    if recompute == "selective":
        remade += 2 * hidden
    if program.target.traits.has_grouped_matmul and sizes.element != _WIDE:
        remade = 0
    end = remade + hidden + pairs + sizes.routed_bytes
    if recompute != "full":
        return end
    clamped = 0 if program.model.swiglu_limit is None else hidden
    return max(end, 4 * hidden + clamped + sizes.routed_bytes)


def messages(program: Program, sizes: Sizes, stages: Sequence[Stage]) -> Iterator[Collective]:
    """Yield the messages of routers and of expert parallelism."""
    yield from _routing(program, sizes, stages)
    yield from _dispatch(program, sizes, stages)


def _routing(program: Program, sizes: Sizes, stages: Iterable[Stage]) -> Iterator[Collective]:
    """Yield the messages of routers, in all-reduces of token counts by expert.

    The load-balancing loss and the experts' capacities need them over the ranks that share a
    sequence, the correction of router biases over all ranks with other tokens.
    """
    layout, train, passes = program.layout, program.train, _passes(program, stages)
    yield from _places(program, sizes, passes)
    if train.router_aux_loss:
        size = sizes.rows * program.model.experts * _WIDE
        for axis in shared_over(layout):
            reason = "backward: each sequence's tokens by expert"
            yield Collective("all_reduce", axis, size, passes, "backward", "experts", reason)
    layers = passes // program.microbatches
    if not train.router_bias_rate or not layers:
        return
    size = layers * program.model.experts * _INT64
    axes: tuple[tuple[Axis, int], ...] = (("tp", layout.folds), ("data", layout.dp * layout.cp))
    for axis, ranks in axes:
        if ranks > 1:
            reason = "routers: the batch's tokens by expert"
            yield Collective("all_reduce", axis, size, 1, "step", "experts", reason)


def _places(program: Program, sizes: Sizes, passes: int) -> Iterator[Collective]:
    """Yield the all-reduces by which ranks that share a sequence learn how many tokens per expert
    precede theirs."""
    layout, train = program.layout, program.train
    if train.expert_capacity is None:
        return
    pieces = len(pieces_of(layout, 0, 0)) * layout.cp * layout.folds
    size = sizes.rows * pieces * program.model.experts * _WIDE
    phases: tuple[tuple[Phase, int], ...] = (
        ("forward", passes),
        ("recompute", 0 if layout.recompute == "none" else passes),
    )
    for phase, count in phases:
        reason = f"{phase}: tokens by expert of each piece of a sequence"
        for axis in shared_over(layout):
            yield Collective("all_reduce", axis, size, count, phase, "experts", reason)


def _passes(program: Program, stages: Iterable[Stage]) -> int:
    """Return the number of passes of a microbatch through a layer with experts, in a step."""
    kinds = (program.model.layer(layer) for stage in stages for layer in stage.layers)
    return program.microbatches * sum(map(program.model.has_experts, kinds))


def _dispatch(program: Program, sizes: Sizes, stages: Iterable[Stage]) -> Iterator[Collective]:
    """Yield the all-to-alls of expert parallelism: token counts, tokens to their experts, and
    results back.

    GShard, arXiv:2006.16668, section 3.2. A recomputed forward sends results back only where
    dropout or a norm after them needs its input.
    """
    layout, model = program.layout, program.model
    if layout.ep == 1:
        return
    passes = _passes(program, stages)
    counts, shares = model.experts * _INT64, sizes.received * _WIDE
    rows = sizes.received * model.dim * sizes.element
    recomputed = 0 if layout.recompute == "none" else passes
    returns = bool(model.dropout or model.norms_after)
    phases: tuple[tuple[Phase, int, int], ...] = (
        ("forward", passes, passes),
        ("recompute", recomputed, recomputed * returns),
    )
    alone: Overlaps = ""
    with_shared: Overlaps = "shared" if model.shared_ffn_dim else alone
    for phase, outward, back in phases:
        for size, count, label, overlaps in (
            (counts, outward, "how many tokens come", alone),
            (rows, outward, "tokens to their experts", with_shared),
            (shares, outward, "their shares", with_shared),
            (rows, back, "results to their tokens", alone),
        ):
            reason = f"{phase}: {label}"
            yield Collective("all_to_all", "ep", size, count, phase, "experts", reason, overlaps)
    for size, label, overlaps in (
        (rows, "gradients of results", alone),
        (rows, "gradients of tokens", with_shared),
        (shares, "gradients of shares", with_shared),
    ):
        reason = f"backward: {label}"
        yield Collective("all_to_all", "ep", size, passes, "backward", "experts", reason, overlaps)
