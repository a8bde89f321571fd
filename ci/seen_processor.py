"""What a process sees of the processor, and a rank that the tests fork: for `ci.processors`.

    python -m ci.seen_processor        prints both, as JSON

It runs in the environment of the tests, with their folder in PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch

from meshwright.kernels.fp32_matmuls import target_of
from meshwright.kernels.processor import processor_facts
from meshwright.spec.training import TrainSpec


def seen(world: Any = None) -> dict[str, Any]:
    """Return what this process sees; with a world, as the body of a test on ranks."""
    text = processor_facts()
    lines = _verbose()
    mkl = re.search(r"^MKL_VERBOSE oneMKL .*?architecture (.*?) ?enabled proc", lines, re.MULTILINE)
    reproducible = re.search(r"CNR:(\w+)", lines)
    onednn = re.search(r"^onednn_verbose.*,cpu,isa:(.*)$", lines, re.MULTILINE)
    return {
        "vendor": text.get("vendor_id", ""),
        "family": int(text.get("cpu family", 0)),
        "cache": text.get("cache size", ""),
        "cores": len(os.sched_getaffinity(0)),
        "counted": os.cpu_count(),
        "route": target_of(TrainSpec(), torch.device("cpu")).products.label,
        "aten": torch.backends.cpu.get_cpu_capability(),
        "onednn": onednn[1] if onednn else "",
        "is_forked": "transformers" in sys.modules,  # which the server of forks has imported
        "mkl": f"{mkl[1] if mkl else ''} CNR:{reproducible[1] if reproducible else ''}",
    }


def _verbose() -> str:
    """Return what oneDNN and MKL say of themselves while they multiply."""
    backends: Any = torch.backends
    x = torch.ones(64, 64)
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with backends.mkl.verbose(1), backends.mkldnn.verbose(1):
                x @ x
                torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], "")
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode(errors="replace")


def main() -> None:
    """Print what this process sees, and what a forked rank sees."""
    import ranks
    from forking import Forks, Server  # of the tests

    server = Server()
    subprocess.Popen = Forks(server.start).popen  # type: ignore[misc]
    try:
        (of_rank,) = ranks.on_ranks(1, seen)
    finally:
        ranks.close_pools()
        server.close()
    print(json.dumps({"here": seen(), "rank": of_rank}))


if __name__ == "__main__":
    from ci import seen_processor  # under its name, by which ranks import it

    seen_processor.main()
