"""Proves layouts on local ranks: compares their training steps with those of one process.

Does not import torch: the ranks are processes of `runtime.proofs.proof_worker`. A `Case` is a
layout with a small model.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from meshwright.errors import ConfigError, RankFailed, StoppedOnRequest, refusal
from meshwright.layout import Layout, resolve_layout
from meshwright.prove.case import Case
from meshwright.prove.kept import not_kept, not_proven
from meshwright.prove.outcome import Outcome
from meshwright.prove.rates import prove_rates
from meshwright.prove.shrink import shrink
from meshwright.prove.verdict import Verdict
from meshwright.runtime.machines.engine import check_async_tp, check_fp8
from meshwright.runtime.machines.machine import (
    check_build,
    check_compiler,
    check_torch,
    count_gpus,
    detect,
    find_gpus,
    lacks_compiler,
    torch_build,
)
from meshwright.runtime.ranks.local import rank_environ
from meshwright.runtime.supervise.crash_records import crash_stack, write_stacks
from meshwright.runtime.supervise.supervisor import (
    LocalRanks,
    StopSignals,
    Timing,
    listen_on_loopback,
    supervise,
)
from meshwright.runtime.supervise.view import EventTail
from meshwright.spec.loading import Config
from meshwright.tables import html_table
from meshwright.training.run_folder import RunFolder

CLAIM: Final = "runs on its ranks"
# Of one set of ranks. Processes keep memory that cases of other sizes needed: some 10 MB a case on
# each rank. After 250 cases 8 ranks had 22 GB, and the system killed one; see docs/records/log.md.
_MOST_CASES: Final = 32


@dataclass(frozen=True)
class ProofFolder:
    """The folder through which ranks receive cases and return verdicts."""

    path: Path

    @property
    def cases(self) -> Path:
        """The file of the cases as JSON, one per line."""
        return self.path / "cases.jsonl"

    @property
    def verdicts(self) -> Path:
        """The file of rank 0's output: a line when a case begins, and one with its verdicts."""
        return self.path / "verdicts.jsonl"

    def write_cases(self, cases: Sequence[Case]) -> None:
        """Write the cases for the ranks to read."""
        text = "".join(f"{case.as_json()}\n" for case in cases)
        self.cases.write_text(text, encoding="utf-8")

    def read_cases(self) -> list[Case]:
        """Return the cases that `write_cases` wrote."""
        return [Case.from_json(line) for line in self.cases.read_text("utf-8").splitlines()]


def worker_command(folder: Path, device: str = "cpu") -> list[str]:
    """Return the command line of a rank process that computes on "cpu" or "cuda"."""
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
    """Prove cases that all have the same number of ranks; `show` receives each outcome at once.

    Ranks compute on `device`, "cpu" or "cuda". If a rank fails, its case counts as failed, and new
    ranks prove the remaining cases. Ranks are also replaced after `_MOST_CASES` cases. After
    `seconds`, but not before the first outcome, ranks are ended and the remaining cases are left
    out. Raises `RankFailed` if the ranks do not start, `StoppedOnRequest` on SIGINT or SIGTERM.
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
    """Return a predicate: does a case, alone on new ranks, fail one of the outcome's claims?"""

    def fails(case: Case) -> bool:
        (retried,) = prove_cases([case], environ, lambda outcome: None, device=device)
        return not retried.failed_claims.isdisjoint(outcome.failed_claims)

    return fails


class _TimeIsUp(Exception):
    """Raised when the deadline of a proof has passed."""


class _Proof:
    """The proof of some cases by one set of ranks, and its outcomes so far."""

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
        """Return the outcomes until all cases are done, time is up, or a rank has failed."""
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
        """Add the outcomes that the ranks have written since the last call."""
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
    """Return the C++ stack of a crash as text, since the folder of a proof is temporary."""
    return "\n".join(["C++ stack of the crash:", *crash_stack(write_stacks(core, file))])


def _outcome(case: Case, record: Mapping[str, Any]) -> Outcome:
    verdicts = tuple(Verdict.from_dict(values) for values in record["verdicts"])
    return Outcome(case, verdicts, record["seconds"])


