"""`meshwright simulate`: dry-runs a step on fake ranks and compares it with its prediction."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.cli.common import (
    add_config_arguments,
    add_json,
    moment,
    print_json,
    read_config,
    say,
)
from meshwright.cli.measured import add_measured, measured_for, take_measured
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_DONE, ConfigError
from meshwright.files import write_atomic
from meshwright.kernels.processor import processor
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of
from meshwright.program.profile import to_json
from meshwright.report.ahead import simulation_page
from meshwright.report.page import Page
from meshwright.simulate.on_standin import out_of_order, watch
from meshwright.simulate.simulation import (
    PEAK_TOLERANCE,
    Simulated,
    Simulation,
    as_json,
    both_profiles,
    layout_of,
    ranks_of,
    simulate,
)
from meshwright.spec.loading import Config
from meshwright.spec.parts import parameter_count
from meshwright.units import format_bytes, format_count, format_seconds

EXAMPLE = """\
examples:
  meshwright simulate run.toml layout.tp=2 --ranks all
  meshwright simulate run.toml layout.pp=4 layout.tp=2 --world 64 --ranks stages
  meshwright simulate run.toml layout.dp_shard=2 layout.zero=3 --world 2 --device cuda
  meshwright simulate run.toml cluster.preset=a40 layout.zero=3 --ranks 0,last --save ledger.json

