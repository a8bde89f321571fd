"""What follows from a commit's hash: whose turn it is, and the seeds of draws."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")
# A seed has so many bits: short enough to be typed.
SEED_BITS: Final = 24


def number_of(commit: str, purpose: str) -> int:
    """Return a number that a commit has for one purpose; those for two purposes are independent."""
    digest = hashlib.sha256(f"{commit}:{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def order_of(commit: str, purpose: str, choices: Sequence[T]) -> list[T]:
    """Return choices in the order of their turns at a commit; all orders are equally frequent."""
    keys = [number_of(commit, f"{purpose}:{place}") for place in range(len(choices))]
    return [choices[place] for _, place in sorted(zip(keys, range(len(choices)), strict=True))]


def seed_of(commit: str, purpose: str) -> int:
    """Return the seed that a commit has for the draw of that name."""
    return number_of(commit, purpose) % 2**SEED_BITS


def head(root: Path) -> str:
    """Return the hash of the commit that is checked out. Raises `SystemExit` without one."""
    asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(f"{root} is not a git checkout: give the turns a --commit") from None
