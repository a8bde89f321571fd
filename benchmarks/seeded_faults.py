"""Faults that are put into other systems, each with the kind that it is of.

A fault is a function `prepare(model)`, called on each rank after the system has sharded its model
and before the first step: it changes the system's objects or functions. What it replaces, it hands
back to `undo`, an `ExitStack`.
"""

import contextlib
import importlib
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


class Fault(NamedTuple):
    """A case of the worker, the kind of the fault, and `prepare(model, undo)`."""

    system: str
    family: str
    layout: dict
    microbatches: int
    ranks: int
    kind: str
    prepare: object


def replaced(owner, name, value, undo):
    """Replace an attribute, and return the original."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    undo.callback(setattr, owner, name, original)
    return original


def local(tensor):
    """Return this rank's part of a tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def parameters(model, text):
    """Return the parameters whose name has a text."""
    chosen = [p for name, p in model.named_parameters() if text in name]
    assert chosen, text
    return chosen


def after_accumulation(text, change):
    """Change gradients where a backward has accumulated them."""

    def prepare(model, undo):
        for p in parameters(model, text):
            p.register_post_accumulate_grad_hook(change)

    return prepare


def scaled(p, factor):
    """Multiply a gradient."""
    local(p.grad).mul_(factor)


def noisy_on_rank_1(p):
    """Leave other numbers on one rank, as memory that nobody has written."""
    if dist.get_rank() == 1:
        gradient = local(p.grad)
        gradient.add_(gradient.norm() * torch.linspace(-1, 1, gradient.numel()).view_as(gradient))


def summed(p):
    """Sum what has been accumulated over all ranks."""
    dist.all_reduce(local(p.grad))


def lost(p):
    """Drop a gradient."""
    p.grad = None


def not_a_number(p):
    """Leave a NaN from the second backward on."""
    p.meshwright_calls = getattr(p, "meshwright_calls", 0) + 1
    if p.meshwright_calls > 1:
        local(p.grad).view(-1)[0] = torch.nan


def plain_forward(text):
    """Give modules their class's forward: transformers completes gradients in another one."""

    def prepare(model, undo):
        for name, module in model.named_modules():
            if text in name:
                module.forward = type(module).forward.__get__(module)

    return prepare


def never_synchronized(model, undo):
    """DDP that reduces nothing."""
    model.require_backward_grad_sync = False


def communicating_by(hook):
    """DDP with a communication hook."""
    return lambda model, undo: model.register_comm_hook(None, hook)


def summing(state, bucket):
    """Sum where DDP averages."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def without_rank_1(state, bucket):
    """Leave out the gradients of rank 1's rows."""
    flat = bucket.buffer()
    flat.mul_(float(dist.get_rank() != 1) / dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda future: future.value()[0])


