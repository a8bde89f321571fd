"""The secret of a job: a rank must prove that it knows it before it may join. Doesn't import
torch."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from meshwright.errors import ConfigError

VARIABLE: Final = "MESHWRIGHT_SECRET"
FILE_VARIABLE: Final = "MESHWRIGHT_SECRET_FILE"
_SHORTEST: Final = 16  # characters
_LONGEST: Final = 4096


@dataclass(frozen=True)
class Secret:
    """A text that only the ranks of a job know; falsy if the job has none."""

    key: bytes = field(default=b"", repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Secret:
        """Return the secret in `MESHWRIGHT_SECRET`, or in the file `MESHWRIGHT_SECRET_FILE` names.

        Raises `ConfigError` if it is too short, or if others can read the file. An empty variable
        counts as unset; an empty file is refused, because it was meant to protect.
        """
        key, where = os.fsencode(environ.get(VARIABLE, "")), VARIABLE
        if not key and environ.get(FILE_VARIABLE):
            path = Path(environ[FILE_VARIABLE])
            key, where = _read(path), f"{FILE_VARIABLE} = {path}"
        elif not key:
            return NONE
        if not _SHORTEST <= len(key) <= _LONGEST:
            has = f"more than {_LONGEST}" if len(key) > _LONGEST else str(len(key))
            rule = f"must have {_SHORTEST} to {_LONGEST} characters, and has {has}"
            raise ConfigError(f"{where} {rule}. `openssl rand -hex 32` makes one")
        return cls(key)

    def __bool__(self) -> bool:
        return bool(self.key)

    def tag(self, *parts: str) -> str:
        """Return the HMAC of some texts, 64 hex digits: computing it requires the secret."""
        return hmac.new(self.key, json.dumps(parts).encode(), hashlib.sha256).hexdigest()

    def sign(self, text: str, *parts: str) -> str:
        """Return a text with its tag, which also covers `parts`; unchanged without a secret."""
        return f"{self.tag(text, *parts)}{text}" if self else text

    def opened(self, signed: str, *parts: str) -> str | None:
        """Return the text that was signed with the same parts; None if the tag is wrong."""
        if not self:
            return signed
        tag, text = signed[:64], signed[64:]
        return text if hmac.compare_digest(tag.encode(), self.tag(text, *parts).encode()) else None


NONE: Final = Secret()


def _read(path: Path) -> bytes:
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
                rule = "must be a file that its owner alone can read"
                raise ConfigError(f"{FILE_VARIABLE} = {path} {rule}: chmod 600 {path}")
            return file.read(_LONGEST + 1).strip()
    except OSError as error:
        raise ConfigError(f"{FILE_VARIABLE} = {path} cannot be read: {error.strerror}") from None
