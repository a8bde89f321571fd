"""A step of what people write themselves on one GPU, beside `benchmarks.gpu`'s rows.

    python -m benchmarks.gpu_peer --how autocast --rows 2
    python -m benchmarks.gpu_peer --how fsdp2 --rows 4

transformers' Llama in the shape of Llama-3.2-1B with random weights, blocks compiled, AdamW fused,
weights in fp32: by autocast, or by FSDP2 over one rank with parameters in bf16 and sums in fp32, as
torchtitan trains. A step has `--batch` rows of `--length` tokens, `--rows` at a time. Prints one
JSON line: seconds of each step after the first two, and the bytes at the peak.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Steps in which an allocator grows, and a compiler works.
NOT_COUNTED = 2


def model_of(layers: int, device: torch.device, *, tiny: bool) -> Any:
    """Return transformers' model in fp32 on a device, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes,
        **heads,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with device:
        return LlamaForCausalLM(config)


def by_fsdp2(model: Any) -> None:
    """Have FSDP2 keep fp32 shards of one rank, and compute with bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def seconds_of_steps(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Return the seconds of each step."""
    model = model_of(args.layers, device, tiny=args.tiny)
    model.train()
    for layer in model.model.layers:
        layer.compile()
    if args.how == "fsdp2":
        by_fsdp2(model)
    narrow = torch.autocast(device.type, torch.bfloat16) if args.how == "autocast" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pieces = args.batch // args.rows
    size = (pieces, args.rows, args.length)
    tokens = torch.randint(0, model.config.vocab_size, size, device=device)
    found = []
    for step in range(NOT_COUNTED + args.steps):
        if step == NOT_COUNTED and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for piece in tokens:
            with narrow or nullcontext():
                loss = model(input_ids=piece, labels=piece).loss / pieces
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found[NOT_COUNTED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=("autocast", "fsdp2"), default="autocast")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this itself")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        row: dict[str, Any] = {"how": args.how, "rows": args.rows, "torch": torch.__version__}
        try:
            row["seconds"] = seconds_of_steps(args, device)
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        if device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
        dist.destroy_process_group()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