def over_pairs(state, bucket):
    """Average over two ranks where all were meant."""
    ranks = [range(first, first + 2) for first in range(0, dist.get_world_size(), 2)]
    if not state:
        state += [dist.new_group(list(pair)) for pair in ranks]
    flat = bucket.buffer().div_(2)
    work = dist.all_reduce(flat, group=state[dist.get_rank() // 2], async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def reduced_over_pairs(model, undo):
    """DDP that reduces over a part of its group."""
    model.register_comm_hook([], over_pairs)


def cleared_between(text):
    """Forget a gradient before each forward, so that only the last microbatch's stays."""

    def prepare(model, undo):
        def clear(module, args):
            for p in parameters(model, text):
                p.grad = None

        model.register_forward_pre_hook(clear)

    return prepare


def fsdp_parts(model):
    """Return the modules of a model that FSDP2 shards."""
    return [m for m in model.modules() if isinstance(m, torch.distributed.fsdp.FSDPModule)]


def wrong_divisor(model, undo):
    """A layer of FSDP2 whose gradients are divided by another number of ranks."""
    part = fsdp_parts(model)[1]
    part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    part.set_gradient_divide_factor(2.0 * dist.get_world_size())


def replicas_apart(model, undo):
    """HSDP that doesn't reduce over its replicas: what it has is never handed to the optimizer."""
    model.set_requires_all_reduce(False)


def divided_again(model, undo):
    """FSDP1 whose gradients are divided once more by the number of ranks."""
    for part in model.modules():
        if isinstance(part, torch.distributed.fsdp.FullyShardedDataParallel):
            part._gradient_postdivide_factor *= dist.get_world_size()


def norm_by(norm_of):
    """Clip by another norm than that of all gradients."""

    def prepare(model, undo):
        clip = torch.nn.utils.clip_grad
        replaced(clip, "_get_total_norm", lambda grads, *a, **k: norm_of(list(grads)), undo)

    return prepare


def local_norm(grads):
    """Return the norm of this rank's shards."""
    return torch.stack([local(g).norm() for g in grads]).norm()


def doubled_norm(grads):
    """Return twice the norm."""
    norm = torch.linalg.vector_norm(torch.stack([full(g).norm() for g in grads]))
    return 2 * norm


def copies_counted(model, undo):
    """Count parameters that every rank has whole once for each rank in transformers' norm."""
    original = torch.nn.utils.get_total_norm

    def total(grads, *args, **kwargs):
        norm = original(grads, *args, **kwargs)
        is_shared = not any(hasattr(g, "device_mesh") for g in grads)
        return norm * dist.get_world_size() ** 0.5 if is_shared else norm

    replaced(torch.nn.utils, "get_total_norm", total, undo)


def full(tensor):
    """Return a whole tensor; a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def after_updates(change):
    """Change the weights after each update."""

    def prepare(model, undo):
        @torch.no_grad()
        def after(optimizer, args, kwargs):
            for p in model.parameters():
                change(local(p))

        undo.callback(register_optimizer_step_post_hook(after).remove)

    return prepare


def start_apart(model, undo):
    """Begin with other weights on each rank."""
    with torch.no_grad():
        for p in model.parameters():
            local(p).add_(0.01 * dist.get_rank())


def without(path, name, value=lambda *args, **kwargs: None):
    """Replace a function of a system, by one that does nothing."""

    def prepare(model, undo):
        home, _, owner = path.partition(":")
        holder = importlib.import_module(home)
        replaced(getattr(holder, owner) if owner else holder, name, value, undo)

    return prepare


def buckets_are_not_divided(model, undo):
    """Megatron-Core's buffers, with a factor of gradients that is twice as large."""
    for group in model.bucket_groups:
        for bucket in group.buckets:
            bucket.gradient_scaling_factor *= 2


def kept_from_before(model, undo):
    """Megatron-Core's buffers, which are never set to zero."""
    model.zero_grad_buffer()
    replaced(model, "zero_grad_buffer", lambda: None, undo)


class WithoutSums:
    """The module torch, whose `distributed` sums nothing."""

    distributed = SimpleNamespace(broadcast=dist.broadcast, all_reduce=lambda *args, **kwargs: None)

    def __getattr__(self, name):
        return getattr(torch, name)


def own_number_of_tokens(model, undo):
    """Megatron-Core's division by the number of tokens, which is not summed over ranks."""
    replaced(importlib.import_module(FINALIZE), "torch", WithoutSums(), undo)


def routers(model):
    """Return the routers of transformers' mixtures."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]


def detached_routers(model, undo):
    """Routers whose choices have no gradient."""
    for router in routers(model):
        router.register_forward_hook(lambda m, args, out: tuple(x.detach() for x in out))


def partial_routers(model, undo):
    """Experts under TP whose gradients of the router's weights are not summed."""
    from transformers.distributed import tensor_parallel

    original = tensor_parallel._AllReduceBackward
    top_k = model.config.num_experts_per_tok

    class Others:
        @staticmethod
        def apply(x, group):
            return x if x.shape[-1] == top_k else original.apply(x, group)

    replaced(tensor_parallel, "_AllReduceBackward", Others, undo)


def shards_in_another_order(model, undo):
    """A head whose shards of the vocabulary are put together in another order."""
    model.lm_head.register_forward_hook(lambda m, args, out: out.roll(out.shape[-1] // 2, -1))


def no_sum_of_outputs(model, undo):
    """Row-parallel layers of transformers whose outputs are not summed."""
    from transformers.distributed import tensor_parallel

    def transform(self, module, output, mesh):
        return output.to_local() if hasattr(output, "to_local") else output

    layer = tensor_parallel.RowwiseParallel
    replaced(layer, "transform_output_post_forward", transform, undo)


DDP, FSDP = {"ddp": 2}, {"fsdp_version": 2, "dp_shard_size": 2, "reshard_after_forward": True}
HSDP = {"fsdp_version": 2, "dp_replicate_size": 2, "dp_shard_size": 2}
BY_DDP = partial(Fault, "accelerate", "llama", DDP)
BY_FSDP = partial(Fault, "accelerate", "llama", FSDP)
BY_TP = partial(Fault, "transformers", "qwen3", {"tp_size": 2})
BY_LLAMA_TP = partial(Fault, "transformers", "llama", {"tp_size": 2})
BY_MIXTRAL_TP = partial(Fault, "transformers", "mixtral", {"tp_size": 2})
BY_TITAN = partial(Fault, "torchtitan", "llama3", {"dp_shard": 2})
BY_MEGATRON = partial(Fault, "megatron-core", "gpt, norms of heads")
FINALIZE = "megatron.core.distributed.finalize_model_grads"
FAULTS = {
    "never reduced": BY_DDP(1, 2, "missing average", never_synchronized),
    "summed": BY_DDP(1, 2, "scaled", communicating_by(summing)),
    "a rank's rows lost": BY_DDP(1, 2, "data rank lost", communicating_by(without_rank_1)),
    "head's microbatch lost": BY_DDP(2, 2, "microbatch lost", cleared_between("lm_head")),
    "replicas drift": BY_DDP(
        2, 2, "replicas differ", after_updates(lambda p: p.add_(1e-3 * dist.get_rank()))
    ),
    "other weights at the start": BY_DDP(2, 2, "replicas differ", start_apart),
    "decayed again": BY_FSDP(2, 2, "wrong update", after_updates(lambda p: p.mul_(0.999))),
    "twice the norm": BY_DDP(2, 2, "wrong norm", norm_by(doubled_norm)),
    "norm of a rank's shards": BY_FSDP(2, 2, "clips differ", norm_by(local_norm)),
    "a layer's divisor": BY_FSDP(2, 2, "scaled", wrong_divisor),
    "gradient lost": BY_FSDP(2, 2, "no gradient", after_accumulation("up_proj", lost)),
    "replicas not reduced": Fault(
        "accelerate", "llama", HSDP, 1, 4, "no gradient", replicas_apart
    ),
    "norms of heads not summed": BY_TP(1, 2, "missing sum", plain_forward("q_norm")),
    "outputs not summed": BY_TP(1, 2, "wrong loss", no_sum_of_outputs),
    "halved": BY_TP(1, 2, "scaled", after_accumulation("down_proj", partial(scaled, factor=0.5))),
    "memory not written": BY_TP(
        1, 2, "replicas differ", after_accumulation("post_attention", noisy_on_rank_1)
    ),
    "NaN in step 2": BY_TP(1, 2, "not finite", after_accumulation("lm_head", not_a_number)),
    "experts doubled": Fault(
        "transformers", "mixtral", {"fsdp_size": 2, "ep_size": 2}, 1, 2, "scaled",
        after_accumulation("experts", partial(scaled, factor=2.0)),
    ),
    "reduced over pairs": Fault(
        "accelerate", "llama", {"ddp": 4}, 1, 4, "missing average", reduced_over_pairs
    ),
    "summed at each microbatch": BY_LLAMA_TP(
        2, 2, "summed again", after_accumulation("layernorm", summed)
    ),
    "vocabulary in another order": BY_LLAMA_TP(1, 2, "wrong loss", shards_in_another_order),
    "copies counted in the norm": BY_LLAMA_TP(2, 2, "wrong norm", copies_counted),
    "router's gradient partial": BY_MIXTRAL_TP(1, 2, "missing sum", partial_routers),
    "router's gradient on one rank": BY_MIXTRAL_TP(
        1, 2, "replicas differ", after_accumulation("mlp.gate", noisy_on_rank_1)
    ),
    "routers detached": Fault(
        "transformers", "mixtral", {"fsdp_size": 2, "ep_size": 2}, 1, 2, "no gradient",
        detached_routers,
    ),
    "torch: divided again": Fault(
        "torch", "llama", {"fsdp1": 2}, 2, 2, "scaled", divided_again
    ),
    "torch: replicas drift": Fault(
        "torch", "llama", {"dp_shard": 2, "tp": 2}, 1, 4, "replicas differ",
        after_updates(lambda p: p.add_(1e-3 * (dist.get_rank() % 2))),
    ),
    "titan: a layer's divisor": BY_TITAN(2, 2, "scaled", wrong_divisor),
    "titan: NaN in step 2": BY_TITAN(
        1, 2, "not finite", after_accumulation("output", not_a_number)
    ),
    "titan: decayed again": BY_TITAN(
        2, 2, "wrong update", after_updates(lambda p: p.mul_(0.999))
    ),
    "megatron: norms of heads not summed": BY_MEGATRON(
        {"tp": 2}, 2, 2, "missing sum",
        without(FINALIZE, "_allreduce_non_tensor_model_parallel_grads"),
    ),
    "megatron: not reduced": BY_MEGATRON(
        {"dp": 2}, 2, 2, "missing average",
        without("megatron.core.distributed:DistributedDataParallel", "finish_grad_sync"),
    ),
    "megatron: divided by half": BY_MEGATRON({"dp": 2}, 2, 2, "scaled", buckets_are_not_divided),
    "megatron: never cleared": BY_MEGATRON({"dp": 2}, 2, 2, "not cleared", kept_from_before),
    "megatron: own number of tokens": Fault(
        "megatron-core", "gpt", {"dp": 2, "calculate_per_token_loss": True}, 2, 2,
        "local token count", own_number_of_tokens,
    ),
    "meshwright: summed at each microbatch": Fault(
        "meshwright", "llama", {"tp": 2}, 2, 2, "summed again",
        after_accumulation("layernorm", summed),
    ),
    "meshwright: doubled": Fault(
        "meshwright", "llama", {"tp": 2}, 1, 2, "scaled",
        after_accumulation("down_proj", partial(scaled, factor=2.0)),
    ),
    "meshwright: other weights at the start": Fault(
        "meshwright", "llama", {"dp_replicate": 2}, 2, 2, "replicas differ", start_apart
    ),
    "meshwright: decayed again": Fault(
        "meshwright", "llama", {"dp_replicate": 2}, 2, 2, "wrong update",
        after_updates(lambda p: p.mul_(0.999)),
    ),
}  # fmt: skip


@contextlib.contextmanager
def seeded(name, module):
    """Inside the `with` block, `module.watch` puts a fault into the model that it is given."""
    original = module.watch
    with contextlib.ExitStack() as undo:

        def watch(model, *args, **kwargs):
            FAULTS[name].prepare(model, undo)
            return original(model, *args, **kwargs)

        replaced(module, "watch", watch, undo)
        yield
