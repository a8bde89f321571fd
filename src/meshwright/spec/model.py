"""`ModelSpec`: the architecture of a Llama or GPT-NeoX model, and the rules that it obeys."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.errors import nearest_divisors, refusal

# Far above what anybody trains: a program has a row for each layer, microbatch and rank.
LARGEST: Final = 2**31 - 1
MOST_LAYERS: Final = 2048
Family = Literal["llama", "neox"]


class Spec(BaseModel):
    """Base of all specs: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )


class RopeScaling(Spec):
    """Rescaling of the rotary frequencies for longer contexts.

    `linear` divides all frequencies by `factor`. `llama3` (Llama 3.1, "rope scaling" of its model
    card; transformers `_compute_llama3_parameters`) divides those whose wavelength exceeds
    `original_context / low_freq_factor`, keeps those below `original_context / high_freq_factor`
    and interpolates between.
    """

    kind: Literal["linear", "llama3"]
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_context: int = Field(default=8192, gt=0, le=LARGEST)


class ModelSpec(Spec):
    """Architecture of one model; every size is resolved.

    `context` is the longest sequence that the model is meant for (`max_position_embeddings`); the
    sequence length of training is `train.seq_len`. `ffn_dim` is the width of one projection
    (SwiGLU has three matrices of it, the NeoX MLP two). `rotary_pct` is the share of each head's
    dimensions that is rotated. `dropout` is the share that training drops of the embedding's output
    and of what each attention and MLP adds to the residual stream (GPT-NeoX `hidden_dropout`).
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
    parallel_residual: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    init_std: float = Field(default=0.02, gt=0)
    init_from: str | None = None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that RoPE rotates (GPT-NeoX `rotary_ndims`)."""
        return int(self.head_dim * self.rotary_pct)

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
        if self.family == "llama" and (self.parallel_residual or self.rotary_pct != 1.0):
            raise ValueError(
                "model.parallel_residual and model.rotary_pct are of the neox family; "
                "model.family is llama"
            )
        if self.family == "neox" and self.n_kv_heads != self.n_heads:
            raise ValueError(
                refusal(
                    f"the neox family has one key/value head per head, but model.n_kv_heads = "
                    f"{self.n_kv_heads} and model.n_heads = {self.n_heads}",
                    legal=[f"model.n_kv_heads = {self.n_heads}"],
                )
            )
        return self
