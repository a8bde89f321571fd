"""Runs killers on a tree of the source, in a process that has already imported torch.

A killer is a command line of `meshwright prove`, or `pytest` with tests. This process imports what
the package imports, but never the package itself; a child that it forks imports the package from
the tree, and `tests/forking.py` forks ranks from that child. So a killer with two ranks takes two
seconds instead of eight.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from benchmarks.mutants.table import ROOT

# A killer takes some seconds, on a busy machine a minute. One that takes so long hangs.
TIMEOUT_S: Final = 600.0
PACKAGE: Final = "meshwright"
# The modules of the ranks that a killer starts.
WORKERS: Final = ("runtime.proofs.proof_worker", "runtime.ranks.worker")


class Answer(NamedTuple):
    """What a killer found in a tree: the claims that failed, each with what was observed.

    `error` is why it checked no claim: it crashed, hung or could not start. `seconds` is CPU time,
    which does not depend on the machine's load.
    """

    failed: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0


class Place(NamedTuple):
    """Folder in which killers work: the text that runs read, its prepared store, and caches."""

    folder: Path

    @property
    def data(self) -> list[str]:
        """The overrides for a config's data."""
        return [f"data.source={self.folder / 'text.txt'}", f"data.cache={self.folder / 'store'}"]

    def make(self) -> Place:
        """Make the folder and its text; returns itself."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stories = (f"story {n}: the cat sat on mat {n}. " * 3 for n in range(40))
        (self.folder / "text.txt").write_text("<|endoftext|>".join(stories), encoding="utf-8")
        return self


def preload() -> None:
    """Import the other packages that the package imports, as a child finds out by importing it."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        sys.path.insert(0, str(ROOT / "src"))
        for name in ("cli.prove", *WORKERS):
            importlib.import_module(f"{PACKAGE}.{name}")
        names = [name for name in sys.modules if name.partition(".")[0] != PACKAGE]
        with os.fdopen(write, "w") as out:
            out.write("\n".join(names))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as found:
        names = found.read().split("\n")
    os.waitpid(child, 0)
    for name in names:
        with contextlib.suppress(Exception):  # some modules are made by others, not found
            importlib.import_module(name)


class Task(NamedTuple):
    """Killers to run on a tree: their command lines by name, and the folder of their answers."""

    tree: Path
    commands: Mapping[str, str]
    place: Place
    answers: Path

    def answer(self, killer: str) -> Path:
        """The file of a killer's answer; its log is beside it."""
        return self.answers / f"{killer}.json"


