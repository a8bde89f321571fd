"""One's own model in one's own loop, parallel: a transformers GPT that knows nothing of Meshwright.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py
    torchrun --nproc-per-node 4 examples/own_loop.py --tp 2 --zero 3
    torchrun --nproc-per-node 2 examples/own_loop.py --cp 2 --save own-steps
    python examples/own_loop.py --save own-steps --steps 10

It runs on GPUs if the machine has one for each process, else on the CPU. Ranks that --tp and --cp
leave over read different data. The losses are the same on every layout, and any layout goes on from
the steps that another has saved.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import meshwright as mw

BATCH, SEQ, VOCAB = 8, 64, 256
# Which layers tensor parallelism cuts. The fused q, k, v of this model interleave by head, so
# cutting its rows gives every rank whole heads.
PLAN = {
    "gpt_neox.embed_in": "vocab",
    "gpt_neox.layers.*.attention.query_key_value": "column",
    "gpt_neox.layers.*.attention.dense": "row",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "column",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "row",
    "lm_head": "column_gathered",
}


def join() -> torch.device:
    """Join the other processes, if there are any; returns the device of this one."""
    torch.set_num_threads(1)
    place, others = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= others:
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def main() -> None:
    """Train a few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--zero", type=int, choices=[0, 1, 2, 3], default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--save", metavar="FOLDER", help="save the last step here, or go on from it"
    )
    args = parser.parse_args()
    device = join()
    world, ranks = dist.get_world_size(), args.tp * args.cp
    if world % ranks:
        sys.exit(f"--tp {args.tp} --cp {args.cp}: {world} processes are no multiple of {ranks}")
    data = world // ranks
    layout = mw.Layout(
        tp=args.tp,
        cp=args.cp,
        zero=args.zero,
        dp_shard=data if args.zero else 1,
        dp_replicate=1 if args.zero else data,
    )
    mesh = mw.make_mesh(layout, device.type)

    torch.manual_seed(0)  # the same weights on every rank
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=SEQ,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device)
    mw.parallelize(model, layout, mesh, plan=PLAN)
    # foreach=False: parameters that tp cuts and those that it does not are different tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    start, checkpoints = 0, None
    if args.save:
        checkpoints = mw.Checkpoints(args.save, model, optimizer, layout)
        found = checkpoints.load()
        start = found.step if found else 0

    at = mw.positions(layout, SEQ).to(device)  # of each row this rank's, which are all without cp
    share = BATCH // data
    rank = layout.mesh.data_rank(dist.get_rank())
    for step in range(start, args.steps):
        generator = torch.Generator().manual_seed(step % 2)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        mine = tokens[rank * share : (rank + 1) * share].to(device)
        logits = model(mine[:, at], position_ids=at[None]).logits
        # The sum over one's own tokens, divided by the number of all: gradients are summed.
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, at + 1].flatten(), reduction="sum")
        loss = loss / (BATCH * SEQ)
        loss.backward()
        norm = mw.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)  # every tp rank has the whole loss of its data rank
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {total.item() / args.tp:.6f} norm {norm:.6f}", flush=True)
        if checkpoints and step + 1 == args.steps:
            checkpoints.save(step + 1)
    dist.barrier()
    dist.destroy_process_group()
    # Threads of torch's process groups can outlive an interpreter that ends by itself.
    os._exit(0)


if __name__ == "__main__":
    main()
