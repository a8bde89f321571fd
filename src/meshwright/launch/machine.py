"""What this machine offers: devices, ranks, cores. Found without importing torch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from meshwright.errors import ConfigError, refusal
from meshwright.execute.rendezvous import Rendezvous
from meshwright.layout import Machine
from meshwright.spec.training import ClusterSpec

# Two processes with half of the cores each train a little faster than one with all of them, and
# more than two share the memory bandwidth to no gain.
CPU_RANKS = 2


def detect(
    cluster: ClusterSpec, environ: Mapping[str, str], at: Rendezvous | None = None
) -> Machine:
    """Return the machine at hand as the [cluster] section wants it seen.

    Where others have started the ranks, `at` says how many there are on this node.
    Raises `ConfigError` where CUDA is asked for and there is none, or fewer GPUs than asked.
    """
    gpus = count_gpus(environ)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if cluster.device == "cuda" and not gpus:
        raise ConfigError(
            refusal("cluster.device = 'cuda', but no NVIDIA GPU is visible", legal=["'cpu'"])
        )
    device: Literal["cpu", "cuda"] = "cuda" if gpus and cluster.device != "cpu" else "cpu"
    asked = at.local_size if at is not None else cluster.devices_per_node
    if device == "cuda":
        count = asked or gpus
        if count > gpus:
            raise ConfigError(
                refusal(
                    f"cluster.devices_per_node = {count}, but {gpus} GPUs are visible", legal=[gpus]
                )
            )
        return Machine("cuda", count, cores, "CUDA GPU", is_fixed=True)
    count = asked or min(CPU_RANKS, cores)
    name = f"CPU ({_processor()}, {cores} cores)"
    return Machine("cpu", count, cores, name, is_fixed=asked is not None)


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many NVIDIA GPUs this process may use, from the driver's files."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    found = len(list(folder.iterdir())) if folder.is_dir() else 0
    return found or len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])


def gpu_name(folder: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Return what the driver calls the first GPU, such as "NVIDIA H100 80GB HBM3", if it says."""
    for file in sorted(folder.glob("*/information")):
        found = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1]
    return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
