"""Tells the tracker the purpose of data-parallel memory, which only its structures know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from meshwright.parallel import offload
from meshwright.parallel.data_parallel.exchange import Exchange
from meshwright.parallel.data_parallel.master_weights import Weight
from meshwright.simulate.fake import replaced
from meshwright.simulate.memory import HOST, MemoryTracker


@contextmanager
def labelled_in_data(memory: MemoryTracker) -> Iterator[None]:
    """Label what FSDP2 and exchanges gather, accumulate, reduce, buffer; what is on the host."""

    def gathering(gather: Any) -> Any:
        def run(parameter: FSDPParam) -> None:
            gather(parameter)
            for output in parameter.all_gather_outputs:
                memory.label("gathered", output)

        return run

    def reducing(reduce: Any) -> Any:
        def run(group: FSDPParamGroup, *arguments: Any) -> None:
            _label_gradients(memory, group)
            reduce(group, *arguments)
            _label_gradients(memory, group)

        return run

    def buffering(allocate: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Tensor:
            buffer: Tensor = allocate(*arguments, **options)
            memory.label("buffers", buffer)
            return buffer

        return run

    def exchanging(begin: Any) -> Any:
        def run(self: Exchange, weights: Sequence[Weight], *arguments: Any) -> None:
            for weight in weights:
                memory.label("gradients", weight.gradient)
            begin(self, weights, *arguments)
            for buffer in self.buffers:
                memory.label("buffers", buffer)

        return run

    def leaving(allocate_on_host: Any) -> Any:
        def run(flat: Tensor) -> Tensor:
            host: Tensor = allocate_on_host(flat)
            memory.label(HOST, host)
            return host

        return run

    with ExitStack() as stack:
        for owner, name, make in (
            (offload, "host_buffer", leaving),
            (Exchange, "__init__", exchanging),
            (FSDPParam, "init_unsharded_param", gathering),
            (FSDPParamGroup, "post_backward", reducing),
            (DefaultAllocMixin, "allocate", buffering),
        ):
            stack.enter_context(replaced(owner, name, make))
        yield


def _label_gradients(memory: MemoryTracker, group: Any) -> None:
    """Label the gradients that a group holds: whole ones, accumulated or new, and shards."""
    for parameter in group.fsdp_params:
        memory.label("gradients", parameter.unsharded_accumulated_grad)
        unsharded = getattr(parameter, "_unsharded_param", None)
        memory.label("gradients", None if unsharded is None else unsharded.grad)
        memory.label("gradients", parameter.sharded_param.grad)
    memory.label("gradients", group._partial_reduce_output)
