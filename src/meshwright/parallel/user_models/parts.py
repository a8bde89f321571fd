"""Whole parameters of a user's model that are used with activations sharded by tp.

Between a column- and a row-parallel layer, each rank has its own heads or features. A whole
parameter that is used there, such as the weight of a norm of each head's queries, receives only
this rank's part of its gradient; the whole gradient is the sum over ranks (the operator f of
Megatron-LM, arXiv:1909.08053, section 3). For Meshwright's models these places are known; in a
user's model, they are found while it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.comm.groups import Link
from meshwright.errors import ConfigError
from meshwright.parallel.data_parallel.gradients import local_shard
from meshwright.parallel.user_models.following import Following
from meshwright.torch_private import (
    current_graph_task_id,
    execution_engine,
    tree_flatten,
    tree_iter,
    tree_unflatten,
)

_MARK = "_meshwright_is_part"


def is_part(value: Any) -> bool:
    """Whether a value is a tensor that is marked as sharded over tp."""
    return isinstance(value, Tensor) and getattr(value, _MARK, False)


def mark(values: Any, *, part: bool) -> None:
    """Mark all tensors in nested values as sharded over tp (`part`), or as whole."""
    for value in tree_iter(values):
        if isinstance(value, Tensor) and (part or is_part(value)):
            setattr(value, _MARK, part)


class PartFollower(Following):
    """Tracks sharded activations through operators, and sums the gradients of whole inputs.

    `begins` are the layers whose outputs are sharded over tp, `ends` those whose outputs are whole
    again. These do their own sums: operators inside of them are not tracked.
    """

    def __init__(self, link: Link, begins: Iterable[nn.Module], ends: Iterable[nn.Module]) -> None:
        super().__init__()
        self._link, self._sums, self._inside = link, 0, 0
        for layers, part in ((begins, True), (ends, False)):
            for layer in layers:
                layer.register_forward_pre_hook(self._enter)
                leave = functools.partial(self._leave, part=part)
                layer.register_forward_hook(leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += 1

    def _leave(self, module: nn.Module, args: Any, out: Any, *, part: bool) -> None:
        self._inside -= 1
        mark(out, part=part)

    def begin(self) -> None:
        """Reset the count of sums at the beginning of a forward."""
        self._sums = 0

    def is_done(self, module: nn.Module) -> bool:
        """Whether no gradient had to be summed, so that tracking (microseconds per operator) can
        end.

        It continues while a weight is frozen, which may need a sum once it is trained.
        """
        if self._sums or not torch.is_grad_enabled():
            return False
        return all(parameter.requires_grad for parameter in module.parameters())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; its result is marked as sharded if an input is."""
        kwargs = kwargs or {}
        leaves, form = tree_flatten((args, kwargs))
        if self._inside or not any(map(is_part, leaves)):
            return func(*args, **kwargs)
        met = [self._met(leaf) for leaf in leaves]
        new_args, new_kwargs = tree_unflatten(met, form)
        try:
            out = func(*new_args, **new_kwargs)
        except RuntimeError as error:
            raise _refusal(leaves, self._link.size, error) from error
        mark(out, part=True)
        if func is Tensor.__setitem__:
            mark(args[0], part=True)
        return out

    def _met(self, value: Any) -> Any:
        is_whole = isinstance(value, Tensor) and not is_part(value)
        if is_whole and value.requires_grad and not isinstance(value, DTensor):
            self._sums += 1
            return _SumOfParts.apply(value, self._link)  # type: ignore[no-untyped-call]
        return value


def _refusal(leaves: list[Any], ranks: int, error: RuntimeError) -> Exception:
    """Return the error to raise for a failed operator.

    It is a `ConfigError` if a whole weight has the features of all ranks, else `error` itself.
    """
    parts = [leaf for leaf in leaves if is_part(leaf)]
    whole_tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_part(leaf)]
    sizes = {part.shape[-1] for part in parts if part.dim()}
    for tensor in whole_tensors:
        if tensor.dim() and any(tensor.shape[-1] == ranks * size for size in sizes):
            return ConfigError(
                f"a weight of {tensor.shape[-1]} features meets the {tensor.shape[-1] // ranks} "
                f"that layout.tp = {ranks} leaves on a rank (as a norm over all heads does, which "
                'needs the sums of all ranks): cut the layer before it by "column_gathered", or '
                f"leave it and the one after it out of the plan ({error})"
            )
    return error


class _SumOfParts(torch.autograd.Function):
    """The identity, whose backward sums the gradient over the ranks of a link."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.link.group)
        return total, None


class GradientAgreement:
    """Checks that the gradients of whole parameters are the same on all tp ranks.

    Each rank computes them from the same whole activations, so a difference beyond rounding means a
    missing sum. A parameter is checked in the first backward with a nonzero gradient of it; from
    then on, each backward checks one parameter, in turn.
    """

    def __init__(self, model: nn.Module, link: Link, layers: Iterable[nn.Module]) -> None:
        self._model, self._link = model, link
        self._checked, self._turn, self._backward = list[str](), 0, -1
        for layer in layers:
            layer.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def _queue(self, grad: Tensor) -> None:
        backward = current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            # After the callback of data parallelism, which the model's output has queued before.
            engine: Any = execution_engine
            engine.queue_callback(self._check)

    @torch.no_grad()
    def _check(self) -> None:
        gradients = {
            name: parameter.grad
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and not _is_cut(parameter)
        }
        due = [name for name in gradients if name not in self._checked]
        if self._checked:
            self._turn = (self._turn + 1) % len(self._checked)
            due += [name for name in [self._checked[self._turn]] if name in gradients]
        wrong = {name: off for name in due if (off := self._off(name, gradients[name])) is not None}
        if wrong:
            worst = max(wrong, key=wrong.__getitem__)
            raise ConfigError(
                f"the gradient of {worst} differs between the ranks of tp by {wrong[worst]:.2g} of "
                f"its size, and of {len(wrong) - 1} more parameters: it is whole on every rank, "
                "but sees the part of a layer that the plan cuts, where Meshwright could not "
                "follow (a custom autograd function or kernel). Leave the layers around it out of "
                "the plan"
            )

    def _off(self, name: str, grad: Tensor) -> float | None:
        """Return the relative difference of a gradient between ranks, or None if it is rounding."""
        gradient = local_shard(grad).float()
        mean = gradient.clone()
        dist.all_reduce(mean, group=self._link.group)
        mean /= self._link.size
        off = torch.stack([(gradient - mean).norm(), mean.norm()])
        dist.all_reduce(off, dist.ReduceOp.MAX, group=self._link.group)
        distance, size = off.tolist()
        if size and name not in self._checked:
            self._checked.append(name)
        if distance <= torch.finfo(grad.dtype).eps ** 0.5 * size:
            return None
        return distance / size if size else float("inf")


def _is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
