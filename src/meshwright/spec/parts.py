"""The parameters of a model: name, shape and logical axes of each, without building the model.

The names are those of the `nn.Module`s in `models`; a test compares them. Logical axes name the
meaning of a tensor dim (`vocab`, `dim`, `heads`, `kv_heads`, `ffn`, `head_dim`), so that a
parallelism can map an axis of the mesh to a dim of the tensor by its meaning. A parameter of all
experts of a layer has the axis `experts` first; `routes` are a router's scores, `latent` the
vectors from which latent attention computes heads, `rank` the inner axis of an adapter's two
matrices; `taps` are the tokens that a convolution sees; an `addend` is added once to a sum over
what tensor parallelism shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from meshwright.spec.families import FAMILIES
from meshwright.spec.lora import JOINED, LINEAR, matrices
from meshwright.spec.mixers import Matrix, Mixer
from meshwright.spec.model import LayerSpec, ModelSpec, unpadded

Side = tuple[int, str]
"""One side of a matrix: its size and its logical axis."""


class Linear(NamedTuple):
    """A linear layer of a block: its name in the block, and the size and axis of outputs and
    inputs.
    """

    name: str
    outer: Side
    inner: Side
    has_bias: bool

    @property
    def norm(self) -> str | None:
        """The name of the norm of its inputs, if these are latent vectors."""
        return f"{self.name.removesuffix('b')}a_norm" if self.inner[1] == "latent" else None


@dataclass(frozen=True)
class Part:
    """One parameter: its global name, its whole shape and the logical axis of each dim.

    If not `trained`, it has neither gradient nor optimizer state. With `is_nf4` it is stored in
    NF4. The last `padding` rows are zero and stay zero: they are not saved.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    trained: bool = True
    is_nf4: bool = False
    padding: int = 0

    @property
    def real_shape(self) -> tuple[int, ...]:
        """Its shape without padding, as it is stored."""
        return (self.shape[0] - self.padding, *self.shape[1:])

    @property
    def numel(self) -> int:
        """Elements of the whole, unsharded parameter."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or one per expert; biases, norms and sinks are vectors."""
        return len(self.axes) - self.is_of_experts == 2

    @property
    def is_matmul(self) -> bool:
        """Whether tokens are multiplied by it; false for embeddings, which are only looked up."""
        return self.is_matrix and not self.is_lookup

    @property
    def is_lookup(self) -> bool:
        """Whether it is an embedding, with a row per vocabulary entry that is only looked up."""
        return self.name == "embed.weight" or (self.axes[0] == "vocab" and ".mixer." in self.name)

    @property
    def is_adapter(self) -> bool:
        """Whether it is a LoRA matrix."""
        return "rank" in self.axes

    @property
    def is_of_experts(self) -> bool:
        """Whether it has one matrix or vector per expert."""
        return self.axes[0] == "experts"

    def active(self, spec: ModelSpec) -> int:
        """Return the number of elements that one token uses: for experts, those of `top_k`
        of them.
        """
        return self.numel * spec.top_k // spec.experts if self.is_of_experts else self.numel


@lru_cache(maxsize=64)
def parts(spec: ModelSpec) -> tuple[Part, ...]:
    """Return the parameters of the model in the order of the module's `named_parameters`."""
    parameters = [_of_vocabulary(spec, "embed.weight")]
    for layer in range(spec.n_layers):
        parameters += _block(spec, spec.layer(layer), f"layers.{layer}")
    parameters += _norm(spec, "norm")
    if not spec.tie_embeddings:
        parameters.append(_of_vocabulary(spec, "head.weight"))
    if spec.lora is None:
        return tuple(parameters)
    return tuple(replace(part, trained=part.is_adapter) for part in parameters)


@lru_cache(maxsize=64)
def names_by_layer(spec: ModelSpec) -> Mapping[int | None, tuple[str, ...]]:
    """Return the parameter names of each layer; the key None has those outside of layers."""
    by_layer: dict[int | None, list[str]] = {None: []}
    for part in parts(spec):
        prefix, _, suffix = part.name.partition(".")
        layer = int(suffix.partition(".")[0]) if prefix == "layers" else None
        by_layer.setdefault(layer, []).append(part.name)
    return {layer: tuple(names) for layer, names in by_layer.items()}


def _of_vocabulary(spec: ModelSpec, name: str) -> Part:
    shape, padding = (spec.vocab_rows, spec.dim), spec.vocab_rows - spec.vocab_size
    return Part(name, shape, ("vocab", "dim"), padding=padding)


