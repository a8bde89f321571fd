"""The values to try for a key that a rule names: divisors and multiples of what they divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import get_args

from meshwright.layout.layout import Layout
from meshwright.spec.lora import Base
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import ContextKind, Offload, Schedule, TrainSpec, Zero


@lru_cache(maxsize=256)
def divisors(value: int) -> tuple[int, ...]:
    """Return the divisors of a number; of one above 2^32, those that a degree may be."""
    small = [d for d in range(1, min(math.isqrt(value), 1 << 16) + 1) if value % d == 0]
    return tuple(sorted({*small, *(value // d for d in small)}))


def _tensor_sizes(model: ModelSpec) -> int:
    """Return the greatest common divisor of the sizes that tp cuts."""
    widths = (model.ffn_dim, model.expert_width, model.shared_ffn_dim)
    return math.gcd(model.n_heads, model.n_kv_heads, *widths)


def _up_to(top: int, near: int) -> Iterable[int]:
    """Return the numbers from 1 to `top` that are near a given one."""
    near = min(near, max(top, 1))
    return (1, *range(max(1, near - 64), min(top, near + 64) + 1))


def _multiples(near: int, *units: int) -> Iterator[int]:
    for unit in units:
        for factor in range(-1, 3):
            yield (near // unit + factor) * unit


def _batches(model: ModelSpec, train: TrainSpec, layout: Layout) -> Iterable[int]:
    one_each = layout.dp * layout.microbatch
    # A schedule wants a number of microbatches, often of a multiple of the pipeline's ranks.
    filled = one_each * layout.pp
    return _multiples(train.batch, layout.dp, one_each, filled, 2 * filled)


def _seq_lens(model: ModelSpec, train: TrainSpec, layout: Layout) -> Iterable[int]:
    cp, tp = layout.cp, layout.tp
    return _multiples(train.seq_len, cp, 2 * cp, cp * tp, cp * math.lcm(2, tp))


NUMBERS: Mapping[str, Callable[[ModelSpec, TrainSpec, Layout], Iterable[int]]] = {
    "layout.tp": lambda model, train, layout: divisors(_tensor_sizes(model)),
    "layout.cp": lambda model, train, layout: divisors(train.seq_len),
    "layout.ep": lambda model, train, layout: divisors(
        math.gcd(model.experts or 1, layout.alike_ranks * layout.folds)
    ),
    "layout.etp": lambda model, train, layout: (1, layout.tp),
    "layout.pp": lambda model, train, layout: _up_to(
        model.n_layers // layout.virtual_stages, layout.pp
    ),
    "layout.virtual_stages": lambda model, train, layout: _up_to(
        model.n_layers // layout.pp, layout.virtual_stages
    ),
    "layout.dp_replicate": lambda model, train, layout: divisors(train.batch),
    "layout.dp_shard": lambda model, train, layout: divisors(train.batch),
    "layout.microbatch": lambda model, train, layout: divisors(max(train.batch // layout.dp, 1)),
    "train.batch": _batches,
    "train.seq_len": _seq_lens,
}

# The values to try for keys whose values are not numbers, or for which only the default is legal.
CHOICES: Mapping[str, tuple[object, ...]] = {
    "layout.zero": get_args(Zero),
    "layout.cp_kind": get_args(ContextKind),
    "layout.schedule": get_args(Schedule),
    "layout.offload": get_args(Offload),
    "layout.sp": (False, True),
    **dict.fromkeys(("train.fp8", "train.async_tp"), (False, True)),
    "lora.base": get_args(Base),
    "train.precision": ("bf16",),  # which fp8 needs
    "train.router_aux_loss": (0.0,),
    "train.router_z_loss": (0.0,),
    "train.router_bias_rate": (0.0,),
    "train.expert_capacity": (None,),
    "train.routing": ("learned",),
    "train.imbalance": (1.0,),
}
