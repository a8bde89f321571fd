"""The reference model, in plain torch operations: it shares no code with the code under test.

It uses no kernel, no hand-written backward and no class of `models`, only weights with the same
names. Only dropout masks come from `models.dropout`: a hash defines them, and a second version
would have the same lines. Matmuls are in the dtype of the weights, and like `models` this rounds to
it after each matmul, norm, rotation, activation and sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.data.sampler import IGNORE, PADDING
from meshwright.models.dropout import dropout, layer_keys
from meshwright.parallel.batch import Batch
from meshwright.prove.fake_float8 import float8_linear
from meshwright.prove.oracle_routers import Routed
from meshwright.prove.rotation import rotation
from meshwright.spec.model import ModelSpec

# The dropout of an adapter has a mask of its own for each linear layer of a block.
_ADAPTER_SITES = (
    *("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"),
    *("attn.q_a", "attn.q_b", "attn.kv_a", "attn.kv_b"),
    *("mlp.shared.gate", "mlp.shared.up", "mlp.shared.down"),
)
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
    capacity: float | None = None,
    gaps: list[float] | None = None,
    routers: list[Routed] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Compute the forward, and yield the name and the residual stream `[batch, seq, dim]` after the
    embedding and after each layer.

    The names are `embed`, `layers.0`, and so on. `drops` turns dropout on, by the keys of the
    batch's sequences, if it has any; the embedding is yielded before its dropout. `fp8` computes
    linear layers in float8. `capacity` is `train.expert_capacity`. `gaps`, if given, receives per
    layer of experts the smallest difference between the router scores of a selected and an
    unselected expert; `routers` receives the routers' results.
    """
    model = _Model(spec, weights, batch, batch.keys if drops else None, fp8)
    model.gaps, model.routers, model.capacity = gaps, routers, capacity
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
    capacity: float | None = None,
    gaps: list[float] | None = None,
    routers: list[Routed] | None = None,
) -> Tensor:
    """Return the summed cross-entropy over a batch's targets, in nats; the arguments are those of
    `streams`.
    """
    options: dict[str, Any] = {"capacity": capacity, "gaps": gaps, "routers": routers}
    *_, (_, x) = streams(spec, weights, batch, drops=drops, fp8=fp8, **options)
    x = _times(_norm(spec, weights, "norm", x), 1 / spec.logits_divisor)
    head = weights["embed.weight" if spec.tie_embeddings else "head.weight"]
    logits = _capped(_wide(F.linear(x, head)), spec.logits_softcap)
    return F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


