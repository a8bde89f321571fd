"""Data parallelism and mixed precision: replicas, and ZeRO's three stages.

ZeRO, arXiv:1910.02054, section 5: stage 1 shards the optimizer states, 2 also gradients, 3 also
parameters. The stage determines what is gathered from FSDP2's shards, and how long it stays. If
ranks keep weights whole and sum gradients themselves, `Replicas` replaces FSDP2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise, zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from meshwright.comm.groups import Groups
from meshwright.layout import Layout
from meshwright.parallel.data_parallel.replicas import Replicas
from meshwright.parallel.tensor_parallel.deferred import defer
from meshwright.program.shards import cuts_frozen, data_rank
from meshwright.spec.training import TrainSpec
from meshwright.torch_private import ReplicateModule, replicate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Weights and inputs as they are.
_FP32: Final = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def mixed_precision(train: TrainSpec) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: products and sums as configured, whatever the weights' dtype is."""
    if train.precision == train.weight_dtype == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[train.precision], reduce_dtype=DTYPES[train.reduced_dtype]
    )


def narrow_weights(model: nn.Module, train: TrainSpec) -> None:
    """Convert a model's parameters in place, before they are sharded.

    Frozen ones are converted to the dtype of matrix products (`train.precision`), trained ones to
    `train.weight_dtype`: fp32, or bf16 if there are no fp32 masters.
    """
    used, trained = DTYPES[train.precision], DTYPES[train.weight_dtype]
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_trained, dtype = parameter.requires_grad, parameter.dtype
            target = trained if is_trained else used
            if dtype != target:
                narrow = parameter.detach().to(target)
                setattr(module, name, nn.Parameter(narrow, requires_grad=is_trained))


