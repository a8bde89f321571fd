"""This machine's devices, whether the installed torch supports them, and its compilers."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import ConfigError, lacks_training, nearest_divisors, refusal
from meshwright.kernels.processor import processor_facts
from meshwright.layout import Machine
from meshwright.spec.loading import Config
from meshwright.spec.training import ClusterSpec, TrainSpec
from meshwright.units import MIB

ROOT: Final = Path("/")
_INTEL: Final = "0x8086"
# The variables that hide a vendor's GPUs, in the order in which torch reads them.
_HIDES: Final[Mapping[str, tuple[str, ...]]] = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
# Asks NVIDIA's driver for the memory of each GPU, in MiB; it takes a second.
_SMI: Final = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_SMI_S: Final = 20.0


class Build(NamedTuple):
    """The version of an installed torch, and the CUDA and ROCm versions it was built for.

    None if it was not built for CUDA or ROCm.
    """

    torch: str
    cuda: str | None = None
    hip: str | None = None

    def lacks(self, vendor: str) -> bool:
        """Return whether this torch cannot compute on GPUs of "NVIDIA" or "AMD"."""
        return (self.cuda if vendor == "NVIDIA" else self.hip) is None


class Gpus(NamedTuple):
    """GPUs with a driver: the number `present` and the number `visible` to this process.

    `hidden_by` is the environment variable that restricts them, or "".
    """

    vendor: Literal["NVIDIA", "AMD"]
    present: int
    visible: int
    hidden_by: str = ""


def torch_build(file: Path | None = None) -> Build | None:
    """Return what the installed torch was built for, from its version.py; None without torch."""
    if file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        file = Path(spec.origin).with_name("version.py")
    if not file.is_file():
        return None
    pairs = re.findall(r"^(\w+)[^=\n]*= '([^']*)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    versions = dict(pairs)
    return Build(versions.get("__version__", "?"), versions.get("cuda"), versions.get("hip"))


def check_torch(command: str) -> None:
    """Raise an error that names the command if torch is not installed."""
    if torch_build() is None:
        raise lacks_training(command)


def find_gpus(environ: Mapping[str, str], root: Path = ROOT) -> Gpus | None:
    """Return the NVIDIA or AMD GPUs whose driver files exist; None if there are none.

    Under WSL2 the driver's files do not list the devices: one is assumed, unless the environment
    names more.
    """
    nvidia, amd = _nvidia(environ, root), _amd(root)
    if not nvidia and not amd:
        return None
    vendor: Literal["NVIDIA", "AMD"] = "NVIDIA" if nvidia else "AMD"
    present = nvidia or amd
    for name in _HIDES[vendor]:
        if name in environ:
            return Gpus(vendor, present, min(present, len(_named(environ[name]))), name)
    return Gpus(vendor, present, present)


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs this process may use."""
    gpus = find_gpus(environ)
    return 0 if gpus is None else gpus.visible


