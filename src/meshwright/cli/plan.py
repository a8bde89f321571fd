"""`meshwright plan`: prints which layout fits and is fastest, and why others are not."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.cli.common import (
    LONGEST_WORD,
    add_config_arguments,
    add_json,
    moment,
    print_json,
    read_config,
    say,
    say_command,
    table,
)
from meshwright.cli.measured import add_measured, measured_for, take_measured
from meshwright.cli.questions import (
    add_questions,
    answers,
    compare_plans,
    print_answers,
    print_ways_to_fit,
    ways_to_fit_json,
)
from meshwright.cli.serve import add_serve, frozen_page, serve_page
from meshwright.cli.trainer_arguments import add_trainers, check_trainers
from meshwright.cost.calibration import read_calibration, shipped_calibration
from meshwright.cost.evidence import evidence
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction, RankMemory, memories
from meshwright.cost.profile import predicted_profile
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_DONE, ConfigError, refusal
from meshwright.files import write_atomic
from meshwright.kernels.processor import processor
from meshwright.layout import Layout, Machine, unsharded
from meshwright.planner.advice import warnings
from meshwright.planner.plan import (
    COLUMNS,
    Plan,
    as_json,
    assumptions,
    check_legal,
    cost_inputs_of,
    explain,
    on_cluster,
    plan,
    prediction_json,
    training_command,
)
from meshwright.planner.rank import MARGIN
from meshwright.planner.space import given, words
from meshwright.planner.ways_to_fit import ways_to_fit
from meshwright.report.terminal import memory_chart, timeline_chart
from meshwright.runtime.checks.notes import layout_notes, plan_notes
from meshwright.runtime.machines.machine import detect, lacks_compiler
from meshwright.runtime.measure.measuring import measured_first
from meshwright.runtime.pricing.planned import on_machine, slower
from meshwright.spec.loading import Config
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parameter_count, trained_parameter_count
from meshwright.spec.words import unnamed_inputs
from meshwright.training.run_folder import RunFolder, other_name, read_job
from meshwright.units import format_bytes, format_count, format_seconds

# A part of a step or of a peak below this share is not printed.
_LEAST = 0.001
# The columns of a terminal that a ranking leaves for the reasons why layouts lost.
_REASONS = 32
EXAMPLE = """\
examples:
  meshwright plan
  meshwright plan model.preset=llama-3-70b cluster.preset=h100-sxm cluster.nodes=64 train.batch=1024
  meshwright plan run.toml --explain "shard2 zero3 mb1"
  meshwright plan run.toml cluster.preset=a40 --largest-batch --longest-context
  meshwright plan run.toml cluster.preset=a40 --after-oom "dp8 mb4"
  meshwright plan run.toml cluster.preset=a40 --measured "layout=shard8 zero3 mb1 step=13.9s"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan` to the parser."""
    parser.description = "Rank the layouts of a config on its cluster, without running anything."
    parser.epilog = EXAMPLE
    add_config_arguments(parser)
    parser.add_argument("--top", type=int, default=6, metavar="N", help="kinds of layout to show")
    parser.add_argument(
        "--explain", metavar="LAYOUT", help="the terms of one layout, such as 'tp2 mb1'"
    )
    parser.add_argument("--save", type=Path, metavar="plan.json", help="write the plan")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that shows it")
    parser.add_argument(
        "--margin", type=float, default=MARGIN, help="share of memory to leave free"
    )
    parser.add_argument(
        "--calibration", type=Path, help="measured constants, over the shipped ones"
    )
    parser.add_argument(
        "--after-oom",
        metavar="LAYOUT | RUN",
        help="what would fit instead of a layout, or a run's, that ran out of memory",
    )
    add_trainers(parser)
    add_measured(parser, "RUN | FILE | layout=LAYOUT step=13.9s memory=61GiB")
    add_questions(parser)
    add_serve(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Plan and print the result; the exit code is 1 if no layout fits."""
    if args.compare:
        return compare_plans(args.compare, as_json=args.json)
    run_folder, named = _run_folder(args.after_oom), take_measured(args)
    _check(args)
    if args.serve:
        return serve_page(args, named)
    if args.trainer is not None or args.like is not None:
        return _for_trainer(args, named)
    config = read_config(args, None if run_folder is None else run_folder.config, plans=True)
    calibration = read_calibration(args.calibration) if args.calibration else None
    lacks, shared, machine = None, 1.0, None
    if calibration is None:
        config = measured_first(config, os.environ)
    measured = measured_for(named, config, calibration, os.environ, keeps=not args.no_keep)
    if measured is not None:
        calibration = measured.calibration
        if not args.json:
            measured.print()
    if config.cluster.preset == "local":
        machine = detect(config.cluster, os.environ)
        lacks = lacks_compiler(machine.device, os.environ)
        config = on_machine(config, machine)
        shared = slower(config, machine)
    if args.explain:
        setting = cost_inputs_of(config, calibration, processor=processor(), slower=shared)
        return _explain(config, setting, args)
    if args.after_oom:
        layout = (
            Layout.parse(args.after_oom) if run_folder is None else read_job(run_folder.path).layout
        )
        setting = cost_inputs_of(config, calibration, processor=processor())
        return _after_oom(setting, layout, args)
    started = time.perf_counter()
    planned = plan(
        config,
        args.top,
        calibration,
        args.margin,
        lacks=lacks,
        processor=processor(),
        slower=shared,
    )
    seconds = time.perf_counter() - started
    command = training_command(args.words, planned, other_name(config))
    document = {**as_json(planned), "command": command, "notes": unnamed_inputs(planned.config)}
    if measured is not None:
        document["measured"] = measured.document
    extra_answers = answers(args, planned)
    if extra_answers:
        document["answers"] = {answer.name: answer.document for answer in extra_answers}
    _write(args, planned, document, named if measured is not None and measured.file is None else [])
    if not args.json:
        _print_plan(planned, seconds, machine)
        print_answers(extra_answers)
        _print_command(command, unnamed_inputs(planned.config))
    return EXIT_DONE if planned.best else EXIT_CHECK_FAILED


def _for_trainer(args: argparse.Namespace, named: list[str]) -> int:
    """Plan for another trainer (`--for`), or from its config (`--like`); prints the result.

    The exit code is 1 if no layout fits.
    """
    from meshwright.cli import trainers  # not at the top: readers and writers of nine formats
    from meshwright.planner.for_trainer import plan_for, priced_as

    like = trainers.read_like(args)
    config = read_config(args, plans=True) if like is None else like.config
    trainer = trainers.trainer_of(args, like)
    trainers.check_written(config, trainer)
    calibration = read_calibration(args.calibration) if args.calibration else None
    measured = measured_for(
        named,
        config,
        calibration,
        os.environ,
        keeps=not args.no_keep,
        system="meshwright" if trainer is None else priced_as(trainer, config),
        layout=None if like is None else like.layout,
    )
    if measured is not None:
        calibration = measured.calibration
        if not args.json:
            measured.print()
    started = time.perf_counter()
    asked = config if like is None else trainers.free_config(like)
    if trainer is None:
        planned = plan(asked, args.top, calibration, args.margin)
    else:
        planned = plan_for(asked, trainer, args.top, calibration, args.margin)
    seconds = time.perf_counter() - started
    document = as_json(planned)
    if measured is not None:
        document["measured"] = measured.document
    if not args.json and like is not None:
        trainers.print_like(like)
    if like is not None and like.layout is not None:
        comparison = trainers.compared(
            like, trainer, planned, *trainers.priced(like, trainer, calibration)
        )
        document["like"] = trainers.compared_json(like, comparison)
        if not args.json:
            trainers.print_compared(comparison)
            print()
    file = None if trainer is None else trainers.config_file(args, trainer, planned)
    if trainer is not None:
        document["for"] = trainers.file_json(trainer, file)
    if args.json:
        print_json(document)
        return EXIT_DONE if planned.best else EXIT_CHECK_FAILED
    if trainer is not None:
        trainers.print_trainer(trainer, planned)
    _print_plan(planned, seconds, None)
    trainers.print_file(args, file)
    return EXIT_DONE if planned.best else EXIT_CHECK_FAILED


def _print_command(command: str | None, notes: list[str]) -> None:
    """Print the command that trains the best layout, after `notes`; nothing without a command."""
    if command is None:
        return
    print()
    for text in notes:
        say(f"note: {text}")
    print("to train the best:")
    say_command(command)


def _check(args: argparse.Namespace) -> None:
    check_trainers(args)
    if args.top < 1:
        raise ConfigError(refusal(f"--top {args.top} must be at least 1", legal=[1]))
    if not 0 <= args.margin < 1:
        nearest = 0 if args.margin < 0 else 0.5
        rule = f"--margin {args.margin} is not a share of memory, at least 0 and less than 1"
        raise ConfigError(refusal(rule, legal=[f"--margin {nearest}"]))


def _write(
    args: argparse.Namespace, plan: Plan, document: dict[str, Any], named: list[str]
) -> None:
    """Write the files that options ask for, and with `--json` the document on stdout.

    `named` are measurements that apply to this plan and are not stored.
    """
    if args.save:
        write_atomic(args.save, (json.dumps(document, indent=1) + "\n").encode())
    if args.html:
        write_atomic(args.html, frozen_page(args, named, plan, document).encode())
    if args.json:
        print_json(document)


def _explain(config: Config, setting: CostInputs, args: argparse.Namespace) -> int:
    """Print each term of the predicted memory and step time of the layout in `--explain`."""
    layout = Layout.parse(args.explain)
    prediction, notes = explain(setting, layout), _notes(config, setting, layout)
    if args.json:
        terms = [(t.category, t.bytes, t.formula) for t in prediction.memory.terms]
        print_json({**prediction_json(prediction), "terms": terms, "notes": notes})
        return EXIT_DONE
    _print_terms(prediction)
    for note in notes:
        say(f"note: {note}")
    _print_charts(setting, prediction.layout)
    return EXIT_DONE


def _notes(config: Config, setting: CostInputs, layout: Layout) -> list[str]:
    """Return notes on where the layout in `--explain` differs from the config."""
    notes = assumptions(setting.model)
    devices = setting.cluster.devices
    if layout.world != devices:
        ranks = "rank" if layout.world == 1 else "ranks"
        notes.append(
            f"this prices {layout.world} {ranks}, each on a device of its own; the cluster has "
            f"{devices} devices"
        )
    if (idle := unsharded(layout)) is not None:
        notes.append(idle)
    differing = {
        key: value for key, value in given(config).items() if getattr(layout, key) != value
    }
    if differing:
        notes.append(f"this layout does not have the config's {words(differing)}")
    return notes


def _run_folder(named: str | None) -> RunFolder | None:
    """Return the run folder that `--after-oom` names; None for something else or nothing."""
    if named is None or not Path(named).is_dir():
        return None
    folder = RunFolder(Path(named))
    if not folder.plan.is_file():
        raise ConfigError(f"--after-oom {named}: not a run folder, {folder.plan} is missing")
    return folder


def _after_oom(setting: CostInputs, layout: Layout, args: argparse.Namespace) -> int:
    """Print changes with which a layout that ran out of memory would fit.

    The exit code is 1 if there are none.
    """
    check_legal(setting, layout)
    setting = on_cluster(setting, layout)
    started = time.perf_counter()
    current, ways = ways_to_fit(setting, layout, args.margin)
    if args.json:
        print_json(ways_to_fit_json(current, ways))
    else:
        print_ways_to_fit(current, ways, time.perf_counter() - started)
    return EXIT_DONE if ways else EXIT_CHECK_FAILED


def _defaults(config: Config) -> list[str]:
    """Return notes on batch size, sequence length and precision if the user did not set them."""
    origins = {key: config.origins[f"train.{key}"] for key in ("batch", "seq_len", "precision")}
    notes = [
        f"train.{key} = {getattr(config.train, key)}, {where}"
        for key, where in origins.items()
        if where.startswith("derived")
    ]
    plain = [f"train.{key}" for key, where in origins.items() if where == "default"]
    if plain and config.model.preset is not None:
        notes.append(f"{', '.join(plain)}: defaults for a first look; set them for a real run")
    return notes


def _parameters(model: ModelSpec) -> str:
    """Return the number of parameters in words and, with adapters, how many are trained."""
    count = f"{format_count(parameter_count(model))} parameters"
    if model.lora is None:
        return count
    trained = format_count(trained_parameter_count(model))
    return f"{count}, {trained} of them in adapters of rank {model.lora.rank}, the others frozen,"


def _print_plan(plan: Plan, seconds: float, machine: Machine | None) -> None:
    console, setting, ranking = Console(), plan.setting, plan.found
    cluster, train = setting.cluster, setting.train
    say(
        f"{_parameters(setting.model)} on {cluster.devices} x {cluster.device.name} "
        f"({cluster.topology}); batch "
        f"{train.batch} x {train.seq_len} tokens, {train.precision}"
    )
    for text in assumptions(setting.model):
        say(text)
    for text in [*map(str, plan.removed), *plan_notes(plan.config), *_defaults(plan.config)]:
        say(f"note: {text}")
    known = setting.calibration
    if known is not shipped_calibration():
        source = ", ".join(text for text in (known.source, known.date) if text)
        say(f"calibration: {source or 'a file that states neither source nor date'}")
    say(f"{ranking.considered:,} legal layouts considered in {seconds:.2f} s")
    if pins := given(plan.config):
        say(f"fixed by the config: {words(pins)}")
    if plan.best is None:
        _print_unfit(plan)
    else:
        console.print(_table(plan))
        _print_winner(plan, plan.best)
        for text in () if machine is None else layout_notes(plan.config, plan.best.layout, machine):
            say(f"note: {text}", "  ")
    print("ruled out:")
    for reason, count in ranking.reasons.items():
        say(f"{count:>12,}  {reason}", "  ")


def _table(plan: Plan) -> Table:
    # Where two columns wrap, rich cuts the words of one of them. So labels are wrapped here.
    printed = table(*COLUMNS, wraps=("why not",))
    rows = plan.rows()
    *fixed, _ = list(zip(COLUMNS, *rows, strict=True))[1:]
    between = len("  ") * (len(COLUMNS) - 1)
    taken = sum(max(map(len, cells)) for cells in fixed) + between + _REASONS
    width = max(LONGEST_WORD, Console().width - taken)
    for label, *cells in rows:
        printed.add_row(textwrap.fill(label, width, break_on_hyphens=False), *cells)
    return printed


def _print_winner(plan: Plan, best: Prediction) -> None:
    print()
    say(f"best: {best.layout.label}")
    low, high = map(format_seconds, best.interval)
    say(f"step time: {', '.join(_causes(best))}; 80% interval {low} to {high}", "  ")
    for choice in plan.choices:
        say(f"{choice.subject}: {choice.text}", "  ")
    ranks = memories(plan.setting, best.layout)
    smallest, largest = map(format_bytes, best.memory_interval)
    interval = f"80% interval, from the peaks of other systems: {smallest} to {largest}"
    say(f"pipeline rank {best.memory.rank}: {_memory(best.memory)}; {interval}", "  ")
    if len(ranks) > 1:
        alike: dict[str, list[str]] = {}
        for rank_memory in ranks:
            alike.setdefault(format_bytes(rank_memory.total), []).append(str(rank_memory.rank))
        ranks_text = (
            f"{memory_text} on {', '.join(pp_ranks)}" for memory_text, pp_ranks in alike.items()
        )
        say(f"pipeline ranks: {'; '.join(ranks_text)}", "  ")
    say(evidence(plan.setting, best.layout), "  ")
    for warning in warnings(best, plan.setting):
        say(f"note: {warning}", "  ")


def _causes(prediction: Prediction) -> list[str]:
    total = prediction.time.total
    return [
        f"{cause} {format_seconds(seconds)} ({seconds / total:.0%})"
        for cause, seconds in prediction.time.causes.items()
        if seconds > _LEAST * total
    ]


def _memory(memory: RankMemory) -> str:
    categories = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in memory.by_category().items()
        if size > _LEAST * memory.total
    )
    return f"{format_bytes(memory.total)} of {format_bytes(memory.limit)}: {categories}"


def _print_unfit(plan: Plan) -> None:
    memory, layout = plan.found.unfit, plan.found.unfit_layout
    print("no layout fits")
    if memory is not None and layout is not None:
        say(f"nearest: {layout.label}", "  ")
        say(f"pipeline rank {memory.rank}: {_memory(memory)}", "  ")


def _print_terms(prediction: Prediction) -> None:
    memory = prediction.memory
    verdict = "fits" if memory.fits else "does not fit"
    moment_text = f", which holds most at {moment(memory.at)}" if memory.at else ""
    say(f"{prediction.layout.label}: {verdict}; pipeline rank {memory.rank}{moment_text}")
    printed = table("memory", "size", "formula", wraps=("memory", "formula"))
    for term in memory.terms:
        printed.add_row(term.category, format_bytes(term.bytes), term.formula)
    printed.add_row("total", format_bytes(memory.total), f"of {format_bytes(memory.limit)}")
    Console().print(printed)
    times = table("time", "seconds", "share")
    for cause, seconds in prediction.time.causes.items():
        times.add_row(cause, f"{seconds:.4f}", f"{seconds / prediction.time.total:.1%}")
        if cause == "data":
            share = prediction.time.gathers / prediction.time.total
            times.add_row("  of it gathers", f"{prediction.time.gathers:.4f}", f"{share:.1%}")
    times.add_row(
        "step", f"{prediction.time.total:.4f}", f"{prediction.tokens_per_s:,.0f} tokens/s"
    )
    Console().print(times)


def _print_charts(setting: CostInputs, layout: Layout) -> None:
    drawn = predicted_profile(on_cluster(setting, layout), layout)
    console = Console()
    charts = (timeline_chart(drawn, console.width), memory_chart([drawn], console.width))
    for chart in charts[layout.pp == 1 :]:
        print()
        console.print(chart)