def sum_apart_from_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Have FSDP2 keep the shards of gradients in a dtype of their own.

    By itself, it rounds each microbatch's sum to the dtype of the weights.
    """
    for module in wrapped(model):
        for group in _param_groups(_state(module)):
            group.lazy_init()
            group._orig_dtype = dtype
            group._init_mp_dtypes = lambda: None  # the first forward would set it again
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad_dtype = None


def needs_wrapping(layout: Layout, train: TrainSpec) -> bool:
    """Whether weights or gradients are communicated, or products need another dtype."""
    is_fp32 = train.precision == train.weight_dtype == "fp32"
    return layout.dp * layout.cp > 1 or layout.zero > 0 or not is_fp32


def distribute_data(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    layout: Layout,
    train: TrainSpec,
    mesh: DeviceMesh,
    replicas: str = "replicate",
    shards: str = "shard",
    of_experts: DeviceMesh | None = None,
    *,
    embed: nn.Module | None = None,
    head: nn.Module | None = None,
    keeps_frozen: bool = False,
    in_fp32: Collection[nn.Module] = (),
) -> None:
    """Replicate or shard a model over data with FSDP2: each block is a unit, and so is the rest.

    `replicas` and `shards` name the axes of `mesh`, and of `of_experts`, the mesh of experts that
    are divided over ranks. `embed` and `head` become units of their own: the embedding is gathered
    only for its forward; the loss gathers the head, see `HeadUnit`. With `keeps_frozen`, untrained
    weights have the compute dtype, and may stay whole. Each module of `in_fp32` computes in fp32,
    whatever the compute dtype is, as a unit of its own. Gradients are summed, not averaged: the
    loss is already divided by the global number of target tokens, which stays right for uneven
    batches.
    """
    if not needs_wrapping(layout, train):
        return
    usual = mixed_precision(train)
    pins = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pins) if layout.offload == "params" else OffloadPolicy()

    def wrap(module: nn.Module, mesh: DeviceMesh) -> None:
        policy = _FP32 if module in in_fp32 else usual
        if layout.zero == 0:
            replicate(module, mesh=mesh[replicas], mp_policy=policy)
            return
        fully_shard(
            module,
            mesh=mesh[replicas, shards] if layout.dp_replicate > 1 else mesh[shards],
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=layout.zero == 3,
            ignored_params=_whole(model, layout) if keeps_frozen else None,
        )

    turns: list[list[Any]] = []  # blocks, each with what it takes up after itself
    for block in blocks:
        inner = dict(_units_of(block, mesh, of_experts, in_fp32))
        for unit, on in inner.items():
            wrap(unit, on)
        wrap(block, mesh)
        turns.append([block, *inner])
    for module in (*in_fp32, embed, head):
        if module is not None and not isinstance(module, FSDPModule):  # it is in no block
            wrap(module, mesh)
    wrap(model, mesh)
    _begin_together(turns)
    _sum_gradients(model)
    _prefetch(model, embed, head, turns)


def _sum_gradients(model: nn.Module) -> None:
    for managed in wrapped(model):
        # A divide factor needs PREMUL_SUM, which gloo lacks.
        managed.set_force_sum_reduction_for_comms(True)
        managed.set_gradient_divide_factor(1.0)


def _units_of(
    block: nn.Module,
    mesh: DeviceMesh,
    of_experts: DeviceMesh | None,
    in_fp32: Collection[nn.Module],
) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """Yield the modules within a block that are FSDP units of their own, with their meshes."""
    experts = getattr(getattr(block, "mlp", None), "experts", None)
    if of_experts is not None and isinstance(experts, nn.Module):
        yield experts, of_experts
    for module in block.modules():
        if module in in_fp32 and module is not block:
            yield module, mesh


def _prefetch(model: Any, embed: Any, head: Any, turns: Sequence[Sequence[Any]]) -> None:
    """Make each FSDP unit prefetch the next one in forwards and in backwards.

    By default FSDP2 takes the order of backwards from the forward, last in first out: with several
    microbatches in flight it would gather a unit again that it has just freed. The last unit of a
    backward prefetches itself, which has no effect. An embedding's weights are not needed there.
    """
    forward = [model, *chain.from_iterable(turns)]
    backward = [model, *chain.from_iterable(reversed(turns))]
    if embed is not None:
        forward.insert(1, embed)
        embed.set_unshard_in_backward(False)
        embed.set_modules_to_backward_prefetch([embed])
    for unit, after in pairwise(forward):
        unit.set_modules_to_forward_prefetch([after])
    for unit, after in zip_longest(backward, backward[1:], fillvalue=backward[-1]):
        unit.set_modules_to_backward_prefetch([after])
    if head is not None:  # nothing tells it of a backward of its own
        model.set_modules_to_backward_prefetch(list(dict.fromkeys([head, *backward[1:2]])))


def _begin_together(turns: Sequence[Sequence[Any]]) -> None:
    """Start the backward of the units within a block when the block's own backward starts.

    By default a unit starts with the gradient of its output. Recomputation may run its forward
    earlier, where something after it needs recomputed tensors, such as dropout. FSDP2 would take
    that for the forward of another microbatch, with operations that the first one lacked.
    """
    for block, *inner_units in turns:
        for inner in inner_units:
            block.register_forward_hook(partial(_begin_with, _state(inner)))


def _begin_with(state: Any, _: nn.Module, __: Any, out: Tensor) -> None:
    """Run a unit's pre-backward hook when the gradient of a block's output arrives."""
    if out.requires_grad:
        out.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]


class HeadUnit:
    """The output head as a separate FSDP2 unit, which the loss gathers in the backward.

    No forward uses its weights, because the loss is computed in the backward. FSDP2 by itself
    gathers for a backward only what it has gathered for a forward.
    """

    def __init__(self, head: Any) -> None:
        self._head = head

    @property
    def is_trained(self) -> bool:
        """Whether the head is trained, so that the loss has to provide its gradient."""
        return bool(self._head.weight.requires_grad)

    def gather(self) -> nn.Parameter:
        """Gather and return the head's weights `[vocab, dim]`, or this rank's tp shard of them."""
        self._head.unshard()
        weight: nn.Parameter = self._head.weight
        return weight

    def leave(self, gradient: Tensor | None) -> None:
        """Add `gradient` to the head's gradient, then reduce and reshard as after a backward."""
        if gradient is not None:
            defer(self._head.weight, lambda: gradient)
        for group in _param_groups(_state(self._head)):
            group.post_backward()


def head_unit(model: nn.Module) -> HeadUnit | None:
    """Return a model's head if it is a separate FSDP unit, otherwise None."""
    head = getattr(model, "head", None)
    return HeadUnit(head) if isinstance(head, FSDPModule) else None


def _whole(model: nn.Module, layout: Layout) -> set[nn.Parameter] | None:
    """Return the frozen weights that FSDP2 must not shard, or None if it shards all."""
    if cuts_frozen(layout):
        return None
    return {parameter for parameter in model.parameters() if not parameter.requires_grad} or None


