"""Parses and formats bytes, counts and durations, the same everywhere."""

from __future__ import annotations

import re
from typing import Final

KIB, MIB, GIB = 1024, 1024**2, 1024**3
# Units that bytes are printed in, the largest first.
BINARY: Final = (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_BYTES: Final[dict[str, int]] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def parse_bytes(text: str) -> int:
    """Return a number of bytes, from `2GiB`, `1.5 GB` or `4096`; else raises `ValueError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit_bytes = _BYTES.get(match[2].upper()) if match else None
    if match is None or unit_bytes is None:
        raise ValueError(f"{text!r} is not a number of bytes, as 2GiB, 1.5GB or 4096")
    exact = float(match[1]) * unit_bytes
    return round(exact)


def format_bytes(count: float) -> str:
    """Format bytes in binary units, such as `1.50 GiB`."""
    for unit, size in BINARY:
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


_SECONDS: Final[dict[str, float]] = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6, "min": 60, "h": 3600}


def parse_seconds(text: str) -> float:
    """Return a duration, from `13.9s`, `850ms` or `13.9`; else, or for 0, raises `ValueError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-z]*)\s*", text)
    scale = _SECONDS.get(match[2]) if match else None
    seconds = float(match[1]) * scale if match and scale is not None else 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is not a time, as 13.9s or 850ms, above 0")
    return seconds


def format_count(count: float) -> str:
    """Format a count with a decimal suffix, such as `1.24B` or `35.1k`."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{suffix}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.3g}"


def format_money(amount: float) -> str:
    """Return an amount with four significant digits, and all digits of a large one."""
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.4g}"


def format_seconds(seconds: float) -> str:
    """Format a duration, such as `1h02m`, `3m20s`, `4.1s`, `12ms` or `3.4ms`."""
    if seconds >= 3600:
        hours, remaining = divmod(round(seconds / 60), 60)
        return f"{hours}h{remaining:02d}m"
    if seconds >= 60:
        minutes, remaining = divmod(round(seconds), 60)
        return f"{minutes}m{remaining:02d}s"
    if seconds >= 1:
        return f"{seconds:.1f}s"
    is_short = 0.05 <= seconds * 1e3 < 9.95
    return f"{seconds * 1e3:.1f}ms" if is_short else f"{seconds * 1e3:.0f}ms"


def format_ratio(ratio: float) -> str:
    """Format a ratio with three digits, such as `2.51` or `1,100`."""
    short = float(f"{ratio:.3g}")
    return f"{short:,.0f}" if short >= 100 else f"{short:.3g}"


def counted(count: int, noun: str) -> str:
    """Format a number of things, such as `1 step` or `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
