"""Devices, links and clusters for which programs are priced, from a catalogue that names its
sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from meshwright.program.target import Processor
from meshwright.spec.presets import LOCAL, catalogue_rows, check_device, check_link
from meshwright.spec.training import ClusterSpec

# The fields that name a device "local" in a config, until it has been measured.
LOCAL_DEVICE = "cpu"
_NAMELESS: Final = Processor()


# Patterns of what drivers and papers call a device, the first that is found.
_DEVICES: Final = (
    (r"H100.*96", "h100-96gb-hbm2e"),
    (r"H100.*PCI", "h100-pcie"),
    (r"H100.*NVL", "h100-nvl"),
    (r"H100", "h100-sxm"),
    (r"GH200.*144", "gh200-144gb"),
    (r"GH200", "gh200-96gb"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"A100.*40", "a100-40gb"),
    (r"A100", "a100-80gb"),
    (r"A800", "a800"),
    (r"V100.*16", "v100-16gb"),
    (r"V100", "v100-32gb"),
    (r"A6000", "a6000"),
    (r"RTX ?PRO ?6000", "rtxpro6000"),
    (r"RTX 6000 Ada", "rtx6000-ada"),
    (r"3090", "rtx3090"),
    (r"4090", "rtx4090"),
    (r"5090", "rtx5090"),
)


_LINK_TITLES: Final = {
    "nvlink": "NVLink",
    "infinity": "Infinity Fabric",
    "pcie": "PCIe",
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "efa": "EFA",
}


@dataclass(frozen=True)
class DeviceLink:
    """A link between devices: its bandwidth in bytes/s of one device in one direction, and its
    latency in seconds."""

    name: str
    bandwidth: float
    latency: float
    source: str

    @property
    def title(self) -> str:
        """The name as people write it, such as "PCIe 4" or "25 GbE"."""
        if self.name.startswith("ethernet-"):
            return f"{self.name.removeprefix('ethernet-')} GbE"
        kind = next((kind for kind in _LINK_TITLES if self.name.startswith(kind)), None)
        if kind is None:
            return self.name
        return f"{_LINK_TITLES[kind]} {self.name.removeprefix(kind).lstrip('-')}".rstrip()


@dataclass(frozen=True)
class Device:
    """An accelerator or CPU: memory in bytes, memory bandwidth in bytes/s, and dense FLOP/s by
    dtype.

    `kind` names its constants in the calibration. `per_node` is the usual number in a node; `links`
    are the names of its usual links inside a node, between nodes and to the host. `processor` is
    set for a CPU.
    """

    name: str
    kind: str
    memory: int
    bandwidth: float
    peaks: Mapping[str, float]
    per_node: int
    links: tuple[str, str, str]
    source: str
    processor: Processor = _NAMELESS

    def peak(self, products: str, *, tf32: bool = False) -> float:
        """Return the peak FLOP/s of matmuls in a format such as "bf16" or "fp8-mx".

        With `tf32`, fp32 matmuls have the peak of TF32.
        """
        dtype = products.partition("-")[0]
        if tf32 and dtype == "fp32":
            return self.peaks.get("tf32", self.peaks[dtype])
        return self.peaks[dtype]


def slowed(device: Device, times: float) -> Device:
    """Return the device with its FLOP/s and memory bandwidth divided by `times`, as for a shared
    CPU."""
    peaks = {dtype: peak / times for dtype, peak in device.peaks.items()}
    return replace(device, peaks=peaks, bandwidth=device.bandwidth / times)


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `per_node` devices, with the links inside a node (`inner`), between nodes
    (`outer`) and to the CPU (`host`)."""

    device: Device
    nodes: int
    per_node: int
    inner: DeviceLink
    outer: DeviceLink
    host: DeviceLink

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return self.nodes * self.per_node

    @property
    def topology(self) -> str:
        """The links in words, as `8 per node over NVLink 4; InfiniBand 400 between nodes`."""
        inside = f"{self.per_node} per node over {self.inner.title}"
        return inside if self.nodes == 1 else f"{inside}; {self.outer.title} between nodes"


@cache
def catalogue() -> tuple[Mapping[str, Device], Mapping[str, DeviceLink]]:
    """Return the devices and the links of the catalogue, each by name."""
    content = catalogue_rows()
    links = {
        name: DeviceLink(name, row["gbs"] * 1e9, row["latency_us"] * 1e-6, row["source"])
        for name, row in content["links"].items()
    }
    return {name: _device(name, row) for name, row in content["devices"].items()}, links


def _device(name: str, row: Mapping[str, Any]) -> Device:
    first, second, third = row["links"]
    return Device(
        name,
        row["class"],
        int(row["memory_gb"] * 1e9 if row["class"] == "cpu" else row["memory_gb"] * 2**30),
        row["memory_gbs"] * 1e9,
        {dtype: peak * 1e12 for dtype, peak in row["peaks"].items()},
        row["per_node"],
        (first, second, third),
        row["source"],
        Processor(*row.get("processor", ())),
    )


def find_device(name: str) -> Device:
    """Return a device of the catalogue; raises `ConfigError` with the nearest names."""
    check_device(name)
    return catalogue()[0][name]


def device_named(text: str) -> Device | None:
    """Return the catalogue's device for a name from a driver or a paper, such as "NVIDIA H100 80GB
    HBM3"; None if there is none."""
    devices, _ = catalogue()
    for pattern, name in _DEVICES:
        if re.search(pattern, text, re.IGNORECASE):
            return devices[name]
    # An A4000 is not an A40.
    alike = [name for name in devices if re.search(rf"{name.split('-')[0]}(?!\d)", text.lower())]
    return devices[max(alike, key=len)] if alike else None


def find_link(name: str) -> DeviceLink:
    """Return a link of the catalogue; raises `ConfigError` with the nearest names."""
    check_link(name)
    return catalogue()[1][name]


def cluster_of(
    device: Device, devices: int, per_node: int | None = None, links: tuple[str, ...] | None = None
) -> Cluster:
    """Return a cluster of `devices` devices.

    `per_node` and `links` (inside a node, between nodes) default to the device's usual ones.
    """
    inner, outer, host = (*(links or device.links[:2]), device.links[2])
    size = min(per_node or device.per_node, devices)
    nodes = -(-devices // size)
    return Cluster(device, nodes, size, find_link(inner), find_link(outer), find_link(host))


def resolve_cluster(
    spec: ClusterSpec, local_devices: int, processor: Processor | None = None
) -> Cluster:
    """Return the cluster of a [cluster] section; the preset "local" has `local_devices` devices.

    `processor` is this machine's CPU, None if unknown. Raises `ConfigError` for names that the
    catalogue lacks.
    """
    if spec.preset == LOCAL:
        device = find_device(LOCAL_DEVICE)
        device = replace(device, processor=processor or device.processor)
        per_node = spec.devices_per_node or local_devices
    else:
        device = find_device(spec.preset)
        per_node = spec.devices_per_node or device.per_node
    if spec.memory is not None:
        device = replace(device, memory=spec.memory)
    if spec.peak_tflops is not None:
        device = replace(device, peaks=dict.fromkeys(device.peaks, spec.peak_tflops * 1e12))
    return cluster_of(device, per_node * spec.nodes, per_node, spec.links)
