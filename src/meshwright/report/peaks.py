"""The two peaks of memory and their names, the same on pages and in terminals.

A *tensor peak* is the most that the tensors of a rank take at one moment: what a layout decides. A
*process peak* is the most that its whole process takes, with Python, the libraries, a CUDA context
and what the allocator keeps: what has to fit.
"""

from __future__ import annotations

from typing import Final

from meshwright.program.profile import MemoryPoint

TENSORS, PROCESS = "tensor peak", "process peak"
MEANINGS: Final = {
    TENSORS: "tensors alone",
    PROCESS: "the whole process",
}


def peak_name(peak: MemoryPoint) -> str:
    """Return which of the two a profile has; it knows what is not the program's, or it does not."""
    return PROCESS if peak.bytes.get("fixed") else TENSORS


def name_in_events(device: str) -> str:
    """Return which of the two step events have, by the name of the device in the start event.

    It is the size of a process on a CPU, what torch allocated for tensors on a GPU.
    """
    return PROCESS if device.startswith("CPU") or device == "cpu" else TENSORS