def start(task: Task) -> int:
    """Start a task in a child; returns its process id."""
    task.answers.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # so that all of it can be ended together
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _work(task)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def _work(task: Task) -> None:
    """Run a task in this process, which ends after it."""
    sys.path[:0] = [str(task.tree), str(ROOT / "tests")]
    os.environ |= {
        "PYTHONPATH": str(task.tree),
        "XDG_CACHE_HOME": str(task.place.folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    used = 0.0
    for killer, command in task.commands.items():
        answer = task.answer(killer)
        with answer.with_suffix(".log").open("w") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        try:
            found = _asked(shlex.split(command), task)
        except BaseException as error:
            traceback.print_exc()
            found = Answer(error=f"{type(error).__name__}: {error}")
        before, used = used, _processor_s()
        answer.write_text(json.dumps(found._replace(seconds=used - before)), encoding="utf-8")


def _asked(words: Sequence[str], task: Task) -> Answer:
    found = importlib.import_module(PACKAGE)
    assert str(found.__file__).startswith(str(task.tree)), found.__file__
    return _pytest(words[1:]) if words[0] == "pytest" else _meshwright(words, task.place)


def _processor_s() -> float:
    """Return the seconds that this process and those that it has waited for have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def read(task: Task, end: str) -> dict[str, Answer]:
    """Return the answers of a task's killers; `end`, how it ended, for one that gave none."""
    return {killer: _read(task.answer(killer), end) for killer in task.commands}


def _read(answer: Path, end: str) -> Answer:
    log = answer.with_suffix(".log")
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    last = lines[-1] if lines else ""
    if not answer.is_file():
        return Answer(error=f"{end} and no answer: {last}")
    failed, error, seconds = json.loads(answer.read_text(encoding="utf-8"))
    return Answer(tuple(failed), f"{error}: {last}" if error else "", seconds)


def end_all(child: int) -> None:
    """End a child and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _meshwright(words: Sequence[str], place: Place) -> Answer:
    """Run `meshwright prove` with forked ranks, and return the verdicts that failed."""
    for worker in WORKERS:  # before the forks: all ranks share it
        importlib.import_module(f"{PACKAGE}.{worker}")
    forking: Any = importlib.import_module("forking")
    main: Callable[[list[str]], int] = importlib.import_module(f"{PACKAGE}.cli.main").main
    if "--resume" in words:
        words = [*words, *place.data]
    forked = mock.patch.object(subprocess, "Popen", forking.Forks(forking.fork_here).popen)
    with forked, contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*words, "--json"])
    if code not in (0, 1):
        return Answer(error=f"it ended with exit code {code}")
    failed: list[str] = []
    errors: list[str] = []
    for verdict in json.loads(out.getvalue())["verdicts"]:
        if not verdict["passed"]:
            text = f"{verdict['claim']}: {_seen(verdict)}"
            # A rank that raised has shown nothing of what the claims are about.
            (errors if verdict["claim"] == "runs on its ranks" else failed).append(text)
    return Answer(tuple(failed), "" if failed else "; ".join(errors))


def _seen(values: Mapping[str, Any]) -> str:
    """Return in a few words what a failed verdict observed."""
    kind: Any = importlib.import_module(f"{PACKAGE}.prove.verdict").Verdict
    verdict = kind.from_dict({key: value for key, value in values.items() if key != "case"})
    if verdict.error is None:
        return str(verdict.observed)[:160]
    text, where = f"{verdict.error:.1e}, {verdict.tolerance:.1e} allowed", verdict.first_divergence
    return text if where is None else f"{text}, first in {where.quantity} of {where.tensor}"


def _pytest(words: Sequence[str]) -> Answer:
    """Run tests and return the assertions that failed."""
    import pytest

    judge = _Judge()
    os.chdir(ROOT)
    code = pytest.main([*words, "-q", "-p", "no:cacheprovider"], plugins=[judge])
    if code not in (0, 1) or not judge.ran:
        return Answer(error=f"pytest ended with {int(code)}: see the log")
    return Answer(tuple(judge.failed), "" if judge.failed else "; ".join(judge.errors))


class _Judge:
    """A plugin that distinguishes failed assertions from other errors."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.errors: list[str] = []
        self.ran = 0

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        self.ran += call.when == "call"
        if call.excinfo is None:
            return
        last = f"{call.excinfo.value}".strip().splitlines() or [""]
        asserted = call.excinfo.errisinstance((AssertionError, _outcome_failed()))
        if asserted and call.excinfo.typename == "RankError":  # what a rank raised is in its text
            asserted, last = "AssertionError" in last[-1] or "assert" in last[-1], last[-1:]
        text = f"{item.name}: {last[0]}"[:160]
        (self.failed if asserted else self.errors).append(text)


def _outcome_failed() -> type[BaseException]:
    import pytest

    found: type[BaseException] = pytest.fail.Exception
    return found


Done = Callable[[Task, Mapping[str, Answer]], None]


def run_all(tasks: Sequence[Task], jobs: int, done: Done, timeout_s: float) -> None:
    """Run `jobs` tasks at a time, each for at most `timeout_s` a killer; call `done` after each."""
    waiting, running = list(reversed(tasks)), dict[int, tuple[Task, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop()
                running[start(task)] = (task, time.monotonic() + timeout_s * len(task.commands))
            for task, end in _ended(running):
                done(task, read(task, end))
            time.sleep(0.02)
    finally:
        for child in running:
            end_all(child)


def _ended(running: dict[int, tuple[Task, float]]) -> Iterator[tuple[Task, str]]:
    """Yield the tasks that have ended, and how; kills those that hang."""
    for child, (task, until) in list(running.items()):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            del running[child]
            yield task, f"it ended with {os.waitstatus_to_exitcode(status)}"
        elif time.monotonic() > until:
            del running[child]
            end_all(child)
            os.waitpid(child, 0)
            yield task, "it hung"