exit codes: 0 done, 1 a rank does not fit or does not do what the program says, 2 refused
"""
# Differences and collectives that are shown of a rank; --json has all.
SHOWN = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `simulate` to the parser."""
    parser.description = (
        "Rehearse one training step of a config on fake ranks: the code that trains, without "
        "messages and without memory, for any number of ranks, on one core."
    )
    parser.epilog = EXAMPLE
    add_config_arguments(parser)
    parser.add_argument(
        "--world", type=int, metavar="N", help="so many ranks, instead of the cluster's devices"
    )
    parser.add_argument(
        "--ranks",
        default="stages",
        metavar="RANKS",
        help="of numbers, middle, last, all, stages (one of each pipeline stage; the default)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="ledger.json", help="write predicted and simulated profile"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that shows it")
    add_measured(parser, "RUN | FILE | layout=LAYOUT step=13.9s memory=61GiB")
    parser.add_argument(
        "--device",
        choices=("cuda",),
        help="rehearse what is done on a GPU alone, on a stand-in: host waits, streams, copies",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print what the simulated ranks store, send and compute; returns the exit code.

    It is 1 if a rank runs out of memory or differs from the program.
    """
    named = take_measured(args)
    config = read_config(args)
    if args.world is not None and args.world < 1:
        raise ConfigError(f"--world {args.world} must be at least 1")
    measured = measured_for(named, config, None, os.environ, keeps=not args.no_keep)
    calibration = None if measured is None else measured.calibration
    setting = cost_inputs_of(config, calibration, processor=processor())
    layout = layout_of(config, setting, args.world)
    ranks = ranks_of(args.ranks, layout)
    if args.device == "cuda":
        return _on_standin(config, layout, ranks, as_document=args.json)
    started = time.perf_counter()

    def tell(simulated_rank: Simulated) -> None:
        rehearsal = simulated_rank.rehearsal
        took = format_seconds(rehearsal.seconds)
        print(
            f"rank {rehearsal.rank}: {format_bytes(simulated_rank.peak)}, in {took}",
            file=sys.stderr,
        )

    simulation = simulate(config, layout, ranks, setting, tell)
    if args.save:
        document = to_json(both_profiles(simulation))
        write_atomic(args.save, (json.dumps(document) + "\n").encode())
    if args.html:
        write_atomic(args.html, _page(simulation).html().encode())
    if args.json:
        document = as_json(simulation)
        print_json(document if measured is None else {**document, "measured": measured.document})
    else:
        if measured is not None:
            measured.print()
        _print(simulation, time.perf_counter() - started)
    return EXIT_DONE if simulation.fits and simulation.agrees else EXIT_CHECK_FAILED


def _on_standin(config: Config, layout: Layout, ranks: Sequence[int], *, as_document: bool) -> int:
    """Dry-run the code path of GPUs on a stand-in device, and print the problems found."""
    case = {
        "model": config.model.model_dump_json(),
        "train": config.train.model_dump_json(),
        "optimizer": config.optimizer.model_dump_json(),
        "layout": layout.model_dump_json(),
        "packed": config.data.packing == "documents",
        "ranks": list(ranks),
    }
    reports = []
    for report in watch([case]):
        reports.append(report)
        took = format_seconds(report.seconds)
        verdict = "passed" if report.passed else "FAILED"
        print(f"rank {report.rank}: {verdict}, in {took}", file=sys.stderr)
    between = list(out_of_order(reports))
    if as_document:
        rows = [{**report._asdict(), "sent": len(report.sent)} for report in reports]
        print_json({"label": layout.label, "ranks": rows, "between_ranks": between})
    for report in () if as_document else reports:
        say(f"rank {report.rank} of {layout.label}, on a stand-in for a GPU")
        for faults, fine in (
            (report.messages, "collectives are the program's, every one"),
            (report.syncs, "no wait of the host in a step but those named"),
            (report.order, "streams wait for what they use, and memory lasts until then"),
        ):
            for text in [f"FAILED: {text}" for text in faults] or [fine]:
                say(text, "  ")
        for text in report.named:
            say(f"the host waits: {text}", "  ")
    if len(reports) > 1 and not as_document:
        lines = [f"FAILED: {text}" for text in between[:SHOWN]]
        for text in lines or ["these ranks begin the messages between them in one order"]:
            say(text)
    passed = all(report.passed for report in reports) and not between
    return EXIT_DONE if passed else EXIT_CHECK_FAILED


def _page(simulation: Simulation) -> Page:
    predicted, simulated = both_profiles(simulation)
    differences = {
        simulated_rank.rehearsal.rank: simulated_rank.differences
        for simulated_rank in simulation.ranks
    }
    device = simulation.setting.cluster.device.name
    breaches = [
        _breach(simulated_rank, device)
        for simulated_rank in simulation.ranks
        if simulated_rank.breach is not None
    ]
    problems = (differences, breaches)
    return simulation_page(simulation.program, simulation.setting, predicted, simulated, *problems)


def _print(simulation: Simulation, seconds: float) -> None:
    program = simulation.program
    say(
        f"{format_count(parameter_count(program.model))} parameters, {program.layout.label}: "
        f"{program.layout.world} ranks, {program.microbatches} microbatches of "
        f"{program.layout.microbatch} x {program.train.seq_len} tokens, {program.train.precision}"
    )
    for simulated_rank in simulation.ranks:
        _print_rank(simulated_rank)
    for simulated_rank in simulation.ranks:
        if simulated_rank.breach is not None:
            say(_breach(simulated_rank, simulation.setting.cluster.device.name))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say(f"simulated in {format_seconds(seconds)} with {format_bytes(peak)} of memory")


def _print_rank(simulated_rank: Simulated) -> None:
    rehearsal = simulated_rank.rehearsal
    stages = " ".join(map(str, rehearsal.stages))
    print()
    say(f"rank {rehearsal.rank}, stage {stages}: most memory at {rehearsal.worst.name}")
    memory, predicted = simulated_rank.memory, simulated_rank.predicted_memory()
    memory_table = Table("memory", "simulated", "predicted", box=None, pad_edge=False)
    for name in [*dict.fromkeys((*memory, *predicted)), "all"]:
        sizes = [side.get(name, 0) for side in (memory, predicted)]
        if name == "all":
            sizes = [sum(side.values()) for side in (memory, predicted)]
        memory_table.add_row(name, *(format_bytes(size) if size else "-" for size in sizes))
    Console().print(memory_table)
    table = Table("collective", "axis", "size", "count", "program", box=None, pad_edge=False)
    tensors = format_bytes(rehearsal.worst.total)
    say(
        f"tensors {tensors}; the program's timeline has "
        f"{format_bytes(simulated_rank.timeline.total)}, "
        f"at {moment(simulated_rank.timeline.action)}"
    )
    volumes = {
        message: message.bytes * count
        for message, count in (rehearsal.messages | rehearsal.expected).items()
    }
    largest = sorted(volumes, key=lambda message: -volumes[message])
    for message in largest[:SHOWN]:
        counts = (rehearsal.messages[message], rehearsal.expected[message])
        table.add_row(message.kind, message.axis, format_bytes(message.bytes), *map(str, counts))
    Console().print(table)
    if len(largest) > SHOWN:
        say(f"and {len(largest) - SHOWN} smaller ones")
    flops = ", ".join(
        f"stage {stage} {size:.4g}" for stage, size in sorted(rehearsal.stage_flops.items())
    )
    say(
        f"FLOPs: {rehearsal.products:.6g} of matmuls, {rehearsal.attention:.6g} of attention; "
        f"{flops}"
    )
    for difference in simulated_rank.differences[:SHOWN]:
        say(f"not the program's: {difference}", "  ")
    if not simulated_rank.differences:
        say(
            "collectives and FLOPs are the program's, every one; so is memory, within "
            f"{PEAK_TOLERANCE:.0%}"
        )


def _breach(simulated_rank: Simulated, device: str) -> str:
    """Return a sentence on a rank that runs out of memory: when, and what fills the memory."""
    breach = simulated_rank.breach
    assert breach is not None
    largest = breach.largest
    return (
        f"out of memory: rank {simulated_rank.rehearsal.rank} at {breach.phase} asks for "
        f"{format_bytes(breach.size)} of {breach.asked} beside {format_bytes(breach.tensors)}, "
        f"most of it {largest} ({format_bytes(breach.held[largest])}); {device} has "
        f"{format_bytes(simulated_rank.limit)}, {format_bytes(simulated_rank.beside)} of it "
        "reserved"
    )
