"""`meshwright doctor`: checks the machine, a config before its start, or a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.cli.common import add_json, print_json, read_config, say_line
from meshwright.comm.generations import replicas_text
from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_DONE, ConfigError
from meshwright.runtime.doctor import examine_config, examine_machine
from meshwright.runtime.machines.system import Finding
from meshwright.runtime.pricing.measured import calibration_in_use
from meshwright.runtime.supervise.crash_records import crash_stack
from meshwright.runtime.supervise.diagnosis import Diagnosis, diagnose
from meshwright.spec.loading import Config
from meshwright.units import format_seconds

EXAMPLE = """\
examples:
  meshwright doctor                            this machine
  meshwright doctor run.toml layout.tp=2       could this start here?
  meshwright doctor runs/latest                why does it hang, why did it end?
  torchrun --nnodes 2 --nproc-per-node 1 ... -m meshwright doctor run.toml    on all nodes
"""


_STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor` to the parser."""
    parser.description = "Examine the machine, a config before its start, or a run."
    parser.epilog = EXAMPLE
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN | CONFIG.toml | section.key=value",
        help="a run folder, or a config with overrides; without them, the machine alone",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check what the arguments name and print the findings; the exit code is 1 for a problem."""
    folders = [word for word in args.words if "=" not in word and Path(word).is_dir()]
    if folders:
        if len(args.words) > 1:
            raise ConfigError(f"a run folder stands alone: {' '.join(args.words)}")
        return _examine_run(Path(folders[0]), as_json=args.json)
    config = read_config(args)
    rendezvous = Rendezvous.from_environment(os.environ)
    if rendezvous is not None:
        return _examine_nodes(config, rendezvous, as_json=args.json)
    findings = list(examine_machine(os.environ, Path(config.log.dir)))
    findings.append(calibration_in_use(config, os.environ))
    if args.words:
        findings += examine_config(config, os.environ)
    is_well = all(finding.state != "bad" for finding in findings)
    if args.json:
        print_json({"ok": is_well, "findings": [finding.as_dict() for finding in findings]})
    else:
        _print_findings(findings, config if args.words else None)
    return EXIT_DONE if is_well else EXIT_CHECK_FAILED


def _examine_nodes(config: Config, rendezvous: Rendezvous, *, as_json: bool) -> int:
    """Check all nodes, with one process on each; that of rank 0 prints the findings."""
    from meshwright.runtime.preflight import preflight  # only here: it needs torch

    node_findings = preflight(config, os.environ, rendezvous)
    is_well = all(finding.state != "bad" for _, finding in node_findings)
    if rendezvous.rank == 0 and as_json:
        findings = [{"node": node, **finding.as_dict()} for node, finding in node_findings]
        print_json({"ok": is_well, "findings": findings})
    elif rendezvous.rank == 0:
        _print_nodes(node_findings)
    return EXIT_DONE if is_well else EXIT_CHECK_FAILED


def _print_nodes(node_findings: Sequence[tuple[str, Finding]]) -> None:
    table = Table("", "node", "", "", box=None, pad_edge=False, show_header=False)
    for node, finding in node_findings:
        state = Text(finding.state, _STYLES[finding.state])
        table.add_row(state, node, finding.name, Text(finding.text))
    Console().print(table)
    bad = sorted(
        {f"{finding.name} on {node}" for node, finding in node_findings if finding.state == "bad"}
    )
    if bad:
        say_line(f"meshwright doctor: problems that prevent a run: {', '.join(bad)}", sys.stderr)
    else:
        say_line("this config can start on these nodes")


def _print_findings(findings: Sequence[Finding], config: Config | None) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(Text(finding.state, _STYLES[finding.state]), finding.name, Text(finding.text))
    Console().print(table)
    bad = [finding.name for finding in findings if finding.state == "bad"]
    verdict = "this machine can train" if config is None else "this config can start here"
    if bad:
        say_line(f"meshwright doctor: problems that prevent a run: {', '.join(bad)}", sys.stderr)
    else:
        say_line(verdict)


def _examine_run(path: Path, *, as_json: bool) -> int:
    diagnosis = diagnose(path)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        _print_diagnosis(diagnosis)
    return EXIT_DONE if diagnosis.is_well else EXIT_CHECK_FAILED


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    state = "" if diagnosis.reason.startswith(diagnosis.state) else f"{diagnosis.state}. "
    say_line(f"{diagnosis.run}: {state}{diagnosis.reason}")
    for witness in diagnosis.witnesses:
        waits = "" if witness.waits_in is None else f", waits in {witness.waits_in}"
        say_line(f"rank {witness.rank}: {witness.process}, last seen: {witness.place}{waits}")
    for rank, file in diagnosis.stacks.items():
        say_line(f"rank {rank} crashed; the C++ stacks of its threads are in {file}:")
        for frame in crash_stack(file.read_text("utf-8", "replace")):
            print(f"  {frame}")
    for event in diagnosis.slow:
        say_line(f"rank {event['rank']} was slow from step {event['from_step']} to {event['step']}")
    for event in diagnosis.lost:
        say_line(f"lost {replicas_text(event['replicas'])}: {event['cause']}")
    for cost in diagnosis.costs:
        known = {"detected": cost.detect_s, "restarted": cost.restart_s, "recomputed": cost.lost_s}
        durations = [f"{name} in {format_seconds(s)}" for name, s in known.items() if s is not None]
        say_line(f"restart {cost.attempt}: {cost.cause} ({', '.join(durations)})")
    say_line(f"last step {diagnosis.last_step}; newest checkpoint: {diagnosis.good}")
    if not diagnosis.is_well:
        say_line(f"what the ranks printed is in {diagnosis.run}/logs/rank-*.log")
