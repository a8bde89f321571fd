"""What `benchmarks.gpu` measures with: a process that may fail, and a file that keeps results."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

LINES: Final = 40  # of what a process said before it failed
PATHS: Final = os.pathsep.join(["src", *sys.path])


@dataclass
class Answer:
    """What came of a request: what was found, and why it failed, where it did."""

    found: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    told: list[str] = field(default_factory=list)


class Worker:
    """A process that answers requests, started when it is needed, and anew if it has ended."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.command, self.environ = command, dict(environ)
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "stderr"

    def ask(self, request: Mapping[str, Any], limit_s: float) -> Answer:
        """Return the answer to a request; after so many seconds the process is ended instead."""
        until = time.monotonic() + limit_s
        answer, process = Answer(), self._start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already: so do its lines
            print(json.dumps(request), file=process.stdin, flush=True)
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.end()
                answer.failed, answer.told = f"took longer than {limit_s:.0f} s", self._said()
                return answer
            if line is None:
                code = process.wait()
                self.end()
                answer.failed = answer.failed or f"the process ended with exit code {code}"
                answer.told = answer.told or self._said()
                return answer
            said = json.loads(line)
            if said.pop("ended", False):
                return answer
            if "failed" in said and "told" in said:
                answer.failed, answer.told = said["failed"], said["told"]
                return answer
            answer.found |= said

    def end(self) -> None:
        """End the process, and the compiler's that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._lines = queue.Queue()
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**self.environ, "PYTHONPATH": PATHS},
                start_new_session=True,
            )
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
        return self._process

    def _said(self) -> list[str]:
        """Return the last lines that the process wrote to its standard error."""
        text = self._errors.read_text(encoding="utf-8", errors="replace")
        return text.strip().splitlines()[-LINES:]


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def run_module(module: str, *words: str, environ: Mapping[str, str], limit_s: float) -> Answer:
    """Return what a module prints: its JSON document, else its last lines, and its exit code."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            capture_output=True,
            text=True,
            env={**environ, "PYTHONPATH": PATHS},
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        late = error.stderr or b""
        text = late if isinstance(late, str) else late.decode(errors="replace")
        return Answer({}, f"took longer than {limit_s:.0f} s", text.strip().splitlines()[-LINES:])
    found = document(done.stdout) or {}
    told = done.stdout.strip().splitlines()[-LINES:]
    answer = Answer(found | {"code": done.returncode, "said": told})
    if done.returncode not in (0, 1):
        said = done.stderr.strip().splitlines()[-LINES:]
        answer.failed, answer.told = f"exit code {done.returncode}: {''.join(said[-1:])}", said
    return answer


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


@dataclass
class Results:
    """What is measured of a device with some versions (`on`), kept in a file a line for a row.

    A row is there as soon as it is measured. Rows of other versions stay in the file, and count for
    nothing. `failed` are those that raised or took too long, each with why.
    """

    on: str
    path: Path | None = None
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            row = document(line)  # None of a line that was cut off
            if row is not None and row.get("on") == self.on:
                self._take(row)

    def add(self, key: str, answer: Answer, seconds: float) -> None:
        """Keep what was found of a row, or why nothing was."""
        date = time.strftime("%Y-%m-%d", time.gmtime())
        row: dict[str, Any] = {
            "key": key,
            "on": self.on,
            "date": date,
            "seconds": round(seconds, 1),
        }
        row |= {"found": answer.found} if answer.found else {}
        row |= {"failed": answer.failed, "told": answer.told} if answer.failed else {}
        self._take(row)
        if self.path is not None:
            with self.path.open("a+b") as file:
                file.seek(max(0, file.tell() - 1))
                begins = b"\n" if file.read(1) not in (b"", b"\n") else b""  # a cut line before it
                file.write(begins + json.dumps(row).encode() + b"\n")

    def _take(self, row: Mapping[str, Any]) -> None:
        key = row["key"]
        if "found" in row:
            about = {name: row[name] for name in ("date", "seconds")}
            self.found[key] = {**about, **row["found"]}
        if "failed" in row:
            self.failed[key] = row["failed"]
        elif "found" in row:
            self.failed.pop(key, None)


def versions(machine: Mapping[str, Any], source: Path) -> str:
    """Return what figures depend on, in words: the device, what drives it, and our own source."""
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        if path.suffix in (".py", ".toml"):
            digest.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    said = [machine["name"], f"torch {machine['torch']}", f"Python {machine['python']}"]
    said += [f"{key} {machine[key]}" for key in ("cuda", "driver") if machine.get(key)]
    return ", ".join([*said, f"source {digest.hexdigest()[:12]}"])
