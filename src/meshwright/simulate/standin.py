"""A stand-in for a GPU: torch's device for other backends, with streams and events that are noted.

Fake tensors lie on it, so that nothing is computed. What the package does on "cuda" is done on it,
to the letter: `literal_branches` has the modules that train be imported with this device's name in
place of CUDA's. It lasts as long as the process, which is one of its own (`on_standin.py`).
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
    """A stream of the stand-in; `number` 0 is the default one."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number = module().order.new_stream()
        self.stream_id, self.device_index, self.device_type = self.number, 0, 20
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        """Have later work on this stream wait for all that another has now."""
        module().order.wait(self.number, module().order.now(other.number))

    def wait_event(self, event: Event) -> None:
        """Have later work on this stream wait for an event."""
        module().order.wait(self.number, event.time)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event recorded now."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Have the host wait."""
        module().order.host_waits("stream", module().order.now(self.number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


class Event:
    """An event of the stand-in; `time` is the vector clock of the work that it comes after."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Record the work that a stream has been given so far."""
        number = module().current_stream().number if stream is None else stream.number
        self.time = module().order.now(number)

    def wait(self, stream: Stream | None = None) -> None:
        """Have later work on a stream wait for this event."""
        (stream or module().current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Have the host wait."""
        module().order.host_waits("event", self.time)

    def query(self) -> bool:
        """Whether it has completed."""
        return True


class Module(backend_registration._DummyBackendModule):
    """The stand-in's `torch.cuda`."""

    def __init__(self) -> None:
        # A GPU's module has the classes by these names.
        vars(self).update(Stream=Stream, Event=Event)
        self.order = StreamOrder()
        self._current: list[Stream] = []

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream that work goes to."""
        if not self._current:
            self._current.append(Stream())
        return self._current[-1]

    def default_stream(self, device: Any = None) -> Stream:
        """Return the first stream."""
        self.current_stream()
        return self._current[0]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Have work go to a stream."""
        self.current_stream()
        self._current.append(stream or self._current[-1])
        try:
            yield
        finally:
            self._current.pop()

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device: Any = None) -> None:
        """Have the host wait for everything."""
        self.order.host_waits("device", self.order.everything())

    def _lazy_init(self) -> None:
        """Nothing is to be loaded."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return free and all bytes."""
        return 1 << 37, 1 << 37

    def memory_allocated(self, device: Any = None) -> int:
        """Return 0: nothing has memory."""
        return 0

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return 0: nothing has memory."""
        return 0

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of autocast, which a recomputed forward asks for."""
        return [torch.float16, torch.bfloat16]

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return Hopper's."""
        return (9, 0)


def module() -> Module:
    """Return the stand-in's module, `torch.standin`."""
    backend: Module = getattr(torch, NAME)
    return backend


class Edit(NamedTuple):
    """A seeded fault: a text that occurs once in a module, and its replacement."""

    module: str
    old: str
    new: str


def install(edits: Sequence[Edit] = ()) -> torch.device:
    """Make the stand-in a device of torch in this process, and have branches for CUDA take it.

    `edits` change the modules that train as they are imported.
    """
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        module().order.keep(tensor, stream.number)

    torch.Tensor.record_stream = record_stream  # type: ignore[assignment]
    literal_branches(edits)
    return torch.device(NAME, 0)


def literal_branches(edits: Sequence[Edit] = ()) -> None:
    """Import the modules that train with the stand-in's name where they say CUDA."""
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
        """Return code that is compiled anew: no file of bytecode has it."""
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