def by_world(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Yield the cases grouped by their number of ranks, the smallest number first."""
    for world in sorted({case.layout.world for case in cases}):
        yield [case for case in cases if case.layout.world == world]


Device = Literal["cpu", "cuda"]
_COLUMNS = ("case", "claim", "passed", "error", "tolerance")


class Question(NamedTuple):
    """A layout whose losses and gradients are to be compared with those of one device.

    `cases` are the small models and batches that are computed in its place. `not_kept` are the
    config's keys that have other values in them; `not_proven` are keys of which no proof computes
    anything, whatever their value.
    """

    layout: Layout
    cases: tuple[Case, ...]
    not_kept: tuple[str, ...]
    not_proven: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Proof:
    """The result of `prove_layout`: an outcome with verdicts for each small case.

    `not_kept` are config keys with other values in the small cases, and `not_proven` keys that no
    proof covers. Its `repr` is what the command prints, also in a notebook.
    """

    layout: Layout
    outcomes: tuple[Outcome, ...]
    not_kept: tuple[str, ...]
    not_proven: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there is an outcome and every claim holds."""
        return bool(self.outcomes) and all(outcome.passed for outcome in self.outcomes)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of all cases, in order."""
        return tuple(verdict for outcome in self.outcomes for verdict in outcome.verdicts)

    def _headlines(self) -> list[str]:
        lines = [f"{self.layout.label}: {'proven' if self.passed else 'NOT proven'}"]
        if self.not_kept:
            lines.append(f"not in the small case: {', '.join(self.not_kept)}")
        if self.not_proven:
            lines.append(f"not proven: {', '.join(self.not_proven)}")
        return lines

    def __repr__(self) -> str:
        """Return the lines that `meshwright prove` prints."""
        lines = [line for outcome in self.outcomes for line in outcome.lines()]
        return "\n".join([*self._headlines(), *lines])

    def _repr_html_(self) -> str:
        """Return a table of the verdicts for a notebook."""
        rows = [
            (
                outcome.case.label,
                verdict.claim,
                "yes" if verdict.passed else "NO",
                "" if verdict.error is None else f"{verdict.error:.1e}",
                "" if verdict.tolerance is None else f"{verdict.tolerance:.1e}",
            )
            for outcome in self.outcomes
            for verdict in outcome.verdicts
        ]
        return html_table(_COLUMNS, rows, self._headlines())


def prove_layout(
    config: Config, device: Device = "cpu", environ: Mapping[str, str] | None = None
) -> Proof:
    """Prove that a config's layout computes the losses, gradients and updates of one device.

    The same as `meshwright prove CONFIG`: local ranks on `device` train a small model of the same
    architecture, and one process does so without a layout. `environ` defaults to this process's
    environment. Raises `ConfigError` for an illegal layout or too few GPUs, `RankFailed` if ranks
    do not start.
    """
    environ = dict(os.environ) if environ is None else environ
    question = question_of(config, environ)
    if device == "cuda":
        check_gpus(question.cases, environ)
    lacks = lacks_compiler(device, environ)
    for case in question.cases:
        check_compiler(case.train, lacks)
    rates = (prove_rates(config.train.steps, config.optimizer),)
    outcomes = prove_all(
        question.cases, environ, lambda outcome: None, device, math.inf, also=rates
    )
    return Proof(question.layout, tuple(outcomes), question.not_kept, question.not_proven)


def question_of(config: Config, environ: Mapping[str, str]) -> Question:
    """Return the small cases that represent a config's layout, and what they do not cover.

    Raises `ConfigError` for a config that cannot be proven.
    """
    if config.train.routing != "learned":
        rule = f'train.routing = "{config.train.routing}" depends on positions in a rank\'s batch'
        raise ConfigError(refusal(f"{rule}, which no other layout has", legal=["learned"]))
    layout = layout_of(config, environ)
    packed, chat = config.data.packing == "documents", config.data.format == "chat"
    specs = config.model, config.train, layout
    cases = tuple(shrink(*specs, config.optimizer, packed=packed, chat=chat))
    unshrunk = Case(*specs, packed, config.train.steps, config.optimizer, chat=chat)
    lost = sorted({name for case in cases for name in not_kept(unshrunk, case)})
    return Question(layout, cases, tuple(lost), tuple(not_proven(config)))


def layout_of(config: Config, environ: Mapping[str, str]) -> Layout:
    """Return the layout that `train` would use; on a machine without GPUs, for the CPU."""
    cluster = config.cluster
    if not count_gpus(environ):
        cluster = cluster.model_copy(update={"device": "cpu"})
    machine = detect(cluster, environ)
    check_fp8(config, machine.device)
    check_async_tp(config, Layout(), machine.device, None)
    return resolve_layout(config, machine)


def check_gpus(cases: Sequence[Case], environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a case has more ranks than there are GPUs."""
    check_build("cuda", find_gpus(environ), torch_build())
    ranks, gpus = max((case.layout.world for case in cases), default=0), count_gpus(environ)
    if ranks > gpus:
        raise ConfigError(
            f"--device cuda needs a GPU for each of {ranks} ranks, and there are {gpus}; nearest: "
            "--device cpu, where ranks are processes"
        )


def prove_all(
    cases: Sequence[Case],
    environ: Mapping[str, str],
    show: Callable[[Outcome], None],
    device: str,
    seconds: float,
    also: tuple[Verdict, ...] = (),
) -> list[Outcome]:
    """Prove cases and return their outcomes, those with the fewest ranks first.

    Each number of ranks gets a share of `seconds` in proportion to its ranks. The verdicts `also`
    are added to each outcome, which `show` receives as soon as it is available.
    """
    outcomes: list[Outcome] = []

    def whole(outcome: Outcome) -> Outcome:
        return replace(outcome, verdicts=(*outcome.verdicts, *also))

    ends = time.monotonic() + seconds
    ranks_left = sum(case.layout.world for case in cases)
    for same_world in by_world(cases):
        ranks = sum(case.layout.world for case in same_world)
        proven = prove_cases(
            same_world,
            environ,
            lambda outcome: show(whole(outcome)),
            device=device,
            seconds=(ends - time.monotonic()) * ranks / ranks_left,
        )
        outcomes += map(whole, proven)
        ranks_left -= ranks
    return outcomes
