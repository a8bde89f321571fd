"""Numbers of weight elements on a rank: all, only trained ones, or only those in NF4."""

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
from meshwright.spec.optimizers import OPTIMIZERS, block_width
from meshwright.spec.parts import Part, parts

# Which float8 is for.
_BF16: Final = ELEMENT_BYTES["bf16"]
# Which weights are counted; also those trained that an optimizer updates by a rule, by its number,
# or the blocks of their rows that share a scale in 8 bits.
Which = (
    Literal["all", "trained", "four bits"] | tuple[str, int] | tuple[str, int, Literal["blocks"]]
)


class Weights(NamedTuple):
    """Numbers of weight elements on one tp rank: a layer of each kind, the embedding, the last
    norm, the head.

    `experts` has, for each kind of layer, the elements of expert-parallel experts; `layers`
    includes them.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    embedding: int
    norm: int
    head: int

    @property
    def layer(self) -> int:
        """The elements of the largest layer."""
        return max(self.layers)

    def largest(self, held_layers: RankLayers) -> int:
        """Return the elements of a pipeline rank's largest unit: a layer, the embedding, or last
        norm and head."""
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
    """Return the numbers of weight elements on a tp rank, of which experts are those of one `ep`
    rank.

    Rows are padded to a multiple of `shard_ranks`. `which` selects all weights, those trained,
    those in NF4, or those that one rule of an optimizer updates; or the blocks of these. With
    `rounded`, weights that are gathered in float8 count half, as sizes are in bf16 elements.
    """
    model = padded(model, tp)
    layout = Layout(tp=tp, dp_shard=shard_ranks, zero=3, ep=ep, etp=etp)
    if shard_ranks == 1:
        layout = Layout(tp=tp, dp_replicate=layout.expert_data, ep=ep, etp=etp)
    of_blocks = isinstance(which, tuple) and len(which) == 3
    layers, experts = [], []
    for kind in model.layer_kinds:
        block_parts = parts(model.alike(kind, n_layers=1))
        sizes = {
            part.name: shard(part, layout).padded_elements
            * gathered_element(part, _BF16, rounded)
            // _BF16
            * is_of(part, which)
            // (block_width(shard(part, layout).tp_shape[-1]) if of_blocks else 1)
            for part in block_parts
        }
        shared_out = (part.name for part in block_parts if part.is_of_experts and ep > 1)
        experts.append(sum(map(sizes.__getitem__, shared_out)))
        layers.append(sum(size for name, size in sizes.items() if name.startswith("layers.")))
    norm = sum(size for name, size in sizes.items() if name.startswith("norm."))
    ends = sizes["embed.weight"], norm, sizes.get("head.weight", 0)
    return Weights(tuple(layers), tuple(experts), *ends)


def is_of(part: Part, which: Which) -> bool:
    """Return whether `which` selects this parameter."""
    if isinstance(which, tuple):
        name, number, *_ = which
        return part.trained and OPTIMIZERS[name].rule_number(part) == number
    return {"all": True, "trained": part.trained, "four bits": part.is_nf4}[which]


def gathered_weights(setting: CostInputs, layout: Layout) -> Weights:
    """Return the weight elements that ZeRO gathers; those gathered in float8 count as half an
    element of bf16."""
    rounded = gathers_float8(setting.train, layout, setting.target)
    cut = layout.tp, layout.shard_ranks, layout.ep, layout.etp
    return weights(setting.model, *cut, rounded=rounded)


class Elements(NamedTuple):
    """Weight elements of a pipeline rank before ZeRO's sharding: expert-parallel ones, and all
    others (`plain`)."""

    plain: int
    experts: int

    @property
    def total(self) -> int:
        """All elements."""
        return self.plain + self.experts

    def share(self, layout: Layout) -> int:
        """Return the elements in a rank's ZeRO shard."""
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
    """Return the weight elements of a pipeline rank with these layers; options as in `weights`.

    Without `is_padded`, rows are not padded for sharding. A tied head counts as a copy of the
    embedding.
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
    """Return `elements_of`, cached by the few layout keys on which it depends."""
    unit_weights = weights(model, tp, ranks, ep, etp, which=which, rounded=rounded)
    experts = int(held_layers.total(unit_weights.experts))
    plain = int(held_layers.total(unit_weights.layers)) - experts
    plain += unit_weights.embedding * held_layers.embeddings
    return Elements(plain + (unit_weights.norm + unit_weights.head) * held_layers.has_head, experts)


def gathered_elements(
    setting: CostInputs, layout: Layout, held_layers: RankLayers, *, is_padded: bool = True
) -> Elements:
    """Return the trained elements that ZeRO gathers; those in float8 count as half an element of
    bf16."""
    rounded = gathers_float8(setting.train, layout, setting.target)
    return elements_of(
        setting.model, layout, held_layers, is_padded=is_padded, which="trained", rounded=rounded
    )
