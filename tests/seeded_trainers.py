"""Faults that are put into training loops on torch's engines, and the kind that each is."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import trainer_loops
from trainer_loops import build, sum_of_head_norms, train


@dataclass
class Seed:
    """A fault: the engine, its kind, and what it changes of the model or of the loop."""

    engine: str
    ranks: int
    kind: str
    head_norms: Any = sum_of_head_norms
    change: Any = lambda model: None
    options: dict = field(default_factory=dict)
    patch: Any = contextlib.nullcontext


def parameters(model, text):
    return [p for name, p in model.named_parameters() if text in name and p.grad is not None]


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def scaling(text, factor):
    def before_step(model):
        for p in parameters(model, text):
            p.grad.mul_(factor)

    return {"before_step": before_step}


def without(text):
    def before_step(model):
        for p in parameters(model, text):
            p.grad = None

    return {"before_step": before_step}


def on_rank_1(text):
    def before_step(model):
        for p in parameters(model, text):
            if dist.get_rank() == 1:
                gradient = local(p.grad)
                noise = torch.linspace(-1, 1, gradient.numel()).view_as(gradient)
                gradient.add_(0.3 * gradient.norm() * noise)

    return {"before_step": before_step}


def not_a_number(model):
    not_a_number.calls = getattr(not_a_number, "calls", 0) + 1
    if not_a_number.calls % 2 == 0:
        for p in parameters(model, "head"):
            local(p.grad)[0] = torch.nan


def never_synchronized(model):
    model.require_backward_grad_sync = False


def ignores(text):
    def ignore(model):
        names = [name for name, _ in model.named_parameters() if text in name]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, names
        )

    return ignore


def zeroed_between(model):
    """Forget the gradient of all microbatches but the last."""
    seen = []

    def forget(module, args):
        seen.append(1)
        if module.training and len(seen) % 2 == 0:
            for p in model.parameters():
                p.grad = None

    model.register_forward_pre_hook(forget)


def zeroes(text):
    """Forget the gradient of some parameters of all microbatches but the last."""

    def change(model):
        seen = []

        def forget(module, args):
            seen.append(1)
            if len(seen) % 2 == 0:
                for p in parameters(model, text):
                    p.grad = None

        model.register_forward_pre_hook(forget)

    return change


def summing(state, bucket):
    """A communication hook that sums where DDP averages."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def summed_again(model, mesh):
    """Sum the accumulated gradient over tp after each microbatch."""
    group = mesh.get_group()
    for name, p in model.named_parameters():
        if "q_norm" in name:
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))


def averaged(model, mesh):
    """Average a partial gradient over tp, which a sum completes."""
    sum_of_head_norms(model, mesh)
    for layer in model.layers:
        layer.attention.q_norm.weight.register_hook(lambda g: g / 2)


def summed_twice(model, mesh):
    sum_of_head_norms(model, mesh)
    for layer in model.layers:
        layer.attention.q_norm.weight.register_hook(lambda g: g * 2)


@contextlib.contextmanager
def clipping(norm_of):
    """Clip by another norm than the whole gradient's."""
    name = "_get_total_norm"
    original = getattr(torch.nn.utils.clip_grad, name)
    torch.nn.utils.clip_grad.__dict__[name] = lambda grads, *a, **k: norm_of(grads, original)
    try:
        yield
    finally:
        torch.nn.utils.clip_grad.__dict__[name] = original


def full(norm):
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def local_norm(grads, original):
    return torch.stack([local(g).norm() for g in grads]).norm()


def doubled_norm(grads, original):
    return 2 * full(original(list(grads)))


def norm_without_the_last(grads, original):
    return full(original(list(grads)[:-1]))


