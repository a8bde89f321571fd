"""Opens safetensors files from untrusted sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from meshwright.errors import CheckpointError

MAX_TENSORS: Final = 100_000  # of one file: a hostile header has more


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file for reading on the CPU; reads only its header.

    Raises `CheckpointError` for a file that is not valid safetensors, or has more than
    `MAX_TENSORS` tensors.
    """
    try:
        opened: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error
    count = len(opened.keys())
    if count > MAX_TENSORS:
        raise CheckpointError(f"{path} holds {count} tensors, more than {MAX_TENSORS}")
    return opened
