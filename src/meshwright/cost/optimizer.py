"""The elements that a rank's optimizer updates, by rule, and the time of updates of whole
matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.elements import Which, elements_of, is_of
from meshwright.cost.inputs import CostInputs
from meshwright.cost.kernels import Kernels
from meshwright.cost.work import Product, RankLayers
from meshwright.layout import Layout
from meshwright.program.optimizer import needs_matrices, rule_of
from meshwright.program.shards import shard
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizers import DTYPE_BYTES, OPTIMIZERS, UpdateRule
from meshwright.spec.parts import Part, parts


class RuleShare(NamedTuple):
    """What a rank updates by one rule of the optimizer: `elements` in its shards of `parameters`
    parameters, in `blocks` that share a scale if their states are in int8."""

    rule: UpdateRule
    elements: int
    parameters: int
    blocks: int


def updates(setting: CostInputs, layout: Layout, held_layers: RankLayers) -> Iterator[RuleShare]:
    """Yield what a rank with these layers updates, for each rule of the optimizer."""
    optimizer = OPTIMIZERS[setting.optimizer.name]
    for number, rule in enumerate(optimizer.rules):
        which: Which = (optimizer.name, number)
        elements = elements_of(setting.model, layout, held_layers, which=which).share(layout)
        blocks = 0
        if rule.block_bytes(setting.optimizer):
            of_blocks: Which = (optimizer.name, number, "blocks")
            blocks = elements_of(setting.model, layout, held_layers, which=of_blocks).share(layout)
        yield RuleShare(rule, elements, _parameters(setting.model, held_layers, which), blocks)


@lru_cache(maxsize=1024)
def _parameters(model: ModelSpec, held_layers: RankLayers, which: Which) -> int:
    """Return the number of parameters of a rank that `which` selects; a tied head on another stage
    counts again."""
    per_layer = []
    for kind in model.layer_kinds:
        block = parts(model.alike(kind, n_layers=1))
        per_layer.append(
            sum(is_of(part, which) for part in block if part.name.startswith("layers."))
        )
    ends = [part for part in parts(model) if not part.name.startswith("layers.")]
    of_embedding = sum(is_of(part, which) for part in ends if part.name.startswith("embed."))
    of_head = sum(is_of(part, which) for part in ends if not part.name.startswith("embed."))
    return (
        int(held_layers.total(per_layer))
        + of_embedding * held_layers.embeddings
        + of_head * held_layers.has_head
    )


def matrix_seconds(
    setting: CostInputs, kernels: Kernels, layout: Layout, held_layers: RankLayers
) -> float:
    """Return the seconds in which a rank gathers whole matrices and orthogonalizes them (Muon);
    else 0.

    Each rank does so for all matrices of which it has shards, one after the other; messages and
    matmuls do not overlap.
    """
    if not needs_matrices(setting.optimizer):
        return 0.0
    model, per_kind = setting.model, []
    for kind in model.layer_kinds:
        block = parts(model.alike(kind, n_layers=1))
        per_kind.append(
            sum(
                _seconds_of(setting, kernels, layout, part)
                for part in block
                if part.trained and rule_of(setting.optimizer, part).needs_matrix
            )
        )
    return held_layers.total(per_kind)


def _seconds_of(setting: CostInputs, kernels: Kernels, layout: Layout, part: Part) -> float:
    """Return the seconds of one parameter: its gathers, and Newton-Schulz iterations on its
    matrices."""
    spec, sharding = setting.optimizer, shard(part, layout)
    element, peak = DTYPE_BYTES[spec.ns_precision], setting.cluster.device.peak(spec.ns_precision)
    network, seconds = kernels.network, 0.0
    if sharding.cuts_rows_of_matrix:
        size = sharding.padded_elements * element
        seconds += network.seconds("all_gather", size, sharding.shard_ranks, layout.tp, "shard")
    count = sharding.rows_each if part.is_of_experts else 1
    if sharding.tp_dim is not None:
        size = math.prod(part.shape[-2:]) * count * element
        seconds += network.seconds("all_gather", size, layout.tp, 1, "tp")
    short, long = sorted(part.shape[-2:])
    products = ((short, long, short), (short, short, short), (short, short, long))
    iteration = sum(
        kernels.product(Product(rows * count, inner, outer, groups=count), peak, element)
        for rows, inner, outer in products
    )
    return seconds + spec.ns_steps * iteration
