"""`ModelSpec`: the architecture of a model, and the rules that it obeys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from meshwright.errors import nearest, nearest_divisors, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import FEATURES, LATER, NEWEST

# Far above what anybody trains: a program has a row for each layer, microbatch and rank.
LARGEST: Final = 2**31 - 1
MOST_LAYERS: Final = 2048
MOST_EXPERTS: Final = 4096


def _known_family(name: str) -> str:
    if name not in FAMILIES:
        legal = nearest(name, FAMILIES, 3) or sorted(FAMILIES)
        raise ValueError(refusal(f"model.family = {name!r} is not known", legal=legal))
    return name


Family = Annotated[str, AfterValidator(_known_family)]


class Spec(BaseModel):
    """Base of all specs: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )


def _as_tuple(value: object) -> object:
    """Take a list of a TOML or JSON file for a tuple."""
    return tuple(value) if isinstance(value, list) else value


RopeKind = Literal["linear", "llama3", "yarn", "longrope"]
ROPE_KINDS: Final[tuple[RopeKind, ...]] = get_args(RopeKind)
_Factors = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_as_tuple)]
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
    interpolates between in the order of the dimensions, whose bounds `truncate` rounds outwards.
    `longrope` (arXiv:2402.13753) divides each by a number of its own: of `long_factor` in rows of
    more than `original_context` tokens, else of `short_factor`.

    The last two also multiply the rotated queries and keys by `attention_factor`, which follows
    from `factor` where it is not given, and for `yarn` from `mscale` and `mscale_all_dim` where
    both are.
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
        """What cosines and sines are multiplied by."""
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

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what another kind is made of: earlier versions' dumps stay what they were."""
        values: dict[str, Any] = handler(self)
        mine = (*_OF_EVERY_KIND, *_OWN_KEYS.get(self.kind, _OF_THE_FIRST))
        return {key: value for key, value in values.items() if key in mine}

    @model_validator(mode="after")
    def _rules(self) -> RopeScaling:
        at = "model.rope_scaling"
        self._refuse_others(at)
        if self.beta_fast < self.beta_slow:
            what = f"{at}.beta_fast = {self.beta_fast} is below beta_slow = {self.beta_slow}"
            raise ValueError(refusal(what, legal=[f"beta_slow = {self.beta_fast}"]))
        if self.kind != "longrope":
            return self
        if self.original_context < 2:
            what = f"{at}.original_context = {self.original_context} is too short for longrope"
            raise ValueError(refusal(what, legal=[2]))
        for key in ("short_factor", "long_factor"):
            if not getattr(self, key):
                what = f"{at}.kind = 'longrope' needs {key}, a list with a number for each"
                raise ValueError(f"{what} rotated pair of a head's dimensions")
        return self

    def _refuse_others(self, at: str) -> None:
        """Raise `ValueError` for what another kind is made of."""
        # A linear one may have those of llama3: earlier versions took and kept them.
        of_kinds = dict(_OWN_KEYS)
        if self.kind in _OWN_KEYS:
            of_kinds["llama3"] = _OF_THE_FIRST
        mine = of_kinds.get(self.kind, ())
        for key in (key for keys in of_kinds.values() for key in keys if key not in mine):
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                what = f"{at}.{key} = {value!r} is not of {at}.kind = {self.kind!r}"
                kinds = [repr(kind) for kind, keys in of_kinds.items() if key in keys]
                raise ValueError(refusal(what, legal=[f"kind = {kind}" for kind in kinds]))

    def check_pairs(self, pairs: int, theta: float) -> None:
        """Raise `ValueError` where heads with so many rotated pairs, of a base, cannot have it."""
        at = "model.rope_scaling"
        if self.kind == "yarn" and theta <= 1:
            what = f"model.rope_theta = {theta} must be above 1 with {at}.kind = 'yarn'"
            raise ValueError(refusal(what, legal=[10000.0]))
        if self.kind == "longrope":
            for key in ("short_factor", "long_factor"):
                if (count := len(getattr(self, key))) != pairs:
                    what = f"{at}.{key} has {count} numbers, but a head rotates {pairs} pairs of "
                    raise ValueError(refusal(f"{what}dimensions", legal=[f"{pairs} numbers"]))


