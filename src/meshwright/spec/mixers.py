"""`Mixer`: sublayers that Meshwright has no module for, described by their shapes for planning.

Its matrices, other parameters, scores and recurrences determine parameters, FLOPs and bytes; models
that have one cannot be trained.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from meshwright.spec.kinds import LARGEST, Spec, as_tuple

Cut = Literal["outer", "inner", "whole"]
"""The side of a matrix that tensor parallelism cuts."""


class Matrix(Spec):
    """A weight `[outer, inner]`, and the side of it that tensor parallelism cuts.

    A `lookup` has a row for each token of a vocabulary; the others multiply tokens.
    """

    name: str
    outer: int = Field(gt=0, le=LARGEST)
    inner: int = Field(gt=0, le=LARGEST)
    cut: Cut
    lookup: bool = False

    @property
    def weight(self) -> str:
        """The name of the parameter in its layer."""
        return f"{self.name}.weight"


class PairScores(Spec):
    """Attention scores over pairs of a query and a key, for a number of heads.

    `width` is the size summed over per pair: that of a head's keys, plus that of its values if the
    scores weigh values. A query attends to `window` positions; None: all before it.
    """

    heads: int = Field(gt=0, le=LARGEST)
    width: int = Field(gt=0, le=LARGEST)
    window: int | None = Field(default=None, gt=0, le=LARGEST)


class Mixer(Spec):
    """Sublayers of a layer that have no module here, described by their shapes.

    `attends`: the layer also has the model's attention. `feeds`: an MLP or experts follow. Tensor
    parallelism shards it by `heads`. `vectors` is the number of parameters outside of matrices,
    `flops` a recurrence's forward FLOPs per token, and `saved` the elements per token that its
    operators save for the backward, without the inputs of matmuls.
    """

    attends: bool = False
    feeds: bool = True
    heads: int = Field(default=1, gt=0, le=LARGEST)
    matrices: Annotated[tuple[Matrix, ...], BeforeValidator(as_tuple)] = ()
    vectors: int = Field(default=0, ge=0)
    scores: Annotated[tuple[PairScores, ...], BeforeValidator(as_tuple)] = ()
    flops: int = Field(default=0, ge=0)
    saved: int = Field(default=0, ge=0)

    @property
    def mixes(self) -> bool:
        """Whether it has any sublayer before the MLP."""
        return self.attends or bool(self.matrices)


class Planned(Spec):
    """Why a model can only be planned: its unsupported `model_type`, and the plan's assumptions."""

    model_type: str
    assumed: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
