"""`meshwright bench`: measures this machine, and compares layouts by running them on it."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.cli import peers
from meshwright.cli.common import add_config_arguments, add_json, print_json, read_config
from meshwright.cost.calibration import as_toml, blocks_of, read_calibration
from meshwright.cost.catalogue import device_named, find_device
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction, price
from meshwright.cost.timeline import timeline
from meshwright.errors import EXIT_DONE, ConfigError, refusal
from meshwright.files import write_atomic
from meshwright.kernels.processor import processor
from meshwright.layout import Layout, Machine, broken, resolve_layout
from meshwright.planner.plan import cost_inputs_of, on_cluster, plan
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.report.ahead import layouts_page
from meshwright.runtime.machines.machine import check_compiler, detect, lacks_compiler
from meshwright.runtime.measure.benchmark import measure_on_ranks
from meshwright.runtime.pricing.measured import keep, kept_at, source_of
from meshwright.runtime.pricing.planned import on_machine
from meshwright.runtime.ranks.local import sets_allocator
from meshwright.spec.loading import Config
from meshwright.units import format_bytes, format_seconds

EXAMPLE = """\
examples:
  meshwright bench device --out here.toml
  meshwright bench layouts --layout "dp2 mb2" "tp2 mb2" --calibration here.toml
  meshwright bench layouts run.toml --top 4 --memory
  meshwright bench peers --modes ddp tp --peers-python PYTHON
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `bench` and their arguments to the parser."""
    parser.description = "Measure the machine at hand, layouts on it side by side, and peers."
    parser.epilog = EXAMPLE
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    device = actions.add_parser(
        "device", help="matmuls, attention, memory and collectives: writes a calibration"
    )
    device.add_argument("--out", type=Path, metavar="FILE", help="the calibration to write, TOML")
    device.add_argument(
        "--budget", type=float, default=1.5, metavar="S", help="seconds of each measurement"
    )
    add_config_arguments(device)
    add_json(device)

    layouts = actions.add_parser(
        "layouts", help="a step's time and memory under several layouts, beside the prediction"
    )
    layouts.add_argument(
        "--layout", nargs="+", default=[], metavar="LABEL", help="such as 'dp2 mb1'"
    )
    layouts.add_argument("--top", type=int, metavar="N", help="the planner's best instead")
    layouts.add_argument("--rounds", type=int, default=3, help="how often each takes its turn")
    layouts.add_argument("--steps", type=int, default=3, help="steps that count, in each turn")
    layouts.add_argument("--memory", action="store_true", help="also the peak of each rank")
    layouts.add_argument("--shares", action="store_true", help="also where a step's time goes")
    layouts.add_argument("--calibration", type=Path, help="what `bench device` has written")
    layouts.add_argument("--out", type=Path, metavar="FILE", help="write the JSON document there")
    layouts.add_argument("--html", type=Path, metavar="FILE", help="write a page that shows it")
    add_config_arguments(layouts)
    add_json(layouts)

    peers.add_arguments(
        actions.add_parser("peers", help="the same model and modes on the peers that are installed")
    )


def run(args: argparse.Namespace) -> int:
    """Run a subcommand of `bench`, which measures and prints the results; returns the exit code."""
    return {"device": _device, "layouts": _layouts, "peers": peers.run}[args.action](args)


def _device(args: argparse.Namespace) -> int:
    config = read_config(args)
    machine = detect(config.cluster, os.environ)
    case = Case(config.model, config.train, resolve_layout(config, machine))
    request = {
        "what": "device",
        "budget_s": args.budget,
        "device": machine.device,
        "case": case.as_json(),
        "compiles": _compiles(config, machine),
    }
    results: list[dict[str, Any]] = []
    threads = machine.threads(machine.devices)
    measure_on_ranks(request, machine.devices, os.environ, results.append, threads=threads)
    (measured,) = results
    gain = _allocator_gain(request, machine) if measured["is_own"] else None
    if gain is not None:
        measured["constants"][f"blocks.allocator.{config.train.precision}"] = gain
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = source_of(machine, measured, "meshwright bench device")
    blocks = blocks_of(config.model, config.train.seq_len)
    kind = _kind(config, machine, measured["machine"])
    text = as_toml({kind: measured["constants"]}, date, source, blocks, measured["had_core"])
    if args.out:
        write_atomic(args.out, text.encode())
    if args.json:
        print_json({"date": date, "source": source, **measured})
    elif not args.out:
        print(text, end="")
    else:
        _print_device(measured["constants"], source)
    _keep(text, config, machine, os.environ)
    return EXIT_DONE


def _keep(text: str, config: Config, machine: Machine, environ: Mapping[str, str]) -> None:
    """Store a calibration of this machine, unless its number of ranks is not the default."""
    if config.cluster.devices_per_node is not None:
        return
    with contextlib.suppress(RuntimeError):  # no home at all
        path = kept_at(machine, environ)
        if keep(text, path):
            print(f"note: plan, train and others on this machine read {path}", file=sys.stderr)


def _kind(config: Config, machine: Machine, name: str) -> str:
    """Return the kind of the machine's devices under which the catalogue has constants.

    `name` is a GPU's name. For a GPU that the catalogue lacks, it is the kind of the config's
    `cluster.preset`.
    """
    if machine.device != "cuda":
        return machine.device
    device = device_named(name)
    if device is None and config.cluster.preset != "local":
        device = find_device(config.cluster.preset)
    return machine.device if device is None else device.kind


def _compiles(config: Config, machine: Machine) -> bool:
    """Return whether to measure the gain of torch.compile; prints why if that is impossible."""
    if config.train.compile is False:
        return False
    lacks = lacks_compiler(machine.device, os.environ)
    if lacks is not None:
        print(f"note: what compiling gains is not measured: {lacks}", file=sys.stderr)
    return lacks is None


def _allocator_gain(request: Mapping[str, Any], machine: Machine) -> float | None:
    """Return the speed-up of blocks by the allocator settings with which ranks are started.

    None if ranks are started without them. Measured with two launches of the ranks.
    """
    if machine.device != "cpu" or not sets_allocator(os.environ):
        return None
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for keeps in (False, True):
        measure_on_ranks(
            {**request, "what": "blocks"},
            machine.devices,
            os.environ,
            lambda result, keeps=keeps: seconds[keeps].append(result["seconds"]),  # type: ignore[misc]
            threads=machine.threads(machine.devices),
            keeps_memory=keeps,
        )
    return statistics.median(seconds[False]) / statistics.median(seconds[True])


def _print_device(constants: Mapping[str, float], source: str) -> None:
    print(source)
    for name, value in constants.items():
        if name.startswith("peak."):
            print(f"  {name:28} {value / 1e9:10.1f} GFLOP/s")
        elif name == "bandwidth" or ".rate" in name:
            print(f"  {name:28} {value / 1e9:10.2f} GB/s")
        elif any(word in name for word in ("latency", "overhead", "blocks.sum")):
            print(f"  {name:28} {value * 1e6:10.1f} us")
        elif name.startswith("blocks.rows."):
            print(f"  {name:28} {value * 1e6:10.3f} us a token")
        else:
            print(f"  {name:28} {value:10.3f}")


@dataclass
class LayoutRow:
    """A layout with its prediction and its measurements."""

    layout: Layout
    predicted: Prediction
    predicted_bytes: list[int]
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    shares: list[dict[str, float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median step time in seconds."""
        return statistics.median(self.seconds)

    def as_dict(self, tokens: int) -> dict[str, Any]:
        """Return the row as a JSON-ready dict; `tokens` is the number per step."""
        return {
            "layout": self.layout.label,
            "step_time_s": self.median,
            "step_times_s": self.seconds,
            "tokens_per_s": tokens / self.median,
            "predicted_step_time_s": self.predicted.time.total,
            "predicted_seconds": self.predicted.time.causes,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.predicted_bytes if self.peak_bytes else [],
            "shares_s": self.shares,
        }