class _Model:
    """The layers of the reference model in one forward, with the masks of its batch.

    `sees` `[batch, seq, seq]` or `[1, seq, seq]` is true where a query may attend to a key.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, batch: Batch, keys: Tensor | None, fp8: bool
    ) -> None:
        self.spec, self.weights, self.keys = spec, weights, keys
        self.gaps: list[float] | None = None
        self.routers: list[Routed] | None = None
        self.capacity: float | None = None
        self.linear: Linear = float8_linear if fp8 else F.linear
        seq = batch.inputs.shape[1]
        places = torch.arange(seq)
        self.places = places.float()
        self.back = places[:, None] - places  # how far a key lies behind a query
        self.sees = self.back[None] >= 0
        self.together = torch.ones_like(self.sees)  # tokens of one document
        self.is_data = torch.ones_like(batch.inputs, dtype=torch.bool)
        if batch.segments is not None:
            self.together = batch.segments[:, :, None] == batch.segments[:, None, :]
            self.sees = self.sees & self.together
            self.is_data = batch.segments != PADDING

    def block(self, layer: int, x: Tensor) -> Tensor:
        """Return the residual stream after layer number `layer`; `x` is the one before, `[batch,
        seq, dim]`.
        """
        spec, weights, prefix = self.spec, self.weights, f"layers.{layer}"
        keys = None if self.keys is None else layer_keys(self.keys, layer)

        def normed(name: str, x: Tensor) -> Tensor:
            is_normed = f"{prefix}.{name}.weight" in weights
            return _norm(spec, weights, f"{prefix}.{name}", x) if is_normed else x

        kind = spec.layer(layer)
        mix = self.delta if kind.delta else self.mamba if kind.mamba else self.attention
        attended = normed("attn_post_norm", mix(layer, normed("attn_norm", x)))
        scale = spec.residual_scale
        mixed = x.add(self.dropped(attended, keys, site=1), alpha=scale)
        source = x if spec.parallel_residual else mixed
        feed = self.experts if spec.has_experts(spec.layer(layer)) else self.feed_forward
        fed = normed("mlp_post_norm", feed(f"{prefix}.mlp", normed("mlp_norm", source)))
        return mixed.add(self.dropped(fed, keys, site=2), alpha=scale)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """Return the output of causal attention, within the layer's window and within each document
        of packed sequences.
        """
        spec, prefix, kind = self.spec, f"layers.{layer}", self.spec.layer(layer)
        q, k, v = (self.latent_heads if spec.kv_lora_rank else self.plain_heads)(layer, x)
        room = max(spec.head_dim, v.shape[-1])
        scores = torch.einsum("bqhd,bkhd->bhqk", _wide(q), _wide(k)) / math.sqrt(room)
        scores = _capped(scores, spec.attention_softcap)
        seen = self.sees if kind.window is None else self.sees & (self.back < kind.window)
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        if spec.attention_sinks:  # a key that all see, with nothing to give
            sinks = _wide(self.weights[f"{prefix}.attn.sinks"])
            scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        shares = scores.softmax(-1)[..., : len(self.places)]
        mixed = torch.einsum("bhqk,bkhd->bqhd", _wide(shares.to(x.dtype)), _wide(v)).to(x.dtype)
        mixed = mixed.flatten(2)
        if spec.attention_gate:
            mixed = mixed * self.project(f"{prefix}.attn.gate", x).sigmoid()
        return self.project(f"{prefix}.attn.o", mixed)

    def delta(self, layer: int, x: Tensor) -> Tensor:
        """Return the output of a Gated DeltaNet layer, computed token by token. arXiv:2412.06464,
        equation 10.
        """
        spec, prefix, weights = self.spec, f"layers.{layer}.attn", self.weights
        shared = spec.delta_heads // spec.delta_key_heads
        keys = spec.delta_key_dim
        q, k, v = (
            self.convolved(self.project(f"{prefix}.{name}", x), weights[f"{prefix}.{conv}_conv"])
            for name, conv in (("queries", "q"), ("keys", "k"), ("values", "v"))
        )
        b, a, gate = (self.project(f"{prefix}.{name}", x) for name in "baz")
        shape = (*x.shape[:2], spec.delta_heads, -1)
        q, k = (
            _unit(part.reshape(*x.shape[:2], spec.delta_key_heads, keys)).repeat_interleave(
                shared, 2
            )
            for part in (q, k)
        )
        q, v, gate = q / math.sqrt(keys), _wide(v).view(shape), gate.view(shape)
        strength = _wide(b.sigmoid())
        step = F.softplus(_wide(a) + _wide(weights[f"{prefix}.dt_bias"]))
        decay = (-step * _wide(weights[f"{prefix}.a_log"]).exp()).exp()
        memory, reads = v.new_zeros(x.shape[0], spec.delta_heads, keys, spec.delta_value_dim), []
        for token in range(x.shape[1]):
            if token:
                goes_on = self.together[:, token, token - 1]
                memory = memory * (decay[:, token] * goes_on[:, None])[..., None, None]
            known = torch.einsum("bhk,bhkv->bhv", k[:, token], memory)
            written = (v[:, token] - known) * strength[:, token, :, None]
            memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, token], written)
            reads.append(torch.einsum("bhk,bhkv->bhv", q[:, token], memory))
        read = _wide(torch.stack(reads, 1).to(x.dtype))
        size = (read.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt()
        normed = read / size * _wide(weights[f"{prefix}.gated_norm.weight"])
        return self.project(f"{prefix}.out", (normed * F.silu(_wide(gate))).to(x.dtype).flatten(2))

    def mamba(self, layer: int, x: Tensor) -> Tensor:
        """Return the output of a Mamba-2 layer, computed token by token. arXiv:2405.21060, section
        2.1.
        """
        spec, prefix = self.spec, f"layers.{layer}.attn"
        weights = {
            name: _wide(self.weights[f"{prefix}.{name}"]) for name in ("a_log", "dt_bias", "skip")
        }
        z, v, kq, dt = (self.project(f"{prefix}.{name}", x) for name in ("z", "x", "bc", "dt"))
        v, kq = (
            self.convolved(
                part,
                self.weights[f"{prefix}.{name}_conv.weight"],
                self.weights[f"{prefix}.{name}_conv.bias"],
            )
            for name, part in (("x", v), ("bc", kq))
        )
        shape, shared = (*x.shape[:2], spec.mamba_groups), spec.mamba_heads // spec.mamba_groups
        k, q = (
            _wide(part).reshape(*shape, -1).repeat_interleave(shared, 2) for part in kq.chunk(2, -1)
        )
        v = _wide(v).view(*x.shape[:2], spec.mamba_heads, -1)
        step = F.softplus(_wide(dt) + weights["dt_bias"])
        if spec.mamba_dt_limit is not None:
            step = step.clamp(*spec.mamba_dt_limit)
        decay = (-step * weights["a_log"].exp()).exp()
        memory, reads = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
        for token in range(x.shape[1]):
            if token:
                goes_on = self.together[:, token, token - 1]
                memory = memory * (decay[:, token] * goes_on[:, None])[..., None, None]
            written = v[:, token] * step[:, token, :, None]
            memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, token], written)
            read = torch.einsum("bhk,bhkv->bhv", q[:, token], memory)
            reads.append(read + weights["skip"][:, None] * v[:, token])
        gated = _wide(torch.stack(reads, 1).to(x.dtype)).flatten(2) * F.silu(_wide(z))
        by_group = gated.view(*shape, -1)
        size = (by_group.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt()
        normed = (by_group / size).flatten(2) * _wide(self.weights[f"{prefix}.gated_norm.weight"])
        return self.project(f"{prefix}.out", normed.to(x.dtype))

    def convolved(self, x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return SiLU of a causal depthwise convolution over the sequence, within documents.

        `x` `[batch, seq, channels]`, `taps` `[channels, 1, kernel]`.
        """
        total = torch.zeros_like(_wide(x))
        for back in range(taps.shape[-1]):
            earlier = _wide(F.pad(x, (0, 0, back, 0))[:, : x.shape[1]])
            same = F.pad(self.together.diagonal(-back, 1, 2), (min(back, x.shape[1]), 0))
            total = total + earlier * _wide(taps[:, 0, -1 - back]) * same[..., None]
        return F.silu(total if bias is None else total + _wide(bias)).to(x.dtype)

    def plain_heads(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[batch, seq, heads, head_dim]`, rotated; keys and values
        repeated for all query heads.
        """
        spec, prefix = self.spec, f"layers.{layer}"
        q, k, v = (self.project(f"{prefix}.attn.{name}", x) for name in "qkv")
        q, k, v = (
            self.normed_heads(prefix, "q", q),
            self.normed_heads(prefix, "k", k),
            self.heads(v),
        )
        q, k = self.turned(layer, _times(q, spec.query_scale)), self.turned(layer, k)
        k, v = (heads.repeat_interleave(spec.n_heads // spec.n_kv_heads, dim=2) for heads in (k, v))
        return q, k, v

    def latent_heads(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of latent attention (MLA), with the shapes of
        `plain_heads`. arXiv:2405.04434, equations 9 to 17.

        The queries include YaRN's attention factor, and a factor that undoes the effect of values
        with more dims than keys on the attention scale.
        """
        spec, prefix = self.spec, f"layers.{layer}.attn"
        if spec.q_lora_rank:
            q = self.small_norm(f"{prefix}.q_a_norm", self.project(f"{prefix}.q_a", x))
            q = self.project(f"{prefix}.q_b", q)
        else:
            q = self.project(f"{prefix}.q", x)
        q = q.view(*x.shape[:2], spec.n_heads, -1)
        joint = self.project(f"{prefix}.kv_a", x)
        rank, alone = spec.kv_lora_rank, spec.qk_nope_head_dim
        latent = self.small_norm(f"{prefix}.kv_a_norm", joint[..., :rank])
        kv = self.project(f"{prefix}.kv_b", latent).view(*x.shape[:2], spec.n_heads, -1)
        shared = self.turned(layer, joint[..., None, rank:]).expand(-1, -1, spec.n_heads, -1)
        k = torch.cat((kv[..., :alone], shared), -1)
        q = torch.cat((q[..., :alone], self.turned(layer, q[..., alone:])), -1)
        length, scaling = 1.0, spec.rope_scaling
        if scaling is not None and scaling.mscale_all_dim is not None:
            length += 0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0))
        width_factor = math.sqrt(max(1.0, spec.v_head_dim / spec.head_dim))
        return _times(q, length**2 * width_factor), k, kv[..., alone:]

    def small_norm(self, prefix: str, x: Tensor) -> Tensor:
        """Return RMSNorm of a latent vector, whose epsilon is 1e-6 in all models."""
        wide = _wide(x)
        scale = (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return (wide / scale * self.weights[f"{prefix}.weight"]).to(x.dtype)

    def turned(self, layer: int, x: Tensor) -> Tensor:
        """Apply RoPE to `[batch, seq, heads, dims]`; with `rope_interleave`, a pair is two adjacent
        dims, which the result has in another order.
        """
        if not self.spec.rope_interleave:
            return self.rotated(layer, x)
        size = self.spec.rotary_dim
        pairs = x[..., :size:2], x[..., 1:size:2]
        return self.rotated(layer, torch.cat((*pairs, x[..., size:]), -1))

    def normed_heads(self, prefix: str, name: str, x: Tensor) -> Tensor:
        """Split queries or keys (`name` is "q" or "k") into heads, and apply QK-norm per head or
        over all heads, if the model has it.
        """
        spec = self.spec
        if spec.qk_norm == "none":
            return self.heads(x)
        weight = self.weights[f"{prefix}.attn.{name}_norm.weight"]
        if spec.qk_norm == "all":
            return self.heads(_rms(spec, x, weight))
        return _rms(spec, self.heads(x), weight)

    def heads(self, x: Tensor) -> Tensor:
        """Split `[batch, seq, heads * head_dim]` into `[batch, seq, heads, head_dim]`."""
        return x.view(*x.shape[:2], -1, self.spec.head_dim)

    def feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        """Return the output of an MLP, gated or plain, whose weights begin with `prefix`."""
        up = self.project(f"{prefix}.up", x)
        if self.spec.gated_mlp:
            between = self.activated(self.project(f"{prefix}.gate", x)) * up
        else:
            between = self.activated(up)
        return self.project(f"{prefix}.down", between)

    def experts(self, prefix: str, x: Tensor) -> Tensor:
        """Return the output of a mixture of experts: the weighted sum over each token's experts,
        plus the shared expert.

        Every expert computes every token here; a weight of 0 removes unselected ones.
        """
        spec, weights = self.spec, self.weights
        scores = torch.einsum("bsd,ed->bse", _wide(x), _wide(weights[f"{prefix}.router.weight"]))
        if spec.expert_bias:
            scores = scores + _wide(weights[f"{prefix}.router.bias"])
        if spec.router_scores == "sigmoid":
            affinities = scores.sigmoid()
            judged = self.corrected(prefix, affinities.detach())
        else:
            affinities = scores.softmax(-1)
            judged = scores.detach()
        picked = self.best(judged, spec.top_k)
        if self.routers is not None:
            self.routers.append(Routed(prefix, scores, picked, self.is_data))
            if spec.router_scores == "sigmoid":  # the load-balancing loss counts these
                self.best(4 * affinities.detach(), spec.top_k)
        shares = torch.where(picked, affinities, torch.zeros_like(affinities))
        if spec.norm_top_k:
            shares = shares / shares.sum(-1, keepdim=True)
        shares = shares * spec.routed_scale
        if self.capacity is not None:  # the first of a sequence's tokens, until an expert is full
            lengths = self.is_data.sum(1).tolist()
            capacities = [math.ceil(self.capacity * n * spec.top_k / spec.experts) for n in lengths]
            met = (picked & self.is_data[..., None]).cumsum(1)
            shares = shares * (met <= torch.tensor(capacities)[:, None, None])
        total = torch.zeros_like(x)

        def project(name: str, expert: int, x: Tensor) -> Tensor:
            out = F.linear(x, weights[f"{prefix}.experts.{name}.weight"][expert])
            second = weights.get(f"{prefix}.experts.{name}.lora_b")
            if second is None:
                return out
            # One adapter of gate and up, as of one matrix above the other, has one A.
            first = weights.get(f"{prefix}.experts.{name}.lora_a")
            first = weights[f"{prefix}.experts.gate.lora_a"] if first is None else first
            return out + F.linear(F.linear(x, first[expert]), second[expert]) * self.scale

        def bias(name: str, expert: int) -> Tensor | float:
            return weights[f"{prefix}.experts.{name}.bias"][expert] if spec.expert_bias else 0.0

        for expert in range(spec.experts):
            gate, up = (project(name, expert, x) + bias(name, expert) for name in ("gate", "up"))
            share = shares[..., expert, None].to(x.dtype)
            between = self.between(gate, up)
            total = total + project("down", expert, between * share) + bias("down", expert) * share
        if spec.shared_ffn_dim:
            shared = self.feed_forward(f"{prefix}.shared", x)
            if spec.shared_gate:
                shared = self.project(f"{prefix}.shared_gate", x).sigmoid() * shared
            total = total + shared
        return total

    def corrected(self, prefix: str, scores: Tensor) -> Tensor:
        """Return the scores by which DeepSeek-V3 selects experts: with the router's correction, and
        `-inf` outside of the best groups. arXiv:2412.19437, equation 16.

        They are multiplied by 4, because a sigmoid's slope is at most 1/4: so an error of the
        sigmoid's input moves the score by at most as much.
        """
        spec = self.spec
        scaled = 4 * (scores + self.weights[f"{prefix}.router.correction"])
        grouped = scaled.view(*scaled.shape[:-1], spec.expert_groups, -1)
        if spec.top_groups == spec.expert_groups:
            return scaled
        two = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
        in_best = self.best(two, spec.top_groups, errors=2)
        return torch.where(in_best[..., None], grouped, -math.inf).flatten(-2)

    def best(self, scores: Tensor, number: int, errors: int = 1) -> Tensor:
        """Return a mask of the `number` highest scores along the last dim.

        `gaps` receives the smallest distance between a selected and an unselected score, divided by
        `errors`: the number of rounding errors in a score.
        """
        ranked = scores.sort(-1, descending=True).values
        if self.gaps is not None and number < scores.shape[-1]:
            gap = (ranked[..., number - 1] - ranked[..., number]).min().item()
            self.gaps.append(gap / errors)
        return scores >= ranked[..., number - 1, None]

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the input of an expert's down projection, from its gate and up projections;
        clamped if the model has `swiglu_limit`.
        """
        limit = self.spec.swiglu_limit
        if limit is None:
            return self.activated(gate) * up
        gate, up = torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)
        return (up + 1) * (gate * torch.sigmoid(self.spec.swiglu_alpha * gate))

    def activated(self, x: Tensor) -> Tensor:
        """Apply the model's activation function."""
        if self.spec.activation == "silu":
            return F.silu(x)
        if self.spec.activation == "relu2":
            return x.clamp(min=0) * x.clamp(min=0)
        return F.gelu(x, approximate="tanh" if self.spec.activation == "gelu_tanh" else "none")

    def project(self, prefix: str, x: Tensor) -> Tensor:
        """Apply the linear layer named `prefix`, plus its low-rank adapter if it has one.
        arXiv:2106.09685, section 4.1.
        """
        out = self.linear(x, self.weights[f"{prefix}.weight"], self.weights.get(f"{prefix}.bias"))
        first, lora = self.weights.get(f"{prefix}.lora_a"), self.spec.lora
        if first is None or lora is None:
            return out
        if self.keys is not None and lora.dropout > 0:
            layer, name = prefix.removeprefix("layers.").split(".", 1)
            site = _ADAPTER_SITES.index(name) + 16
            keys = layer_keys(self.keys, int(layer))
            stays = dropout(torch.ones(x.shape), lora.dropout, keys, None, site) != 0
            x = (_wide(x) * stays / (1 - lora.dropout)).to(x.dtype)
        return out + F.linear(F.linear(x, first), self.weights[f"{prefix}.lora_b"]) * self.scale

    @property
    def scale(self) -> float:
        """The factor of an adapter's output: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        arXiv:2106.09685, section 4.1; arXiv:2312.03732.
        """
        lora = self.spec.lora
        assert lora is not None
        return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)

    def rotated(self, layer: int, x: Tensor) -> Tensor:
        """Apply RoPE to `[batch, seq, heads, head_dim]`: the first `rotary_dim` dims of each head
        are rotated by their position.

        Dims i and i + rotary_dim / 2 are a pair. arXiv:2104.09864, equation 34.
        """
        half = self.spec.rotary_dim // 2
        if half == 0 or not self.spec.layer(layer).rotary:
            return x
        lengths, which = torch.unique(self.together.sum(-1), return_inverse=True)
        rotations = [rotation(self.spec, layer, length) for length in lengths.tolist()]
        stretch = rotations[0][1]  # the same for all lengths
        frequencies = torch.stack([frequency for frequency, _ in rotations])[which]
        angles = (self.places[:, None] * frequencies)[:, :, None]
        wide = _wide(x)
        a, b, unrotated = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        cos, sin = angles.cos() * stretch, angles.sin() * stretch
        return torch.cat((a * cos - b * sin, b * cos + a * sin, unrotated), -1).to(x.dtype)

    def dropped(self, x: Tensor, keys: Tensor | None, site: int) -> Tensor:
        """Apply dropout, with the mask that `keys` (one per sequence) and `site` (the place in the
        layer) define.
        """
        p = self.spec.dropout
        if keys is None or p == 0:
            return x
        stays = dropout(torch.ones(x.shape), p, keys, None, site) != 0
        return (_wide(x) * stays / (1 - p)).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """Normalize each head's vector to length 1, in fp32."""
    wide = _wide(x)
    return wide / (wide.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def _norm(spec: ModelSpec, weights: Weights, prefix: str, x: Tensor) -> Tensor:
    """Apply the model's RMSNorm or LayerNorm, with statistics in fp32 or more."""
    weight = weights[f"{prefix}.weight"]
    if spec.norm == "layer":
        return F.layer_norm(x, (spec.dim,), weight, weights[f"{prefix}.bias"], spec.norm_eps)
    return _rms(spec, x, weight)


def _rms(spec: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
    """Apply RMSNorm over the last dim. arXiv:1910.07467, equation 4."""
    wide = _wide(x)
    scale = (wide.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt()
    times = _wide(weight) + 1 if spec.norm_plus_one else weight
    return (wide / scale * times).to(x.dtype)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(x / cap)`, or `x` without a cap. arXiv:2408.00118, section 2."""
    return x if cap is None else cap * torch.tanh(x / cap)


def _times(x: Tensor, factor: float) -> Tensor:
    """Return `x * factor`; `x` itself if the factor is 1."""
    return x if factor == 1 else x * factor


def _wide(x: Tensor) -> Tensor:
    """Return x in fp32; unchanged if it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()
