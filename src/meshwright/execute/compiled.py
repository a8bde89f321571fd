"""Compiled blocks: torch's compiler, which leaves fp32 products on a CPU to their own route."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from meshwright.execute import products as own_products
from meshwright.program.target import Route

_PRODUCTS: Final = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def compile_block(block: nn.Module, products: Route) -> None:
    """Have a block compiled by its first forward, its fp32 products computed as `products` says.

    Where parts of it cannot be compiled, these run as they are, and so do their products: the
    compiler would otherwise go on to the route's own functions.
    """
    trace_rules.add(own_products.__name__)
    options = {"post_grad_custom_post_pass": _KEEPS_PRODUCTS} if products.rows else None
    block.compile(options=options)


class _KeepsProducts(CustomGraphPass):
    """Leaves the operators of fp32 products on a CPU as they are.

    The compiler would call their `out` forms, which the route does not replace: oneDNN's has no
    such form, and its result would have to be copied. An operator that is left makes its own.
    """

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.target in _PRODUCTS and _is_fp32_on_cpu(node):
                node.meta["should_fallback"] = True

    def uuid(self) -> str:
        """Return what names this pass in the compiler's cache."""
        return "meshwright keeps products 1"


def _is_fp32_on_cpu(node: Node) -> bool:
    made: Tensor = node.meta["val"]
    return made.dtype == torch.float32 and made.device.type == "cpu"


_KEEPS_PRODUCTS: Final = _KeepsProducts()
