"""Other systems that train the mixture of `benchmarks.mixture`, each in its own interpreter.

    GLOO_SOCKET_IFNAME=lo python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m benchmarks.mixture_peers.titan --precision fp32 --rows 4 --steps 2

prints one JSON line. One rank has two threads; two ranks have one each, and share out the experts.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULES = {"torchtitan": "titan", "megatron": "megatron", "olmo": "olmo"}
THREADS = 2
LONGEST = 900  # seconds of a run
ROOT = Path(__file__).parents[2]


def run(peer: str, python: str, ranks: int, rows: int, words: Sequence[str]) -> dict[str, Any]:
    """Return what a peer's first rank found: seconds of steps, losses, parameters."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src"))),
        "OMP_NUM_THREADS": str(THREADS // ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [python, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", f"{__name__}.{MODULES[peer]}"]
    command += ["--rows", str(rows), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=LONGEST)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(_reason(done.stderr))
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _reason(stderr: str) -> str:
    """Return the last line in which Python names an error of a rank, else the last of all."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
    return (named or lines or ["no output"])[-1]
