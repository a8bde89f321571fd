"""`plan --serve`: a local page that plans again when its inputs change; and `plan --html`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshwright.cli.common import read_config, read_words
from meshwright.cli.measured import measured_for
from meshwright.cli.questions import question_flags
from meshwright.cost.calibration import read_calibration
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.planner.plan import Plan
from meshwright.planner.rank import MARGIN
from meshwright.runtime.pricing.measured import VARIABLES
from meshwright.serve.conditions import TOP, Conditions
from meshwright.spec.loading import read_given


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the options `--serve` and `--port` to a parser."""
    parser.add_argument(
        "--serve", action="store_true", help="a page that plans as it is changed, on this machine"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="of --serve; any free one unless given"
    )


def serve_page(args: argparse.Namespace, named: Sequence[str]) -> int:
    """Serve the page, which starts with the plan of the arguments, until interrupted.

    `named` are measurements by which its predictions are corrected. Returns the exit code.
    """
    from meshwright.serve.answer import asked_words, named_files
    from meshwright.serve.app import serve  # with a web server, which no other plan needs

    if not 0 <= args.port < 1 << 16:
        raise ConfigError(f"--port {args.port} must be from 0 to {(1 << 16) - 1}")
    calibration = read_calibration(args.calibration) if args.calibration else None
    if named:
        measured = measured_for(
            list(named),
            read_config(args, plans=True),
            calibration,
            os.environ,
            keeps=not args.no_keep,
        )
        assert measured is not None
        measured.print()
        # What is kept of a cluster is found again by each question about it.
        calibration = measured.calibration if measured.file is None else None
    environ = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    flags = tuple(_flags(args, named if calibration else ()))
    stated = read_given(*read_words(args))
    conditions = Conditions(environ, calibration, args.margin, args.top, flags, named_files(stated))
    arguments = asked_words(stated)
    with suppress(KeyboardInterrupt):
        serve(
            args.port,
            arguments,
            conditions,
            lambda address: print(f"{address}  Ctrl-C ends it", flush=True),
        )
    return EXIT_DONE


def frozen_page(
    args: argparse.Namespace, named: Sequence[str], plan: Plan, planned: Mapping[str, Any]
) -> str:
    """Return the static HTML page of a plan, with the details of each ranked layout.

    `named` are measurements that are not stored; `planned` is the plan's JSON document.
    """
    from meshwright.serve.answer import asked_words, document  # only plans with a page need these
    from meshwright.serve.plan_page import page

    stated = read_given(*read_words(args))
    labels = [prediction.layout.label for prediction in plan.found.ranked]
    contents = document(
        plan, args.words, labels, stated, (*_flags(args, named), *question_flags(args))
    )
    answers = planned.get("answers", {})
    shown = {"points": answers.get("devices", []), "tokens": answers.get("tokens")}
    return page(asked_words(stated), {**contents, **shown})


def _flags(args: argparse.Namespace, named: Sequence[str]) -> Iterator[str]:
    """Yield the options that make a command plan under the same conditions, as arguments."""
    if args.margin != MARGIN:
        yield from ("--margin", f"{args.margin:g}")
    if args.top != TOP:
        yield from ("--top", str(args.top))
    if args.calibration is not None:
        yield from ("--calibration", str(args.calibration))
    for text in named:
        yield from ("--measured", text)
    if named:
        yield "--no-keep"
