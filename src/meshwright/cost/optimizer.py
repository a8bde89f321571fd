"""What a rank's optimizer updates, by rule: elements of its shards, and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.elements import Which, elements_of, is_of
from meshwright.cost.setting import Setting
from meshwright.cost.work import HeldLayers
from meshwright.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizers import OPTIMIZERS, Rule
from meshwright.spec.parts import parts


class RuleShare(NamedTuple):
    """What a rank updates by one rule: `elements` of its shards, of so many `parameters`."""

    rule: Rule
    elements: int
    parameters: int


def updates(setting: Setting, layout: Layout, held: HeldLayers) -> Iterator[RuleShare]:
    """Yield what a rank with such layers updates, by the rules of the optimizer."""
    optimizer = OPTIMIZERS[setting.optimizer.name]
    for number, rule in enumerate(optimizer.rules):
        of: Which = (optimizer.name, number)
        elements = elements_of(setting.model, layout, held, of=of).share(layout)
        yield RuleShare(rule, elements, _parameters(setting.model, held, of))


@lru_cache(maxsize=1024)
def _parameters(model: ModelSpec, held: HeldLayers, of: Which) -> int:
    """Return the number of parameters that a rank has shards of; a tied head is one of its own."""
    per_layer = []
    for kind in model.layer_kinds:
        block = parts(model.alike(kind, n_layers=1))
        per_layer.append(sum(is_of(one, of) for one in block if one.name.startswith("layers.")))
    ends = [part for part in parts(model) if not part.name.startswith("layers.")]
    of_embedding = sum(is_of(part, of) for part in ends if part.name.startswith("embed."))
    has_embedding = held.has_embedding or (held.has_head and model.tie_embeddings)
    of_head = sum(is_of(part, of) for part in ends if not part.name.startswith("embed."))
    return int(held.total(per_layer)) + of_embedding * has_embedding + of_head * held.has_head
