"""What device there is: `python -m benchmarks.gpu_machine` prints a JSON object.

It also takes memory, as training will: an allocator that is set to what this machine lacks fails
here, and not in each measurement.
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch

_TRIED = 2**30


def look() -> dict[str, Any]:
    """Return the name and the memory in bytes of the first GPU, and versions of what drives it."""
    torch.empty(_TRIED, dtype=torch.uint8, device="cuda").zero_()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {
        "name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "free_bytes": free,
        "total_bytes": total,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    if parser.parse_args().device == "cuda":
        print(json.dumps(look()))
        return
    name = platform.processor() or platform.machine()
    print(json.dumps({"name": name, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
