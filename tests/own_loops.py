"""Training loops that people write themselves, right and wrong, for tests of `watch`.

Each takes `fault` (what is put in, or None), and trains a model on two ranks under `watch`.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from meshwright.prove.trainers.watch import watch
from trainer_loops import DIM, VOCAB, Tiny, loss_of, rows

STEPS, MICROBATCHES = 3, 2


def run_loop(world, name, fault, folder):
    """Return the verdict of a loop under `watch`, on rank 0."""
    reference = Experts if name == "experts by rank" else None
    with contextlib.ExitStack() as stack:

        def watched(model):
            options = {"folder": folder, "say": lambda line: None, "reference": reference}
            return stack.enter_context(watch(model, **options))

        holder = LOOPS[name](watched, fault)
    return None if holder.verdict is None else holder.verdict.as_dict()


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def accumulate(model, step, microbatches=MICROBATCHES, scale=1.0):
    """Add up the gradients of a step, of a mean over the targets of all microbatches."""
    places = [(m, d) for m in range(microbatches) for d in range(2)]
    count = sum(int((rows(step, m, d)[1] != -100).sum()) for m, d in places)
    for microbatch in range(microbatches):
        ids, targets = rows(step, microbatch, dist.get_rank())
        (loss_of(model(ids), targets, count) * 2 * scale).backward()


def stages(watched, fault, named_apart=False):
    """A pipeline of two stages, with names of their own or from 0 in each."""
    rank = dist.get_rank()
    whole = Tiny()
    model = Stage(whole, rank, named_apart)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holder = watched(model)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            ids, targets = rows(step, microbatch, 0)
            if rank == 0:
                hidden = model(ids)
                dist.send(hidden.detach(), 1)
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, 1)
                hidden.backward(gradient)
            else:
                received = torch.empty(*ids.shape, DIM)
                dist.recv(received, 0)
                received.requires_grad_()
                loss_of(model(received), targets, 100).backward()
                dist.send(received.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
    return holder


class Stage(nn.Module):
    def __init__(self, whole, rank, named_apart):
        super().__init__()
        self.embed = whole.embed if rank == 0 else None
        layer = whole.layers[rank]
        key = str(rank) if named_apart else "0"
        self.layers = nn.ModuleDict({key: layer})
        self.norm, self.head = (None, None) if rank == 0 else (whole.norm, whole.head)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def flat_buffers(watched, fault):
    """The optimizer of each rank holds a flat part of the weights, and reads `main_grad`."""
    model, rank = Tiny(), dist.get_rank()
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    flat = torch.zeros(-(-size // 2) * 2)
    place = 0
    for p in parameters:
        flat[place : place + p.numel()].copy_(p.data.flatten())
        p.data = flat[place : place + p.numel()].view_as(p)
        place += p.numel()
    gradients = torch.zeros_like(flat)
    place = 0
    for p in parameters:
        p.main_grad = gradients[place : place + p.numel()].view_as(p)
        place += p.numel()

        def accumulate_main(p):
            p.main_grad.add_(p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(accumulate_main)
    half = len(flat) // 2
    part = nn.Parameter(flat[rank * half : (rank + 1) * half].clone())
    optimizer = torch.optim.Adam([part], lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        gradients.zero_()
        accumulate(model, step)
        shard = torch.empty(half)
        dist.reduce_scatter_tensor(shard, gradients.clone())
        part.grad = shard / 2
        optimizer.step()
        whole = torch.empty_like(flat)
        dist.all_gather_into_tensor(whole, part.data)
        flat.copy_(whole)
    return holder


class Experts(nn.Module):
    """Experts that all ranks' tokens visit; each rank holds those of its own."""

    def __init__(self, ranks=(0, 1)):
        super().__init__()
        whole = Tiny()
        self.embed, self.head = whole.embed, whole.head
        self.experts = nn.ModuleDict({str(r): whole.layers[r].up for r in ranks})
        self.is_shared = len(ranks) == 1

    def forward(self, ids):
        x = self.embed(ids)
        parts = sum(F.gelu(expert(x))[..., :DIM] for expert in self.experts.values())
        return self.head(Both.apply(parts) if self.is_shared else parts)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def experts_by_rank(watched, fault):
    """Each rank's model has an expert that the other's has not."""
    rank = dist.get_rank()
    model = Experts((rank,))
    if fault != "embedding not summed":
        model.embed.register_forward_hook(lambda m, args, out: Copied.apply(out))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            ids, targets = rows(step, microbatch, 0)
            loss_of(model(ids), targets, 100).backward()
        if fault == "expert doubled" and rank == 1:
            model.experts["1"].weight.grad *= 2
        optimizer.step()
        optimizer.zero_grad()
    return holder