def _row(setting: CostInputs, layout: Layout) -> LayoutRow:
    """Return a row with the predictions for a layout, without measurements."""
    program = lower(setting.model, setting.train, setting.optimizer, layout, setting.target)
    ranks = range(layout.world)
    peaks = [timeline(program, rank).peak.total for rank in ranks]
    return LayoutRow(layout, price(setting, layout), peaks)


def _layouts(args: argparse.Namespace) -> int:
    config = read_config(args)
    machine = detect(config.cluster, os.environ)
    calibration = read_calibration(args.calibration) if args.calibration else None
    lacks = lacks_compiler(machine.device, os.environ)
    is_cpu = machine.device == "cpu"
    if not is_cpu:
        config = on_machine(config, machine)
    if args.top:
        planned = plan(
            config,
            args.top,
            calibration,
            local_devices=machine.devices,
            lacks=lacks,
            processor=processor(),
        )
        config = planned.config
        layouts = [prediction.layout for prediction in planned.found.ranked]
    else:
        layouts = [Layout.parse(label) for label in args.layout]
    _refuse(config, layouts, machine)
    check_compiler(config.train, lacks)
    setting = cost_inputs_of(config, calibration, layouts[0].world, processor())
    setting = on_cluster(setting, layouts[0])
    rows = [_row(setting, layout) for layout in layouts]
    request = {
        "what": "layouts",
        "device": machine.device,
        "cases": [Case(config.model, config.train, layout).as_json() for layout in layouts],
        "rounds": args.rounds,
        "steps": args.steps,
        "also": [option for option in ("memory", "shares") if getattr(args, option)],
    }

    def take(result: Mapping[str, Any]) -> None:
        row = rows[result["case"]]
        row.seconds += result.get("seconds", [])
        row.peak_bytes = result.get("peak_bytes", row.peak_bytes)
        row.shares = result.get("shares", row.shares)

    world = layouts[0].world
    measure_on_ranks(request, world, os.environ, take, threads=machine.threads(world))
    rows.sort(key=lambda row: row.median)
    tokens = config.train.batch * config.train.seq_len
    document = {"machine": machine.name, "rows": [row.as_dict(tokens) for row in rows]}
    if args.out:
        write_atomic(args.out, (json.dumps(document, indent=1) + "\n").encode())
    if args.html:
        write_atomic(args.html, layouts_page(document).html().encode())
    if args.json:
        print_json(document)
    else:
        Console().print(_table(rows, tokens))
        if args.shares:
            Console().print(_shares(rows))
    return EXIT_DONE


