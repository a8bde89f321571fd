"""A small language model and training loops on each of torch's engines, for tests of `watch`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

VOCAB, DIM, LENGTH = 40, 16, 12


class Mixer(nn.Module):
    """Attention with a norm of each head's queries, which tensor parallelism must sum."""

    def __init__(self, heads=4):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.q_norm = nn.RMSNorm(DIM // heads)
        self.head_dim, self.group = DIM // heads, None

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        weight = self.q_norm.weight
        weight = weight if self.group is None else Summed.apply(weight, self.group)
        q = F.rms_norm(q, (self.head_dim,), weight)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(DIM), Mixer()
        self.mlp_norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Tiny(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.25 * noise)

    def forward(self, ids):
        x = self.dropout(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


TP_PLAN = {
    **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
    "attention.o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Summed(torch.autograd.Function):
    """A weight whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx, weight, group):
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_of_head_norms(model, mesh):
    """Sum the gradients of norms of heads over tp, in each backward."""
    for layer in model.layers:
        layer.attention.group = mesh.get_group()


def build(engine, model=None, head_norms=sum_of_head_norms):
    """Return (the model on an engine, its data ranks, this rank's data rank)."""
    model = model or Tiny()
    world, rank = dist.get_world_size(), dist.get_rank()
    if engine == "ddp":
        return DistributedDataParallel(model), world, rank
    if engine == "fsdp1":
        on_cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=on_cpu), world, rank
    if engine == "fsdp2":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), world, rank
    if engine.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        mesh = mesh if engine == "hsdp" else mesh["shard"]
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), world, rank
    tp = 2
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("shard", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], TP_PLAN)
    if head_norms is not None:
        head_norms(model, mesh["tp"])
    if engine == "tp_fsdp2":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["shard"])
        model = fully_shard(model, mesh=mesh["shard"])
    elif world > tp:
        raise ValueError("tp alone has two ranks")
    return model, world // tp, rank // tp


def rows(step, microbatch, data_rank, batch=2):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + data_rank)
    ids = torch.randint(0, VOCAB, (batch + microbatch, LENGTH), generator=generator)
    targets = ids.roll(-1, 1)
    targets[:, -1 - data_rank :] = -100
    return ids, targets


def loss_of(logits, targets, count):
    flat = logits.flatten(0, 1), targets.flatten()
    return F.cross_entropy(*flat, ignore_index=-100, reduction="sum") / count


def train(
    model, data_ranks, data_rank, *, microbatches=2, steps=2, optimizer="AdamW", clip=1.0,
    before_step=lambda model: None,
):  # fmt: skip
    """Take some steps; the loss is the mean over all targets of the global batch."""
    kind = getattr(torch.optim, optimizer)
    optimizer = kind(model.parameters(), lr=1e-2, foreach=False)
    for step in range(steps):
        places = [(m, d) for m in range(microbatches) for d in range(data_ranks)]
        count = sum(int((rows(step, m, d)[1] != -100).sum()) for m, d in places)
        for microbatch in range(microbatches):
            ids, targets = rows(step, microbatch, data_rank)
            loss = loss_of(model(ids), targets, count) * data_ranks
            loss.backward()
        before_step(model)
        if clip:
            if isinstance(model, FullyShardedDataParallel):
                model.clip_grad_norm_(clip)
            else:
                clip_by_norm(model, clip)
        optimizer.step()
        optimizer.zero_grad()


def clip_by_norm(model, clip):
    """Clip parameters on several meshes: torch's own function refuses them together."""
    kinds = {}
    for p in model.parameters():
        if p.grad is not None:
            kinds.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    if len(kinds) == 1:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    return None
