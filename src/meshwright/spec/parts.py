"""The parameters of a model: name, shape and logical axes of each, without building the model.

The names are those of the `nn.Module`s in `models`; a test holds the two equal. Logical axes name
what a tensor dim means (`vocab`, `dim`, `heads`, `kv_heads`, `ffn`, `head_dim`), so that a
parallelism can map an axis of the mesh to a dim of the tensor by its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.spec.model import ModelSpec


@dataclass(frozen=True)
class Part:
    """One parameter: its global name, its shape and the logical axis of each dim."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole, unsharded parameter."""
        return math.prod(self.shape)

    @property
    def is_product(self) -> bool:
        """Whether each token is multiplied by it: a matrix that is not only looked up."""
        return len(self.shape) == 2 and self.name != "embed.weight"


def parts(spec: ModelSpec) -> tuple[Part, ...]:
    """Return the parameters of the model in the order of the module's `named_parameters`."""
    found = [Part("embed.weight", (spec.vocab_size, spec.dim), ("vocab", "dim"))]
    for layer in range(spec.n_layers):
        found += _block(spec, f"layers.{layer}")
    found += _norm(spec, "norm")
    if not spec.tie_embeddings:
        found.append(Part("head.weight", (spec.vocab_size, spec.dim), ("vocab", "dim")))
    return tuple(found)


def _block(spec: ModelSpec, at: str) -> Iterator[Part]:
    heads, kv_heads = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    if spec.norms_before:
        yield from _norm(spec, f"{at}.attn_norm")
    bias = spec.attention_bias
    yield from _linear(f"{at}.attn.q", (heads, "heads"), (spec.dim, "dim"), bias)
    yield from _linear(f"{at}.attn.k", (kv_heads, "kv_heads"), (spec.dim, "dim"), bias)
    yield from _linear(f"{at}.attn.v", (kv_heads, "kv_heads"), (spec.dim, "dim"), bias)
    yield from _linear(f"{at}.attn.o", (spec.dim, "dim"), (heads, "heads"), spec.has_output_bias)
    if spec.qk_norm == "head":
        for name in ("q_norm", "k_norm"):
            yield Part(f"{at}.attn.{name}.weight", (spec.head_dim,), ("head_dim",))
    elif spec.qk_norm == "all":
        yield Part(f"{at}.attn.q_norm.weight", (heads,), ("heads",))
        yield Part(f"{at}.attn.k_norm.weight", (kv_heads,), ("kv_heads",))
    if spec.norms_after:
        yield from _norm(spec, f"{at}.attn_post_norm")
    if spec.norms_before:
        yield from _norm(spec, f"{at}.mlp_norm")
    names = ("gate", "up") if spec.gated_mlp else ("up",)
    for name in names:
        yield from _linear(
            f"{at}.mlp.{name}", (spec.ffn_dim, "ffn"), (spec.dim, "dim"), spec.mlp_bias
        )
    yield from _linear(f"{at}.mlp.down", (spec.dim, "dim"), (spec.ffn_dim, "ffn"), spec.mlp_bias)
    if spec.norms_after:
        yield from _norm(spec, f"{at}.mlp_post_norm")


def _norm(spec: ModelSpec, at: str) -> Iterator[Part]:
    yield Part(f"{at}.weight", (spec.dim,), ("dim",))
    if spec.norm == "layer":
        yield Part(f"{at}.bias", (spec.dim,), ("dim",))


def _linear(at: str, out: tuple[int, str], inner: tuple[int, str], bias: bool) -> Iterator[Part]:
    yield Part(f"{at}.weight", (out[0], inner[0]), (out[1], inner[1]))
    if bias:
        yield Part(f"{at}.bias", (out[0],), (out[1],))


def parameter_count(spec: ModelSpec) -> int:
    """Return the number of parameters, a tied matrix counted once."""
    return sum(part.numel for part in parts(spec))
