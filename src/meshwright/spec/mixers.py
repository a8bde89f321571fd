"""`Mixer`: what a layer that is planned only has beside, or in place of, our attention and MLP.

It is known by its shapes: matrices, other parameters, scores and recurrences. From these follow its
parameters, FLOPs and bytes; there is no module of it, so models that have one cannot be trained.
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
    """Products over pairs of a query and a key, for so many heads.

    `width` is what a pair's products sum over: the size of a head's keys, and that of its values if
    scores weigh values. A query sees `window` positions; None: all before it.
    """

    heads: int = Field(gt=0, le=LARGEST)
    width: int = Field(gt=0, le=LARGEST)
    window: int | None = Field(default=None, gt=0, le=LARGEST)


class Mixer(Spec):
    """What a layer has that has no module here, by its shapes.

    `attends`: attention as the model's other layers have it is there, too. `feeds`: an MLP or
    experts follow. Tensor parallelism cuts it by `heads`. `vectors` are its parameters outside of
    matrices, `flops` a recurrence's for one token, forward, and `saved` the elements of one token
    that its operators keep for the backward, inputs of products aside.
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
        """Whether there is anything before the MLP."""
        return self.attends or bool(self.matrices)


class Planned(Spec):
    """Why a model is planned, but not trainable: its `model_type`, and what a plan assumes."""

    model_type: str
    assumed: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
