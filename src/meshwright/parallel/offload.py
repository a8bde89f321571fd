"""Offloads activations: keeps what blocks need in their backward in host memory until then.

When a block's forward has ended, the tensors that autograd saved in it are copied to the host on a
separate stream, while the next block computes. Then the device waits for the copies and frees its
own. When a backward first asks for a saved tensor of a block, all tensors of that block are copied
back, and the copies of the block before begin, so that they arrive while this block computes. The
tensors of the last block are still on the device: if a backward begins with that block, it uses
them. On a CPU, host and device share the memory, and a copy has ended when it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.models.blocks import Block, Recurrence
from meshwright.models.context import PLAIN, Context
from meshwright.models.experts import ExpertMLP
from meshwright.torch_private import VersionWrapper, tree_leaves

Place = Literal["device", "leaving", "host", "coming"]


class MovedStorage:
    """A whole tensor storage that autograd saved: `flat` on the device, `host` on the host, or
    both.
    """

    __slots__ = ("__weakref__", "flat", "host")

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat
        self.host: Tensor | None = None


class SavedPlace(NamedTuple):
    """What autograd saves in place of an offloaded tensor: a storage, and the view into it."""

    stay: Stay
    piece: MovedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor on the device, copied back if necessary."""
        self.stay.need()
        flat = self.piece.flat
        assert flat is not None
        if flat.dtype != self.dtype:
            flat = flat.view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class _Moved(VersionWrapper):
    """A result cached by selective recomputation that is offloaded like saved tensors."""

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """Return the tensor on the device, copied back if necessary."""
        assert isinstance(self.val, SavedPlace)
        return self.val.tensor()


class Copies:
    """Copies between device and host: on a GPU in order, on a separate stream."""

    def __init__(self) -> None:
        self.stream: Any = None

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Start to copy for each (target, source) pair; return the event of the end, None
        on a CPU.
        """
        if not any(tensor.is_cuda for pair in pairs for tensor in pair):
            for target, source in pairs:
                target.copy_(source)
            return None
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Make later work of the current stream wait for copies; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def keep(self, tensor: Tensor) -> None:
        """Prevent reuse of a tensor's memory until the copy stream is done with it."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)


def host_buffer(flat: Tensor) -> Tensor:
    """Return uninitialised host memory like a tensor, pinned if the tensor is on a GPU."""
    return torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda)


