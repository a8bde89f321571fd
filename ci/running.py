"""Runs parts one after the other, each within its minutes, and says what came of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from ci.counts import Counts, count
from ci.parts import Part

PR_SET_CHILD_SUBREAPER: Final = 36  # of Linux's prctl.h
# From the interrupt, on which pytest ends its fixtures and writes its report, to the kill.
GRACE_S: Final = 30.0


@dataclass(frozen=True)
class Result:
    """What came of a part; `outcome` is passed, failed, timed out, left out or not run."""

    part: Part
    outcome: str
    seconds: float
    counts: Counts

    @property
    def is_good(self) -> bool:
        """Whether it is no reason to fail: it passed, or was optional and there was no time."""
        return self.outcome in ("passed", "left out")


@dataclass(frozen=True)
class Budget:
    """Seconds for all parts: optional ones end within `soft`, and no part outlives `hard`."""

    soft: float
    hard: float


def run_all(
    parts: Sequence[Part],
    folder: Path,
    budget: Budget,
    clock: Callable[[], float] = time.monotonic,
) -> list[Result]:
    """Run the parts, whatever fails, but for what needs a part that failed."""
    began, results = clock(), list[Result]()
    failed: set[str] = set()
    for at, part in enumerate(parts):
        spent = clock() - began
        part = _for_its_share(part, parts[at + 1 :], budget.soft - spent)
        reason = _reason_against(part, spent, budget, failed)
        if reason:
            print(f"\n=== {part.name}: {reason}", flush=True)
            outcome = "not run" if part.is_required else "left out"
            result = Result(part, outcome, 0.0, Counts(failed=int(part.is_required)))
        else:
            result = run_part(part, folder, min(part.limit_s, budget.hard - spent))
        if not result.is_good:
            failed.add(part.name)
        results.append(result)
    return results


def _for_its_share(part: Part, rest: Sequence[Part], left_s: float) -> Part:
    """Return a part with {minutes} of its command filled in, where it shares what is left."""
    if part.between is None:
        return part
    sharing = sum(other.between is not None for other in rest) + 1
    others_s = sum(one.expected_s for one in rest if one.is_required and one.between is None)
    least, most = part.between
    minutes = min(max((left_s - others_s) / 60 / sharing, least), most)
    filled = (word.replace("{minutes}", f"{minutes:.1f}") for word in part.command)
    return replace(part, command=tuple(filled))


def _reason_against(part: Part, spent: float, budget: Budget, failed: set[str]) -> str:
    """Return why a part does not start, or ""."""
    if part.needs & failed:
        return f"not run, for {', '.join(sorted(part.needs & failed))} failed"
    if not part.is_required and spent + part.expected_s > budget.soft:
        left = max(0.0, budget.soft - spent) / 60
        return f"left out: it takes {part.minutes:g} minutes, and {left:.0f} are left"
    if spent >= budget.hard:
        return f"not run: all {budget.hard / 60:.0f} minutes are spent"
    return ""


def run_part(part: Part, folder: Path, limit_s: float) -> Result:
    """Run one part, with its output shown and kept in folder/NAME.log."""
    folder.mkdir(parents=True, exist_ok=True)
    junit, log = folder / f"{part.name}.xml", folder / f"{part.name}.log"
    junit.unlink(missing_ok=True)
    command = [word.replace("{junit}", str(junit)) for word in part.command]
    # Modules are compiled once, and not by each of the thousands of processes.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    print(f"\n=== {part.name}, {limit_s / 60:.0f} minutes at most: {' '.join(command)}", flush=True)
    began, others = time.monotonic(), descendants(os.getpid())
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            errors="replace",
            text=True,
        )
    except OSError as error:
        print(error, flush=True)
        return Result(part, "failed", 0.0, Counts(failed=1))
    assert process.stdout is not None
    copier = threading.Thread(target=_copy, args=(process.stdout, log), daemon=True)
    copier.start()
    is_late = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
        print(f"=== {part.name}: it took more than {limit_s:.0f} s and is ended", flush=True)
    finally:
        _end(process, others)
    copier.join(GRACE_S)  # longer only where a process that got away keeps the pipe open
    code = -1 if is_late else process.returncode
    counts = count(code, junit, log.read_text("utf-8"))
    outcome = "timed out" if is_late else ("failed" if counts.failed else "passed")
    return Result(part, outcome, time.monotonic() - began, counts)


def _copy(source: IO[str], log: Path) -> None:
    with log.open("w", encoding="utf-8") as file:
        for line in source:
            sys.stdout.write(line)
            sys.stdout.flush()
            file.write(line)
            file.flush()


def _end(process: subprocess.Popen[str], others: set[int]) -> None:
    """End a process and all that is left of what it started, which `others` are not."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    left = descendants(os.getpid()) - others
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    for pid in left:
        with contextlib.suppress(ChildProcessError):  # not ours: no Linux, or already waited for
            os.waitpid(pid, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own has ended (Linux), so that none gets away."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> set[int]:
    """Return the processes that come from one, whatever sessions and groups they have made."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    unseen = list(children.get(pid, ()))
    while unseen:
        one = unseen.pop()
        found.add(one)
        unseen += children.get(one, ())
    return found


def table(results: Sequence[Result]) -> str:
    """Return a line for each part, and the closing line with the sums."""
    rows = [["part", "outcome", "seconds", "passed", "failed", "skipped"]]
    for one in results:
        rows.append([one.part.name, one.outcome, f"{one.seconds:.0f}", *map(str, one.counts)])
    passed, failed, skipped = map(sum, zip(*(one.counts for one in results), strict=True))
    closing = f"{passed} passed, {failed} failed, {skipped} skipped"
    return f"{columns(rows)}\n\n{closing}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines: two columns of words, then numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(lines)
