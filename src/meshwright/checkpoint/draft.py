"""A new folder that appears under its name complete or not at all. No torch here."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError

from meshwright.checkpoint.commit import sync
from meshwright.errors import CheckpointError, ConfigError, refusal


class Draft:
    """A temporary folder next to `out`, used as a context; removed if it is not published.

    `out` must be new or empty, else `ConfigError` is raised before anything is written. A disk
    error inside the context becomes a `CheckpointError` that names `out`.
    """

    def __init__(self, out: Path) -> None:
        self._out = out.resolve()
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            free = next(f"{out}-{n}" for n in range(2, 10**6) if not Path(f"{out}-{n}").exists())
            state = "is not empty" if out.is_dir() else "is a file"
            raise ConfigError(
                refusal(f"OUT = {out} {state}, it must be new or empty", legal=[free])
            )
        self.path = self._out.with_name(f".{self._out.name}.tmp-{uuid.uuid4().hex[:8]}")

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise self._refused(error) from error
        return self

    def publish(self) -> None:
        """Flush everything to the disk and give the folder its name."""
        for path in (*sorted(self.path.rglob("*")), self.path):
            sync(path)
        self.path.rename(self._out)
        sync(self._out.parent)

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> CheckpointError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return CheckpointError(f"{self._out} was not written: {reason}; nothing is left of it")
