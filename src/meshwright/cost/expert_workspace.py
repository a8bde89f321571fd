"""What the backward of a layer with experts needs besides saved tensors, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from meshwright.program.layers.workspace import Workspace, frozen, of_result, trained
from meshwright.program.lower import Program
from meshwright.program.sizes import Sizes
from meshwright.spec.lora import DOWN, JOINED, matrices
from meshwright.spec.parts import expert_columns, mlp_linears

_WIDE: Final = 4


def expert_workspaces(program: Program, sizes: Sizes) -> Iterator[Workspace]:
    """Yield the needs of the routed experts, their router and the shared expert.

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

    parameters_of = partial(trained, program)
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
    columns = (parameters_of(product, model.expert_bias) for product in (DOWN, *products))
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
        yield from _shared_workspaces(
            program, sizes, came + whole_bytes if not back else came + pairs + back
        )
    scores = sizes.routed * model.experts * _WIDE
    widened = 0 if el == _WIDE else sizes.routed * sizes.dim * _WIDE
    router = came + 2 * sizes.routed_bytes + 2 * scores + widened
    arrived = (
        came + back + 2 * sizes.routed_bytes if back else 0
    )  # they have come, and are summed by token
    names = trained(program, "mlp.router", model.expert_bias)
    yield Workspace("mlp.router", max(router, arrived), names, waits * scores)


def _shared_workspaces(program: Program, sizes: Sizes, held_bytes: int) -> Iterator[Workspace]:
    """Yield the needs of the shared expert, beside `held_bytes` that are there meanwhile."""
    model, el, whole_bytes = program.model, sizes.element, sizes.whole_bytes
    parameters_of = partial(trained, program)
    if model.shared_gate:
        line = sizes.tokens * el
        yield Workspace("mlp.shared_gate.act", held_bytes + 2 * whole_bytes)
        waits = line if model.lora is None else 0
        yield Workspace(
            "mlp.shared_gate", held_bytes + 2 * whole_bytes, parameters_of("mlp.shared_gate"), waits
        )
        held_bytes += whole_bytes
    hidden_bytes = sizes.tokens * sizes.shared_ffn * el
    *columns, down = (linear.name for linear in mlp_linears(model, "mlp.shared"))

    def product(
        name: str, held_bytes: int, result: int, inputs: int, waits: int
    ) -> Iterator[Workspace]:
        if model.lora is not None:
            yield from frozen(program, sizes, name, held_bytes, result, inputs)
        else:
            yield Workspace(name, held_bytes + result + inputs, parameters_of(name), waits)

    yield from product(down, held_bytes + whole_bytes, 0, hidden_bytes, whole_bytes)
    yield Workspace("mlp.shared.act", held_bytes + (len(columns) + 1) * hidden_bytes)
    made_before = [whole_bytes, hidden_bytes][-len(columns) :]  # what the first product has made
    for name, waiting in zip(reversed(columns), reversed(made_before), strict=True):
        yield from product(name, held_bytes + waiting, hidden_bytes, whole_bytes, hidden_bytes)
