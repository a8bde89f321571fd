"""Checks of `doctor`: what this machine has, and whether a config could start on it.

Does not import torch.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from meshwright.comm.rendezvous import loopback_interface
from meshwright.cost.price import worst_memory
from meshwright.data import BlendSampler, StreamedDataset, open_data
from meshwright.errors import MeshwrightError
from meshwright.layout import Layout, Machine, resolve_layout
from meshwright.lines import fitted
from meshwright.runtime.checks.epochs import with_epochs
from meshwright.runtime.checks.notes import check_room, config_notes, layout_notes, nearest_folder
from meshwright.runtime.checks.start import (
    check_device,
    check_extras,
    check_limit,
    check_memory,
    check_tokenizer,
)
from meshwright.runtime.machines.machine import (
    check_build,
    check_compiler,
    detect,
    find_gpus,
    lacks_compiler,
    memory_of_machine,
    torch_build,
)
from meshwright.runtime.machines.system import Finding, examine_system
from meshwright.runtime.pricing.planned import cost_inputs_on, settled
from meshwright.runtime.session import cache_folder
from meshwright.runtime.supervise.supervisor import LOOPBACK, listen_on_loopback
from meshwright.spec.loading import Config
from meshwright.spec.parts import parameter_count
from meshwright.spec.training import ClusterSpec
from meshwright.spec.words import busy
from meshwright.store import place
from meshwright.training.sinks import TRACKERS, trackers_of
from meshwright.units import counted, format_bytes, format_count
from meshwright.version import __version__

# Packages that something needs, and the extra that brings them.
_EXTRAS: Final[Mapping[str, str]] = {
    "tiktoken": "tiktoken",
    "datasets": "hf",
    **{name: name for name in TRACKERS},
}


def examine_machine(environ: Mapping[str, str], log_dir: Path) -> Iterator[Finding]:
    """Yield findings on this machine's software, devices, memory, network and `log_dir`."""
    yield Finding("meshwright", f"{__version__}, Python {platform.python_version()}")
    torch = _version("torch")
    yield Finding(
        "torch", torch or "not installed: pip install 'meshwright[train]'", "ok" if torch else "bad"
    )
    for package, extra in _EXTRAS.items():
        installed = _version(package)
        text = installed or f"not installed: pip install 'meshwright[{extra}]'"
        yield Finding(package, text, "ok" if installed else "note")
    yield Finding("system", platform.platform())
    yield _looked_at("devices", lambda: _devices(environ))
    yield _load()
    yield _memory()
    yield _interface()
    yield _looked_at("port", lambda: _port(None))
    writable = _looked_at("log.dir", lambda: _folder(log_dir))
    yield writable
    yield from examine_system(nearest_folder(log_dir) if writable.state == "ok" else Path.cwd())


