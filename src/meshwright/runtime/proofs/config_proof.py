"""`prove_layout`: whether a config's layout computes what one device does, and the answer to it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from meshwright.errors import ConfigError, refusal
from meshwright.layout import Layout, resolve_layout
from meshwright.prove.case import Case
from meshwright.prove.kept import not_kept, not_proven
from meshwright.prove.outcome import Outcome
from meshwright.prove.rates import prove_rates
from meshwright.prove.shrink import shrink
from meshwright.prove.verdict import Verdict
from meshwright.runtime.machines.accelerators import check_build, count_gpus, find_gpus, torch_build
from meshwright.runtime.machines.compiler import check_compiler, lacks_compiler
from meshwright.runtime.machines.engine import check_async_tp, check_fp8
from meshwright.runtime.machines.machine import detect
from meshwright.runtime.proofs.proof import by_world, prove_cases
from meshwright.spec.loading import Config
from meshwright.tables import html_table

Device = Literal["cpu", "cuda"]
_COLUMNS = ("case", "claim", "passed", "error", "tolerance")


class Question(NamedTuple):
    """A layout to prove: the small cases that stand for it, and what they don't show."""

    layout: Layout
    cases: tuple[Case, ...]
    not_kept: tuple[str, ...]
    not_proven: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Proof:
    """The answer of `prove_layout`: an outcome for each small case, with its verdicts.

    `not_kept` are keys that the small cases have other values of, and `not_proven` keys that no
    proof covers. Prints as the command does, also in a notebook.
    """

    layout: Layout
    outcomes: tuple[Outcome, ...]
    not_kept: tuple[str, ...]
    not_proven: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every claim holds; no outcome is no proof."""
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
        """Return the lines that the command prints."""
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

    The same as `meshwright prove CONFIG`: local ranks, on the `device`, train a small model of the
    same kind, and one process does so without a layout. `environ` is this process's own unless
    given. Raises `ConfigError` for a layout that is not legal or has no GPUs, `RankFailed` if ranks
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
    """Return the small cases that stand for a config's layout; raises `ConfigError`."""
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
    """Return the layout as `train` would resolve it; no GPU needs to be there."""
    cluster = config.cluster
    if not count_gpus(environ):
        cluster = cluster.model_copy(update={"device": "cpu"})
    machine = detect(cluster, environ)
    check_fp8(config, machine.device)
    check_async_tp(config, Layout(), machine.device, None)
    return resolve_layout(config, machine)


def check_gpus(cases: Sequence[Case], environ: Mapping[str, str]) -> None:
    """Refuse cases with more ranks than there are GPUs."""
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
    """Return the outcomes, smallest worlds first: a part of the time for each, by its ranks.

    Each has the verdicts of `also`, too, and is shown as soon as it is there.
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
