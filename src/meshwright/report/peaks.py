"""The two memory peaks and their names, the same on pages and in terminals.

A *tensor peak* is the most that the tensors of a rank take at one moment: what a layout decides. A
*process peak* is the most that its whole process takes, including Python, the libraries, a CUDA
context and the allocator's reserve: what has to fit.
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
    """Return which of the two peaks a profile has.

    It has the process peak if it includes memory outside of the program.
    """
    return PROCESS if peak.bytes.get("fixed") else TENSORS


def name_in_events(device: str) -> str:
    """Return which of the two peaks step events have, by the start event's device.

    It is the size of the process on a CPU, torch's allocated memory on a GPU.
    """
    return PROCESS if device.startswith("CPU") or device == "cpu" else TENSORS
