"""`meshwright prove`: compares the steps of layouts with those of one device."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from meshwright.cli.common import print_json, read_config, say_line
from meshwright.cli.prove_arguments import configure, refuse_mixed
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_DONE, ConfigError, refusal
from meshwright.layout import broken, nearest_legal
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.draw import WORLDS as DRAWN_WORLDS
from meshwright.prove.draw import draw
from meshwright.prove.matrix import drawn, matrix
from meshwright.prove.order import prove_order
from meshwright.prove.outcome import Outcome, document, refusal_line
from meshwright.prove.rates import prove_rates
from meshwright.prove.refused import Refusal, refuse
from meshwright.prove.smallest import smallest
from meshwright.prove.verdict import Verdict
from meshwright.runtime.certificate import certify
from meshwright.runtime.machines.machine import check_compiler, lacks_compiler
from meshwright.runtime.proofs.proof import check_gpus, fails_alike, prove_all, question_of
from meshwright.spec.loading import Config
from meshwright.spec.parts import parameter_count
from meshwright.units import format_count, format_seconds

# So many failures of `--random` are reduced to a small case; each takes minutes.
MOST_SHRUNK = 3

__all__ = ["configure", "run"]


def run(args: argparse.Namespace) -> int:
    """Prove layouts, printing a line for each; with `--json`, stdout has one JSON document.

    Returns the exit code.
    """
    out = sys.stderr if args.json else sys.stdout
    started = time.perf_counter()
    refusals: list[Refusal] = []
    extra: dict[str, Any] = {}
    refuse_mixed(args)
    if args.program:
        from meshwright.cli.prove_trainer import prove_command  # with torch

        return prove_command(args, out)
    if args.matrix:
        cases, refusals = _of_table(args, out)
    elif args.random is not None:
        cases, extra = _by_chance(args, out)
    elif args.case is not None:
        cases = [case_of_json(args.case)]
    else:
        cases, extra = _of_config(args, out)
    if args.minutes is not None:
        cases = drawn(cases, len(cases), args.seed or 0)
    if args.device == "cuda":
        check_gpus(cases, os.environ)
    if not args.check_order:
        lacks = lacks_compiler(args.device, os.environ)
        for case in cases:
            check_compiler(case.train, lacks)
    if args.resume:
        outcomes = _certified(read_config(args), cases, out)
    elif args.check_order:
        outcomes = [_checked(case, out) for case in cases]
    else:
        seconds = math.inf if args.minutes is None else 60 * args.minutes
        also: tuple[Verdict, ...] = ()
        if "asked" in extra:
            config = read_config(args)
            also = (prove_rates(config.train.steps, config.optimizer),)
        outcomes = prove_all(
            cases, os.environ, lambda outcome: _show(outcome, out), args.device, seconds, also
        )
    if args.random is not None:
        extra["smallest"] = [_smallest(outcome, args, out) for outcome in _failed(outcomes, out)]
    for refused in refusals:
        say_line(refusal_line(refused), out)
    seconds = time.perf_counter() - started
    world = max((case.layout.world for case in cases), default=args.world or 0)
    summary = document(world, outcomes, refusals, seconds) | extra
    if args.minutes is not None:
        summary["left_out"] = len(cases) - len(outcomes)
    if args.json:
        print_json(summary)
    say_line(_summary(summary, len(refusals)), out)
    return EXIT_CHECK_FAILED if summary["failed"] else EXIT_DONE


def _of_table(args: argparse.Namespace, out: TextIO) -> tuple[list[Case], list[Refusal]]:
    """Return the cases of the built-in table that the arguments select.

    Also returns the outcome for each layout that must be refused.
    """
    world = 8 if args.world is None else args.world
    only = args.only or ""
    chosen = [case for case in matrix(world) if only in case.label]
    if not chosen:
        raise ConfigError(f"no layout of {world} ranks has {only!r} in its label")
    cases = [case for case in chosen if case.refused is None]
    refusals = [refuse(case) for case in chosen if case.refused is not None]
    if args.draw is not None:
        cases = drawn(cases, args.draw, args.seed or 0)
    say_line(f"{len(cases)} layouts of {world} ranks, {len(refusals)} to be refused", out)
    return cases, refusals


def _by_chance(args: argparse.Namespace, out: TextIO) -> tuple[list[Case], dict[str, Any]]:
    """Return the random layouts that `--random` and `--seed` select, and fields for the JSON."""
    worlds = DRAWN_WORLDS if args.world is None else (args.world,)
    seed, only = args.seed or 0, args.only or ""
    cases = [case for case in draw(seed, args.random, worlds) if only in case.label]
    if not cases:
        raise ConfigError(f"no layout of these {args.random} has {only!r} in its label")
    counts = sorted({case.layout.world for case in cases})
    ranks = ", ".join(map(str, counts))
    say_line(f"{len(cases)} random layouts, seed {seed}, of {ranks} ranks", out)
    return cases, {"seed": seed}


def case_of_json(text: str) -> Case:
    """Return the case in `--case`, as a failure printed it; raises `ConfigError` if invalid."""
    try:
        case = Case.from_json(text)
    except KeyError as error:
        problem = f"--case lacks {error}: it takes what a failure of --random has printed"
        raise ConfigError(problem) from None
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"--case takes what a failure of --random has printed: {error}") from None
    specs = case.model, case.train, case.layout
    rule = broken(*specs)
    if rule is not None:
        raise ConfigError(refusal(rule, legal=nearest_legal(*specs)))
    return case


def _of_config(args: argparse.Namespace, out: TextIO) -> tuple[list[Case], dict[str, Any]]:
    """Return the small cases that represent a config's layout, and fields for the JSON."""
    config = read_config(args)
    question = question_of(config, os.environ)
    layout = question.layout
    asked = {
        "layout": layout.label,
        "world": layout.world,
        "parameters": parameter_count(config.model),
    }
    count = format_count(parameter_count(config.model))
    say_line(f"asked: {layout.label} on {layout.world} ranks, {count} parameters", out)
    if args.check_order:
        return [Case(config.model, config.train, layout)], {"asked": asked}
    for case in question.cases:
        size = format_count(parameter_count(case.model))
        ranks = f"{case.layout.world} local {'GPU' if args.device == 'cuda' else 'CPU'} ranks"
        say_line(f"run:   {case.label} on {ranks}, {size} parameters", out)
    lost, unused = list(question.not_kept), list(question.not_proven)
    if lost:
        say_line(f"not in the small case: {', '.join(lost)}", out)
    if unused:
        say_line(f"not proven: {', '.join(unused)} (see docs/commands/prove.md)", out)
    return list(question.cases), {"asked": asked, "not_kept": lost, "not_proven": unused}


