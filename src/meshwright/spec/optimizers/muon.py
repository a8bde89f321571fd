"""Muon: momentum, orthogonalized for hidden matrices; AdamW for all other parameters.

Keller Jordan, kellerjordan.github.io/posts/muon; scaled to language models: arXiv:2502.16982.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshwright.spec.optimizers.adamw import ADAMW_RULE
from meshwright.spec.optimizers.base import Optimizer, State, UpdateRule, counted_if_rounded

if TYPE_CHECKING:
    from meshwright.spec.parts import Part
    from meshwright.spec.training import OptimizerSpec

_MOMENTUM = (State("momentum_buffer"),)
# Passes over fp32 tensors that read or write one: dividing gradients by the loss scale, clearing
# those of a skipped step and the decay take 2 each, the momentum and the update 3 each, the scaled
# update that is added 1.
_PASSES = 13
_NESTEROV_PASSES = 3
# What is looked up or routes tokens is not orthogonalized: each of its rows acts by itself.
_LOOKED_UP = frozenset({"vocab", "routes"})
# Bytes of an element in which matrices are orthogonalized, and gathered for it.
DTYPE_BYTES: Final = {"bf16": 2, "fp32": 4}


def _moved(spec: OptimizerSpec) -> int:
    in_dtype = DTYPE_BYTES[spec.ns_precision]
    return 4 * (_PASSES + _NESTEROV_PASSES * spec.nesterov) + 2 * in_dtype


def _flops(spec: OptimizerSpec, rows: int, columns: int) -> float:
    """Return the FLOPs of orthogonalizing a matrix by Newton-Schulz: three matmuls per iteration.

    One computes the Gram matrix, one its square, and one multiplies the polynomial by the matrix.
    """
    short, long = sorted((rows, columns))
    return spec.ns_steps * (4.0 * short * short * long + 2.0 * short**3)


def _rule_number(part: Part) -> int:
    is_hidden = part.is_matrix and _LOOKED_UP.isdisjoint(part.axes)
    return 0 if is_hidden else 1


MUON = Optimizer(
    "muon",
    "Muon",
    (
        UpdateRule(
            "muon",
            "Muon's momentum",
            states=lambda spec: (*_MOMENTUM, *counted_if_rounded(spec)),
            moved=_moved,
            # The update that is added, in fp32.
            workspace=lambda spec: 4 * (spec.ns_precision == "bf16"),
            needs_matrix=True,
            flops=_flops,
        ),
        ADAMW_RULE,
    ),
    rule_number=_rule_number,
    keys=frozenset(
        {
            *("momentum", "nesterov", "ns_steps", "ns_precision", "scale"),
            *("betas", "eps", "rounding"),
        }
    ),
    defaults={"momentum": 0.95},
    names={"deepspeed": ("Muon",), "megatron": ("muon", "dist_muon")},
)
