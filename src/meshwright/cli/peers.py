"""`meshwright bench peers`: measures the same model and modes on all installed frameworks."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.cli.common import add_config_arguments, add_json, print_json, read_config
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_DONE, ConfigError, refusal
from meshwright.files import write_atomic
from meshwright.runtime.machines.machine import detect
from meshwright.runtime.peers.catalogue import MODES, PEERS, RANKS, PeerSizes
from meshwright.runtime.peers.match import (
    NOT_COUNTED,
    OURS,
    Bench,
    Entrant,
    line_up,
    measure,
    random_tokens,
    sizes_of,
    versions,
)
from meshwright.spec.training import ClusterSpec

_NATIVE = "native"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench peers` to a parser."""
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES), metavar="MODE")
    parser.add_argument(
        "--systems", choices=[OURS, *PEERS], nargs="+", default=[OURS, *PEERS], metavar="SYSTEM"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each takes its turn")
    parser.add_argument("--steps", type=int, default=6, help="of a run; the first two don't count")
    parser.add_argument("--peers-python", metavar="PYTHON", help="an interpreter that has peers")
    parser.add_argument(
        "--microbatches", type=Path, metavar="FILE", help="an earlier result: take its choices"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON document there")
    add_config_arguments(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the frameworks and print a table; the exit code is 1 if one of them failed."""
    if args.steps <= NOT_COUNTED or args.rounds < 1:
        problem = f"--steps {args.steps} --rounds {args.rounds}"
        raise ConfigError(
            refusal(problem, legal=[f"--steps {NOT_COUNTED + 1} --rounds 1 and above"])
        )
    sizes = sizes_of(read_config(args)) if args.words else PeerSizes()
    environ = dict(os.environ)
    peer_versions, pythons = _interpreters(args.peers_python, environ)
    entrants = line_up(
        args.modes,
        [name for name in args.systems if name in (OURS, *peer_versions)],
        args.microbatches,
    )
    missing = [name for name in args.systems if name not in (OURS, *peer_versions)]
    document: dict[str, Any] = {
        "command": shlex.join(["meshwright", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": detect(ClusterSpec(device="cpu"), environ).name,
        "load_at_start": os.getloadavg()[0],
        "versions": peer_versions,
        "not_installed": missing,
        "sizes": vars(sizes),
        "ranks": RANKS,
    }
    with tempfile.TemporaryDirectory() as folder:
        tokens = random_tokens(Path(folder), sizes, args.steps)
        bench = Bench(sizes, pythons, tokens, environ)
        for result in measure(bench, entrants, args.rounds, args.steps, _progress):
            document |= result | {"load_at_end": os.getloadavg()[0]}
            if args.out:  # each round, so that an interrupted comparison leaves what it has
                write_atomic(args.out, (json.dumps(document, indent=1) + "\n").encode())
    if args.json:
        print_json(document)
    else:
        _print(document["rows"], entrants, missing)
    return EXIT_CHECK_FAILED if document["failures"] else EXIT_DONE


def _interpreters(
    peers_python: str | None, environ: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the version of each framework that can be imported, and the interpreter for it."""
    peer_versions: dict[str, str] = {}
    pythons: dict[str, str] = {}
    for python in filter(None, (peers_python, sys.executable)):
        known = versions(python, environ)
        if python == peers_python:  # PyTorch's own wrappers run beside us, on our torch
            known.pop(_NATIVE, None)
        new = {name: version for name, version in known.items() if name not in peer_versions}
        peer_versions |= new
        pythons |= dict.fromkeys(new, python)
    return peer_versions, pythons


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(
    rows: Sequence[Mapping[str, Any]], entrants: Sequence[Entrant], missing: Sequence[str]
) -> None:
    """Print the table of results, the fastest of each mode first."""
    table = Table(
        *(
            "mode",
            "system",
            "tokens/s",
            "from",
            "to",
            "steps",
            "microbatch",
            "peak MiB",
            "to best peer",
        ),
        box=None,
        pad_edge=False,
    )
    order = {mode: index for index, mode in enumerate(MODES)}
    for row in sorted(rows, key=lambda row: (order[row["mode"]], -row["tokens_per_s"])):
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        speeds = [f"{row[key]:,.0f}" for key in ("tokens_per_s", "slowest", "fastest")]
        peak = f"{row['peak_bytes'] / 2**20:,.0f}"
        cells = [*speeds, str(row["steps"]), str(row["microbatch"]), peak, ratio]
        table.add_row(row["mode"], row["system"], *cells)
    Console().print(table)
    for entrant in entrants:
        if entrant.failure is not None:
            print(f"{entrant.mode} {entrant.system} failed: {entrant.failure}")
    if missing:
        print(f"not installed: {', '.join(missing)}")