class Stay:
    """The tensors that a block saved for one microbatch, and where they are.

    Only autograd keeps their storages alive, so that each is freed with the operation that needs
    it; `_copied` keeps those that a copy is working with. `left` are storages that are not
    offloaded.
    """

    def __init__(self, offload: Offload, before: Stay | None, left: set[int], device: Any) -> None:
        self._of, self._before, self.left, self._device = offload, before, left, device
        self.cached: list[Mapping[Any, Any]] = []
        self.place: Place = "device"
        self._by_storage = WeakValueDictionary[int, MovedStorage]()
        self._pieces: list[ref[MovedStorage]] = []
        self._copied: list[MovedStorage] = []
        self._event: Any = None

    def pack(self, tensor: Tensor) -> Tensor | SavedPlace:
        """Autograd's pack hook: return the tensor itself, or the place of its offloaded storage."""
        if isinstance(tensor, DTensor) or not tensor.is_floating_point():
            return tensor
        storage = tensor.untyped_storage()
        key, storage_bytes = storage._cdata, storage.nbytes()
        if key in self.left or storage_bytes < self._of.least or tensor.device != self._device:
            return tensor
        piece = self._by_storage.get(key)
        if piece is None:
            flat_shape = (storage_bytes // tensor.element_size(),)
            piece = MovedStorage(tensor.detach().as_strided(flat_shape, (1,), 0))
            self._by_storage[key] = piece
            self._pieces.append(ref(piece))
        where = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return SavedPlace(self, piece, tensor.dtype, *where)

    def _pack_cached(self) -> None:
        """Pack the results that selective recomputation caches outside of autograd."""
        for result in tree_leaves([list(storage.values()) for storage in self.cached]):
            if isinstance(result, VersionWrapper) and isinstance(result.val, Tensor):
                result.val = self.pack(result.val)
                if isinstance(result.val, SavedPlace):
                    result.__class__ = _Moved
        self.cached.clear()

    def _alive(self) -> list[MovedStorage]:
        return [piece for reference in self._pieces for piece in [reference()] if piece is not None]

    def leave(self) -> None:
        """Start to copy the saved tensors to the host."""
        self._pack_cached()
        self._by_storage.clear()
        self._copied = self._alive()
        pairs = []
        for piece in self._copied:
            assert piece.flat is not None
            piece.host = host_buffer(piece.flat)
            pairs.append((piece.host, piece.flat))
        self._event, self.place = self._of.copies.begin(pairs), "leaving"

    def let_go(self) -> None:
        """Free the device's memory of the saved tensors, once the copies are done."""
        self._of.copies.wait(self._event)
        for piece in self._copied:
            piece.flat = None
        self._copied, self.place = [], "host"

    def _fetch(self) -> None:
        """Start to copy the saved tensors back to the device, if they are on the host."""
        if self.place != "host":
            return
        self._copied = self._alive()
        pairs = []
        for piece in self._copied:
            assert piece.host is not None
            piece.flat = torch.empty_like(piece.host, device=self._device, pin_memory=False)
            pairs.append((piece.flat, piece.host))
        self._event, self.place = self._of.copies.begin(pairs), "coming"

    def need(self) -> None:
        """Make all saved tensors available on the device, and prefetch those of the block
        before.
        """
        if self.place == "device":
            return
        if self._of.leaving is self:
            self._of.leaving = None
            for piece in self._copied:
                assert piece.flat is not None
                self._of.copies.keep(piece.flat)
        else:
            self._of.let_go()
            self._fetch()
            self._of.copies.wait(self._event)
        for piece in self._copied:
            piece.host = None
        self._copied, self.place = [], "device"
        if self._before is not None:
            self._before._fetch()
            self._before = None


class Offload:
    """Offloading of a rank's blocks; storages of less than `least` bytes are not offloaded.

    `leaving` are the tensors of the last block that ran, which the device still has.
    """

    def __init__(self, least_bytes: int) -> None:
        self.least, self.copies = least_bytes, Copies()
        self.leaving: Stay | None = None
        self._last: Stay | None = None
        self._open: Stay | None = None

    def wrap(self, block: Block, *, is_first: bool) -> None:
        """Offload a block's saved tensors; `is_first`: it is the first block of its stage.

        The block's `forward` is replaced on the instance, outside of recomputation and the
        compiler.
        """
        inner = block.forward
        if isinstance(block.mlp, ExpertMLP):
            self._note_weights(block.mlp.experts)

        def forward(x: Tensor, context: Context = PLAIN) -> Tensor:
            if not torch.is_grad_enabled():
                return inner(x, context)
            left = set(map(_storage, _lasting(block, x, context)))
            before = None if is_first else self._last
            self._open = stay = Stay(self, before, left, x.device)
            with torch.autograd.graph.saved_tensors_hooks(stay.pack, _unpack):
                out = inner(x, context)
            self._open, self._last = None, stay
            self.let_go()
            stay.leave()
            self.leaving = stay
            return out

        block.forward = forward  # type: ignore[method-assign]

    def _note_weights(self, experts: nn.Module) -> None:
        """Exclude the experts' weights, which data parallelism gathers after the block's forward
        began.
        """
        inner = experts.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._open is not None:
                self._open.left.update(map(_storage, map(_local, experts.parameters())))
            return inner(*args, **kwargs)

        experts.forward = forward

    def note(self, cached: Mapping[Any, Any]) -> None:
        """Register a cache in which selective recomputation keeps results of the current block."""
        if self._open is not None:
            self._open.cached.append(cached)

    def let_go(self) -> None:
        """Free the device's memory of the last offloaded block, once the host has its tensors."""
        if self.leaving is not None:
            self.leaving.let_go()
            self.leaving = None


def _unpack(saved: Tensor | SavedPlace) -> Tensor:
    return saved.tensor() if isinstance(saved, SavedPlace) else saved


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _lasting(block: Block, x: Tensor, context: Context) -> Iterator[Tensor]:
    """Yield tensors that exist anyway, so need no offload: weights, tables, context, leaf input."""
    yield from map(_local, block.parameters())
    yield from block.buffers()
    if not isinstance(block.attn, Recurrence):
        yield from block.attn.rope.held()
    yield from (tensor for tensor in context if isinstance(tensor, Tensor))
    if x.is_leaf:
        yield x
