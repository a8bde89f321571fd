"""What device there is, and what it does at best: products of random numbers, and copies.

It also takes memory, as training will: an allocator that is set to what this machine lacks fails
here, and not in each measurement.
"""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch

from meshwright.bench.device import copy_rate, products
from meshwright.cost.work import Product

_TRIED = 2**30
# Large enough for the rate that kernels reach at best.
_SIDE = 8192
_SECONDS = 0.3


def look(device: torch.device) -> dict[str, Any]:
    """Return the device's name, versions of what drives it, on a GPU also its memory and rates."""
    about = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), **about}
    torch.empty(_TRIED, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    found = {
        "name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "free_bytes": free,
        "total_bytes": total,
        **about,
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "driver": driver(),
    }
    shape = Product(_SIDE, _SIDE, _SIDE)
    ((_, seconds),) = products(device, "bf16", _SECONDS, [shape])
    rates = {
        "flops_per_s": shape.flops / seconds,
        "copied_bytes_per_s": copy_rate(device, _SECONDS),
    }
    torch.cuda.empty_cache()
    return found | rates


def driver() -> str:
    """Return the version of NVIDIA's driver, as nvidia-smi says it; "unknown" where it does not."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"
