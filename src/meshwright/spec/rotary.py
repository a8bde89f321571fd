"""`RopeScaling`: how rotary frequencies are rescaled for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from meshwright.errors import refusal
from meshwright.spec.kinds import LARGEST, Spec, as_tuple

RopeKind = Literal["linear", "llama3", "yarn", "longrope"]
ROPE_KINDS: Final[tuple[RopeKind, ...]] = get_args(RopeKind)
_Factors = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(as_tuple)]
_OF_EVERY_KIND: Final = ("kind", "factor", "original_context")
# Dumps of these always had both.
_OF_THE_FIRST: Final = ("low_freq_factor", "high_freq_factor")
# The fields that only one kind is made of, or two.
_OWN_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "yarn": (
        *("attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
}


class RopeScaling(Spec):
    """Rescaling of the rotary frequencies for longer contexts.

    `linear` divides all frequencies by `factor`. `llama3` (Llama 3.1, "rope scaling" of its model
    card; transformers `_compute_llama3_parameters`) divides those whose wavelength exceeds
    `original_context / low_freq_factor`, keeps those below `original_context / high_freq_factor`
    and interpolates between. `yarn` (arXiv:2309.00071) keeps those that turn more than `beta_fast`
    times in `original_context`, divides those that turn less than `beta_slow` times, and
    interpolates between in the order of the dimensions; `truncate` rounds the bounds outwards.
    `longrope` (arXiv:2402.13753) divides each by its own number: of `long_factor` in documents of
    more than `original_context` tokens, otherwise of `short_factor`.

    The last two also multiply the rotated queries and keys by `attention_factor`. By default, it
    follows from `factor`, and for `yarn` from `mscale` and `mscale_all_dim` if both are set.
    """

    kind: RopeKind
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_context: int = Field(default=8192, gt=0, le=LARGEST)
    attention_factor: float | None = Field(default=None, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    mscale: float | None = Field(default=None, gt=0)
    mscale_all_dim: float | None = Field(default=None, gt=0)
    truncate: bool = True
    short_factor: _Factors = ()
    long_factor: _Factors = ()

    @property
    def cos_sin_factor(self) -> float:
        """The factor of cosines and sines."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        grown = math.log(self.factor)
        if self.kind == "longrope":
            return math.sqrt(1 + grown / math.log(self.original_context))
        if self.mscale is not None and self.mscale_all_dim is not None:
            return (0.1 * self.mscale * grown + 1) / (0.1 * self.mscale_all_dim * grown + 1)
        return 0.1 * grown + 1

    @property
    def score_factor(self) -> float:
        """The factor of latent attention's scores: YaRN's scale for `mscale_all_dim`, squared.

        As in transformers' `yarn_apply_mscale`; other attention doesn't use it.
        """
        if self.mscale_all_dim is None or self.factor <= 1:
            return 1.0
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1) ** 2

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields of other kinds, so that dumps are as those of earlier versions."""
        values: dict[str, Any] = handler(self)
        used = (*_OF_EVERY_KIND, *_OWN_KEYS.get(self.kind, _OF_THE_FIRST))
        return {key: value for key, value in values.items() if key in used}

    @model_validator(mode="after")
    def _rules(self) -> RopeScaling:
        section = "model.rope_scaling"
        self._refuse_others(section)
        if self.beta_fast < self.beta_slow:
            rule = f"{section}.beta_fast = {self.beta_fast} is below beta_slow = {self.beta_slow}"
            raise ValueError(refusal(rule, legal=[f"beta_slow = {self.beta_fast}"]))
        if self.kind != "longrope":
            return self
        if self.original_context < 2:
            rule = f"{section}.original_context = {self.original_context} is too short for longrope"
            raise ValueError(refusal(rule, legal=[2]))
        for key in ("short_factor", "long_factor"):
            if not getattr(self, key):
                rule = f"{section}.kind = 'longrope' needs {key}, a list with a number for each"
                raise ValueError(f"{rule} rotated pair of a head's dimensions")
        return self

    def _refuse_others(self, section: str) -> None:
        """Raise `ValueError` for settings that another kind of scaling has."""
        # A linear one may have those of llama3: earlier versions took and kept them.
        of_kinds = dict(_OWN_KEYS)
        if self.kind in _OWN_KEYS:
            of_kinds["llama3"] = _OF_THE_FIRST
        used = of_kinds.get(self.kind, ())
        for key in (key for keys in of_kinds.values() for key in keys if key not in used):
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                rule = f"{section}.{key} = {value!r} is not of {section}.kind = {self.kind!r}"
                kinds = [repr(kind) for kind, keys in of_kinds.items() if key in keys]
                raise ValueError(refusal(rule, legal=[f"kind = {kind}" for kind in kinds]))

    def check_pairs(self, pairs: int, theta: float) -> None:
        """Raise `ValueError` if heads with so many rotated pairs and this base cannot use it."""
        section = "model.rope_scaling"
        if self.kind == "yarn" and theta <= 1:
            rule = f"model.rope_theta = {theta} must be above 1 with {section}.kind = 'yarn'"
            raise ValueError(refusal(rule, legal=[10000.0]))
        if self.kind == "longrope":
            for key in ("short_factor", "long_factor"):
                if (count := len(getattr(self, key))) != pairs:
                    rule = (
                        f"{section}.{key} has {count} numbers, but a head rotates {pairs} pairs of "
                    )
                    raise ValueError(refusal(f"{rule}dimensions", legal=[f"{pairs} numbers"]))


class RotaryBase(NamedTuple):
    """The key of a rotary table: its base, and whether the model's scaling applies."""

    theta: float
    scaled: bool
