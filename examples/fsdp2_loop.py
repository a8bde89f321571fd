"""A loop on FSDP2 that knows nothing of Meshwright, to be proven from outside.

meshwright prove -- torchrun --nproc-per-node 2 examples/fsdp2_loop.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, DIM, LENGTH, ROWS, MICROBATCHES, STEPS = 64, 32, 16, 4, 2, 20


class Block(nn.Module):
    """A norm and an MLP around each position's mean over the positions before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the block."""
        places = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        mixed = self.norm(x).cumsum(1) / places
        return x + self.down(F.gelu(self.up(mixed)))


class Model(nn.Module):
    """A language model of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    """Train for some steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.Generator().manual_seed(1 + rank)
    for step in range(STEPS):
        for _ in range(MICROBATCHES):
            ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=rows).to(device)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / MICROBATCHES
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item() * MICROBATCHES:.4f}, norm {norm:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
