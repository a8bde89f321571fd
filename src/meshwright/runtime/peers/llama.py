"""The compared Llama in torch operations only, like that of `benchmarks.plain_loop`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.runtime.peers.catalogue import PeerSizes


class LlamaBlock(nn.Module):
    """A Llama block whose number of heads follows from the width of its weights or shards."""

    def __init__(self, sizes: PeerSizes) -> None:
        super().__init__()
        dim, ffn = sizes.dim, sizes.ffn
        self.head_dim = dim // sizes.heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            projection(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        q, k = (t * cos + _half_turned(t) * sin for t in (q, k))
        mixed = self.attend(q, k, v)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Llama(nn.Module):
    """A Llama, or a pipeline stage of one with the given `layers`.

    `positions` are those of the tokens that it reads; by default those of the whole sequence.
    """

    def __init__(
        self, sizes: PeerSizes, layers: range | None = None, positions: Tensor | None = None
    ) -> None:
        super().__init__()
        layers = range(sizes.layers) if layers is None else layers
        positions = torch.arange(sizes.seq) if positions is None else positions
        self.embed = nn.Embedding(sizes.vocab, sizes.dim) if 0 in layers else None
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in layers)
        is_last = layers.stop == sizes.layers
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5) if is_last else None
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False) if is_last else None
        head_dim = sizes.dim // sizes.heads
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(positions, frequency).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits or, unless it is the last stage, hidden states `[rows, seq, dim]`."""
        if self.embed is not None:
            x = self.embed(x)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, computed in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
