"""`CollectiveRecorder` records every collective of this process in its flight recorder.

It runs before torch's own kernels of the c10d operations, which all collectives use: Meshwright's,
those of FSDP2 and DTensor, functional ones. It is registered at BackendSelect, which no guard of
autograd or of a dispatch mode skips. Other operations are not slowed down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.flight_recorder_file import TRANSFERS
from meshwright.comm.wire import MESSAGES
from meshwright.torch_private import C

# Those that a program has none of, and their arguments that are messages.
_OTHERS: Final = {
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "input_tensors"),
    "c10d::scatter_": ("scatter", "output_tensors"),
    "c10d::barrier": ("barrier", "tensor"),
}
_KEY: Final = C.DispatchKey.BackendSelect
# Seconds between two looks at the device.
_LOOK_S: Final = 1.0
_WAIT: Final = "_c10d_functional::wait_tensor"

Kernel = Callable[..., Any]


class CollectiveRecorder:
    """A context that records this process's collectives in a flight recorder.

    Blocking collectives are recorded as waited for, and as ended on return.
    `flight_recorder.Pending` records later waits. On a GPU, the host only enqueues them: a thread
    checks when the device has reached them, so that a hang shows which are open.
    """

    def __init__(self, recorder: FlightRecorder, device: torch.device | None = None) -> None:
        self._recorder = recorder
        self._on_gpu = device is not None and device.type == "cuda"
        self._ended = threading.Event()
        self._numbers: dict[str, int] = {}
        self._libraries: dict[str, Any] = {}

    def __enter__(self) -> CollectiveRecorder:
        for schema in C._jit_get_all_schemas():
            names = [argument.name for argument in schema.arguments]
            if schema.name.startswith("c10d::") and "process_group" in names:
                self._stand_before(schema.name, partial(self._begun, schema.name, names))
        self._stand_before(_WAIT, self._waited)
        if self._on_gpu:
            self._recorder.mark = _marked
            threading.Thread(target=self._look, name="collectives", daemon=True).start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._recorder.look()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._recorder.mark = None
        for library in self._libraries.values():
            library._destroy()

    def _stand_before(self, name: str, make: Callable[[Kernel], Kernel]) -> None:
        """Register the kernel that `make` returns for an operation, given the kernels that it
        wraps."""
        space, _, operation = name.partition("::")
        if space not in self._libraries:
            library = torch.library.Library(space, "IMPL")  # type: ignore[no-untyped-call]
            self._libraries[space] = library
        op = getattr(getattr(torch.ops, space), operation).default

        def inner(keys: Any, *args: Any) -> Any:
            # Lets go of the GIL, as a kernel that is called by itself would not: gloo's threads may
            # need it to drop a tensor while they hold a lock that this thread waits for.
            return op.redispatch(keys.remove(_KEY), *args)

        self._libraries[space].impl(operation, make(inner), _KEY.name, with_keyset=True)

    def _begun(self, name: str, names: Sequence[str], inner: Kernel) -> Kernel:
        """Return a kernel that records a collective or a transfer before it calls `inner`."""
        kind, message = {**MESSAGES, **_OTHERS}.get(name, ("other", ""))
        indices = {argument: index for index, argument in enumerate(names)}
        at_group, at_message = indices["process_group"], indices.get(message)
        at_peer = indices.get("dst", indices.get("src"))
        at_async = indices.get("async_op", len(names))
        is_transfer = kind in TRANSFERS

        def recorded(keys: Any, *args: Any) -> Any:
            group = dist.ProcessGroup.unbox(args[at_group])
            if group.size() == 1:
                return inner(keys, *args)
            # A trailing argument is left out where it is the default: asynchronous.
            waits = len(args) > at_async and not args[at_async]
            peer = -1
            if is_transfer and at_peer is not None:
                peer = dist.get_process_group_ranks(group)[args[at_peer]]
            message_bytes = 0 if at_message is None else _bytes(args[at_message])
            entry = self._recorder.begin(
                kind, self._number(group), message_bytes, peer, waits=waits
            )
            out = inner(keys, *args)
            if waits:
                if keys.has(C.DispatchKey.CPU):
                    work = out[-1] if isinstance(out, tuple) else out
                    dist.Work.unbox(work).wait()
                self._recorder.end(entry)
            return out

        return recorded

    def _waited(self, inner: Kernel) -> Kernel:
        """Return a kernel that records the wait for a functional collective."""

        def recorded(keys: Any, *args: Any) -> Any:
            entries = self._recorder.left_open()
            self._recorder.wait(*entries)
            out = inner(keys, *args)
            self._recorder.end(*entries)
            return out

        return recorded

    def _number(self, group: dist.ProcessGroup) -> int:
        name = group.group_name
        if name not in self._numbers:
            self._numbers[name] = self._recorder.group(name, dist.get_process_group_ranks(group))
        return self._numbers[name]


def _marked() -> Callable[[], bool]:
    """Mark the present end of the device's stream; returns a function that says whether it is
    reached."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return lambda: bool(event.query())


def _bytes(message: Any) -> int:
    if isinstance(message, Tensor):
        return message.numel() * message.element_size()
    return sum(_bytes(tensor) for tensor in message)
