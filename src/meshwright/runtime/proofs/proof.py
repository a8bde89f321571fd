"""Proves cases on local ranks: starts them, follows their results, and survives their failures.

No torch here: the ranks are processes of `runtime.proofs.proof_worker`.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from meshwright.errors import RankFailed, StoppedOnRequest
from meshwright.prove.case import Case
from meshwright.prove.outcome import Outcome
from meshwright.prove.verdict import Verdict
from meshwright.runtime.machines.accelerators import check_torch
from meshwright.runtime.ranks.rank_environ import rank_environ
from meshwright.runtime.supervise.core_dumps import crash_stack, write_stacks
from meshwright.runtime.supervise.signals import StopSignals
from meshwright.runtime.supervise.supervisor import (
    LocalRanks,
    Timing,
    listen_on_loopback,
    supervise,
)
from meshwright.runtime.supervise.view import EventTail
from meshwright.training.run_folder import RunFolder

CLAIM: Final = "runs on its ranks"
# Of one set of ranks. Processes keep memory that cases of other sizes needed: some 10 MB a case on
# each rank. After 250 cases 8 ranks had 22 GB, and the system killed one; see docs/log.md.
_MOST_CASES: Final = 32


@dataclass(frozen=True)
class ProofFolder:
    """The folder of the ranks' cases and verdicts; has the logs of a run folder."""

    path: Path

    @property
    def cases(self) -> Path:
        """The cases as JSON, one per line."""
        return self.path / "cases.jsonl"

    @property
    def verdicts(self) -> Path:
        """Rank 0's output: an object when a case begins, one with its verdicts when it ends."""
        return self.path / "verdicts.jsonl"

    def write_cases(self, cases: Sequence[Case]) -> None:
        """Write the cases for the ranks."""
        text = "".join(f"{case.as_json()}\n" for case in cases)
        self.cases.write_text(text, encoding="utf-8")

    def read_cases(self) -> list[Case]:
        """Return what `write_cases` wrote."""
        return [Case.from_json(line) for line in self.cases.read_text("utf-8").splitlines()]


def worker_command(folder: Path, device: str = "cpu") -> list[str]:
    """Return the command line of a rank process on a device, "cpu" or "cuda"."""
    return [sys.executable, "-m", "meshwright.runtime.proofs.proof_worker", str(folder), device]


def prove_cases(
    cases: Sequence[Case],
    environ: Mapping[str, str],
    show: Callable[[Outcome], None],
    timing: Timing | None = None,
    command: Callable[[Path], list[str]] | None = None,
    *,
    device: str = "cpu",
    seconds: float = math.inf,
) -> list[Outcome]:
    """Prove cases with the same number of ranks; `show` receives each outcome at once.

    Ranks compute on `device`, "cpu" or "cuda", and are started by `worker_command` unless given. If
    a rank fails, its layout counts as failed, and fresh ranks prove the rest. Ranks are also
    replaced after `_MOST_CASES`. After so many `seconds` the ranks are ended, but not before the
    first outcome; the other cases are left out.
    Raises `RankFailed` if the ranks do not even begin, `StoppedOnRequest` on SIGINT or SIGTERM.
    """
    check_torch("proving")
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    command = command or partial(worker_command, device=device)
    ranks_environ = rank_environ(environ, on_gpus=device == "cuda")
    with StopSignals() as signals:
        while len(outcomes) < len(cases) and not (outcomes and time.monotonic() > deadline):
            batch = cases[len(outcomes) : len(outcomes) + _MOST_CASES]
            with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as path:
                proof = _Proof(ProofFolder(Path(path)), batch, signals, show, deadline)
                outcomes += proof.run(ranks_environ, timing or Timing(), command)
    return outcomes


def fails_alike(
    outcome: Outcome, environ: Mapping[str, str], device: str
) -> Callable[[Case], bool]:
    """Return a predicate: whether a case, alone on fresh ranks, fails in one of these claims."""

    def fails(case: Case) -> bool:
        (retried,) = prove_cases([case], environ, lambda outcome: None, device=device)
        return not retried.failed_claims.isdisjoint(outcome.failed_claims)

    return fails


class _TimeIsUp(Exception):
    """The deadline has passed."""


class _Proof:
    """One set of ranks and what it found."""

    def __init__(
        self,
        folder: ProofFolder,
        cases: Sequence[Case],
        signals: StopSignals,
        show: Callable[[Outcome], None],
        deadline: float,
    ) -> None:
        self._folder, self._cases, self._signals, self._show = folder, cases, signals, show
        self._deadline = deadline
        self._tail = EventTail(folder.verdicts)
        self._found: list[Outcome] = []
        self._has_begun = False

    def run(
        self, environ: Mapping[str, str], timing: Timing, command: Callable[[Path], list[str]]
    ) -> list[Outcome]:
        """Return the outcomes up to the end, the deadline, or the case at which a rank failed."""
        self._folder.write_cases(self._cases)
        ranks = LocalRanks(
            command(self._folder.path),
            self._cases[0].layout.world,
            RunFolder(self._folder.path),
            environ,
            listen_on_loopback(None),
            timing,
            read_core=_crash_text,
        )
        try:
            with ranks:
                supervise(ranks, self._look, timing, lambda: False)
        except _TimeIsUp:
            pass
        except RankFailed as error:
            self._take()
            if not self._has_begun:
                raise
            self._add(self._failed(str(error)))
        return self._found

    def _look(self) -> None:
        if self._signals.asked:
            raise StoppedOnRequest(f"stopped on request after {len(self._found)} layouts")
        self._take()
        if self._found and time.monotonic() > self._deadline:
            raise _TimeIsUp

    def _take(self) -> None:
        """Take what the ranks have found since the last time."""
        for record in self._tail.new():
            self._has_begun = "verdicts" not in record
            if not self._has_begun:
                self._add(_outcome(self._cases[record["case"]], record))

    def _add(self, outcome: Outcome) -> None:
        self._found.append(outcome)
        self._show(outcome)

    def _failed(self, text: str) -> Outcome:
        case = self._cases[len(self._found)]
        layout = case.layout.model_dump(mode="json")
        verdict = Verdict(CLAIM, layout, "every rank ends", text, None, passed=False)
        return Outcome(case, (verdict,), 0.0)


def _crash_text(core: Path, file: Path) -> str:
    """Return the C++ stack of a crash; the folder of a proof, and so the file, does not last."""
    return "\n".join(["C++ stack of the crash:", *crash_stack(write_stacks(core, file))])


def _outcome(case: Case, record: Mapping[str, Any]) -> Outcome:
    verdicts = tuple(Verdict.from_dict(values) for values in record["verdicts"])
    return Outcome(case, verdicts, record["seconds"])


def by_world(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Yield the cases in lists with the same number of ranks, the smallest first."""
    for world in sorted({case.layout.world for case in cases}):
        yield [case for case in cases if case.layout.world == world]
