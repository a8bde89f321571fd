"""`ModelSpec`: the architecture of a model, and the rules that it obeys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from meshwright.errors import nearest, nearest_divisors, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import FEATURES, LATER, NEWEST
from meshwright.spec.kinds import LARGEST, Spec, as_tuple
from meshwright.spec.lora import BlockKinds, Lora, adapted, check_targets
from meshwright.spec.mixers import Mixer, Planned
from meshwright.spec.rotary import RopeScaling, RotaryBase
from meshwright.units import round_up

# Far above what anybody trains.
MOST_LAYERS: Final = 2048
MOST_EXPERTS: Final = 4096
# Rows of the embedding and the head are added up to a multiple of this, which kernels take faster.
VOCAB_MULTIPLE: Final = 64
# Fields of a layer that dumps leave out where they are not set.
_RARE: Final = ("dense", "mixer", "delta", "mamba")
# What checkpoints, exports and the identity of a run leave out.
OF_PADDING: Final = "pad_vocab_to_multiple_of"


def _known_family(name: str) -> str:
    if name not in FAMILIES:
        legal = nearest(name, FAMILIES, 3) or sorted(FAMILIES)
        raise ValueError(refusal(f"model.family = {name!r} is not known", legal=legal))
    return name


Family = Annotated[str, AfterValidator(_known_family)]


class LayerSpec(Spec):
    """One layer of a pattern: its attention window and rotation, or its recurrence, and its MLP.

    A query attends to its own position and the `window - 1` before it; None: all. `rope_theta` is a
    separate base, to which `ModelSpec.rope_scaling` doesn't apply; None: the model's base and
    scaling. Without `rotary`, there is no rotary embedding. A `dense` layer has an MLP where others
    have experts. A `delta` layer has Gated DeltaNet in place of attention, a `mamba` layer Mamba-2;
    neither has a window or a rotary embedding. A `mixer` describes sublayers that have no module
    here, beside or in place of attention and MLP: such a model can be planned, but not trained.
    """

    window: int | None = Field(default=None, gt=0, le=LARGEST)
    rope_theta: float | None = Field(default=None, gt=0)
    rotary: bool = True
    dense: bool = False
    delta: bool = False
    mamba: bool = False
    mixer: Mixer | None = None

    @property
    def recurs(self) -> bool:
        """Whether it has a recurrence in place of attention."""
        return self.delta or self.mamba

    @property
    def attends(self) -> bool:
        """Whether it has the model's attention."""
        return not self.recurs and (self.mixer is None or self.mixer.attends)

    @property
    def mixes(self) -> bool:
        """Whether the layer has any sublayer before its MLP."""
        return self.mixer is None or self.mixer.mixes

    @property
    def feeds(self) -> bool:
        """Whether the layer has an MLP or experts."""
        return self.mixer is None or self.mixer.feeds

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave unset rare fields out of dumps, so that these equal those of earlier versions."""
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if key not in _RARE or value}


PLAIN_LAYER: Final = LayerSpec()


@lru_cache(maxsize=64)
def _dense(layer: LayerSpec) -> LayerSpec:
    return layer.model_copy(update={"dense": True})


def _qk_norm(value: object) -> object:
    """Convert the boolean of earlier versions: true meant the norm of each head."""
    return {True: "head", False: "none"}[value] if isinstance(value, bool) else value


class ModelSpec(Spec):
    """Architecture of one model; every size is resolved.

    `context` is the longest sequence that the model is meant for (`max_position_embeddings`); the
    sequence length of training is `train.seq_len`. `ffn_dim` is the width of one projection (a
    gated MLP has three such matrices, a plain one two). `rotary_pct` is the share of each head's
    dimensions that is rotated. `dropout` is the share that training drops of the embedding's output
    and of what each attention and MLP adds to the residual stream (GPT-NeoX `hidden_dropout`).

    `family` determines the names and keys in Hugging Face folders, and the defaults of the blocks'
    features: the `FEATURES` of `spec.families`. `norm` is RMSNorm or LayerNorm with a bias, before
    each sublayer, after it (on what it adds to the stream), or both; an RMSNorm multiplies by its
    weight, or with `norm_plus_one` by 1 + weight. `attention_bias` applies to q, k and v, and to o
    unless `output_bias` says otherwise. With `attention_sinks`, the softmax of each head has one
    more score, a parameter without a value. `qk_norm`: an RMSNorm over each head of q and k, or
    over all heads together, before the rotation. `embedding_scale` multiplies the embedding's
    output, `residual_scale` what each sublayer adds to the stream, `attention_scale` the scores
    (`head_dim ** -0.5` unless given); `logits_divisor` divides the logits. A soft cap bounds scores
    or logits x to `cap * tanh(x / cap)`. `layer_pattern` has the windows and rotations of the first
    layers, and repeats; empty: all layers see and rotate everything.

    With `experts`, the MLP of a layer consists of so many gated ones, each `expert_ffn_dim` wide
    (None: `ffn_dim`), of which a router selects `top_k` for each token: those with the largest
    softmax of the router's scores. The softmax weighs their results; with `norm_top_k`, it is
    divided by the sum of the selected. `expert_bias` adds biases to the router and the experts'
    projections. `swiglu_limit` makes the activation
    `(up + 1) * gate * sigmoid(swiglu_alpha * gate)`, with gate and up clamped to `gate <= limit`
    and `-limit <= up <= limit`. A shared expert of width `shared_ffn_dim` (0: none) sees every
    token; with `shared_gate`, the sigmoid of a separate score weighs its result. The first
    `dense_layers` have an MLP.

    With `router_scores` "sigmoid", the sigmoid of scores selects and weighs experts
    (arXiv:2412.19437, section 2.1.2). For the selection only, a correction is added, which is a
    buffer, not a parameter. Experts are selected from `top_groups` of `expert_groups`, those with
    the largest sum of their two best scores. The sum of the selected experts' results is multiplied
    by `routed_scale`.

    With `kv_lora_rank`, attention is latent (arXiv:2412.19437, section 2.1.1): keys and values of
    all heads are computed from a latent vector of that size, queries from one of `q_lora_rank` (0:
    from the stream). A head's query and key have `qk_nope_head_dim` dims that are not rotated and
    `qk_rope_head_dim` rotated ones, with a key that all heads share; together they are `head_dim`.
    Its value has `v_head_dim`. In any attention with `rope_interleave`, rotated pairs are adjacent
    dims, otherwise half of the rotated dims apart.

    With `attention_gate`, attention's result is multiplied by the sigmoid of a projection of its
    input, before its last projection. Layers that are `delta` in the pattern are Gated DeltaNet
    (arXiv:2412.06464): `delta_heads` heads with values of `delta_value_dim`, of which several share
    the queries and keys of one of `delta_key_heads`, of `delta_key_dim`, after a causal convolution
    of `delta_kernel` tokens. Those that are `mamba` are Mamba-2 (arXiv:2405.21060): `mamba_heads`
    heads of `mamba_head_dim`, with states of that times `mamba_state`, whose keys and queries the
    heads of each of `mamba_groups` share, after a causal convolution of `mamba_kernel` tokens; the
    steps of tokens stay in `mamba_dt_limit`.

    With `pad_vocab_to_multiple_of`, the embedding and the head have rows after the vocabulary's, up
    to a multiple of it. These rows are zero and stay zero, and have no logits. None: only where
    tensor parallelism needs them (`padded`).

    With `lora`, of the section of that name, linear layers have adapters, and only these are
    trained.

    With `planned`, it is a model of a type that has no modules here, read from its shapes: it can
    be planned, but not trained. Its `family` is the nearest one; the features are its own.
    """

    preset: str | None = None
    family: Family = "llama"
    vocab_size: int = Field(gt=0, le=LARGEST)
    pad_vocab_to_multiple_of: int | None = Field(default=None, gt=0, le=LARGEST)
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
    attention_sinks: bool = False
    mlp_bias: bool = False
    embedding_scale: float = Field(default=1.0, gt=0)
    attention_scale: float | None = Field(default=None, gt=0)
    residual_scale: float = Field(default=1.0, gt=0)
    logits_divisor: float = Field(default=1.0, gt=0)
    attention_softcap: float | None = Field(default=None, gt=0)
    logits_softcap: float | None = Field(default=None, gt=0)
    layer_pattern: Annotated[tuple[LayerSpec, ...], BeforeValidator(as_tuple)] = ()
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    experts: int = Field(default=0, ge=0, le=MOST_EXPERTS)
    top_k: int = Field(default=0, ge=0, le=MOST_EXPERTS)
    expert_ffn_dim: int | None = Field(default=None, gt=0, le=LARGEST)
    norm_top_k: bool = True
    expert_bias: bool = False
    swiglu_limit: float | None = Field(default=None, gt=0)
    swiglu_alpha: float = Field(default=1.0, gt=0)
    shared_ffn_dim: int = Field(default=0, ge=0, le=LARGEST)
    shared_gate: bool = False
    dense_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    expert_groups: int = Field(default=1, gt=0, le=MOST_EXPERTS)
    top_groups: int = Field(default=1, gt=0, le=MOST_EXPERTS)
    routed_scale: float = Field(default=1.0, gt=0)
    q_lora_rank: int = Field(default=0, ge=0, le=LARGEST)
    kv_lora_rank: int = Field(default=0, ge=0, le=LARGEST)
    qk_nope_head_dim: int = Field(default=0, ge=0, le=LARGEST)
    qk_rope_head_dim: int = Field(default=0, ge=0, le=LARGEST)
    v_head_dim: int = Field(default=0, ge=0, le=LARGEST)
    rope_interleave: bool = False
    attention_gate: bool = False
    delta_heads: int = Field(default=0, ge=0, le=LARGEST)
    delta_key_heads: int = Field(default=0, ge=0, le=LARGEST)
    delta_key_dim: int = Field(default=0, ge=0, le=LARGEST)
    delta_value_dim: int = Field(default=0, ge=0, le=LARGEST)
    delta_kernel: int = Field(default=0, ge=0, le=LARGEST)
    mamba_heads: int = Field(default=0, ge=0, le=LARGEST)
    mamba_head_dim: int = Field(default=0, ge=0, le=LARGEST)
    mamba_groups: int = Field(default=0, ge=0, le=LARGEST)
    mamba_state: int = Field(default=0, ge=0, le=LARGEST)
    mamba_kernel: int = Field(default=0, ge=0, le=LARGEST)
    mamba_dt_limit: Annotated[
        tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] | None,
        BeforeValidator(as_tuple),
    ] = None
    dropout: float = Field(default=0.0, ge=0, lt=1)
    init_std: float = Field(default=0.02, gt=0)
    init_from: str | None = None
    planned: Planned | None = None
    lora: Lora | None = None

    @property
    def adapted(self) -> frozenset[str]:
        """The linear layers of a layer that have adapters, as `attn.q`."""
        return adapted(self.lora, self.blocks)

    @property
    def blocks(self) -> BlockKinds:
        """The features that determine which linear layers the model's blocks have."""
        features = (self.shared_ffn_dim > 0, self.has_dense, self.is_latent, self.q_lora_rank > 0)
        return BlockKinds(self.family, self.gated_mlp, self.experts, *features)

    @property
    def drops(self) -> bool:
        """Whether training uses dropout, of the model or of its adapters."""
        return self.dropout > 0 or (self.lora is not None and self.lora.dropout > 0)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head: the vocabulary and its padding."""
        return round_up(self.vocab_size, self.pad_vocab_to_multiple_of or 1)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that RoPE rotates (GPT-NeoX `rotary_ndims`)."""
        if self.is_latent:
            return self.qk_rope_head_dim
        return int(self.head_dim * self.rotary_pct)

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are computed from a latent vector."""
        return self.kv_lora_rank > 0

    @property
    def has_delta(self) -> bool:
        """Whether a layer has Gated DeltaNet."""
        return self.delta_heads > 0 and any(kind.delta for kind in self.layer_kinds)

    @property
    def has_mamba(self) -> bool:
        """Whether a layer has Mamba-2."""
        return self.mamba_heads > 0 and any(kind.mamba for kind in self.layer_kinds)

    @property
    def recurs(self) -> bool:
        """Whether a layer has a recurrence in place of attention."""
        return self.has_delta or self.has_mamba

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.v_head_dim or self.head_dim

    @property
    def core_dim(self) -> int:
        """Dimensions of queries, keys and values in attention; smaller ones are padded."""
        return max(self.head_dim, self.value_dim)

    @property
    def has_router_bias(self) -> bool:
        """Whether layers with experts have a correction of their scores, a buffer."""
        return self.experts > 0 and self.router_scores == "sigmoid"

    def __hash__(self) -> int:  # of what tells the models of a search apart: all would be slow
        return hash((self.dim, self.n_layers, self.dense_layers, self.layer_pattern[:1]))

    def layer(self, index: int) -> LayerSpec:
        """Return the spec of a layer, given its number."""
        pattern = self.layer_pattern
        kind = pattern[index % len(pattern)] if pattern else PLAIN_LAYER
        return _dense(kind) if index < self.dense_layers else kind

    def alike(self, kind: LayerSpec, **update: Any) -> ModelSpec:
        """Return a copy of the model in which all layers are of `kind`, with further updated
        fields.
        """
        return self.model_copy(update={"layer_pattern": (kind,), "dense_layers": 0, **update})

    def has_experts(self, layer: LayerSpec) -> bool:
        """Whether a layer has experts instead of one MLP."""
        return self.experts > 0 and layer.feeds and not layer.dense

    @property
    def expert_width(self) -> int:
        """Width of an expert's projections."""
        return self.ffn_dim if self.expert_ffn_dim is None else self.expert_ffn_dim

    @property
    def has_dense(self) -> bool:
        """Whether a layer has one MLP where others have experts."""
        return self.dense_layers > 0 or any(layer.dense for layer in self.layer_pattern)

    def rotary_base(self, layer: LayerSpec) -> RotaryBase | None:
        """Return the rotary base of a layer; None if it rotates nothing."""
        if not layer.rotary or layer.recurs or self.rotary_dim == 0:
            return None
        if layer.rope_theta is not None:
            return RotaryBase(layer.rope_theta, scaled=False)
        return RotaryBase(self.rope_theta, scaled=self.rope_scaling is not None)

    @property
    def rotary_bases(self) -> tuple[RotaryBase, ...]:
        """The distinct rotary bases of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(filter(None, map(self.rotary_base, self.layer_kinds))))

    @property
    def layer_kinds(self) -> tuple[LayerSpec, ...]:
        """The distinct kinds of layers, in the order of their first layers."""
        kinds = max(len(self.layer_pattern), 1) + self.dense_layers  # all are among the first
        return tuple(dict.fromkeys(map(self.layer, range(min(kinds, self.n_layers)))))

    @property
    def norms_before(self) -> bool:
        """Whether sublayers normalize their input from the residual stream."""
        return self.norm_placement != "after"

    @property
    def norms_after(self) -> bool:
        """Whether sublayers normalize their output before it is added to the residual stream."""
        return self.norm_placement != "before"

    @property
    def has_output_bias(self) -> bool:
        """Whether attention's last projection has a bias."""
        return self.attention_bias if self.output_bias is None else self.output_bias

    @property
    def query_scale(self) -> float:
        """The factor of queries before attention, which divides by `sqrt(core_dim)`.

        For latent attention, it includes YaRN's length scale, if `mscale_all_dim` sets it.
        """
        scale = 1.0 if self.attention_scale is None else self.attention_scale * self.head_dim**0.5
        if self.is_latent and self.rope_scaling is not None:
            scale *= self.rope_scaling.score_factor
        return scale * math.sqrt(self.core_dim / self.head_dim)

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that identify the model, without fields that its family fixes."""
        implied = LATER & FAMILIES[self.family].features.keys()
        unused = {key for key in NEWEST if getattr(self, key) == FEATURES[key]}
        if self.pad_vocab_to_multiple_of is None:
            unused.add(OF_PADDING)
        if self.planned is None:
            unused.add("planned")
        return self.model_dump(mode="json", exclude={*implied, *unused})

    @model_validator(mode="before")
    @classmethod
    def _of_family(cls, values: Any) -> Any:
        """Fill in fields that are the same for all models of the family, where they are not
        given.
        """
        if not isinstance(values, Mapping):
            return values
        name = values.get("family", "llama")  # of any type: it is not validated yet
        family = FAMILIES.get(name) if isinstance(name, str) else None
        if family is None or values.get("planned") is not None:  # all features are its own
            return values
        dim = values.get("dim")
        derived = {}
        if isinstance(dim, int) and 0 < dim <= LARGEST:
            derived = family.of_width(dim)
        return {**family.features, **derived, **values}

    @model_validator(mode="after")
    def _rules(self) -> ModelSpec:
        if self.n_heads % self.n_kv_heads:
            rule = f"model.n_kv_heads = {self.n_kv_heads} must divide "
            rule += f"model.n_heads = {self.n_heads}"
            raise ValueError(refusal(rule, legal=nearest_divisors(self.n_heads, self.n_kv_heads)))
        if self.rotary_dim % 2:
            raise ValueError(
                f"the rotated part of a head must be even, but model.head_dim = {self.head_dim} "
                f"x model.rotary_pct = {self.rotary_pct} gives {self.rotary_dim}; "
                "left out, model.head_dim is model.dim / model.n_heads"
            )
        if self.rope_scaling is not None and self.rotary_dim:
            self.rope_scaling.check_pairs(self.rotary_dim // 2, self.rope_theta)
        self._check_planned()
        if self.planned is None:
            FAMILIES[self.family].refuse_others(dict(self))
        self._check_experts()
        self._check_gates()  # first: of these layers no linear layer can be a target
        check_targets(self.lora, self.blocks)
        self._check_router()
        self._check_latent()
        self._check_delta()
        self._check_mamba()
        return self

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave absent adapters out of dumps, so that these equal those of earlier versions."""
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if key != "lora" or value is not None}

    def _check_planned(self) -> None:
        """Raise `ValueError` for what has no modules, or adapters of it, in a model to train."""
        if self.planned is None:
            if any(layer.mixer is not None for layer in self.layer_pattern):
                rule = "model.layer_pattern has a mixer, which can be planned, but not trained"
                raise ValueError(refusal(rule, legal=["model.planned, beside it"]))
        elif self.lora is not None:
            rule = f"lora.rank = {self.lora.rank}: adapters of {self.planned.model_type}, which is "
            raise ValueError(refusal(f"{rule}planned only, are not known", legal=["lora.rank = 0"]))

    def _check_experts(self) -> None:
        if not self.experts:
            defaults = {
                "top_k": 0,
                "shared_ffn_dim": 0,
                "expert_ffn_dim": None,
                "swiglu_limit": None,
            }
            for key, none in defaults.items():
                if (value := getattr(self, key)) != none:
                    raise ValueError(f"model.{key} = {value} needs experts, but model.experts = 0")
            if self.has_dense:
                raise ValueError("model.dense_layers, model.layer_pattern need model.experts > 0")
        elif not 1 <= self.top_k <= self.experts:
            rule = f"model.top_k = {self.top_k} must be from 1 to model.experts = {self.experts}"
            raise ValueError(refusal(rule, legal=[min(max(self.top_k, 1), self.experts)]))
        if self.swiglu_limit is not None and (self.shared_ffn_dim or self.has_dense):
            rule = f"model.swiglu_limit = {self.swiglu_limit} is of experts that a router picks"
            raise ValueError(f"{rule}: there can be neither a shared expert nor a dense layer")
        if self.shared_gate and self.experts and not self.shared_ffn_dim:
            rule = "model.shared_gate = true needs a shared expert, but model.shared_ffn_dim = 0"
            raise ValueError(refusal(rule, legal=["model.shared_gate = false"]))

    def _check_router(self) -> None:
        """Raise `ValueError` for groups that do not fit the number of experts."""
        groups, top = self.expert_groups, self.top_groups
        if groups == 1 and top == 1:
            return
        if self.router_scores != "sigmoid":
            rule = f"model.expert_groups = {groups} needs model.router_scores = 'sigmoid'"
            raise ValueError(refusal(rule, legal=["model.expert_groups = 1"]))
        if self.experts % groups or self.experts // groups < 2:
            rule = f"model.expert_groups = {groups} must give model.experts = {self.experts} groups"
            legal = [n for n in nearest_divisors(self.experts, groups) if n < self.experts]
            raise ValueError(refusal(f"{rule} of at least 2", legal=legal or [1]))
        fewest = -(-self.top_k * groups // self.experts)
        if not fewest <= top <= groups:
            rule = f"model.top_groups = {top} of model.expert_groups = {groups} must be at least "
            rule += (
                f"{fewest}, which have model.top_k = {self.top_k} experts, and not more than all"
            )
            raise ValueError(refusal(rule, legal=[min(max(top, fewest), groups)]))

    def _check_gates(self) -> None:
        """Raise `ValueError` for adapters of recurrences and gates, and gates of latent vectors."""
        gated = self.planned is None and self.attention_gate
        if self.lora is not None and (gated or self.recurs):
            layers = "Mamba-2" if self.has_mamba else "Gated DeltaNet and gated attention"
            rule = f"lora.rank = {self.lora.rank}: adapters of {layers}"
            raise ValueError(refusal(f"{rule} are not supported", legal=["lora.rank = 0"]))
        if gated and self.is_latent:
            rule = "model.attention_gate = true is not supported for latent attention"
            raise ValueError(refusal(rule, legal=["model.kv_lora_rank = 0"]))

    def _need_sizes(self, kind: Literal["delta", "mamba"], keys: Iterable[str]) -> None:
        """Raise `ValueError` for a size of a kind of recurrence that is not set."""
        for key in keys:
            if not getattr(self, f"{kind}_{key}"):
                rule = f"layers with {kind} = true need model.{kind}_{key} of at least 1"
                raise ValueError(rule)

    def _check_delta(self) -> None:
        """Raise `ValueError` for sizes of Gated DeltaNet that do not fit."""
        if not any(kind.delta for kind in self.layer_kinds):
            return
        self._need_sizes("delta", ("heads", "key_heads", "key_dim", "value_dim", "kernel"))
        if self.delta_heads % self.delta_key_heads:
            rule = f"model.delta_key_heads = {self.delta_key_heads} must divide "
            rule += f"model.delta_heads = {self.delta_heads}"
            legal = nearest_divisors(self.delta_heads, self.delta_key_heads)
            raise ValueError(refusal(rule, legal=legal))

    def _check_mamba(self) -> None:
        """Raise `ValueError` for sizes of Mamba-2 that do not fit."""
        if not any(kind.mamba for kind in self.layer_kinds):
            return
        if any(kind.mamba and kind.delta for kind in self.layer_kinds):
            raise ValueError("a layer has one recurrence: delta or mamba, not both")
        self._need_sizes("mamba", ("heads", "head_dim", "groups", "state", "kernel"))
        if self.mamba_heads % self.mamba_groups:
            rule = f"model.mamba_groups = {self.mamba_groups} must divide "
            rule += f"model.mamba_heads = {self.mamba_heads}"
            legal = nearest_divisors(self.mamba_heads, self.mamba_groups)
            raise ValueError(refusal(rule, legal=legal))
        if self.mamba_dt_limit is not None and self.mamba_dt_limit[0] > self.mamba_dt_limit[1]:
            first, second = self.mamba_dt_limit
            rule = f"model.mamba_dt_limit = [{first}, {second}]: the least step is the first"
            raise ValueError(refusal(rule, legal=[f"[{second}, {first}]"]))

    def _check_latent(self) -> None:
        """Raise `ValueError` for sizes of latent attention that do not fit each other."""
        sizes = {
            key: getattr(self, key)
            for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        }
        if not self.is_latent:
            for key, value in sizes.items():
                if value:
                    rule = f"model.{key} = {value} needs model.kv_lora_rank above 0"
                    raise ValueError(refusal(rule, legal=[f"model.{key} = 0"]))
            return
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if not sizes[key]:
                raise ValueError(f"latent attention (model.kv_lora_rank) needs model.{key}")
        total = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.head_dim != total:
            rule = f"model.head_dim = {self.head_dim} must be model.qk_nope_head_dim = "
            rule += f"{self.qk_nope_head_dim} + model.qk_rope_head_dim = {self.qk_rope_head_dim}"
            raise ValueError(refusal(rule, legal=[total]))


def padded(spec: ModelSpec, tp: int) -> ModelSpec:
    """Return the model with embedding and head padded so that `tp` divides their rows.

    Where the config doesn't set a multiple for the vocabulary, it is padded only if necessary.
    """
    multiple = spec.pad_vocab_to_multiple_of
    if multiple is None:
        return spec if spec.vocab_size % tp == 0 else _with_padding(spec, VOCAB_MULTIPLE, tp)
    return spec if multiple % tp == 0 else _with_padding(spec, multiple, tp)


@lru_cache(maxsize=256)
def _with_padding(spec: ModelSpec, multiple: int, tp: int) -> ModelSpec:
    return spec.model_copy(update={OF_PADDING: math.lcm(multiple, tp)})


def unpadded(spec: ModelSpec) -> ModelSpec:
    """Return the model without vocabulary padding, as it is stored and exported."""
    if spec.pad_vocab_to_multiple_of is None:
        return spec
    return spec.model_copy(update={OF_PADDING: None})