def replicate_in_place(
    model: nn.Module, layout: Layout, train: TrainSpec, groups: Groups
) -> dict[str, nn.Parameter]:
    """Set up `Replicas` in place of FSDP2; return the parameters to train, by name.

    The model's parameters must be allocated, and are replaced if matmuls need another dtype.
    """
    if not needs_wrapping(layout, train):
        return dict(model.named_parameters())
    # Not the group's own word for it: rehearsals have groups that don't know.
    rank = data_rank(layout, groups.at)
    used, summed, gradient = train.precision, train.reduced_dtype, train.gradient_dtype
    dtypes = DTYPES[used], DTYPES[summed], DTYPES[gradient]
    replicas = Replicas(model, groups, rank, layout.zero, dtypes)
    object.__setattr__(model, "replicas", replicas)
    return {name: weight.master for name, weight in replicas.weights.items()}


def replicas_of(model: nn.Module) -> Replicas | None:
    """Return the `Replicas` of a model, or None if FSDP2 sums its gradients."""
    replicas = getattr(model, "replicas", None)
    return replicas if isinstance(replicas, Replicas) else None


def finish_replicas(model: nn.Module) -> None:
    """Wait until `Replicas` has reduced a step's gradients; nothing under FSDP2."""
    replicas = replicas_of(model)
    if replicas is not None:
        replicas.finish()


def wrapped(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that FSDP2 manages, the outermost first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def prepare_backward(model: nn.Module, zero: int, *, is_last: bool, defers: bool = False) -> None:
    """Configure the next backward: whether it reduces gradients and frees gathered parameters.

    The last backward before the update does both. For earlier ones, it depends on the ZeRO stage: 0
    and 1 accumulate whole gradients, 2 and 3 reduce each time; only 3 frees its parameters each
    time. If weight gradients are deferred (`defers`), reduction waits for `finish_backward`.
    """
    replicas = replicas_of(model)
    if replicas is not None:
        replicas.begin(is_last=is_last, defers=defers)
        replicas.look_ahead()
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(is_last and not defers)
    model.set_requires_gradient_sync((is_last or zero >= 2) and not defers)
    # Replicas of shards meet once: until then each shard group sums its own microbatches.
    model.set_requires_all_reduce(is_last)
    model.set_reshard_after_backward(is_last or zero == 3)


def end_backward(model: nn.Module) -> None:
    """Free the gathered parameters that a backward has left, if `Replicas` gathered them."""
    replicas = replicas_of(model)
    if replicas is not None:
        replicas.end()


def finish_backward(model: nn.Module, zero: int, *, is_last: bool) -> None:
    """Accumulate weight gradients that were computed outside of autograd, and reduce if due."""
    replicas = replicas_of(model)
    if replicas is not None:
        replicas.begin(is_last=is_last, defers=False)
        replicas.take()
    if not isinstance(model, FSDPModule):
        return
    prepare_backward(model, zero, is_last=is_last)
    # Rounds hold different parameters, as autograd's share runs ahead: none may wait for the last.
    model.set_requires_all_reduce(True)
    state = _state(model)
    for inner in state._state_ctx.all_states:
        for group in _param_groups(inner):
            for parameter in group.fsdp_params:
                # One dtype for all: autograd's share was widened by its own backward already.
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            group.post_backward()
    if is_last:
        state._root_post_backward_final_callback()


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after a forward without a backward.

    FSDP2 does it in the backward. Without one, `named_parameters` would keep returning the compute
    copies, which are bf16 under mixed precision and have no gradients.
    """
    replicas = replicas_of(model)
    if replicas is not None:
        replicas.expire()
    for module in wrapped(model):
        module.reshard()


def ready_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's (private) object of each parameter, in its final memory."""
    for module in wrapped(model):
        for group in _param_groups(_state(module)):
            group.lazy_init()  # else the first forward would pad uneven rows in other memory
            yield from group.fsdp_params


def _state(model: FSDPModule) -> Any:
    """Return torch's (private) state of a wrapped module."""
    if isinstance(model, ReplicateModule):
        return replicate.state(model)  # type: ignore[attr-defined]
    return fully_shard.state(model)  # type: ignore[attr-defined]


def _param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of a state: one until torch 2.12, then a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
