"""How many elements of weights a rank has: of all of them, of those trained, or in four bits."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal, NamedTuple

from meshwright.cost.inputs import CostInputs
from meshwright.cost.work import RankLayers
from meshwright.layout import Layout
from meshwright.program.float8 import gathered_element, gathers_float8
from meshwright.program.shards import shard
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.spec.model import ModelSpec, padded
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import Part, parts

# Which float8 is for.
_BF16: Final = ELEMENT_BYTES["bf16"]
# Which weights are counted; also those trained that an optimizer updates by a rule, by its number.
Which = Literal["all", "trained", "four bits"] | tuple[str, int]


class Weights(NamedTuple):
    """Elements on one tp rank: of a layer of each kind, the embedding, the last norm, the head.

    `experts` are those of a layer that ranks share out, which `layers` count, too.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    embedding: int
    norm: int
    head: int

    @property
    def layer(self) -> int:
        """Those of the largest layer."""
        return max(self.layers)

    def largest(self, held_layers: RankLayers) -> int:
        """Return those of the largest unit of a pipeline rank: a layer or one of the ends."""
        last = self.norm + self.head
        return max(
            self.layer, self.embedding * held_layers.has_embedding, last * held_layers.has_head
        )


@lru_cache(maxsize=1024)
def weights(
    model: ModelSpec,
    tp: int,
    shard_ranks: int,
    ep: int = 1,
    etp: int | None = None,
    *,
    which: Which = "all",
    rounded: bool = False,
) -> Weights:
    """Return the elements of a tp rank; with `shard_ranks`, rows padded to a multiple of them.

    Of experts those of one of `ep` ranks. `which` counts all, or alone what is trained or kept in
    four bits. With `rounded`, they are counted as gathered: two in float8 are as one in bf16.
    """
    model = padded(model, tp)
    layout = Layout(tp=tp, dp_shard=shard_ranks, zero=3, ep=ep, etp=etp)
    if shard_ranks == 1:
        layout = Layout(tp=tp, dp_replicate=layout.expert_data, ep=ep, etp=etp)
    layers, experts = [], []
    for kind in model.layer_kinds:
        block_parts = parts(model.alike(kind, n_layers=1))
        sizes = {
            part.name: shard(part, layout).padded_elements
            * gathered_element(part, _BF16, rounded)
            // _BF16
            * is_of(part, which)
            for part in block_parts
        }
        shared_out = (part.name for part in block_parts if part.is_of_experts and ep > 1)
        experts.append(sum(map(sizes.__getitem__, shared_out)))
        layers.append(sum(size for name, size in sizes.items() if name.startswith("layers.")))
    norm = sum(size for name, size in sizes.items() if name.startswith("norm."))
    ends = sizes["embed.weight"], norm, sizes.get("head.weight", 0)
    return Weights(tuple(layers), tuple(experts), *ends)


def is_of(part: Part, which: Which) -> bool:
    """Return whether a parameter is one of those that are counted."""
    if isinstance(which, tuple):
        name, number = which
        return part.trained and OPTIMIZERS[name].rule_number(part) == number
    return {"all": True, "trained": part.trained, "four bits": part.is_nf4}[which]


def gathered_weights(setting: CostInputs, layout: Layout) -> Weights:
    """Return the elements that ZeRO gathers: two in float8 count as one in bf16."""
    rounded = gathers_float8(setting.train, layout, setting.target)
    cut = layout.tp, layout.shard_ranks, layout.ep, layout.etp
    return weights(setting.model, *cut, rounded=rounded)


class Elements(NamedTuple):
    """Elements that a pipeline rank holds, whole but for tp: of `experts` that ranks share out its
    own, and `plain` ones, which are all others."""

    plain: int
    experts: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.plain + self.experts

    def share(self, layout: Layout) -> int:
        """Return those that a rank trains, where ZeRO cuts them."""
        return self.plain // layout.shard_ranks + self.experts // layout.expert_shard_ranks


def elements_of(
    model: ModelSpec,
    layout: Layout,
    held_layers: RankLayers,
    *,
    is_padded: bool = True,
    which: Which = "all",
    rounded: bool = False,
) -> Elements:
    """Return the elements of all weights that a pipeline rank holds; the rest as in `weights`.

    A tied head is a copy of the embedding.
    """
    ranks = layout.shard_ranks if is_padded else 1
    return _elements(model, layout.tp, ranks, layout.ep, layout.etp, held_layers, which, rounded)


@lru_cache(maxsize=8192)
def _elements(
    model: ModelSpec,
    tp: int,
    ranks: int,
    ep: int,
    etp: int | None,
    held_layers: RankLayers,
    which: Which,
    rounded: bool,
) -> Elements:
    """Return `elements_of`: layouts of a search differ by other things most of the time."""
    unit_weights = weights(model, tp, ranks, ep, etp, which=which, rounded=rounded)
    experts = int(held_layers.total(unit_weights.experts))
    plain = int(held_layers.total(unit_weights.layers)) - experts
    plain += unit_weights.embedding * held_layers.embeddings
    return Elements(plain + (unit_weights.norm + unit_weights.head) * held_layers.has_head, experts)


def gathered_elements(
    setting: CostInputs, layout: Layout, held_layers: RankLayers, *, is_padded: bool = True
) -> Elements:
    """Return the trained elements that ranks gather: two in float8 count as one in bf16."""
    rounded = gathers_float8(setting.train, layout, setting.target)
    return elements_of(
        setting.model, layout, held_layers, is_padded=is_padded, which="trained", rounded=rounded
    )
