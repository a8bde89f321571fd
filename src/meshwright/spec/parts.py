"""The parameters of a model: name, shape and logical axes of each, without building the model.

The names are those of the `nn.Module`s in `models`; a test holds the two equal. Logical axes name
what a tensor dim means (`vocab`, `dim`, `heads`, `kv_heads`, `ffn`, `head_dim`), so that a
parallelism can map an axis of the mesh to a dim of the tensor by its meaning. A parameter of all
experts of a layer has the axis `experts` first; `routes` are the scores of a router.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.spec.model import LayerSpec, ModelSpec


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
        """Whether tokens are multiplied by it: matrices that are not only looked up."""
        return len(self.shape) >= 2 and self.name != "embed.weight"

    @property
    def is_of_experts(self) -> bool:
        """Whether it has a matrix of each expert, of which a token meets a few."""
        return self.axes[0] == "experts"

    def active(self, spec: ModelSpec) -> int:
        """Return the elements that a token meets: of experts those of its `top_k`."""
        return self.numel * spec.top_k // spec.experts if self.is_of_experts else self.numel


def parts(spec: ModelSpec) -> tuple[Part, ...]:
    """Return the parameters of the model in the order of the module's `named_parameters`."""
    found = [Part("embed.weight", (spec.vocab_size, spec.dim), ("vocab", "dim"))]
    for layer in range(spec.n_layers):
        found += _block(spec, spec.layer(layer), f"layers.{layer}")
    found += _norm(spec, "norm")
    if not spec.tie_embeddings:
        found.append(Part("head.weight", (spec.vocab_size, spec.dim), ("vocab", "dim")))
    return tuple(found)


def _block(spec: ModelSpec, kind: LayerSpec, at: str) -> Iterator[Part]:
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
    if spec.has_experts(kind):
        yield from _experts(spec, f"{at}.mlp")
    else:
        yield from _mlp(spec, f"{at}.mlp", spec.ffn_dim)
    if spec.norms_after:
        yield from _norm(spec, f"{at}.mlp_post_norm")


def _mlp(spec: ModelSpec, at: str, width: int) -> Iterator[Part]:
    for name in ("gate", "up") if spec.gated_mlp else ("up",):
        yield from _linear(f"{at}.{name}", (width, "ffn"), (spec.dim, "dim"), spec.mlp_bias)
    yield from _linear(f"{at}.down", (spec.dim, "dim"), (width, "ffn"), spec.mlp_bias)


def _experts(spec: ModelSpec, at: str) -> Iterator[Part]:
    count, width = spec.experts, spec.expert_width
    yield Part(f"{at}.router.weight", (count, spec.dim), ("routes", "dim"))
    for name in ("gate", "up"):
        inner = f"{at}.experts.{name}.weight"
        yield Part(inner, (count, width, spec.dim), ("experts", "ffn", "dim"))
    outer = f"{at}.experts.down.weight"
    yield Part(outer, (count, spec.dim, width), ("experts", "dim", "ffn"))
    if spec.shared_ffn_dim:
        yield from _mlp(spec, f"{at}.shared", spec.shared_ffn_dim)
    if spec.shared_gate:
        yield Part(f"{at}.shared_gate.weight", (1, spec.dim), ("routes", "dim"))


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


def active_parameter_count(spec: ModelSpec) -> int:
    """Return the number of parameters that a token meets: of experts its `top_k`."""
    return sum(part.active(spec) for part in parts(spec))
