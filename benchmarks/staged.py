"""`Staged`: messages of a device through the memory of the host, for several ranks on one GPU.

NCCL refuses two ranks on one GPU. This takes its place: before torch's own kernels of the c10d
operations, which all collectives use (ours, those of FSDP2 and DTensor, functional ones), it copies
a device's tensors to the host, where gloo sends them. What counts messages sees the operations as
they are. The group's backend must have gloo for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

# Where a kernel stands before those of devices; `CollectiveRecorder` says why there.
_KEY: Final = torch._C.DispatchKey.BackendSelect
_HOST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Arguments that are only written, and where `tensors` are only read.
_OUTPUTS: Final = ("output_tensors", "output_tensor", "outputs", "output", "output_lists")
_READS: Final = ("c10d::send",)


class Staged:
    """A context in which messages of a type of device go through the host.

    With "cpu" they are copied like a GPU's, so that everything but the device is tried out.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._key = getattr(torch._C.DispatchKey, device.upper())
        self._open: set[_Message] = set()
        self._library: Any = None

    def __enter__(self) -> Staged:
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for schema in torch._C._jit_get_all_schemas():
            names = [argument.name for argument in schema.arguments]
            if schema.name.startswith("c10d::") and "process_group" in names:
                operation = schema.name.removeprefix("c10d::")
                operator = getattr(torch.ops.c10d, operation).default
                kernel = partial(self._run, schema.name, names, operator)
                self._library.impl(operation, kernel, _KEY.name, with_keyset=True)
        return self

    @property
    def pending(self) -> int:
        """How many messages nobody has waited for."""
        return len(self._open)

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def _run(self, name: str, names: Sequence[str], operator: Any, keys: Any, *args: Any) -> Any:
        """Begin a message on the host; what it brings is on the device once it is waited for."""
        if not keys.has(self._key):
            return operator.redispatch(keys.remove(_KEY), *args)
        if self._on_gpu:
            # What it sends is there, and nothing uses any more what it will write into.
            torch.cuda.current_stream().synchronize()
        written: list[tuple[Tensor, Tensor]] = []
        staged = []
        with torch.no_grad():
            # Arguments that have their default values may be missing at the end.
            for argument, value in zip(names, args, strict=False):
                host = tree_map_only(Tensor, _empty if argument in _OUTPUTS else _copied, value)
                if argument in _OUTPUTS or (argument == "tensors" and name not in _READS):
                    written += zip(tree_leaves(value), tree_leaves(host), strict=True)
                staged.append(host)
            out = operator.redispatch(_HOST, *staged)
        if out is None:
            return None
        work = dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)
        message = _Message(work, staged, written, self._open.discard)
        # Only its own Python object knows how to wait, and the caller may hold none.
        self._open.add(message)
        return (args[0], message.boxed()) if isinstance(out, tuple) else message.boxed()


class _Message(dist.Work):
    """A message under way: waiting for it copies what has arrived to the device."""

    def __init__(
        self,
        work: dist.Work,
        staged: Sequence[Any],
        written: Sequence[tuple[Tensor, Tensor]],
        ended: Callable[[_Message], None],
    ) -> None:
        super().__init__()
        self._work, self._ended, self._is_done = work, ended, False
        self._staged, self._written = staged, written  # gloo does not hold what it sends

    def wait(self, timeout: Any = None) -> bool:
        """Wait until what has been sent is away, and what is received is on the device."""
        if not self._is_done:
            self._work.wait()
            with torch.no_grad(), _disable_current_modes():
                for device, host in self._written:
                    # As kernels write: autograd does not count it as a change. It ends before the
                    # host goes on, so that every stream sees it.
                    device.data.copy_(host)
            self._is_done, self._staged, self._written = True, (), ()
            self._ended(self)
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for."""
        return self._is_done


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="cpu").copy_(tensor.detach())


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="cpu")