@contextlib.contextmanager
def updating(change):
    """Change the weights after an optimizer's step."""
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: change(optimizer))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def drift(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            local(p).add_(1e-3 * dist.get_rank())


@torch.no_grad()
def decayed_again(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            local(p).mul_(1 - 1e-3)


@torch.no_grad()
def start_apart(model):
    for p in model.parameters():
        local(p).add_(0.01 * dist.get_rank())


def weighed(factor):
    @contextlib.contextmanager
    def patch():
        original = trainer_loops.loss_of
        trainer_loops.loss_of = lambda *args: original(*args) * factor
        try:
            yield
        finally:
            trainer_loops.loss_of = original

    return patch


@contextlib.contextmanager
def no_sum_of_outputs():
    """A row-parallel layer that adds up nothing: each rank goes on with its part."""
    original = RowwiseParallel._prepare_output_fn
    RowwiseParallel._prepare_output_fn = staticmethod(
        lambda layouts, use_local, mod, out, mesh: out.to_local()
    )
    try:
        yield
    finally:
        RowwiseParallel._prepare_output_fn = staticmethod(original)


SEEDS = {
    "ddp: never synchronized": Seed("ddp", 2, "missing average", change=never_synchronized),
    "ddp: one parameter ignored": Seed("ddp", 2, "missing average", options={"ignored": "head"}),
    "ddp: layers ignored": Seed("ddp", 2, "missing average", options={"ignored": "layers.0"}),
    # A bucket has the sums of earlier microbatches: they are summed again, and not averaged.
    "ddp: sums": Seed(
        "ddp", 2, "summed again", change=lambda m: m.register_comm_hook(None, summing)
    ),
    "ddp: zeroed between": Seed("ddp", 2, "microbatch lost", change=zeroed_between),
    "ddp: head zeroed": Seed("ddp", 2, "microbatch lost", change=zeroes("head")),
    "ddp: head doubled": Seed("ddp", 2, "scaled", options=scaling("head", 2)),
    "ddp: mlp halved": Seed("ddp", 2, "scaled", options=scaling("up", 0.5)),
    "ddp: no gradient": Seed("ddp", 2, "no gradient", options=without("norm")),
    "ddp: a rank leaks": Seed("ddp", 2, "replicas differ", options=on_rank_1("head")),
    "ddp: nan later": Seed("ddp", 2, "not finite", options={"before_step": not_a_number}),
    "ddp: norm doubled": Seed("ddp", 2, "wrong norm", patch=lambda: clipping(doubled_norm)),
    "ddp: norm short": Seed("ddp", 2, "wrong norm", patch=lambda: clipping(norm_without_the_last)),
    "ddp: drift": Seed("ddp", 2, "replicas differ", patch=lambda: updating(drift)),
    "ddp: decayed again": Seed("ddp", 2, "wrong update", patch=lambda: updating(decayed_again)),
    "ddp: start apart": Seed("ddp", 2, "replicas differ", change=start_apart),
    "ddp: divisor twice": Seed("ddp", 2, "scaled", patch=weighed(0.5)),
    "fsdp1: doubled": Seed("fsdp1", 2, "scaled", options=scaling("embed", 2)),
    "fsdp2: a divisor": Seed("fsdp2", 2, "scaled", options=scaling("layers.1", 2)),
    "fsdp2: all divisors": Seed("fsdp2", 2, "scaled", patch=weighed(2.0)),
    "fsdp2: no gradient": Seed("fsdp2", 2, "no gradient", options=without("down.bias")),
    "fsdp2: doubled": Seed("fsdp2", 2, "scaled", options=scaling("attention.q.", 2)),
    "fsdp2: local norms": Seed("fsdp2", 2, "clips differ", patch=lambda: clipping(local_norm)),
    "fsdp2: decayed": Seed("fsdp2", 2, "wrong update", patch=lambda: updating(decayed_again)),
    "hsdp: replicas apart": Seed("hsdp without replicas", 4, "missing average"),
    "hsdp: a divisor": Seed("hsdp", 4, "scaled", options=scaling("layers.0", 0.5)),
    "tp: partial norms": Seed("tp", 2, "missing sum", head_norms=None),
    "tp: summed again": Seed("tp", 2, "summed again", head_norms=summed_again),
    "tp: averaged": Seed("tp", 2, "scaled", head_norms=averaged),
    "tp: summed twice": Seed("tp", 2, "scaled", head_norms=summed_twice),
    "tp: outputs not summed": Seed("tp", 2, "wrong loss", patch=no_sum_of_outputs),
    "tp: a rank leaks": Seed("tp", 2, "replicas differ", options=on_rank_1("mlp_norm")),
    "tp: drift": Seed("tp", 2, "replicas differ", patch=lambda: updating(drift)),
    "tp x fsdp2: partial norms": Seed("tp_fsdp2", 4, "missing sum", head_norms=None),
    "tp x fsdp2: averaged": Seed("tp_fsdp2", 4, "scaled", head_norms=None),
}
SEEDS["tp x fsdp2: averaged"].options = scaling("down.weight", 0.5)
SEEDS["tp x fsdp2: averaged"].head_norms = sum_of_head_norms


def run_seed(world, name, folder):
    """Return the verdict of a loop with a fault, on rank 0."""
    from meshwright.prove.trainers.watch import watch

    seed, options = SEEDS[name], dict(SEEDS[name].options)
    lines, ignored = [], options.pop("ignored", None)
    model = trainer_loops.Tiny()
    if ignored:
        ignores(ignored)(model)
    with seed.patch():
        model, data_ranks, data_rank = build(seed.engine, model, seed.head_norms)
        seed.change(model)
        reference = trainer_loops.Tiny if seed.engine.startswith("tp") else None
        with watch(model, folder=folder, say=lines.append, reference=reference) as watched:
            train(model, data_ranks, data_rank, **options)
    return None if watched.verdict is None else watched.verdict.as_dict()
