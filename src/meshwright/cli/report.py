"""`meshwright report`: writes a page of one run or several, and a trace for Perfetto."""

from __future__ import annotations

import argparse
import json
import webbrowser
from pathlib import Path

from rich.console import Console

from meshwright.cli.common import local_folder, say
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.files import write_atomic
from meshwright.report.record import RunRecord, read_run
from meshwright.report.run_page import write_report
from meshwright.report.run_words import run_warnings, verdict
from meshwright.report.terminal import summary
from meshwright.report.trace import chrome_trace
from meshwright.units import format_bytes

EXAMPLE = """\
examples:
  meshwright report runs/latest
  meshwright report runs/a runs/b --out compared.html
  meshwright report runs/latest --trace trace.json     open it at ui.perfetto.dev
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report` to the parser."""
    parser.description = (
        "Make one HTML page of a run, or of several side by side: it opens from disk, without a "
        "server or a network."
    )
    parser.epilog = EXAMPLE
    parser.add_argument("runs", nargs="+", type=local_folder, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page; RUN/report/index.html unless given"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="also a trace of planned and measured timelines"
    )
    parser.add_argument("--open", action="store_true", help="show the page in the browser")


def run(args: argparse.Namespace) -> int:
    """Run `meshwright report`: write the HTML page of runs, print a summary of each, return 0.

    Raises `ConfigError` if a folder is not a run, or the page cannot be written.
    """
    if args.trace and len(args.runs) > 1:
        raise ConfigError(f"--trace is of one run, and there are {len(args.runs)}")
    try:
        page = write_report(args.runs, args.out)
    except OSError as error:
        raise ConfigError(f"the page cannot be written: {error}") from None
    for path in args.runs:
        record = read_run(path)
        _summarise(record)
        if len(args.runs) == 1 and record.profiles:
            Console().print(summary(record.profiles))
    print(f"page: {page} ({format_bytes(page.stat().st_size)})")
    if args.trace:
        _write_trace(read_run(args.runs[0]), args.trace)
    if args.open:
        webbrowser.open(page.resolve().as_uri())
    return EXIT_DONE


def _write_trace(record: RunRecord, out: Path) -> None:
    if not record.profiles:
        raise ConfigError(f"{record.path} has no ledger.json: there is no timeline to trace")
    write_atomic(out, json.dumps(chrome_trace(record.profiles)).encode())
    print(f"trace: {out}, for ui.perfetto.dev")


def _summarise(record: RunRecord) -> None:
    say(f"{record.name}: {' '.join(verdict(record))}")
    for problem, todo in run_warnings(record):
        say(f"{problem} {todo}", "  ")
    for text in record.missing:
        say(f"note: {text}", "  ")
