"""A stand-in for a GPU: a device of torch for other backends, whose streams and events are
recorded.

Its tensors are fake, so nothing is computed. The package runs on it the code that it has for
"cuda": `literal_branches` imports the modules for training with this device's name in place of
CUDA's. It lasts as long as its process, which runs nothing else (`on_standin.py`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any, Final, NamedTuple

import torch
from torch.utils import backend_registration

from meshwright.simulate.stream_order import StreamOrder

NAME: Final = "standin"
# The packages with branches for CUDA; in others the word is a value of a config.
_ROOMS: Final = (
    "meshwright.models.",
    "meshwright.parallel.",
    "meshwright.checkpoint.",
    "meshwright.training.",
)


class Stream:
    """A stream of the stand-in device; `number` 0 is the default one."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number = module().order.new_stream()
        self.stream_id, self.device_index, self.device_type = self.number, 0, 20
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        """Make later work on this stream wait for all work that `other` has now."""
        module().order.wait(self.number, module().order.now(other.number))

    def wait_event(self, event: Event) -> None:
        """Make later work on this stream wait for an event."""
        module().order.wait(self.number, event.time)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, by default a new one, on this stream, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for all work of this stream."""
        module().order.host_waits("stream", module().order.now(self.number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


class Event:
    """An event of the stand-in device; `time` is the vector clock of the work before it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Record the work that a stream, by default the current one, has so far."""
        number = module().current_stream().number if stream is None else stream.number
        self.time = module().order.now(number)

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work on a stream, by default the current one, wait for this event."""
        (stream or module().current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        module().order.host_waits("event", self.time)

    def query(self) -> bool:
        """Return True: events always count as completed."""
        return True


class Module(backend_registration._DummyBackendModule):
    """The stand-in's counterpart of the module `torch.cuda`."""

    def __init__(self) -> None:
        # A GPU's module has the classes by these names.
        vars(self).update(Stream=Stream, Event=Event)
        self.order = StreamOrder()
        self._current: list[Stream] = []

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream on which new work is enqueued."""
        if not self._current:
            self._current.append(Stream())
        return self._current[-1]

    def default_stream(self, device: Any = None) -> Stream:
        """Return the default stream, on which work runs unless another is selected."""
        self.current_stream()
        return self._current[0]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Return a context in which new work goes to a stream; None keeps the current one."""
        self.current_stream()
        self._current.append(stream or self._current[-1])
        try:
            yield
        finally:
            self._current.pop()

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device: Any = None) -> None:
        """Make the host wait for all streams."""
        self.order.host_waits("device", self.order.everything())

    def _lazy_init(self) -> None:
        """Do nothing; torch calls this to initialize a device."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the free and the total bytes of memory, both 128 GiB."""
        return 1 << 37, 1 << 37

    def memory_allocated(self, device: Any = None) -> int:
        """Return 0: fake tensors have no memory."""
        return 0

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return 0: fake tensors have no memory."""
        return 0

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of autocast, for which recomputation asks."""
        return [torch.float16, torch.bfloat16]

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the compute capability of Hopper."""
        return (9, 0)


def module() -> Module:
    """Return the stand-in's module, `torch.standin`."""
    backend: Module = getattr(torch, NAME)
    return backend


class Edit(NamedTuple):
    """A seeded fault: a text that must occur once in a module's source, and its replacement."""

    module: str
    old: str
    new: str


def install(edits: Sequence[Edit] = ()) -> torch.device:
    """Register the stand-in as a device of torch in this process, and return it.

    Modules for training are then imported with its name in place of CUDA's, changed by `edits`.
    """
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        module().order.keep(tensor, stream.number)

    torch.Tensor.record_stream = record_stream  # type: ignore[assignment]
    literal_branches(edits)
    return torch.device(NAME, 0)


def literal_branches(edits: Sequence[Edit] = ()) -> None:
    """Make imports of the modules for training replace "cuda" by the stand-in's name, and apply
    `edits`."""
    early = [name for name in sys.modules if name.startswith(_ROOMS)]
    assert not early, f"imported before the stand-in: {early}"
    sys.meta_path.insert(0, _Finder(edits))


class _Renamed(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant(NAME), node) if node.value == "cuda" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = {"cuda": NAME, "is_cuda": f"is_{NAME}"}.get(node.attr, node.attr)
        return node


class _Loader(SourceFileLoader):
    edits: Sequence[Edit] = ()

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.fix_missing_locations(_Renamed().visit(ast.parse(data)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> CodeType:
        """Return the module's code, compiled from its edited source instead of cached bytecode."""
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        for _, old, new in (edit for edit in self.edits if edit.module == fullname):
            if text.count(old) != 1:
                raise ImportError(f"{fullname} does not have once: {old}")
            text = text.replace(old, new)
        return self.source_to_code(text, path)


class _Finder(MetaPathFinder):
    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(_ROOMS):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = loader = _Loader(name, spec.loader.path)
            loader.edits = self._edits
        return spec