def _block(spec: ModelSpec, kind: LayerSpec, path: str) -> Iterator[Part]:
    if kind.mixes and spec.norms_before:
        yield from _norm(spec, f"{path}.attn_norm")
    if kind.delta:
        yield from _delta(spec, path)
    if kind.mamba:
        yield from _mamba(spec, path)
    if kind.attends:
        yield from _attention(spec, path)
    if kind.mixer is not None:
        yield from _mixer(spec, kind.mixer, path)
    if kind.mixes and spec.norms_after:
        yield from _norm(spec, f"{path}.attn_post_norm")
    if not kind.feeds:
        return
    if spec.norms_before:
        yield from _norm(spec, f"{path}.mlp_norm")
    if spec.has_experts(kind):
        yield from _experts(spec, path)
    else:
        yield from _linears(spec, path, mlp_linears(spec))
    if spec.norms_after:
        yield from _norm(spec, f"{path}.mlp_post_norm")


# The axes of a matrix, by the side that tensor parallelism cuts.
_CUT_AXES: Final = {
    "outer": ("heads", "dim"),
    "inner": ("dim", "heads"),
    "whole": ("latent", "dim"),
}


def mixer_linear(matrix: Matrix) -> Linear:
    """Return a `Mixer`'s matrix as a linear layer."""
    outer, inner = ("vocab", "dim") if matrix.lookup else _CUT_AXES[matrix.cut]
    return Linear(matrix.name, (matrix.outer, outer), (matrix.inner, inner), False)


def _mixer(spec: ModelSpec, mixer: Mixer, path: str) -> Iterator[Part]:
    """Yield the parameters of a `Mixer`, which has no module here."""
    yield from _linears(spec, path, map(mixer_linear, mixer.matrices))
    if mixer.vectors:
        yield Part(f"{path}.mixer.vectors", (mixer.vectors,), ("latent",))


def _attention(spec: ModelSpec, path: str) -> Iterator[Part]:
    if spec.attention_sinks and not spec.is_latent:
        yield Part(f"{path}.attn.sinks", (spec.n_heads,), ("heads",))
    for linear in attention_linears(spec):
        if linear.norm is not None:
            width, axis = linear.inner
            yield Part(f"{path}.{linear.norm}.weight", (width,), (axis,))
        yield from _linear(spec, path, *linear)
    if spec.is_latent:
        return
    if spec.qk_norm == "head":
        for name in ("q_norm", "k_norm"):
            yield Part(f"{path}.attn.{name}.weight", (spec.head_dim,), ("head_dim",))
    elif spec.qk_norm == "all":
        heads, kv_heads = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        yield Part(f"{path}.attn.q_norm.weight", (heads,), ("heads",))
        yield Part(f"{path}.attn.k_norm.weight", (kv_heads,), ("kv_heads",))


def delta_shape(spec: ModelSpec, tp: int = 1) -> tuple[int, int, int, int]:
    """Return a tp rank's heads, key heads, key dim and value dim of Gated DeltaNet."""
    heads, key_heads = spec.delta_heads // tp, spec.delta_key_heads // tp
    return heads, key_heads, spec.delta_key_dim, spec.delta_value_dim


class DeltaWidths(NamedTuple):
    """Widths in Gated DeltaNet: of all keys, which is that of all queries, of all values, and the
    number of value heads.
    """

    keys: int
    values: int
    heads: int

    @classmethod
    def of(cls, spec: ModelSpec, tp: int = 1) -> DeltaWidths:
        """Return the widths on each of `tp` ranks that share the heads."""
        heads, key_heads, key_dim, value_dim = delta_shape(spec, tp)
        return cls(key_heads * key_dim, heads * value_dim, heads)


def _delta(spec: ModelSpec, path: str) -> Iterator[Part]:
    """Yield the parameters of Gated DeltaNet."""
    keys, values, _ = DeltaWidths.of(spec)
    for name, channels in (("q", keys), ("k", keys), ("v", values)):
        shape = (channels, 1, spec.delta_kernel)
        yield Part(f"{path}.attn.{name}_conv", shape, ("heads", "taps", "taps"))
    for name in ("a_log", "dt_bias"):
        yield Part(f"{path}.attn.{name}", (spec.delta_heads,), ("heads",))
    yield from _linears(spec, path, delta_linears(spec))
    yield Part(f"{path}.attn.gated_norm.weight", (spec.delta_value_dim,), ("head_dim",))