def gpu_memory(root: Path = ROOT, command: Sequence[str] = _SMI) -> int | None:
    """Return the bytes of the smallest GPU as reported by its driver; None if unknown.

    Asks nvidia-smi for NVIDIA, and reads a file per GPU for AMD.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
        nvidia = [int(word) * MIB for word in done.stdout.split() if word.isdecimal()]
    except (OSError, subprocess.SubprocessError):
        nvidia = []
    files = (root / "sys/class/drm").glob("card*/device/mem_info_vram_total")
    return min(nvidia or [int(file.read_text()) for file in files], default=None)


def check_build(device: str, gpus: Gpus | None, build: Build | None) -> None:
    """Raise `ConfigError` if this machine has GPUs that the installed torch cannot use.

    `device` is "cpu" or "cuda", as in `Machine`.
    """
    if device != "cuda" or gpus is None or build is None or not build.lacks(gpus.vendor):
        return
    needed = "CUDA" if gpus.vendor == "NVIDIA" else "ROCm"
    gpus_text = f"{gpus.visible} {gpus.vendor} GPU{'s' if gpus.visible > 1 else ''}"
    built = (
        f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPUs only"
    )
    rule = f"this machine has {gpus_text}, but torch {build.torch} was built for {built}"
    hint = "pytorch.org/get-started has the command that installs the one for this driver"
    legal = [f"a torch that was built for {needed}", "cluster.device = 'cpu'"]
    raise ConfigError(refusal(rule, legal=legal, hint=hint))


def unused_note(
    asked: str, device: str, gpus: Gpus | None, root: Path = ROOT, system: str | None = None
) -> str | None:
    """Return a note if a GPU exists but training uses the CPU by default, else None.

    `asked` is `cluster.device`.
    """
    if device != "cpu" or asked != "auto":
        return None
    if gpus is not None:
        return (
            f"trains on the CPU: {gpus.hidden_by} hides the {gpus.present} {gpus.vendor} GPU(s) of "
            "this machine; set cluster.device=cpu if you mean this"
        )
    other_vendor = _other(root, system or platform.system())
    if other_vendor is None:
        return None
    return (
        f"trains on the CPU: {unsupported(other_vendor)}; set cluster.device=cpu if you mean this"
    )


def unsupported(name: Literal["Apple", "Intel"]) -> str:
    """Return a line that GPUs of a vendor are not supported."""
    torch_name = {"Apple": "mps", "Intel": "xpu"}[name]
    return f"GPUs of {name} (torch's {torch_name}) are not supported, only those of NVIDIA and AMD"


def _nvidia(environ: Mapping[str, str], root: Path) -> int:
    folder = root / "proc/driver/nvidia/gpus"
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    names = (path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*"))
    count = count or sum(name.isdigit() for name in names)
    is_wsl = (root / "dev/dxg").exists() and any((root / "usr/lib/wsl/lib").glob("libcuda.so*"))
    if not count and is_wsl:
        return max(1, len(_named(environ.get("CUDA_VISIBLE_DEVICES", ""))))
    return count


def _amd(root: Path) -> int:
    """Return the number of AMD GPUs: nodes of the compute driver that have SIMD units."""
    count = 0
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        match = re.search(r"^simd_count (\d+)", file.read_text(errors="replace"), re.MULTILINE)
        count += match is not None and int(match[1]) > 0
    return count


def _other(root: Path, system: str) -> Literal["Apple", "Intel"] | None:
    if system == "Darwin" and platform.machine() == "arm64":
        return "Apple"
    # Of Intel only those that torch's xpu serves: whose driver is xe, not a laptop's display.
    for vendor in sorted((root / "sys/class/drm").glob("card[0-9]/device/vendor")):
        driver = vendor.parent / "driver"
        if vendor.read_text().strip() == _INTEL and driver.resolve().name == "xe":
            return "Intel"
    return None


def _named(text: str) -> list[str]:
    return [device for device in text.split(",") if device.strip() not in ("", "-1")]


def lacks_compiler(device: str, environ: Mapping[str, str]) -> str | None:
    """Return a line on what torch.compile lacks for "cpu" or "cuda"; None if nothing is missing.

    On a CPU it needs a C++ compiler, found as torch does (`cpp.cxx` of torch/_inductor/config.py),
    and Python's headers; on CUDA it needs Triton, a C compiler for its kernel launchers, and the
    headers.
    """
    if device == "cuda" and not importlib.util.find_spec("triton"):
        return "triton is not installed"
    word, language, names = "CC", "C", ["gcc", "clang"]
    if device != "cuda":
        word, language, names = "CXX", "C++", ["clang++" if sys.platform == "darwin" else "g++"]
    if environ.get(word):
        names = [environ[word]]
    path = environ.get("PATH", os.defpath)
    if not any(shutil.which(name, path=path) for name in names):
        missing = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not on the PATH"
        return f"there is no {language} compiler: {missing} ({word} names another)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return f"Python's headers are not installed, which the {language} compiler needs"
    return None


def check_compiler(train: TrainSpec, lacks: str | None) -> None:
    """Raise `ConfigError` if `train.compile = true` and `lacks` says that something is missing."""
    if train.is_compiled and lacks is not None:
        rule = f"train.compile = true, but {lacks}"
        raise ConfigError(refusal(rule, legal=["train.compile = false", 'train.compile = "auto"']))


# Two processes with half of the cores each train a little faster than one with all of them, and
# more than two share the memory bandwidth to no gain.
CPU_RANKS = 2


def detect(
    cluster: ClusterSpec, environ: Mapping[str, str], rendezvous: Rendezvous | None = None
) -> Machine:
    """Return this machine's device type, number of devices, cores and load.

    The [cluster] section may select the device and the number; if another launcher started the
    ranks, `rendezvous` gives their number on this node. Raises `ConfigError` if CUDA is requested
    without a GPU, or more GPUs than there are.
    """
    gpus = count_gpus(environ)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    load = os.getloadavg()[0]
    if cluster.device == "cuda" and not gpus:
        raise ConfigError(
            refusal(
                "cluster.device = 'cuda', but no GPU of NVIDIA or AMD is visible", legal=["'cpu'"]
            )
        )
    device: Literal["cpu", "cuda"] = "cuda" if gpus and cluster.device != "cpu" else "cpu"
    asked = rendezvous.local_size if rendezvous is not None else cluster.devices_per_node
    if device == "cuda":
        count = asked or gpus
        if count > gpus:
            raise ConfigError(
                refusal(
                    f"cluster.devices_per_node = {count}, but {gpus} GPUs are visible", legal=[gpus]
                )
            )
        return Machine("cuda", count, cores, "CUDA GPU", is_fixed=True, load=load)
    count = asked or min(CPU_RANKS, cores)
    name = f"CPU ({_processor()}, {cores} cores)"
    return Machine("cpu", count, cores, name, is_fixed=asked is not None, load=load)


def memory_of_machine() -> tuple[int, int]:
    """Return the bytes of total and of available memory; 0 if unknown."""
    path = Path("/proc/meminfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    matches = (re.search(rf"{key}:\s+(\d+) kB", text) for key in ("MemTotal", "MemAvailable"))
    total, free = (int(match[1]) * 1024 if match else 0 for match in matches)
    return total, free


def on_nodes(config: Config, rendezvous: Rendezvous) -> Config:
    """Return a config with `cluster` set to the nodes and ranks per node that a launcher started.

    Raises `ConfigError` if the config was written or planned for other nodes, since its layout
    assumes their links.
    """
    if rendezvous.size % rendezvous.local_size:
        problem = (
            f"{rendezvous.size} ranks do not divide into nodes of "
            f"LOCAL_WORLD_SIZE = {rendezvous.local_size}"
        )
        raise ConfigError(
            refusal(problem, legal=nearest_divisors(rendezvous.size, rendezvous.local_size))
        )
    cluster, nodes = config.cluster, rendezvous.size // rendezvous.local_size
    if cluster.nodes not in (1, nodes):
        problem = f"cluster.nodes = {cluster.nodes}, but ranks were started on {nodes} node(s)"
        raise ConfigError(refusal(problem, legal=[f"cluster.nodes = {nodes}"]))
    planned = cluster.devices_per_node
    if planned is None and cluster.preset != "local":
        # Only here: `train --help` starts without the catalogue.
        from meshwright.cost.catalogue import find_device

        planned = find_device(cluster.preset).per_node
    if nodes > 1 and planned not in (None, rendezvous.local_size):
        problem = (
            f"the cluster has {planned} devices a node, but nodes were given "
            f"{rendezvous.local_size}"
        )
        legal = [
            f"cluster.devices_per_node = {rendezvous.local_size}",
            f"{planned} ranks on each node",
        ]
        raise ConfigError(refusal(f"{problem} ranks each", legal=legal))
    return config.model_copy(update={"cluster": cluster.model_copy(update={"nodes": nodes})})


def gpu_name(folder: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Return the driver's name of the first NVIDIA GPU ("NVIDIA H100 80GB HBM3"), or None."""
    for file in sorted(folder.glob("*/information")):
        match = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
        if match:
            return match[1]
    return None


def _processor() -> str:
    return processor_facts().get("model name") or platform.processor() or platform.machine()
