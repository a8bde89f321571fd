"""This machine's devices, ranks, cores and memory, found without importing torch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import ConfigError, nearest_divisors, refusal
from meshwright.kernels.processor import processor_facts
from meshwright.layout import Machine
from meshwright.runtime.machines.accelerators import count_gpus
from meshwright.spec.loading import Config
from meshwright.spec.training import ClusterSpec

# Two processes with half of the cores each train a little faster than one with all of them, and
# more than two share the memory bandwidth to no gain.
CPU_RANKS = 2


def detect(
    cluster: ClusterSpec, environ: Mapping[str, str], rendezvous: Rendezvous | None = None
) -> Machine:
    """Return this machine as the [cluster] section describes it.

    If another launcher started the ranks, `rendezvous` says how many there are on this node.
    Raises `ConfigError` if CUDA is requested without a GPU, or with fewer GPUs than requested.
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
    """Return the bytes of total and available memory, 0 if the system doesn't say."""
    path = Path("/proc/meminfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    matches = (re.search(rf"{key}:\s+(\d+) kB", text) for key in ("MemTotal", "MemAvailable"))
    total, free = (int(match[1]) * 1024 if match else 0 for match in matches)
    return total, free


def on_nodes(config: Config, rendezvous: Rendezvous) -> Config:
    """Return a config with the nodes on which its ranks were started.

    Raises `ConfigError` if it was written, or planned, for other nodes: its axes would not use the
    links that they were placed on.
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
    """Return the driver's name of the first GPU, such as "NVIDIA H100 80GB HBM3", if any."""
    for file in sorted(folder.glob("*/information")):
        match = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
        if match:
            return match[1]
    return None


def _processor() -> str:
    return processor_facts().get("model name") or platform.processor() or platform.machine()