def encoder_and_head(watched, fault):
    """Two models in one step: the watched one's outputs go into the other."""
    torch.manual_seed(1)
    model, other = Tiny(), nn.Linear(VOCAB, VOCAB)
    both = nn.ModuleList([model, other])
    optimizer = torch.optim.AdamW(both.parameters(), lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        accumulate(lambda ids: other(model(ids)), step)
        average_gradients(both)
        if fault == "head doubled":
            model.head.weight.grad *= 2
        nn.utils.clip_grad_norm_(both.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return holder


def two_optimizers(watched, fault):
    """Matrices and the rest have optimizers of their own, and are clipped each by its norm."""
    model = DistributedDataParallel(Tiny())
    groups = [[p for p in model.parameters() if (p.dim() == 2) == is_2d] for is_2d in (True, False)]
    optimizers = [torch.optim.AdamW(groups[0], lr=1e-2), torch.optim.SGD(groups[1], lr=1e-2)]
    holder = watched(model)
    for step in range(STEPS):
        accumulate(model, step)
        for group in groups:
            nn.utils.clip_grad_norm_(group, 0.05)
        for optimizer in optimizers:
            optimizer.step()
            if fault == "second decays again":
                with torch.no_grad():
                    for p in groups[1]:
                        p.mul_(1 - 1e-2 * (dist.get_rank() + 1))
            optimizer.zero_grad()
    return holder


def wrapped_parts(watched, fault):
    """A compiled layer, a checkpointed one, and DDP inside of a module."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            tiny = Tiny()
            tiny.layers[0] = torch.compile(tiny.layers[0], backend="eager")
            tiny.layers[1] = checkpoint_wrapper(tiny.layers[1])
            self.net = DistributedDataParallel(tiny)

        def forward(self, ids):
            return self.net(ids)

    model = torch.compile(Outer(), backend="eager")
    if fault == "not averaged":
        model.net.require_backward_grad_sync = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        accumulate(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return holder


def partial_window(watched, fault):
    """The second window of accumulation has one microbatch, of two."""
    model = DistributedDataParallel(Tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    holder = watched(model)
    for step, microbatches in enumerate((2, 1, 2)):
        accumulate(model, step, microbatches, scale=microbatches / MICROBATCHES)
        if fault == "last window doubled" and microbatches == 1:
            for p in model.parameters():
                p.grad *= 2
        optimizer.step()
        optimizer.zero_grad()
    return holder


def scaled_loss(watched, fault):
    """A gradient scaler that finds an infinity in the second step, and skips it."""
    model = DistributedDataParallel(Tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    holder = watched(model)
    for step in range(STEPS + 1):
        places = range(MICROBATCHES)
        for microbatch in places:
            ids, targets = rows(step, microbatch, dist.get_rank())
            scaler.scale(loss_of(model(ids), targets, 100)).backward()
        gradient = model.module.head.weight.grad
        if step == 1 and (fault != "one rank skips" or dist.get_rank() == 1):
            gradient[0, 0] = torch.inf
        if fault == "head doubled":
            gradient *= 2
        if fault == "clipped before unscaling":
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return holder


def zero_redundancy(watched, fault):
    """Torch's optimizer whose states are sharded."""
    model = DistributedDataParallel(Tiny())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        accumulate(model, step)
        optimizer.step()
        if fault == "weights drift":
            with torch.no_grad():
                model.module.head.weight.add_(1e-3 * dist.get_rank())
        optimizer.zero_grad()
    return holder


def parts_by_rank(watched, fault):
    """Each rank updates half of the parameters, and broadcasts them."""
    model = Tiny()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[dist.get_rank() :: 2], lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        accumulate(model, step)
        average_gradients(model)
        optimizer.step()
        for place, p in enumerate(parameters):
            if fault != "one not broadcast" or place != 4:
                dist.broadcast(p.data, place % 2)
        model.zero_grad()
    return holder


def own_clipping(watched, fault):
    """Clips by hand."""
    model = DistributedDataParallel(Tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        accumulate(model, step)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            if fault == "all divided":
                norm = torch.tensor(0.1 * 2)
            for p in model.parameters():
                p.grad.mul_(torch.clamp(0.1 / norm, max=1.0))
            if fault == "head left out":
                model.module.head.weight.grad.mul_(norm / 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return holder


def own_updates(watched, fault):
    """Updates by hand, without an optimizer."""
    model = DistributedDataParallel(Tiny())
    holder = watched(model)
    for step in range(STEPS):
        accumulate(model, step)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        model.zero_grad()
    return holder


def closures(watched, fault, kind=torch.optim.AdamW):
    """The optimizer calls the forward and backward."""
    model = DistributedDataParallel(Tiny())
    optimizer = kind(model.parameters(), lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            accumulate(model, step)
            if fault == "head doubled":
                model.module.head.weight.grad *= 2
            return torch.tensor(1.0)

        optimizer.step(closure)
    return holder


def projected(watched, fault):
    """Normalizes the weights after each update, as nGPT does."""
    model = DistributedDataParallel(Tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    holder = watched(model)
    for step in range(STEPS):
        accumulate(model, step)
        optimizer.step()
        with torch.no_grad():
            weight = model.module.head.weight
            scale = 1 + 0.1 * dist.get_rank() if fault == "on one rank" else 1
            weight.div_(weight.norm(dim=-1, keepdim=True) * scale)
        optimizer.zero_grad()
    return holder


def never_cleared(watched, fault):
    """Forgets to clear the gradients."""
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    holder = watched(model)
    total = {}
    for step in range(STEPS):
        accumulate(model, step)
        for name, p in model.named_parameters():
            own = p.grad.clone()
            dist.all_reduce(own)
            p.grad = own / 2 + (total.get(name, 0) if fault else 0)
            total[name] = p.grad.clone()
        optimizer.step()
        model.zero_grad()
    return holder


LOOPS = {
    "stages numbered from 0": stages,
    "stages with names of their own": lambda *args: stages(*args, named_apart=True),
    "flat buffers": flat_buffers,
    "experts by rank": experts_by_rank,
    "encoder and head": encoder_and_head,
    "two optimizers": two_optimizers,
    "wrapped parts": wrapped_parts,
    "partial window": partial_window,
    "scaled loss": scaled_loss,
    "zero redundancy": zero_redundancy,
    "parts by rank": parts_by_rank,
    "own clipping": own_clipping,
    "own updates": own_updates,
    "closures": closures,
    "several evaluations": lambda *args: closures(*args, kind=torch.optim.LBFGS),
    "projected": projected,
    "never cleared": never_cleared,
}