def delta_linears(spec: ModelSpec) -> tuple[Linear, ...]:
    """Return the linear layers of Gated DeltaNet, `out` last; tp shards all by key heads."""
    keys, values, heads = DeltaWidths.of(spec)
    stream = spec.dim, "dim"
    columns = {"queries": keys, "keys": keys, "values": values, "z": values, "b": heads, "a": heads}
    first = (
        Linear(f"attn.{name}", (size, "heads"), stream, False) for name, size in columns.items()
    )
    return (*first, Linear("attn.out", stream, (values, "heads"), False))


def mamba_shape(spec: ModelSpec, tp: int = 1) -> tuple[int, int, int, int]:
    """Return heads, groups, dims of the state and of a head of a rank's Mamba-2.

    A group that several ranks have heads of counts on each of them.
    """
    groups = max(spec.mamba_groups // tp, 1)
    return spec.mamba_heads // tp, groups, spec.mamba_state, spec.mamba_head_dim


def _mamba(spec: ModelSpec, path: str) -> Iterator[Part]:
    """Yield the parameters of Mamba-2."""
    values = spec.mamba_heads * spec.mamba_head_dim, "heads"
    for name in ("a_log", "dt_bias", "skip"):
        yield Part(f"{path}.attn.{name}", (spec.mamba_heads,), ("heads",))
    yield from _linears(spec, path, mamba_linears(spec))
    of_groups = 2 * spec.mamba_groups * spec.mamba_state, "latent"
    for name, (channels, axis) in (("x", values), ("bc", of_groups)):
        conv = f"{path}.attn.{name}_conv"
        yield Part(f"{conv}.weight", (channels, 1, spec.mamba_kernel), (axis, "taps", "taps"))
        yield Part(f"{conv}.bias", (channels,), (axis,))
    yield Part(f"{path}.attn.gated_norm.weight", values[:1], values[1:])


def mamba_linears(spec: ModelSpec) -> tuple[Linear, ...]:
    """Return the linear layers of Mamba-2, `out` last.

    A rank of tp has heads of all but `bc`, the keys and queries of groups, which it has whole.
    """
    stream, values = (spec.dim, "dim"), (spec.mamba_heads * spec.mamba_head_dim, "heads")
    of_groups = 2 * spec.mamba_groups * spec.mamba_state, "latent"
    columns = {"z": values, "x": values, "bc": of_groups, "dt": (spec.mamba_heads, "heads")}
    first = (Linear(f"attn.{name}", side, stream, False) for name, side in columns.items())
    return (*first, Linear("attn.out", stream, values, False))


def attention_linears(spec: ModelSpec) -> tuple[Linear, ...]:
    """Return the linear layers of attention, `o` last.

    In latent attention, layers named `_a` compute latent vectors, and those named `_b` compute
    heads from them.
    """
    stream, bias = (spec.dim, "dim"), spec.attention_bias
    queries, values = spec.n_heads * spec.head_dim, spec.n_heads * spec.value_dim
    heads = queries, "heads"
    last = Linear("attn.o", stream, (values, "heads"), spec.has_output_bias)
    if not spec.is_latent:
        keys = spec.n_kv_heads * spec.head_dim, "kv_heads"
        sides = {"attn.q": heads, "attn.k": keys, "attn.v": keys}
        sides |= {"attn.gate": heads} if spec.attention_gate else {}
        return (*(Linear(name, side, stream, bias) for name, side in sides.items()), last)
    low, latent = (spec.q_lora_rank, "latent"), (spec.kv_lora_rank, "latent")
    first = [Linear("attn.q", heads, stream, False)]
    if spec.q_lora_rank:
        first = [Linear("attn.q_a", low, stream, bias), Linear("attn.q_b", heads, low, False)]
    joined = spec.kv_lora_rank + spec.qk_rope_head_dim, "latent"
    per_head = spec.n_heads * (spec.qk_nope_head_dim + spec.v_head_dim), "heads"
    into_heads = Linear("attn.kv_b", per_head, latent, False)
    return (*first, Linear("attn.kv_a", joined, stream, bias), into_heads, last)


def mlp_linears(spec: ModelSpec, name: str = "mlp") -> tuple[Linear, ...]:
    """Return the linear layers of a block's MLP, `down` last.

    `name` is its path in the block: `mlp`, or `mlp.shared` for the shared expert.
    """
    width = (spec.shared_ffn_dim if name == "mlp.shared" else spec.ffn_dim), "ffn"
    stream = spec.dim, "dim"
    columns = ("gate", "up") if spec.gated_mlp else ("up",)
    return (
        *(Linear(f"{name}.{column}", width, stream, spec.mlp_bias) for column in columns),
        Linear(f"{name}.down", stream, width, spec.mlp_bias),
    )


def _linears(spec: ModelSpec, layer: str, linears: Iterable[Linear]) -> Iterator[Part]:
    for linear in linears:
        yield from _linear(spec, layer, *linear)


def _experts(spec: ModelSpec, layer: str) -> Iterator[Part]:
    path, count, width = f"{layer}.mlp", spec.experts, spec.expert_width
    routes = (count, "routes"), (spec.dim, "dim")
    yield from _linear(spec, layer, "mlp.router", *routes, spec.expert_bias)
    inner, outer = (width, "ffn"), (spec.dim, "dim")
    for name in expert_columns(spec):
        yield from _of_experts(spec, layer, name, inner, outer, "ffn")
    yield from _of_experts(spec, layer, "mlp.experts.down", outer, inner, "addend")
    if spec.shared_ffn_dim:
        yield from _linears(spec, layer, mlp_linears(spec, "mlp.shared"))
    if spec.shared_gate:
        yield Part(f"{path}.shared_gate.weight", (1, spec.dim), ("routes", "dim"))


def expert_columns(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the experts' first projections: gate and up, or only up."""
    return JOINED if spec.gated_mlp else JOINED[1:]


def _of_experts(
    spec: ModelSpec, layer: str, name: str, out: Side, inner: Side, added: str
) -> Iterator[Part]:
    """Yield the parameters of one projection of all experts; `added` is the axis of its bias."""
    path, count = f"{layer}.{name}", spec.experts
    axes = ("experts", out[1], inner[1])
    yield Part(f"{path}.weight", (count, out[0], inner[0]), axes)
    if spec.expert_bias:
        yield Part(f"{path}.bias", (count, out[0]), ("experts", added))
    for part in _adapter(spec, path, name, out, inner):
        yield replace(part, shape=(count, *part.shape), axes=("experts", *part.axes))


def _norm(spec: ModelSpec, path: str) -> Iterator[Part]:
    yield Part(f"{path}.weight", (spec.dim,), ("dim",))
    if spec.norm == "layer":
        yield Part(f"{path}.bias", (spec.dim,), ("dim",))


def _linear(
    spec: ModelSpec, layer: str, name: str, out: Side, inner: Side, bias: bool
) -> Iterator[Part]:
    path = f"{layer}.{name}"
    nf4 = spec.lora is not None and spec.lora.is_nf4 and name in LINEAR
    axes = out[1], inner[1]
    yield Part(f"{path}.weight", (out[0], inner[0]), axes, is_nf4=nf4)
    if bias:
        yield Part(f"{path}.bias", (out[0],), (out[1],))
    yield from _adapter(spec, path, name, out, inner)


def _adapter(spec: ModelSpec, path: str, name: str, out: Side, inner: Side) -> Iterator[Part]:
    """Yield the LoRA matrices of a layer, if it is adapted."""
    if spec.lora is None:
        return
    parameters = {
        "lora_a": Part(f"{path}.lora_a", (spec.lora.rank, inner[0]), ("rank", inner[1])),
        "lora_b": Part(f"{path}.lora_b", (out[0], spec.lora.rank), (out[1], "rank")),
    }
    yield from (parameters[matrix] for matrix in matrices(spec.adapted, name))


def buffers(spec: ModelSpec) -> tuple[Part, ...]:
    """Return the model's buffers, in the order of the module's `named_buffers`.

    They have no gradients, but checkpoints and exported files contain them.
    """
    if not spec.has_router_bias:
        return ()
    return tuple(
        Part(f"layers.{layer}.mlp.router.correction", (spec.experts,), ("routes",))
        for layer in range(spec.n_layers)
        if spec.has_experts(spec.layer(layer))
    )


@lru_cache(maxsize=64)
def kept_in_fp32(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the buffers that must stay in fp32 under half precision.

    Whatever saves, loads or converts a whole model leaves them in fp32.
    """
    ends = tuple(f".{name}" for name in FAMILIES[spec.family].kept_in_fp32)
    return frozenset(part.name for part in buffers(spec) if part.name.endswith(ends))


def parameter_count(spec: ModelSpec) -> int:
    """Return the number of parameters without padding; tied matrices count once."""
    return sum(part.numel for part in parts(unpadded(spec)))


def active_parameter_count(spec: ModelSpec) -> int:
    """Return the number of parameters that a token uses: of experts, those of `top_k`."""
    return sum(part.active(spec) for part in parts(unpadded(spec)))


def trained_parameter_count(spec: ModelSpec) -> int:
    """Return the number of trained parameters: with adapters, only those of the adapters."""
    return sum(part.numel for part in parts(unpadded(spec)) if part.trained)
