"""`Syncs`: counts what makes the host wait for a GPU, seen on any device."""

from __future__ import annotations

import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Their result, or its size, is known to the host only once the device has come to it.
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique")
# Methods that read without an operation of their own, or bring a tensor to the host.
METHODS = (
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"),
    # What makes a tensor of the host's numbers copies it from memory that is not pinned.
    *("new_tensor", "tensor", "as_tensor", "from_numpy"),
)


class _Operations(TorchDispatchMode):
    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READS or (name.startswith("index") and _by_mask(args)):
            self.note(name)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in METHODS:
            self.note(name)
        return func(*args, **(kwargs or {}))


def _by_mask(args):
    """Whether an index is a mask: how many elements that is, the device has to say."""
    places = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(
        isinstance(place, torch.Tensor) and place.dtype in (torch.bool, torch.uint8)
        for place in places
    )


class Syncs:
    """A context that notes each synchronisation with the place in the package it comes from."""

    def __init__(self):
        self.found = []
        self._modes = (_Operations(self._note), _Methods(self._note))

    def _note(self, name):
        frames = traceback.extract_stack()
        ours = [f for f in frames if "meshwright" in f.filename and "tests" not in f.filename]
        place = ours[-1] if ours else frames[-3]
        self.found.append(f"{name} at {place.filename.rpartition('/')[2]}:{place.lineno}")

    def __enter__(self):
        for mode in self._modes:
            mode.__enter__()
        return self.found

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)
