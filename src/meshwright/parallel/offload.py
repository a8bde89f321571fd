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
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _VersionWrapper

from meshwright.models.blocks import Block, Recurrence
from meshwright.models.context import PLAIN, Context
from meshwright.models.experts import ExpertMLP

Place = Literal["device", "leaving", "host", "coming"]


class MovedStorage:
    """A storage that was saved, whole: `flat` on the device, `host` on the host, or both."""

    __slots__ = ("__weakref__", "flat", "host")

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat
        self.host: Tensor | None = None


class SavedPlace(NamedTuple):
    """The place of an offloaded tensor in a block's storage, which autograd saves instead of it."""

    stay: Stay
    piece: MovedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor, on the device."""
        self.stay.need()
        flat = self.piece.flat
        assert flat is not None
        if flat.dtype != self.dtype:
            flat = flat.view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class _Moved(_VersionWrapper):
    """A result that selective recomputation has kept, on its way like saved tensors."""

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """Return the tensor, on the device."""
        assert isinstance(self.val, SavedPlace)
        return self.val.tensor()


class Copies:
    """Copies between device and host: on a GPU in order, on a stream of their own."""

    def __init__(self) -> None:
        self.stream: Any = None

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Begin to copy to the first of each pair from the second; returns the event of its end."""
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
        """Have later work of the device wait for copies; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from reuse until the copies are done with it."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)


def host_buffer(flat: Tensor) -> Tensor:
    """Return host memory for a tensor: pinned where a GPU copies to it by itself."""
    return torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda)


class Stay:
    """The tensors that a block has saved for one microbatch, and where they are.

    Autograd alone keeps the pieces, so that each is freed with the operation that needs it;
    `_copied` keeps those that a copy works with. `left` are storages that don't move.
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
        """Return what autograd saves of a tensor: itself, or the place of its offloaded storage."""
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
        """Pack the results that selective recomputation keeps outside of autograd."""
        for result in tree_leaves([list(storage.values()) for storage in self.cached]):
            if isinstance(result, _VersionWrapper) and isinstance(result.val, Tensor):
                result.val = self.pack(result.val)
                if isinstance(result.val, SavedPlace):
                    result.__class__ = _Moved
        self.cached.clear()

    def _alive(self) -> list[MovedStorage]:
        return [piece for reference in self._pieces for piece in [reference()] if piece is not None]

    def leave(self) -> None:
        """Begin to copy to the host."""
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
        """Free the device's memory, once the copies are done."""
        self._of.copies.wait(self._event)
        for piece in self._copied:
            piece.flat = None
        self._copied, self.place = [], "host"

    def _fetch(self) -> None:
        """Begin to copy to the device."""
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
        """Bring everything to the device for the backward, and begin to fetch the block before."""
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
    """The blocks of a rank; `least` is the bytes of the smallest storage that moves.

    `leaving` is what left last: the device still has it.
    """

    def __init__(self, least_bytes: int) -> None:
        self.least, self.copies = least_bytes, Copies()
        self.leaving: Stay | None = None
        self._last: Stay | None = None
        self._open: Stay | None = None

    def wrap(self, block: Block, *, is_first: bool) -> None:
        """Have a block's saved tensors go to the host; `is_first` is that of its stage.

        The method is replaced on the instance, outside of recomputation and the compiler.
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
        """Leave weights that data parallelism gathers after the block's."""
        inner = experts.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._open is not None:
                self._open.left.update(map(_storage, map(_local, experts.parameters())))
            return inner(*args, **kwargs)

        experts.forward = forward

    def note(self, cached: Mapping[Any, Any]) -> None:
        """Remember where selective recomputation keeps the open block's results."""
        if self._open is not None:
            self._open.cached.append(cached)

    def let_go(self) -> None:
        """Free the device's memory of the tensors that left last, once they are on the host."""
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
    """Yield tensors that others hold as well: weights, tables, the context, an input leaf."""
    yield from map(_local, block.parameters())
    yield from block.buffers()
    if not isinstance(block.attn, Recurrence):
        yield from block.attn.rope.held()
    yield from (tensor for tensor in context if isinstance(tensor, Tensor))
    if x.is_leaf:
        yield x
