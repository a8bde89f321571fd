"""Tells what the memory is for that data parallelism and offloading allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from torch import Tensor

from meshwright import torch_private
from meshwright.parallel import offload
from meshwright.parallel.data_parallel.exchange import Exchange
from meshwright.parallel.data_parallel.master_weights import Weight

HOST: Final = "host"
# Without these of PyTorch's private names, memory cannot be told apart.
NEEDED: Final = ("FSDPParam", "FSDPParamGroup", "DefaultAllocMixin", "EventType")

Label = Callable[[str, Tensor | None], None]


@contextmanager
def labelled_in_data(label: Label) -> Iterator[None]:
    """Within this context, call `label` for the tensors of data parallelism and offloading.

    These are gathered weights, gradients and communication buffers, of FSDP2 and of our own
    exchanges, and the host memory of offloading.
    """

    def gathering(gather: Any) -> Any:
        def run(parameter: Any) -> None:
            gather(parameter)
            for output in parameter.all_gather_outputs:
                label("gathered", output)

        return run

    def reducing(reduce: Any) -> Any:
        def run(group: Any, *arguments: Any) -> None:
            _label_gradients(label, group)
            reduce(group, *arguments)
            _label_gradients(label, group)

        return run

    def buffering(allocate: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Tensor:
            buffer: Tensor = allocate(*arguments, **options)
            label("buffers", buffer)
            return buffer

        return run

    def exchanging(begin: Any) -> Any:
        def run(self: Exchange, weights: Sequence[Weight], *arguments: Any) -> None:
            for weight in weights:
                label("gradients", weight.gradient)
            begin(self, weights, *arguments)
            for buffer in self.buffers:
                label("buffers", buffer)

        return run

    def leaving(allocate_on_host: Any) -> Any:
        def run(flat: Tensor) -> Tensor:
            host: Tensor = allocate_on_host(flat)
            label(HOST, host)
            return host

        return run

    with ExitStack() as stack:
        for owner, name, make in (
            (offload, "host_buffer", leaving),
            (Exchange, "__init__", exchanging),
            (torch_private.FSDPParam, "init_unsharded_param", gathering),
            (torch_private.FSDPParamGroup, "post_backward", reducing),
            (torch_private.DefaultAllocMixin, "allocate", buffering),
        ):
            stack.enter_context(torch_private.replaced(owner, name, make))
        yield


def _label_gradients(label: Label, group: Any) -> None:
    """Label the gradients that an FSDP2 parameter group holds: unsharded, accumulated, and
    shards."""
    for parameter in group.fsdp_params:
        label("gradients", parameter.unsharded_accumulated_grad)
        unsharded = getattr(parameter, "_unsharded_param", None)
        label("gradients", None if unsharded is None else unsharded.grad)
        kind = HOST if parameter.offload_to_cpu else "gradients"
        label(kind, parameter.sharded_param.grad)
    label("gradients", group._partial_reduce_output)