def _shares(rows: Sequence[LayoutRow]) -> Table:
    """Return a table of the time of each layout's slowest rank by cause, in percent."""
    table = Table("share of a step", box=None, pad_edge=False)
    slowest = [max(row.shares, key=lambda share: sum(share.values())) for row in rows]
    for row in rows:
        table.add_column(row.layout.label, justify="right")
    for kind in slowest[0]:
        fractions = [share[kind] / sum(share.values()) for share in slowest]
        if max(fractions) >= 0.0005:
            table.add_row(kind, *(f"{fraction:.1%}" for fraction in fractions))
    return table


def _refuse(config: Config, layouts: Sequence[Layout], machine: Machine) -> None:
    """Raise `ConfigError` if a layout has too many ranks for this machine, or another number.

    All layouts must have the same number of ranks.
    """
    if not layouts:
        raise ConfigError("nothing to measure: name layouts by --layout, or --top N of the plan")
    world = layouts[0].world
    for layout in layouts:
        if layout.world != world:
            raise ConfigError(
                refusal(
                    f"--layout {layout.label!r} has {layout.world} ranks, and the first one "
                    f"{world}: side by side they have the same ranks",
                    legal=[world],
                )
            )
        if machine.is_fixed and world > machine.devices:
            raise ConfigError(
                refusal(
                    f"--layout {layout.label!r} has {world} ranks, but there are "
                    f"{machine.devices} devices",
                    legal=[machine.devices],
                )
            )
        rule = broken(config.model, config.train, layout)
        if rule is not None:
            raise ConfigError(f"--layout {layout.label!r}: {rule}")


def _table(rows: Sequence[LayoutRow], tokens: int) -> Table:
    table = Table("layout", "step", "spread", "predicted", "", "tokens/s", box=None, pad_edge=False)
    has_memory = any(row.peak_bytes for row in rows)
    if has_memory:
        table.add_column("peak")
        table.add_column("predicted")
    for row in rows:
        spread = (max(row.seconds) - min(row.seconds)) / row.median
        cells = [
            row.layout.label,
            format_seconds(row.median),
            f"{spread:.0%}",
            format_seconds(row.predicted.time.total),
            f"{row.predicted.time.total / row.median - 1:+.0%}",
            f"{tokens / row.median:,.0f}",
        ]
        if has_memory:
            worst = max(range(len(row.peak_bytes)), key=row.peak_bytes.__getitem__)
            measured, expected = row.peak_bytes[worst], row.predicted_bytes[worst]
            cells += [format_bytes(measured), f"{expected / measured - 1:+.1%}"]
        table.add_row(*cells)
    return table
