"""What `make gpu` needs, looked at before anything of it is imported: each with what to do.

Only what comes with Python is imported here, and the one module that reads torch's version.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

LEAST_PYTHON: Final = (3, 11)
LEAST_TORCH: Final = (2, 11)
# Imported names of what `make gpu-wheels` brings, as far as a command needs them to start.
NEEDED: Final = ("annotated_types", "pydantic", "yaml", "rich", "safetensors", "tokenizers")
# The oldest NVIDIA driver for each CUDA: docs.nvidia.com/cuda/cuda-toolkit-release-notes, table 2.
DRIVERS: Final = {13: 580, 12: 525}


def lacking(
    device: str,
    environ: Mapping[str, str],
    *,
    python: Sequence[int] = sys.version_info[:2],
    version_file: Path | None = None,
    root: Path = Path("/"),
    load: Callable[[str], ModuleType] = importlib.import_module,
) -> str | None:
    """Return what keeps the rows from being measured, and what to do; None where nothing does.

    `version_file` is torch's version.py; the rest stands for this machine in tests.
    """
    said = ".".join(map(str, python))
    if tuple(python) < LEAST_PYTHON:
        return f"Python {said} is too old, 3.11 is needed: make gpu PYTHON=PATH takes another one"
    missing = [name for name in NEEDED if not _loads(name, load)]
    if missing:
        return (
            f"{', '.join(missing)} cannot be imported by Python {said}. On a machine that reaches "
            f"an index: make gpu-wheels GPU_PYTHON={said}, then bring build/gpu here"
        )
    # Only now: the package needs what was looked for.
    from meshwright.errors import ConfigError
    from meshwright.runtime.machines.machine import (
        check_build,
        find_gpus,
        torch_build,
        unsupported,
    )

    build = torch_build(version_file)
    if build is None:
        return (
            f"torch is not installed for {sys.executable}: make gpu PYTHON=PATH takes the Python "
            "that has it"
        )
    found = re.match(r"(\d+)\.(\d+)", build.torch)
    if found is None or (int(found[1]), int(found[2])) < LEAST_TORCH:
        return (
            f"torch {build.torch} is too old, 2.11 is needed: pytorch.org/get-started has the "
            "command that installs a new one"
        )
    if device != "cuda":
        return None
    gpus = find_gpus(environ, root)
    if gpus is None or not gpus.visible:
        if gpus is not None:
            return f"{gpus.hidden_by} hides the GPUs of this machine: unset it"
        return (
            "there is no GPU of NVIDIA or AMD, or its driver is not loaded (nvidia-smi says); "
            f"{unsupported('Apple')}. --device cpu --tiny tries all of this on a CPU"
        )
    try:
        check_build(device, gpus, build)
    except ConfigError as error:
        return str(error)
    return None


def _loads(name: str, load: Callable[[str], ModuleType]) -> bool:
    try:
        load(name)
    except ImportError:  # also of wheels for another Python
        return False
    return True


def driver_advice(error: str, cuda: str | None) -> str:
    """Return what to do where torch does not reach the GPU, as its error says."""
    least = DRIVERS.get(int((cuda or "0").split(".")[0]))
    needs = f"; CUDA {cuda} needs an NVIDIA driver {least} or newer" if least else ""
    return f"torch does not reach the GPU: {error}{needs}. nvidia-smi says which there is"


def compiler_advice(environ: Mapping[str, str] = os.environ, device: str = "cuda") -> str | None:
    """Return why nothing is compiled, and what to do; None where a compiler is there."""
    from meshwright.runtime.machines.machine import lacks_compiler

    lacks = lacks_compiler(device, environ)
    return lacks and f"nothing is compiled, eager rows alone are measured: {lacks}"