def _cannot_end(case: Case) -> bool:
    return not prove_order(lower(case.model, case.train, case.optimizer, case.layout)).passed


def _checked(case: Case, out: TextIO) -> Outcome:
    started = time.perf_counter()
    verdict = prove_order(lower(case.model, case.train, case.optimizer, case.layout))
    outcome = Outcome(case, (verdict,), time.perf_counter() - started)
    _show(outcome, out)
    return outcome


def _certified(config: Config, cases: Sequence[Case], out: TextIO) -> list[Outcome]:
    outcomes = []
    for case in cases:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="meshwright-resume-") as folder:
            verdicts = tuple(
                certify(config, case, Path(folder), os.environ, lambda text: say_line(text, out))
            )
        outcomes.append(Outcome(case, verdicts, time.perf_counter() - started))
        _show(outcomes[-1], out)
    return outcomes


def _failed(outcomes: Sequence[Outcome], out: TextIO) -> list[Outcome]:
    """Print how to repeat each failure, and return the first `MOST_SHRUNK` of them."""
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        say_line(f"failed: {outcome.case.label}", out)
        _say_repeat(out, _command(outcome.case))
    return failed[:MOST_SHRUNK]


def _command(case: Case) -> str:
    return f"meshwright prove --case {shlex.quote(case.as_json())}"


def _smallest(outcome: Outcome, args: argparse.Namespace, out: TextIO) -> dict[str, Any]:
    """Search for the smallest case that fails like an outcome, print it and return its JSON."""
    case = outcome.case
    say_line(f"looking for a smaller layout that fails like {case.label}", out)
    on_ranks = fails_alike(outcome, os.environ, args.device)
    fails = _cannot_end if args.check_order else on_ranks
    if not fails(case):
        say_line("  it does not fail alone: the failure depends on the cases before it", out)
        return {"of": case.label, "case": None, "repeat": None}
    smallest_case = smallest(case, fails)
    say_line(f"  smallest: {smallest_case.label}", out)
    _say_repeat(out, _command(smallest_case))
    return {"of": case.label, "case": smallest_case.label, "repeat": _command(smallest_case)}


def _show(outcome: Outcome, out: TextIO) -> None:
    for line in outcome.lines():
        say_line(line, out)


def _summary(summary: dict[str, Any], refusals: int) -> str:
    text = f"{summary['passed']} of {summary['layouts']} layouts passed"
    if refusals:
        text += f", {refusals} were to be refused"
    if summary["failed"]:
        text += f", {summary['failed']} FAILED"
    if summary.get("left_out"):
        text += f", {summary['left_out']} left out: the time was up"
    text += f", in {format_seconds(summary['seconds'])}"
    has_errors = any(verdict["tolerance"] for verdict in summary["verdicts"])
    return f"{text}; (%): the error as a share of what is tolerated" if has_errors else text


def _say_repeat(out: TextIO, command: str) -> None:
    # As it is: a line that ended within the quotes of its JSON could not be pasted.
    print(f"  repeat: {command}", file=out, flush=True)
