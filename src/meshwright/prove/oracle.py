"""The reference model, in plain torch operations: it shares no code with what it checks.

It uses no kernel, no hand-written backward and no class of `models`, only weights with the same
names. Only dropout's masks are those of `models.dropout`: which values drop is defined by a hash,
and a second version of it would be the same lines. Products are in the dtype of the weights, and
like `models` this rounds to it after each product, norm, rotation, activation and sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.data.sampler import IGNORE
from meshwright.execute.batch import Batch
from meshwright.models.dropout import dropout, layer_keys
from meshwright.prove.fake_float8 import float8_linear
from meshwright.spec.model import ModelSpec, RopeScaling

Weights = Mapping[str, Tensor]
# x [..., in], weight [out, in], bias [out] or None -> [..., out]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def streams(
    spec: ModelSpec,
    weights: Weights,
    batch: Batch,
    *,
    drops: bool = True,
    fp8: bool = False,
    gaps: list[float] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the residual stream `[batch, seq, dim]` after the embedding and after each layer.

    By the names `embed`, `layers.0`, ... With `drops` the rows' keys, if any, drop values: those of
    the embedding after it is yielded, as it is a module's own output. `gaps` gets, for each layer
    of experts, the smallest distance of a router's score that was picked from one that was not.
    """
    model = _Model(spec, weights, batch, batch.keys if drops else None, fp8)
    model.gaps = gaps
    x = F.embedding(batch.inputs, weights["embed.weight"])
    yield "embed", x
    x = _times(x, spec.embedding_scale)
    x = model.dropped(x, model.keys, site=0)
    for layer in range(spec.n_layers):
        x = model.block(layer, x)
        yield f"layers.{layer}", x


def loss_sum(
    spec: ModelSpec,
    weights: Weights,
    batch: Batch,
    *,
    drops: bool = True,
    fp8: bool = False,
    gaps: list[float] | None = None,
) -> Tensor:
    """Return the summed cross-entropy of a batch's targets, in nats; `gaps` as in `streams`."""
    *_, (_, x) = streams(spec, weights, batch, drops=drops, fp8=fp8, gaps=gaps)
    x = _times(_norm(spec, weights, "norm", x), 1 / spec.logits_divisor)
    head = weights["embed.weight" if spec.tie_embeddings else "head.weight"]
    logits = _capped(_wide(F.linear(x, head)), spec.logits_softcap)
    return F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