class LayerSpec(Spec):
    """What the attention of a layer sees and rotates, and what follows it.

    A query sees its own position and the `window - 1` before it; None: all. `rope_theta` is a base
    of its own, which `ModelSpec.rope_scaling` leaves alone; None: the model's base and scaling.
    Without `rotary` nothing is rotated. A `dense` layer has an MLP where others have experts.
    """

    window: int | None = Field(default=None, gt=0, le=LARGEST)
    rope_theta: float | None = Field(default=None, gt=0)
    rotary: bool = True
    dense: bool = False

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what only models with experts have: earlier dumps stay what they were."""
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if key != "dense" or value}


PLAIN_LAYER: Final = LayerSpec()


class RotaryBase(NamedTuple):
    """What layers with one rotary table have in common: a base, and whether the scaling holds."""

    theta: float
    scaled: bool


def _qk_norm(value: object) -> object:
    """Take true for the norm of each head: the only one there was when this was a flag."""
    return {True: "head", False: "none"}[value] if isinstance(value, bool) else value


class ModelSpec(Spec):
    """Architecture of one model; every size is resolved.

    `context` is the longest sequence that the model is meant for (`max_position_embeddings`); the
    sequence length of training is `train.seq_len`. `ffn_dim` is the width of one projection
    (a gated MLP has three matrices of it, a plain one two). `rotary_pct` is the share of each
    head's dimensions that is rotated. `dropout` is the share that training drops of the embedding's
    output and of what each attention and MLP adds to the residual stream (GPT-NeoX
    `hidden_dropout`).

    `family` says under which names and keys Hugging Face folders have the model, and presets what
    its blocks are made of: the `FEATURES` of `spec.families`. `norm` is RMSNorm or LayerNorm with a
    bias, before each sublayer, after it (of what it adds to the stream), or both; an RMSNorm
    multiplies by its weight, or with `norm_plus_one` by 1 + weight. `attention_bias` is of q, k and
    v, and of o unless `output_bias` says otherwise. `qk_norm`: an RMSNorm over each head of q and
    k, or over all heads together, before the rotation. `embedding_scale` multiplies the embedding's
    output, `residual_scale` what each sublayer adds to the stream, `attention_scale` the scores
    (`head_dim ** -0.5` unless given); `logits_divisor` divides the logits. A soft cap bounds scores
    or logits x to `cap * tanh(x / cap)`. `layer_pattern` says what layers see and rotate, from the
    first on, and begins anew where it ends; empty: all see and rotate everything.

    With `experts` the MLP of a layer is so many gated ones, each `expert_ffn_dim` wide (None:
    `ffn_dim`), of which a router picks `top_k` for each token: those of the largest softmax of the
    router's scores. Their results are weighed by it, with `norm_top_k` divided by the sum of those
    picked. A shared expert of width `shared_ffn_dim` (0: none) sees every token; with `shared_gate`
    its result is weighed by the sigmoid of a score of its own.
    """

    preset: str | None = None
    family: Family = "llama"
    vocab_size: int = Field(gt=0, le=LARGEST)
    dim: int = Field(gt=0, le=LARGEST)
    n_layers: int = Field(gt=0, le=MOST_LAYERS)
    n_heads: int = Field(gt=0, le=LARGEST)
    n_kv_heads: int = Field(gt=0, le=LARGEST)
    head_dim: int = Field(gt=0, le=LARGEST)
    ffn_dim: int = Field(gt=0, le=LARGEST)
    context: int = Field(gt=0, le=LARGEST)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    rotary_pct: float = Field(default=1.0, ge=0, le=1)
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_placement: Literal["before", "after", "both"] = "before"
    norm_plus_one: bool = False
    parallel_residual: bool = False
    gated_mlp: bool = True
    qk_norm: Annotated[Literal["none", "head", "all"], BeforeValidator(_qk_norm)] = "none"
    attention_bias: bool = False
    output_bias: bool | None = None
    mlp_bias: bool = False
    embedding_scale: float = Field(default=1.0, gt=0)
    attention_scale: float | None = Field(default=None, gt=0)
    residual_scale: float = Field(default=1.0, gt=0)
    logits_divisor: float = Field(default=1.0, gt=0)
    attention_softcap: float | None = Field(default=None, gt=0)
    logits_softcap: float | None = Field(default=None, gt=0)
    layer_pattern: Annotated[tuple[LayerSpec, ...], BeforeValidator(_as_tuple)] = ()
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    experts: int = Field(default=0, ge=0, le=MOST_EXPERTS)
    top_k: int = Field(default=0, ge=0, le=MOST_EXPERTS)
    expert_ffn_dim: int | None = Field(default=None, gt=0, le=LARGEST)
    norm_top_k: bool = True
    shared_ffn_dim: int = Field(default=0, ge=0, le=LARGEST)
    shared_gate: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    init_std: float = Field(default=0.02, gt=0)
    init_from: str | None = None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that RoPE rotates (GPT-NeoX `rotary_ndims`)."""
        return int(self.head_dim * self.rotary_pct)

    def layer(self, index: int) -> LayerSpec:
        """Return what a layer sees and rotates."""
        if not self.layer_pattern:
            return PLAIN_LAYER
        return self.layer_pattern[index % len(self.layer_pattern)]

    def has_experts(self, layer: LayerSpec) -> bool:
        """Whether a layer has experts in place of one MLP."""
        return self.experts > 0 and not layer.dense

    @property
    def expert_width(self) -> int:
        """Width of an expert's projections."""
        return self.ffn_dim if self.expert_ffn_dim is None else self.expert_ffn_dim

    def rotary_base(self, layer: LayerSpec) -> RotaryBase | None:
        """Return by which base a layer rotates; None where it rotates nothing."""
        if not layer.rotary or self.rotary_dim == 0:
            return None
        if layer.rope_theta is not None:
            return RotaryBase(layer.rope_theta, scaled=False)
        return RotaryBase(self.rope_theta, scaled=self.rope_scaling is not None)

    @property
    def rotary_bases(self) -> tuple[RotaryBase, ...]:
        """The different bases by which layers rotate, in the order of their first layers."""
        found = (self.rotary_base(self.layer(index)) for index in range(self.n_layers))
        return tuple(dict.fromkeys(base for base in found if base is not None))

    @property
    def layer_kinds(self) -> tuple[LayerSpec, ...]:
        """The different layers that there are, in the order of their first."""
        used = self.layer_pattern[: self.n_layers] or (PLAIN_LAYER,)
        return tuple(dict.fromkeys(used))

    @property
    def norms_before(self) -> bool:
        """Whether sublayers take a norm of the stream."""
        return self.norm_placement != "after"

    @property
    def norms_after(self) -> bool:
        """Whether what sublayers add to the stream is a norm of their results."""
        return self.norm_placement != "before"

    @property
    def has_output_bias(self) -> bool:
        """Whether attention's last projection has a bias."""
        return self.attention_bias if self.output_bias is None else self.output_bias

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by before attention, which divides by `sqrt(head_dim)`."""
        return 1.0 if self.attention_scale is None else self.attention_scale * self.head_dim**0.5

    def identity(self) -> dict[str, Any]:
        """Return as JSON what identifies the model, also to steps and plans of earlier versions.

        They lack the features that fields were made of later; their families fix them, so these
        say nothing that `family` does not.
        """
        implied = LATER & FAMILIES[self.family].features.keys()
        unused = {key for key in NEWEST if getattr(self, key) == FEATURES[key]}
        return self.model_dump(mode="json", exclude={*implied, *unused})

    @model_validator(mode="before")
    @classmethod
    def _of_family(cls, values: Any) -> Any:
        """Fill what all models of a family have, where it is not given."""
        if not isinstance(values, Mapping):
            return values
        name = values.get("family", "llama")  # of any type: it is not validated yet
        family = FAMILIES.get(name) if isinstance(name, str) else None
        if family is None:
            return values
        dim = values.get("dim")
        derived = {}
        if isinstance(dim, int) and 0 < dim <= LARGEST:
            derived = family.of_width(dim)
        return {**family.features, **derived, **values}

    @model_validator(mode="after")
    def _rules(self) -> ModelSpec:
        if self.n_heads % self.n_kv_heads:
            legal = nearest_divisors(self.n_heads, self.n_kv_heads)
            raise ValueError(
                refusal(
                    f"model.n_kv_heads = {self.n_kv_heads} must divide "
                    f"model.n_heads = {self.n_heads}",
                    legal=legal,
                )
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"the rotated part of a head must be even, but model.head_dim = {self.head_dim} "
                f"x model.rotary_pct = {self.rotary_pct} gives {self.rotary_dim}"
            )
        if self.rope_scaling is not None and self.rotary_dim:
            self.rope_scaling.check_pairs(self.rotary_dim // 2, self.rope_theta)
        FAMILIES[self.family].refuse_others(dict(self))
        self._check_experts()
        return self

    def _check_experts(self) -> None:
        if not self.experts:
            given = {"top_k": 0, "shared_ffn_dim": 0, "expert_ffn_dim": None}
            for key, none in given.items():
                if (value := getattr(self, key)) != none:
                    raise ValueError(f"model.{key} = {value} needs experts, but model.experts = 0")
            if any(layer.dense for layer in self.layer_pattern):
                raise ValueError("a dense layer in model.layer_pattern needs model.experts above 0")
        elif not 1 <= self.top_k <= self.experts:
            what = f"model.top_k = {self.top_k} must be from 1 to model.experts = {self.experts}"
            raise ValueError(refusal(what, legal=[min(max(self.top_k, 1), self.experts)]))
        if self.shared_gate and not self.shared_ffn_dim:
            what = "model.shared_gate = true needs a shared expert, but model.shared_ffn_dim = 0"
            raise ValueError(refusal(what, legal=["model.shared_gate = false"]))
