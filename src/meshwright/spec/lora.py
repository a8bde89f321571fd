"""Low-rank adapters, LoRA (arXiv:2106.09685): their settings and target layers.

A layer's output becomes `x W' + scale * dropout(x) A' B'`, and only A and B are trained. Layers
have their Hugging Face and PEFT names: `q_proj`, `down_proj`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from meshwright.errors import nearest, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.kinds import Spec, as_tuple

# What PEFT calls all linear layers but the head.
ALL_LINEAR: Final = "all-linear"
# The linear layers of blocks. The place of each is also that of its dropout: new ones come last.
LINEAR: Final = (
    *("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"),
    *("attn.q_a", "attn.q_b", "attn.kv_a", "attn.kv_b"),
    *("mlp.shared.gate", "mlp.shared.up", "mlp.shared.down"),
)
# Those of experts; gate and up may have one adapter, as one matrix with the outputs of both.
JOINED: Final = ("mlp.experts.gate", "mlp.experts.up")
DOWN: Final = "mlp.experts.down"
JOINT: Final = "mlp.experts.gate_up"
# Their names in the memory of transformers 5.
IN_MEMORY: Final[Mapping[str, str]] = {JOINT: f"{JOINT}_proj", DOWN: f"{DOWN}_proj"}
_PATTERN: Final = frozenset("*?[")
# Far above what anybody trains, and what a width rarely is.
LARGEST_RANK: Final = 4096
# How frozen weights are kept: in `train.precision`, or those of linear layers in four bits.
Base = Literal["precision", "nf4"]
# Inputs that share a scale (bitsandbytes' and torchao's block), and numbers dequantised at once.
NF4_BLOCK: Final = 64
NF4_PIECE: Final = 1 << 20


def nf4_bytes(inner: int) -> int:
    """Return the bytes of a row of `inner` numbers in NF4: half a byte each, and fp32 scales."""
    return inner // 2 + inner // NF4_BLOCK * 4


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


class Lora(Spec):
    """Adapters of a model: matrices A `[rank, in]` and B `[out, rank]` on each target.

    Experts have their own, `[experts, rank, in]` and `[experts, out, rank]`.
    `alpha` over the rank is the scale, with `rslora` over the root of the rank
    (arXiv:2312.03732). `targets` are names of linear layers or patterns of them. With `base`
    "nf4" the weights of linear layers of blocks are kept in four bits.
    """

    rank: int = Field(gt=0, le=LARGEST_RANK)
    alpha: float = Field(gt=0)
    targets: Annotated[tuple[str, ...], BeforeValidator(_texts)] = (ALL_LINEAR,)
    rslora: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    base: Base = "precision"

    @model_serializer(mode="wrap")
    def _without_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave a base of "precision" out of dumps, so that these equal those of earlier
        versions.
        """
        values: dict[str, Any] = handler(self)
        return {
            key: value for key, value in values.items() if (key, value) != ("base", "precision")
        }

    @property
    def is_nf4(self) -> bool:
        """Whether the weights of linear layers are stored in NF4."""
        return self.base == "nf4"

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class LoraSection(Spec):
    """The [lora] section: low-rank adapters on a frozen model; rank 0 means none.

    An adapter adds `alpha / rank` times two matrices of that rank to a linear layer, with `rslora`
    `alpha` over the root of the rank; `alpha` left out is the rank. `targets` are linear layers by
    their names in Hugging Face models, as "q_proj", patterns as "*_proj", or "all-linear"; experts
    as "gate_proj", or as the parameters that they are in memory, "mlp.experts.gate_up_proj".
    `dropout` is the share of an adapter's input that training drops. `init_from` is a folder of
    PEFT's whose adapters the run begins with. `base` is how frozen weights are kept: "precision",
    as `train.precision` says, or "nf4", linear layers in four bits (arXiv:2305.14314).
    """

    rank: int = Field(default=0, ge=0, le=LARGEST_RANK)
    alpha: float | None = Field(default=None, gt=0)
    targets: Annotated[str | tuple[str, ...], BeforeValidator(as_tuple)] = ALL_LINEAR
    rslora: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    init_from: str | None = None
    base: Base = "precision"

    @model_validator(mode="after")
    def _check_base(self) -> LoraSection:
        if self.base != "precision" and self.rank == 0 and self.init_from is None:
            rule = f"lora.base = {self.base} needs lora.rank above 0: weights that are trained "
            raise ValueError(refusal(f"{rule}are not kept in four bits", legal=["lora.rank = 16"]))
        return self

    @property
    def adapters(self) -> Lora | None:
        """The adapters that the section describes, or None."""
        if self.rank == 0:
            return None
        return Lora(
            rank=self.rank,
            alpha=float(self.rank) if self.alpha is None else self.alpha,
            targets=(self.targets,) if isinstance(self.targets, str) else self.targets,
            rslora=self.rslora,
            dropout=self.dropout,
            base=self.base,
        )