class _Model:
    """What the blocks of one forward share."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, batch: Batch, keys: Tensor | None, fp8: bool
    ) -> None:
        self.spec, self.weights, self.keys = spec, weights, keys
        self.gaps: list[float] | None = None
        self.linear: Linear = float8_linear if fp8 else F.linear
        seq = batch.inputs.shape[1]
        places = torch.arange(seq)
        self.places = places.float()
        self.back = places[:, None] - places  # how far a key lies behind a query
        self.sees = self.back[None] >= 0
        if batch.segments is not None:
            same = batch.segments[:, :, None] == batch.segments[:, None, :]
            self.sees = self.sees & same

    def block(self, layer: int, x: Tensor) -> Tensor:
        """Return the stream after a layer."""
        spec, weights, at = self.spec, self.weights, f"layers.{layer}"
        keys = None if self.keys is None else layer_keys(self.keys, layer)

        def normed(name: str, x: Tensor) -> Tensor:
            there = f"{at}.{name}.weight" in weights
            return _norm(spec, weights, f"{at}.{name}", x) if there else x

        attended = normed("attn_post_norm", self.attention(layer, normed("attn_norm", x)))
        scale = spec.residual_scale
        mixed = x.add(self.dropped(attended, keys, site=1), alpha=scale)
        source = x if spec.parallel_residual else mixed
        feed = self.experts if spec.has_experts(spec.layer(layer)) else self.feed_forward
        fed = normed("mlp_post_norm", feed(f"{at}.mlp", normed("mlp_norm", source)))
        return mixed.add(self.dropped(fed, keys, site=2), alpha=scale)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """Return causal attention within the rows' documents and the layer's window."""
        spec, at, kind = self.spec, f"layers.{layer}", self.spec.layer(layer)
        q, k, v = (self.project(f"{at}.attn.{name}", x) for name in "qkv")
        q, k, v = self.normed_heads(at, "q", q), self.normed_heads(at, "k", k), self.heads(v)
        q, k = self.rotated(layer, _times(q, spec.query_scale)), self.rotated(layer, k)
        k, v = (one.repeat_interleave(spec.n_heads // spec.n_kv_heads, dim=2) for one in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", _wide(q), _wide(k)) / math.sqrt(spec.head_dim)
        scores = _capped(scores, spec.attention_softcap)
        seen = self.sees if kind.window is None else self.sees & (self.back < kind.window)
        shares = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", _wide(shares.to(x.dtype)), _wide(v)).to(x.dtype)
        return self.project(f"{at}.attn.o", mixed.flatten(2))

    def normed_heads(self, at: str, name: str, x: Tensor) -> Tensor:
        """Return heads of queries or keys, normed one by one or together."""
        spec = self.spec
        if spec.qk_norm == "none":
            return self.heads(x)
        weight = self.weights[f"{at}.attn.{name}_norm.weight"]
        if spec.qk_norm == "all":
            return self.heads(_rms(spec, x, weight))
        return _rms(spec, self.heads(x), weight)

    def heads(self, x: Tensor) -> Tensor:
        """Return `[batch, seq, heads, head_dim]` of `[batch, seq, heads * head_dim]`."""
        return x.view(*x.shape[:2], -1, self.spec.head_dim)

    def feed_forward(self, at: str, x: Tensor) -> Tensor:
        """Return what follows attention: gated, or two products."""
        up = self.project(f"{at}.up", x)
        if self.spec.gated_mlp:
            between = self.activated(self.project(f"{at}.gate", x)) * up
        else:
            between = self.activated(up)
        return self.project(f"{at}.down", between)

    def experts(self, at: str, x: Tensor) -> Tensor:
        """Return what each token's experts make of it, and the shared one.

        Every expert sees every token here; a share of 0 takes out those that were not picked.
        """
        spec, weights = self.spec, self.weights
        scores = torch.einsum("bsd,ed->bse", _wide(x), _wide(weights[f"{at}.router.weight"]))
        if self.gaps is not None and spec.top_k < spec.experts:
            ranked = scores.detach().sort(-1, descending=True).values
            self.gaps.append((ranked[..., spec.top_k - 1] - ranked[..., spec.top_k]).min().item())
        every = scores.softmax(-1)
        least = every.sort(-1, descending=True).values[..., spec.top_k - 1, None]
        shares = torch.where(every >= least, every, torch.zeros_like(every))
        if spec.norm_top_k:
            shares = shares / shares.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        gate, up, down = (weights[f"{at}.experts.{one}.weight"] for one in ("gate", "up", "down"))
        for expert in range(spec.experts):
            between = self.activated(F.linear(x, gate[expert])) * F.linear(x, up[expert])
            share = shares[..., expert, None].to(x.dtype)
            total = total + F.linear(between * share, down[expert])
        if spec.shared_ffn_dim:
            shared = self.feed_forward(f"{at}.shared", x)
            if spec.shared_gate:
                shared = self.project(f"{at}.shared_gate", x).sigmoid() * shared
            total = total + shared
        return total

    def activated(self, x: Tensor) -> Tensor:
        """Return the activation of x."""
        if self.spec.activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.spec.activation == "gelu_tanh" else "none")

    def project(self, at: str, x: Tensor) -> Tensor:
        """Return a linear layer of x."""
        return self.linear(x, self.weights[f"{at}.weight"], self.weights.get(f"{at}.bias"))

    def rotated(self, layer: int, x: Tensor) -> Tensor:
        """Return heads `[batch, seq, heads, head_dim]`, a part turned by their positions' angles.

        Dims i and i + half are a point of the plane. arXiv:2104.09864, equation 34.
        """
        half = self.spec.rotary_dim // 2
        if half == 0 or not self.spec.layer(layer).rotary:
            return x
        frequencies, stretch = _rotation(self.spec, layer, len(self.places))
        angles = torch.outer(self.places, frequencies)[:, None]
        wide = _wide(x)
        a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        cos, sin = angles.cos() * stretch, angles.sin() * stretch
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)

    def dropped(self, x: Tensor, keys: Tensor | None, site: int) -> Tensor:
        """Return x with what falls to dropout set to 0, and the rest enlarged."""
        p = self.spec.dropout
        if keys is None or p == 0:
            return x
        stays = dropout(torch.ones(x.shape), p, keys, None, site) != 0
        return (_wide(x) * stays / (1 - p)).to(x.dtype)


def _norm(spec: ModelSpec, weights: Weights, at: str, x: Tensor) -> Tensor:
    """Return a model's norm of x: RMSNorm or LayerNorm, statistics in fp32 at least."""
    weight = weights[f"{at}.weight"]
    if spec.norm == "layer":
        return F.layer_norm(x, (spec.dim,), weight, weights[f"{at}.bias"], spec.norm_eps)
    return _rms(spec, x, weight)


