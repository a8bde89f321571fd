"""Observes a step on the stand-in for a GPU: waits of the host, and the use of memory by
streams."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.simulate.dry_run import Begun
from meshwright.simulate.standin import NAME, module
from meshwright.simulate.stream_order import HOST, StreamOrder, place
from meshwright.torch_private import TorchDispatchMode, tree_leaves

# The result, or its size, is known to the host only once the device has come to it.
_READS: Final = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique")
_SENDS: Final = ("c10d", "_c10d_functional")
# Ask for no value.
_SIZES: Final = ("device", "is_pinned", "sym_size", "sym_stride", "sym_numel", "dim")


class DeviceWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that reports each operation to a `StreamOrder`: its stream, reads and writes.

    An asynchronous collective runs on a stream of its own until the recorder reports that it was
    waited for. `in_step` lists what blocked the host during the step, with places in the code;
    `sent` are the step's messages in the order in which they begin.
    """

    def __init__(self, recorder: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: StreamOrder = module().order
        self.syncs: list[str] = []
        self._travelling: dict[int, int] = {}  # entries of the recorder, and their streams
        self._recorder = recorder
        self.in_step: list[str] = []
        self.sent: list[Begun] = []
        recorder.observer = self

    def begins_step(self) -> None:
        """Forget what was observed before the step."""
        self.syncs.clear()
        self.sent.clear()
        self.order.waits.clear()

    def began(self, message: Begun) -> None:
        """Record a message that begins."""
        self.sent.append(message)

    def ends_step(self) -> None:
        """Store the waits of the host during the step."""
        self.in_step = [*self.syncs, *self.order.waits]

    def arrived(self, *entries: int) -> None:
        """Make the current stream wait for messages, given by their entries in the recorder."""
        current = module().current_stream().number
        for entry in entries:
            stream = self._travelling.pop(entry, None)
            if stream is not None:
                self.order.wait(current, self.order.now(stream))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and report it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with this rank's parts
        kwargs = kwargs or {}
        before = self._recorder.begun_last(1)
        out = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        if not any(tensor.device.type == NAME for tensor in (*inputs, *outputs)):
            return self._on_host(func, inputs, out)
        waits = self._sync(func, args, kwargs, inputs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        writes = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
        writes += _written(func, args, kwargs)
        written = {tensor.untyped_storage()._cdata for tensor in writes}
        reads = [tensor for tensor in inputs if tensor.untyped_storage()._cdata not in written]
        if func.is_view or func.overloadpacket.__name__ in _SIZES:
            reads, writes = [], []
        stream = module().current_stream().number
        entry = self._recorder.begun_last(1)
        if func.namespace in _SENDS and entry and entry != before and _is_async(func, args):
            aside = self.order.new_stream()
            self.order.wait(aside, self.order.now(stream))
            self._travelling[entry[0]] = stream = aside
        self.order.use(stream, reads, writes, func.overloadpacket.__name__)
        if waits:
            self.order.wait(HOST, self.order.now(stream))
        return out

    def _on_host(self, func: Any, inputs: list[Tensor], out: Any) -> Any:
        """Report an operation on the host, which may read memory that a device has not filled
        yet."""
        if func.overloadpacket.__name__ not in _SIZES and not func.is_view and inputs:
            self.order.use(HOST, inputs, (), func.overloadpacket.__name__)
        return out

    def _sync(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> bool:
        """Return whether an operation blocks the host, and record it if so."""
        name = func.overloadpacket.__name__
        waits = name in _READS or (name.startswith("index") and _by_mask(args))
        if name == "copy_":
            is_async = kwargs.get("non_blocking", len(args) > 2 and args[2])
            waits = len({tensor.device.type for tensor in inputs}) > 1 and not is_async
        elif name == "_to_copy" and kwargs.get("device") is not None:
            is_other = torch.device(kwargs["device"]).type != inputs[0].device.type
            waits = is_other and not kwargs.get("non_blocking", False)
        if waits:
            self.syncs.append(f"{name} at {place()}")
        return waits


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    tensors = []
    for place_, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            value = args[place_] if place_ < len(args) else kwargs.get(argument.name)
            tensors += _tensors(value)
    return tensors


def _is_async(func: Any, args: Any) -> bool:
    """Whether a message runs asynchronously: a transfer, or a collective that is waited for
    later."""
    if func.namespace != "c10d":
        return True
    names = [argument.name for argument in func._schema.arguments]
    if "async_op" not in names:
        return True
    position = names.index("async_op")
    return len(args) <= position or bool(args[position])


def _by_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(
        isinstance(index, Tensor) and str(index.dtype) in ("torch.bool", "torch.uint8")
        for index in indices
    )
