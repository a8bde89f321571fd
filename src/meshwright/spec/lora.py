"""Low-rank adapters, LoRA (arXiv:2106.09685): their settings and target layers.

A layer's product becomes `x W' + scale * dropout(x) A' B'`, and only A and B are trained. Layers
have their Hugging Face and PEFT names: `q_proj`, `down_proj`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from meshwright.errors import nearest, refusal
from meshwright.spec.base import Spec, as_tuple
from meshwright.spec.families import FAMILIES

# What PEFT calls all linear layers but the head.
ALL_LINEAR: Final = "all-linear"
# The linear layers of a block, in its order; `mlp.gate` where MLPs are gated.
LINEAR: Final = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
# Far above what anybody trains, and what a width rarely is.
LARGEST_RANK: Final = 4096
# How frozen weights are kept: in `train.precision`, or those of linear layers in four bits.
Base = Literal["precision", "nf4"]
# Inputs that share a scale (bitsandbytes' and torchao's block), and numbers dequantised at once.
NF4_BLOCK: Final = 64
NF4_PIECE: Final = 1 << 20


def nf4_bytes(inner: int) -> int:
    """Return the bytes of a row of so many numbers in NF4: half a byte each, and fp32 scales."""
    return inner // 2 + inner // NF4_BLOCK * 4


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


class Lora(Spec):
    """Adapters of a model: matrices A `[rank, in]` and B `[out, rank]` on each target.

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
        """Leave out a base in the run's precision: earlier versions' dumps stay what they were."""
        values: dict[str, Any] = handler(self)
        return {key: one for key, one in values.items() if (key, one) != ("base", "precision")}

    @property
    def four_bits(self) -> bool:
        """Whether weights of linear layers are kept in four bits."""
        return self.base == "nf4"

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class LoraSection(Spec):
    """The [lora] section: low-rank adapters on a frozen model; rank 0 means none.

    An adapter adds `alpha / rank` times two matrices of that rank to a linear layer, with `rslora`
    `alpha` over the root of the rank; `alpha` left out is the rank. `targets` are linear layers by
    their names in Hugging Face models, as "q_proj", patterns as "*_proj", or "all-linear".
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
            what = f"lora.base = {self.base} needs lora.rank above 0: weights that are trained "
            raise ValueError(refusal(f"{what}are not kept in four bits", legal=["lora.rank = 16"]))
        return self

    @property
    def adapters(self) -> Lora | None:
        """The adapters that the section describes."""
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


def target_names(family: str, *, gated: bool, experts: int = 0) -> dict[str, str]:
    """Return the linear layers of a block, by ours, under the names that targets have for them.

    Layers that a family stores as one have one name. Of a model with experts those of attention.
    """
    modules = FAMILIES[family].modules
    ours = [one for one in LINEAR if gated or one != "mlp.gate"]
    ours = [one for one in ours if not experts or one.startswith("attn.")]
    return {one: modules[one].rsplit(".", 1)[-1] for one in ours}


def own_layers(family: str, *, gated: bool, experts: int = 0) -> list[str]:
    """Return the names of the layers that a family does not store as one matrix with others."""
    names = list(target_names(family, gated=gated, experts=experts).values())
    return [name for name in dict.fromkeys(names) if names.count(name) == 1]


def adapted(lora: Lora | None, family: str, *, gated: bool, experts: int = 0) -> frozenset[str]:
    """Return the linear layers of a block that adapters are for, by our names."""
    if lora is None:
        return frozenset()
    names = target_names(family, gated=gated, experts=experts)
    return frozenset(
        ours
        for ours, name in names.items()
        for target in lora.targets
        if target == ALL_LINEAR or fnmatchcase(name, target)
    )


def check_targets(
    lora: Lora | None, family: str, *, gated: bool, experts: int, latent: bool = False
) -> None:
    """Raise `ValueError` for targets that are no linear layers, or not ones of their own."""
    if lora is None:
        return
    if latent:
        raise ValueError(
            f"lora.rank = {lora.rank} is not for latent attention (model.kv_lora_rank above 0); "
            "train such a model whole"
        )
    every = list(dict.fromkeys(target_names(family, gated=gated, experts=experts).values()))
    free = own_layers(family, gated=gated, experts=experts)
    if not lora.targets:
        raise ValueError(refusal("lora.targets is empty", legal=[*map(repr, (ALL_LINEAR, *every))]))
    for target in lora.targets:
        found = every if target == ALL_LINEAR else [n for n in every if fnmatchcase(n, target)]
        told = f"lora.targets has {target!r}"
        if not found:
            legal = nearest(target, [*free, ALL_LINEAR]) or free
            what = f"{told}, which is no linear layer of the {family} family"
            if experts:
                what = (
                    f"{told}, but with model.experts = {experts} adapters are for attention alone"
                )
                legal = free
            raise ValueError(refusal(what, legal=[*map(repr, legal)]))
        if joint := [name for name in found if name not in free]:
            what = f"{told}, but the {family} family stores {joint[0]} as one matrix of several"
            raise ValueError(refusal(what, legal=[*map(repr, free)]))