def examine_config(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings on whether training a config could start on this machine.

    Starts no process and creates no run, but prepares the data as a start would.
    """
    layout: Layout | None = None

    def resolved() -> str:
        nonlocal layout
        machine = detect(config.cluster, environ)
        check_device(config, machine, environ)
        lacks = lacks_compiler(machine.device, environ)
        layout = resolve_layout(settled(config, machine, lacks), machine)
        check_compiler(config.train, lacks)
        parameters = format_count(parameter_count(config.model))
        return f"{layout.label} on {counted(layout.world, 'rank')}, {parameters} parameters"

    yield _looked_at("layout", resolved)
    yield _looked_at("data", lambda: _data(config, environ))
    yield _looked_at("trackers", lambda: _trackers(config))
    if config.cluster.port is not None:
        yield _looked_at("cluster.port", lambda: _port(config.cluster.port))
    checkpoint_dir = config.checkpoint.dir
    root = place(config.log.dir if checkpoint_dir is None else checkpoint_dir)
    yield _looked_at("checkpoints", lambda: check_room(config, root, for_all=True))
    for text in config_notes(config):
        yield Finding("config", text, "note")
    if layout is not None:
        machine = detect(config.cluster, environ)
        for text in layout_notes(config, layout, machine):
            yield Finding("config", text, "note")
        yield _fits(config, layout, machine)


def _looked_at(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, look())
    except MeshwrightError as error:
        return Finding(name, str(error), "bad")
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return Finding(name, f"{error.strerror}{where}", "bad")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(environ: Mapping[str, str]) -> str:
    machine = detect(ClusterSpec(), environ)
    if machine.device == "cpu":
        return f"{machine.name}; {machine.devices} ranks share them by default"
    check_build(machine.device, find_gpus(environ), torch_build())
    models = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        model = re.search(r"Model:\s*(.+)", path.read_text(encoding="utf-8", errors="replace"))
        models.add(model[1] if model else "NVIDIA GPU")
    return f"{machine.devices} x {' and '.join(sorted(models)) or 'CUDA GPU'}"


def _load() -> Finding:
    """Return a finding on the machine's load average, a note if other processes are busy."""
    machine = detect(ClusterSpec(device="cpu"), {})
    if (text := busy(machine.load, machine.cores)) is not None:
        return Finding("load", text, "note")
    return Finding("load", f"{machine.load:.1f} on {machine.cores} cores")


def _memory() -> Finding:
    total, free = memory_of_machine()
    if not total:
        return Finding("memory", "not known on this system", "note")
    return Finding("memory", f"{format_bytes(free)} of {format_bytes(total)} available")


def _interface() -> Finding:
    name = loopback_interface()
    if name in [known for _, known in socket.if_nameindex()]:
        return Finding("interface", f"local ranks meet on {name} ({LOOPBACK})")
    return Finding("interface", f"there is no {name}: local ranks cannot meet", "bad")


def _port(port: int | None) -> str:
    with listen_on_loopback(port) as listener:
        address, listening_port = listener.getsockname()
    return f"{address}:{listening_port} can be listened on"


def _folder(path: Path) -> str:
    """Return a line on a folder's disk space, after creating and locking a file there.

    If the folder does not exist, this uses the nearest existing parent. Raises OSError if it fails.
    """
    existing = nearest_folder(path)
    with tempfile.TemporaryFile(dir=existing) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    usage = shutil.disk_usage(existing)
    free, total = format_bytes(usage.free), format_bytes(usage.total)
    return f"{path} can be written; {free} of {total} free"


def _data(config: Config, environ: Mapping[str, str]) -> str:
    check_tokenizer(config)
    dataset = open_data(
        config.data,
        cache_folder(config, environ),
        vocab_size=config.model.vocab_size,
        progress=lambda text: print(fitted(text, sys.stderr), file=sys.stderr),
    )
    config = with_epochs(config, dataset)
    dataset.check(config.train)
    if isinstance(dataset, StreamedDataset):
        return f"{config.data.sources[0]} can be read; a stream does not state its size"
    sampler = dataset.sampler("train", config.train.seq_len, config.train.batch)
    samples = config.train.steps * config.train.batch
    tokens = format_count(dataset.tokens("train"))
    if isinstance(sampler, BlendSampler):
        passes_text = (
            f"{source['epochs']:.2g} over {source['source']}" for source in sampler.passes(samples)
        )
        return f"{tokens} training tokens; passes of train.steps: {', '.join(passes_text)}"
    passes = samples / sampler.samples
    return f"{tokens} training tokens; train.steps makes {passes:.2g} passes over them"


def data_identity(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the identity of a config's data, which it prepares if needed; raises `DataError`."""
    folder = cache_folder(config, environ)
    return open_data(config.data, folder, vocab_size=config.model.vocab_size).identity


def _trackers(config: Config) -> str:
    check_extras(config)
    return ", ".join(trackers_of(config.log)) or "none"


def _fits(config: Config, layout: Layout, machine: Machine) -> Finding:
    """Return a finding that compares the predicted peak memory with this machine's."""

    def look() -> str:
        check_limit(config, layout, machine)
        return check_memory(config, layout, machine)

    finding = _looked_at("peak", look)
    limit = config.cluster.memory
    if limit is None or finding.state == "bad":
        return finding
    needed = worst_memory(cost_inputs_on(config, machine, layout), layout).allocated
    if needed <= limit:
        return finding
    return Finding("peak", f"{finding.text}, but cluster.memory = {format_bytes(limit)}", "bad")