def _rms(spec: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm over the last dim of x. arXiv:1910.07467, equation 4."""
    wide = _wide(x)
    scale = (wide.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt()
    times = _wide(weight) + 1 if spec.norm_plus_one else weight
    return (wide / scale * times).to(x.dtype)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    """Return x bounded smoothly to a cap. arXiv:2408.00118, section 2."""
    return x if cap is None else cap * torch.tanh(x / cap)


def _times(x: Tensor, factor: float) -> Tensor:
    """Return x times a constant; the same tensor where that is 1."""
    return x if factor == 1 else x * factor


def _rotation(spec: ModelSpec, layer: int, row: int) -> tuple[Tensor, float]:
    """Return the angle per position of each turned pair of dims, and what their length grows by.

    In fp32, as every implementation. `row`: how many tokens a row has.
    """
    own, scaling = spec.layer(layer).rope_theta, spec.rope_scaling
    base = spec.rope_theta if own is None else own
    plain = 1.0 / base ** (torch.arange(0, spec.rotary_dim, 2).float() / spec.rotary_dim)
    if scaling is None or own is not None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _stretched(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _by_turns(plain, scaling, base), _yarn_length(scaling)
    fits = row <= scaling.original_context
    parts = torch.tensor(scaling.short_factor if fits else scaling.long_factor)
    # arXiv:2402.13753 and its code: sqrt(1 + ln s / ln L).
    more = math.log(max(scaling.factor, 1.0), scaling.original_context)
    given = scaling.attention_factor
    return plain / parts, (1 + more) ** 0.5 if given is None else given


def _by_turns(plain: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Return YaRN's frequencies: where between two pairs one is decides. arXiv:2309.00071, 3.2.

    The paper's ramp is over turns; all code has it over the pairs' numbers.
    """
    log_turns = math.log(scaling.original_context / (2 * math.pi))
    step = math.log(base) / len(plain)  # by which the log of the turns falls from pair to pair
    ends = [(log_turns - math.log(beta)) / step for beta in (scaling.beta_fast, scaling.beta_slow)]
    if scaling.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], 2 * len(plain) - 1)
    high = low + 0.001 if low == high else high
    divided = torch.tensor([(i - low) / (high - low) for i in range(len(plain))]).clamp(0, 1)
    return plain * (1 - divided + divided / scaling.factor)


def _yarn_length(scaling: RopeScaling) -> float:
    """Return what YaRN multiplies queries and keys by: its section 3.4, and DeepSeek's `mscale`."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    grown = 0.1 * math.log(max(scaling.factor, 1.0))
    above, below = scaling.mscale, scaling.mscale_all_dim
    if above is None or below is None:
        return 1 + grown
    return (1 + above * grown) / (1 + below * grown)


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's frequencies: turns of the context that was trained with decide."""
    turns = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def _wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 where it is."""
    return x if x.dtype == torch.float64 else x.float()
