"""Compiles blocks with `torch.compile`, such that fp32 matmuls on a CPU keep their route to
oneDNN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node

from meshwright.kernels import fp32_matmuls as own_products
from meshwright.program.target import Route
from meshwright.torch_private import CustomGraphPass, trace_rules

_PRODUCTS: Final = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def compile_block(
    block: nn.Module,
    products: Route,
    *,
    splits: bool = False,
    recomputes: bool = False,
    backend: Any = "inductor",
    compiler_options: Mapping[str, Any] | None = None,
) -> None:
    """Compile a block at its first forward; fp32 matmuls take the route `products`.

    The hooks of data parallelism stay outside. `splits` is as in `Deferral`: deferred gradients go
    to the parameters themselves. A block that `recomputes` does so with all of its forward.
    `backend` and `compiler_options` are those of `torch.compile`. Parts of a block that cannot be
    compiled run eagerly, and so do their matmuls: the compiler would otherwise trace the route's
    own functions.
    """
    trace_rules.add(own_products.__name__)
    options: dict[str, Any] = dict(compiler_options or {})
    if products.rows:
        options["post_grad_custom_post_pass"] = _KEEPS_PRODUCTS
    if recomputes:
        options["joint_custom_pre_pass"] = _RECOMPUTES_ALL
    compiled = torch.compile(block.forward, backend=backend, options=options or None)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if splits else _plain_parameters(block):
            return compiled(*args, **kwargs)

    block.forward = forward


@contextmanager
def _plain_parameters(block: nn.Module) -> Iterator[None]:
    """Replace a block's DTensor parameters by this rank's local tensors while it computes.

    Compiled code would unwrap DTensors and wrap their gradients in each graph, and the backward of
    one that recomputes would keep their mesh, which is not a tensor (torch 2.13 raises).
    """
    replaced = []
    for parameters in _own_parameters(block):
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                replaced.append((parameters, name, parameter))
    for parameters, name, parameter in replaced:
        parameters[name] = parameter.to_local()
    try:
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


def _own_parameters(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the parameter dicts of a module and of its descendants, except those in nested FSDP
    modules."""
    yield module._parameters
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


class _KeepsProducts(CustomGraphPass):
    """A compiler pass that keeps the operators of fp32 matmuls on a CPU.

    The compiler would call their `out` forms, which the route to oneDNN does not replace, because
    oneDNN has none and its result would have to be copied.
    """

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.target in _PRODUCTS and _is_fp32_of_cpu(node):
                node.meta["should_fallback"] = True

    def uuid(self) -> str:
        """Return the identifier of this pass in the compiler's cache."""
        return "meshwright keeps products 1"


def _is_fp32_of_cpu(node: Node) -> bool:
    value: Tensor = node.meta["val"]
    return value.dtype == torch.float32 and value.device.type == "cpu"


_KEEPS_PRODUCTS: Final = _KeepsProducts()


class _RecomputesAll(CustomGraphPass):
    """A compiler pass that marks all operations of a recomputed forward as to be recomputed.

    The compiler of torch 2.11 marks none within an `autograd.Function`, so it saves their results:
    rotated queries and keys, activations and norms. That of 2.13 marks them itself.
    """

    def __call__(self, graph: Graph) -> None:
        marks = ("recompute", "ac_graph_id")
        marked = next((node for node in graph.nodes if node.meta.get(marks[0]) is not None), None)
        if marked is None:
            return
        after_gradients: set[Node] = set()
        for node in graph.nodes:
            is_gradient = node.op == "placeholder" and str(node.target).startswith("tangents")
            if is_gradient or not after_gradients.isdisjoint(node.all_input_nodes):
                after_gradients.add(node)
            elif node.op == "call_function" and node.meta.get(marks[0]) is None:
                node.meta.update({mark: marked.meta[mark] for mark in marks if mark in marked.meta})

    def uuid(self) -> str:
        """Return the identifier of this pass in the compiler's cache."""
        return "meshwright recomputes all 1"


_RECOMPUTES_ALL: Final = _RecomputesAll()