class BlockKinds(NamedTuple):
    """The features of a model that determine which linear layers its blocks have.

    `experts` is their number, `shared`: there is a shared expert, too; `dense`: some layers have an
    MLP nevertheless. Attention is plain or `latent`, with `low_queries` also its queries come from
    a latent vector.
    """

    family: str
    gated: bool = True
    experts: int = 0
    shared: bool = False
    dense: bool = False
    latent: bool = False
    low_queries: bool = False

    @property
    def linear(self) -> Iterator[str]:
        """Meshwright's names of the linear layers of blocks, without those of routed experts."""
        if self.latent:
            yield from ("attn.q_a", "attn.q_b") if self.low_queries else ("attn.q",)
            yield from ("attn.kv_a", "attn.kv_b", "attn.o")
        else:
            yield from ("attn.q", "attn.k", "attn.v", "attn.o")
        inner = ("gate", "up", "down") if self.gated else ("up", "down")
        if self.dense or not self.experts:
            yield from (f"mlp.{proj}" for proj in inner)
        if self.shared:
            yield from (f"mlp.shared.{proj}" for proj in inner)


def target_names(blocks: BlockKinds) -> dict[str, tuple[str, ...]]:
    """Return, for each layer of a block, the names by which `lora.targets` may select it.

    Keys are Meshwright's names; the name in Hugging Face files comes first. Layers that a family
    stores as one share a name. Experts are stored one by one, and in memory together, as PEFT's
    `target_parameters` name them.
    """
    family = FAMILIES[blocks.family]
    names: dict[str, tuple[str, ...]] = {}
    names |= {layer: (_inside(family.modules[layer]),) for layer in blocks.linear}
    if not blocks.experts:
        return names
    if family.fused_experts:
        stored = {JOINT: "mlp.experts.gate.weight", DOWN: "mlp.experts.down.weight"}
        return names | {layer: (_inside(family.modules[name]),) for layer, name in stored.items()}
    names |= {layer: (_inside(family.modules[layer]),) for layer in (*JOINED, DOWN)}
    return names | {DOWN: (*names[DOWN], IN_MEMORY[DOWN]), JOINT: (IN_MEMORY[JOINT],)}


def _inside(stored: str) -> str:
    """Return a stored name from the block on, without an expert's number."""
    return stored.split(".{}.", 1)[1].replace(".{}", "")


def _is_named(name: str, target: str) -> bool:
    """Whether a target matches the last parts of a dotted name, as many as the target has."""
    parts = name.split(".")[-1 - target.count(".") :]
    return fnmatchcase(".".join(parts), target)


