"""Low-rank adapters, LoRA (arXiv:2106.09685): their settings and target layers.

A layer's product becomes `x W' + scale * dropout(x) A' B'`, and only A and B are trained. Layers
have their Hugging Face and PEFT names: `q_proj`, `down_proj`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from meshwright.errors import nearest, refusal
from meshwright.spec.base import Spec, as_tuple
from meshwright.spec.families import FAMILIES

# What PEFT calls all linear layers but the head.
ALL_LINEAR: Final = "all-linear"
# The linear layers of a block, in its order; `mlp.gate` where MLPs are gated.
LINEAR: Final = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
# Far above what anybody trains, and what a width rarely is.
LARGEST_RANK: Final = 4096


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


class Lora(Spec):
    """Adapters of a model: matrices A `[rank, in]` and B `[out, rank]` on each target.

    The scale is `alpha / rank`, or with `rslora` `alpha / sqrt(rank)` (arXiv:2312.03732). `targets`
    are names of linear layers or patterns.
    """

    rank: int = Field(gt=0, le=LARGEST_RANK)
    alpha: float = Field(gt=0)
    targets: Annotated[tuple[str, ...], BeforeValidator(_texts)] = (ALL_LINEAR,)
    rslora: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class LoraSection(Spec):
    """The [lora] section: low-rank adapters on a frozen model; rank 0 means none.

    An adapter adds `alpha / rank` (with `rslora`: `alpha / sqrt(rank)`) times the product of two
    matrices of that rank to a linear layer; `alpha` defaults to the rank. `targets` are linear
    layers by their names in Hugging Face models, such as "q_proj", patterns such as "*_proj", or
    "all-linear". `dropout` is the share of an adapter's input that training drops. `init_from` is a
    PEFT folder with the initial adapters.
    """

    rank: int = Field(default=0, ge=0, le=LARGEST_RANK)
    alpha: float | None = Field(default=None, gt=0)
    targets: Annotated[str | tuple[str, ...], BeforeValidator(as_tuple)] = ALL_LINEAR
    rslora: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    init_from: str | None = None

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
        )


def target_names(family: str, *, gated: bool) -> dict[str, str]:
    """Return a block's linear layers by our names, with their names as targets.

    Layers that a family stores fused have one name.
    """
    modules = FAMILIES[family].modules
    ours = [one for one in LINEAR if gated or one != "mlp.gate"]
    return {one: modules[one].rsplit(".", 1)[-1] for one in ours}


def own_layers(family: str, *, gated: bool) -> list[str]:
    """Return the names of the layers that a family doesn't store fused with others."""
    names = list(target_names(family, gated=gated).values())
    return [name for name in dict.fromkeys(names) if names.count(name) == 1]


def adapted(lora: Lora | None, family: str, *, gated: bool) -> frozenset[str]:
    """Return a block's linear layers that have adapters, by our names."""
    if lora is None:
        return frozenset()
    names = target_names(family, gated=gated)
    return frozenset(
        ours
        for ours, name in names.items()
        for target in lora.targets
        if target == ALL_LINEAR or fnmatchcase(name, target)
    )


def check_targets(lora: Lora | None, family: str, *, gated: bool, experts: int) -> None:
    """Raise `ValueError` for targets that are no linear layers, or are stored fused."""
    if lora is None:
        return
    if experts:
        raise ValueError(
            f"lora.rank = {lora.rank} is for models without experts, but model.experts = "
            f"{experts}; train such a model whole"
        )
    every = list(dict.fromkeys(target_names(family, gated=gated).values()))
    free = own_layers(family, gated=gated)
    if not lora.targets:
        raise ValueError(refusal("lora.targets is empty", legal=[*map(repr, (ALL_LINEAR, *every))]))
    for target in lora.targets:
        found = every if target == ALL_LINEAR else [n for n in every if fnmatchcase(n, target)]
        told = f"lora.targets has {target!r}"
        if not found:
            legal = nearest(target, [*free, ALL_LINEAR]) or free
            what = f"{told}, which is no linear layer of the {family} family"
            raise ValueError(refusal(what, legal=[*map(repr, legal)]))
        if joint := [name for name in found if name not in free]:
            what = f"{told}, but the {family} family stores {joint[0]} as one matrix of several"
            raise ValueError(refusal(what, legal=[*map(repr, free)]))
