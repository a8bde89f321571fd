"""The yardstick: one process, one device, PyTorch alone, nothing but what the step needs.

    python -m benchmarks.plain_loop --precision fp32 --threads 2

The model is a Llama of 34 M parameters (vocabulary 8192, dim 512, 8 layers, 8 heads, ffn 1408)
with a batch of 8 x 512 tokens. `--ops torch` builds it from PyTorch's own operations; `--ops
meshwright` from the package's modules, plain `nn.Module`s; `--compile` hands either to
torch.compile: whichever is fastest is the bar. Prints one JSON line with the seconds of each step
after the first two.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
from torch import nn
from torch.nn import functional as F

# Steps in which an allocator grows, and a compiler works.
NOT_COUNTED = 2
VOCAB, DIM, LAYERS, HEADS, FFN, SEQ, BATCH = 8192, 512, 8, 8, 1408, 512, 8


class Block(nn.Module):
    """A Llama block of torch's own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = (
            t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A Llama of torch's own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        frequency = 10000.0 ** (-torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS))
        angles = torch.outer(torch.arange(SEQ), frequency).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def build(ops: str) -> nn.Module:
    """Return the model of the named operations."""
    if ops == "torch":
        return Llama()
    from meshwright.models import build_model, init_model
    from meshwright.spec.resolve import model_spec

    spec = model_spec(vocab_size=VOCAB, dim=DIM, n_layers=LAYERS, n_heads=HEADS, ffn_dim=FFN)
    return init_model(build_model(spec, device="cpu", max_seq_len=SEQ), spec, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--ops", choices=["torch", "meshwright"], default="torch")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = build(args.ops)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    forward = torch.compile(model) if args.compile else model
    seconds = []
    for _ in range(args.steps + NOT_COUNTED):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1))
        started = time.perf_counter()
        total = 0.0
        for part in tokens.split(args.microbatch):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                logits = forward(part[:, :-1])
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"
            )
            loss = loss / (BATCH * SEQ)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds[NOT_COUNTED:], "loss": total, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