def _matches(target: str, blocks: BlockKinds) -> Iterator[str]:
    """Yield Meshwright's names of the layers that a target matches.

    "all-linear" matches only attention in models with experts. A pattern does not match gate and up
    of experts together where files separate them.
    """
    family = FAMILIES[blocks.family]
    is_pattern = not _PATTERN.isdisjoint(target) and not family.fused_experts
    for ours, names in target_names(blocks).items():
        if target == ALL_LINEAR:
            if not blocks.experts or ours.startswith("attn."):
                yield ours
        elif any(_is_named(name, target) for name in names) and not (is_pattern and ours == JOINT):
            yield ours


def own_layers(blocks: BlockKinds) -> list[str]:
    """Return the targets of "all-linear" that the family stores as separate matrices."""
    names = target_names(blocks)
    targets = [names[layer][0] for layer in _matches(ALL_LINEAR, blocks)]
    return [
        target.rsplit(".", 1)[-1] for target in dict.fromkeys(targets) if targets.count(target) == 1
    ]


@lru_cache(maxsize=256)
def adapted(lora: Lora | None, blocks: BlockKinds) -> frozenset[str]:
    """Return Meshwright's names of the linear layers of a block that have adapters."""
    if lora is None:
        return frozenset()
    return frozenset(layer for target in lora.targets for layer in _matches(target, blocks))


def matrices(layers: Collection[str], name: str) -> tuple[str, ...]:
    """Return which LoRA matrices the layer `name` has: `lora_a`, `lora_b`, both or none.

    `layers` are the adapted ones. Where gate and up of experts share an adapter, A belongs to gate,
    and each has its rows of B.
    """
    if name in layers:
        return ("lora_a", "lora_b")
    if JOINT in layers and name in JOINED:
        return ("lora_a", "lora_b") if name == JOINED[0] else ("lora_b",)
    return ()


def check_targets(lora: Lora | None, blocks: BlockKinds) -> None:
    """Raise `ValueError` for targets that match no layer, or one stored as a part of a matrix."""
    if lora is None:
        return
    names = target_names(blocks)
    stored = [aliases[0] for aliases in names.values()]
    free = [ours for ours, aliases in names.items() if stored.count(aliases[0]) == 1]
    legal = list(dict.fromkeys(names[layer][-1].rsplit(".", 1)[-1] for layer in free))
    if not lora.targets:
        raise ValueError(refusal("lora.targets is empty", legal=[*map(repr, (ALL_LINEAR, *legal))]))
    for target in lora.targets:
        problem = f"lora.targets has {target!r}"
        matches = list(_matches(target, blocks))
        if not matches:
            nearby = nearest(target, [*legal, ALL_LINEAR]) or legal
            rule = f"{problem}, which is not a linear layer of the {blocks.family} family"
            raise ValueError(refusal(rule, legal=[*map(repr, nearby)]))
        if joint := [layer for layer in matches if layer not in free]:
            name = names[joint[0]][0].rsplit(".", 1)[-1]
            rule = (
                f"{problem}, but the {blocks.family} family stores {name} as one matrix of several"
            )
            raise ValueError(refusal(rule, legal=[*map(repr, legal)]))
    _check_experts(lora, adapted(lora, blocks), names)


def _check_experts(
    lora: Lora, layers: Collection[str], names: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise `ValueError` for adapters of experts that cannot be combined."""
    separate = [layer for layer in JOINED if layer in layers]
    if JOINT in layers and separate:
        joined, single = names[JOINT][0], names[separate[0]][0]
        rule = f"lora.targets has {joined}, one adapter for both, and {single}"
        raise ValueError(refusal(rule, legal=[f"{joined!r} alone", f"{single!r} alone"]))
    if lora.dropout and (
        targeted := [layer for layer in (*JOINED, JOINT, DOWN) if layer in layers]
    ):
        rule = f"lora.dropout = {lora.dropout} drops inputs of linear layers, and the matrices of "
        rule += f"experts are none: lora.targets has {names[targeted[0]][-1]}"
        raise ValueError(refusal(rule, legal=["lora.dropout = 0"]))
