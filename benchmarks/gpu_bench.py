"""What `benchmarks.gpu` runs its parts with: processes that may fail, files written early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.gpu_page import page

LINES: Final = 40  # of what a command said before it failed


class Skip(NamedTuple):
    """What was left out, why, and the last lines that were said of it."""

    what: str
    why: str
    said: list[str]


@dataclass
class Bench:
    """What is asked for, and what came of it; at `until` all of it ends.

    `environ` is set for what is run, `calibrations` are of the device, `done` is what is written.
    """

    device: str
    tiny: bool
    until: float
    preset: str
    out: Path | None = None
    page: Path | None = None
    calibrations: list[Path] = field(default_factory=list)
    done: dict[str, Any] = field(
        default_factory=lambda: {"training": [], "devices": [], "proofs": []}
    )
    skipped: list[Skip] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    environ: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def words(self) -> list[str]:
        """The overrides that choose the device, and on a GPU what predictions are for."""
        asked = [f"cluster.device={self.device}"]
        return asked if self.device == "cpu" else [*asked, f"cluster.preset={self.preset}"]

    def run(self, what: str, *words: str, limit_s: float = 200) -> dict[str, Any] | None:
        """Return the JSON document of a command, or None where it failed or had no time."""
        return self.run_module(what, "meshwright", *words, "--json", limit_s=limit_s)

    def run_module(
        self, what: str, module: str, *words: str, limit_s: float = 200
    ) -> dict[str, Any] | None:
        """Return the JSON document that a module prints; as `run`."""
        done = self.call(what, module, *words, limit_s=limit_s)
        if done is None:
            return None
        found = None if done.returncode not in (0, 1) else document(done.stdout)
        if found is None:
            said = f"{done.stdout}\n{done.stderr}" if done.returncode in (0, 1) else done.stderr
            self.skip(what, f"exit code {done.returncode}", said)
        return found

    def call(
        self, what: str, module: str, *words: str, limit_s: float = 200
    ) -> subprocess.CompletedProcess[str] | None:
        """Return what a module did; None where it took too long, or had no time at all."""
        left = self.until - time.monotonic()
        if left < 5:
            self.skip(what, "no time left")
            return None
        print(f"{self.seconds:5.0f} s: {what} ...\n", end="", flush=True)
        path = os.pathsep.join(["src", *sys.path])
        try:
            return subprocess.run(
                [sys.executable, "-m", module, *words],
                capture_output=True,
                text=True,
                env={**os.environ, **self.environ, "PYTHONPATH": path},
                timeout=min(left, limit_s),
            )
        except subprocess.TimeoutExpired as error:
            said = error.stderr or b""
            text = said if isinstance(said, str) else said.decode(errors="replace")
            self.skip(what, f"took longer than {min(left, limit_s):.0f} s", text)
            return None

    def skip(self, what: str, why: str, said: str = "") -> None:
        """Note that something was left out."""
        lines = said.strip().splitlines()[-LINES:]
        last = f": {lines[-1]}" if lines else ""
        self.skipped.append(Skip(what, why + last, lines))

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Do something, or note why not, and write what is there."""
        try:
            work()
        except Exception:
            self.skip(what, "raised", traceback.format_exc())
        self.write()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.started

    def write(self) -> None:
        """Write what is there by now."""
        with self.lock:
            found = self.found()
            if self.out:
                self.out.write_text(json.dumps(found, indent=1) + "\n")
            if self.page:
                self.page.write_text(page(found))

    def found(self) -> dict[str, Any]:
        """Return all as one JSON-ready object."""
        about = {"command": "make gpu", "date": time.strftime("%Y-%m-%d", time.gmtime())}
        more = {"seconds": self.seconds, "preset": self.preset}
        skipped = [one._asdict() for one in self.skipped]
        return {**about, **more, **self.done, "skipped": skipped}


def document(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, or that its last line is, if any."""
    for part in (text, *text.strip().splitlines()[-1:]):
        try:
            found = json.loads(part)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    return None
