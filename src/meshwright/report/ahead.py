"""Pages of what has not run: a plan, a simulation, and layouts that were run side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.predict.price import Prediction
from meshwright.predict.profile import predicted_profile
from meshwright.predict.setting import Setting
from meshwright.program.lower import Program, lower
from meshwright.program.profile import StepProfile
from meshwright.report.causes import CAUSE_NAMES, bars, stacked
from meshwright.report.colours import CAUSE_LOOKS, INK, MEASURED, PREDICTED, SOFT
from meshwright.report.curves import line, lines
from meshwright.report.figure import byte_unit, seconds, time_unit
from meshwright.report.page import (
    Page,
    commands,
    facts,
    folded,
    grid,
    key_of,
    notices,
    prose,
    table,
)
from meshwright.report.peaks import PROCESS, TENSORS, peak_name
from meshwright.report.placement import mesh_chart, mesh_words, placement_table
from meshwright.report.steps import step_sections
from meshwright.report.words import profile_warnings
from meshwright.search.advice import lost_by, warnings
from meshwright.search.plan import Plan
from meshwright.spec.parts import parameter_count
from meshwright.spec.words import HAS_RUN
from meshwright.units import counted, format_bytes, format_count


def plan_page(
    made: Plan, curve: Sequence[Mapping[str, Any]] = (), command: str | None = None
) -> Page:
    """Return the page of a plan: a step of its winner, why the others lost, how to train it.

    `curve` has the best layout of other numbers of devices, as `Point.as_json` says it; `command`
    is what trains the winner.
    """
    setting, best = made.setting, made.best
    predicted = predicted_profile(setting, best.layout) if best else None
    devices = f"{setting.cluster.devices} x {setting.cluster.device.name}"
    page = Page(f"Plan for {devices}", _asked(setting))
    page.section(
        "headline",
        "At a glance",
        facts(_winner(made, best, predicted)) if best else "",
        prose(f"Best: `{best.layout.label}`: {mesh_words(best.layout)}.") if best else _unfit(made),
        notices([(text[0].upper() + text[1:] + ".", "") for text in warnings(best, setting)])
        if best
        else "",
    )
    page.section("ranked", "Layouts, ranked", *_ranked(page, made))
    if any(one["fits"] for one in curve):
        page.section("devices", "More and fewer devices", _curve(page, curve))
    if best is not None:
        program = lower(setting.model, setting.train, best.layout, setting.target)
        _layout(page, program)
        step_sections(page, predicted, None, best.layout, setting.cluster)
    source = setting.calibration.source
    page.section("source", "What it rests on", prose(f"Calibration: {source}.", HAS_RUN))
    if command is not None:
        page.section("train", "Train it", prose("This trains the best layout:"), commands(command))
    return page


def _asked(setting: Setting) -> str:
    train, cluster = setting.train, setting.cluster
    count = format_count(parameter_count(setting.model))
    nodes = f"{cluster.per_node} a node by {cluster.inner.name}, then {cluster.outer.name}"
    return (
        f"{count} parameters; batch {train.batch} x {train.seq_len} tokens, {train.precision}; "
        f"{nodes}"
    )


def _winner(
    made: Plan, best: Prediction, predicted: StepProfile | None
) -> list[tuple[str, str, str]]:
    held = best.memory
    share = f"of {format_bytes(held.limit)} on the worst rank, {held.total / held.limit:.0%}"
    each = format_count(best.tokens_per_s / best.layout.world)
    worst = predicted.worst if predicted else None
    name = peak_name(worst.peak) if worst and worst.peak else PROCESS
    return [
        (
            "Parameters",
            format_count(parameter_count(made.setting.model)),
            made.setting.model.family,
        ),
        ("Devices", f"{best.layout.world}", made.setting.cluster.device.name),
        ("Step", seconds(best.time.total), "predicted"),
        ("Tokens a second", format_count(best.tokens_per_s), f"{each} a device"),
        ("MFU", f"{best.mfu:.1%}", f"{best.tflops_per_device:.0f} TFLOP/s a device"),
        (name.capitalize(), format_bytes(held.total), share),
    ]


def _unfit(made: Plan) -> str:
    held, layout = made.found.unfit, made.found.unfit_layout
    nearest = ""
    if held is not None and layout is not None:
        nearest = (
            f"Nearest is `{layout.label}`, which needs {format_bytes(held.total)} of "
            f"{format_bytes(held.limit)}."
        )
    return notices([("No layout fits.", nearest)])


def _curve(page: Page, points: Sequence[Mapping[str, Any]]) -> str:
    """Return the chart of tokens a second over the number of devices."""
    fitting = [one for one in points if one["fits"]]
    xs = [float(one["devices"]) for one in fitting]
    ideal = [fitting[0]["tokens_per_s"] * at / xs[0] for at in xs]
    drawn = lines(
        [
            line("in step with the first", xs, ideal, SOFT, line={"dash": "dot"}),
            line("tokens/s", xs, [one["tokens_per_s"] for one in fitting], INK),
        ],
        "tokens/s",
        280,
        x_title="devices",
    )
    rows = [
        (
            str(one["devices"]),
            one["label"],
            format_bytes(one["peak_memory_bytes"]),
            format_count(one["tokens_per_s"]),
            f"{one['mfu']:.1%}",
            f"{one['takes']['days']:.3g}",
            "-" if one["takes"]["cost"] is None else f"{one['takes']['cost']:,.4g}",
        )
        if one["fits"]
        else (str(one["devices"]), "no layout fits", *"-----")
        for one in points
    ]
    tokens = format_count(fitting[0]["takes"]["tokens"])
    heads = ("devices", "layout", "memory", "tokens/s", "MFU", "days", "cost")
    return page.chart(
        "devices-curve",
        "Tokens per second by the number of devices",
        drawn,
        f"The best layout of each number; days and cost are those of {tokens} tokens.",
        table(heads, rows),
    ) + table(heads, rows)


def _ranked(page: Page, made: Plan) -> list[str]:
    ranked, best = made.found.ranked, made.best
    reasons = table(
        ("reason", "layouts"),
        [(reason, f"{count:,}") for reason, count in made.found.reasons.items()],
        caption=f"Ruled out, of {made.found.considered:,} legal layouts",
    )
    if best is None:
        return [reasons]
    rows = [
        (
            one.layout.label,
            format_bytes(one.memory.total),
            seconds(one.time.total),
            format_count(one.tokens_per_s),
            f"{one.mfu:.1%}",
            "best" if one is best else lost_by(one, best),
        )
        for one in ranked
    ]
    causes = {one.layout.label: one.time.causes for one in ranked}
    drawn, used = stacked(
        causes, [f"{seconds(one.time.total)}, {one.mfu:.1%} MFU" for one in ranked]
    )
    listed = table(("layout", "memory", "step", "tokens/s", "MFU", "why not"), rows)
    chart = page.chart(
        "ranking",
        "Predicted time of a step",
        drawn,
        "The best layout of each division of the devices. The first is the one to take: where "
        "another is a little faster, the first is simpler.",
        table(
            ("layout", *(CAUSE_NAMES[cause] for cause in used)),
            [
                (label, *(seconds(found.get(cause, 0.0)) for cause in used))
                for label, found in causes.items()
            ],
        ),
        key=key_of([(CAUSE_NAMES[cause], CAUSE_LOOKS[cause]) for cause in used]),
    )
    return [chart, listed, reasons]


def _layout(page: Page, program: Program) -> None:
    page.section(
        "layout",
        "Layout",
        mesh_chart(page, program),
        folded("Placement of the parameters, by module", placement_table(program)),
    )


def simulation_page(
    program: Program,
    setting: Setting,
    predicted: StepProfile | None,
    simulated: StepProfile,
    differences: Mapping[int, Sequence[str]],
    breaches: Sequence[str],
) -> Page:
    """Return the page of a simulation: simulated ranks beside what was predicted of them.

    `differences` are by rank what is not the program's; `breaches` say where memory runs out.
    """
    layout = program.layout
    page = Page(f"Simulation of {layout.world} ranks", f"{_asked(setting)}; {layout.label}")
    worst = simulated.worst
    peak = worst.peak if worst else None
    said = [
        (f"Rank {rank}: {text}", "") for rank, found in differences.items() for text in found[:6]
    ]
    told = (
        ["Every message and every FLOP of the simulated ranks is the program's."]
        if not said
        else []
    )
    numbers = [
        ("Parameters", format_count(parameter_count(program.model)), program.model.family),
        ("Ranks", f"{layout.world}", f"{len(simulated.ranks)} of them simulated"),
        ("Microbatches", f"{program.microbatches}", f"of {counted(layout.microbatch, 'sequence')}"),
    ]
    if worst is not None and peak is not None:
        limit = simulated.memory_limit
        of_limit = f", {peak.total / limit:.0%} of the limit" if limit else ""
        beside = f"rank {worst.rank} at {peak.at}{of_limit}"
        numbers.append((peak_name(peak).capitalize(), format_bytes(peak.total), beside))
    page.section(
        "headline",
        "At a glance",
        facts(numbers),
        prose(f"Layout: {mesh_words(layout)}.", *told),
        notices([(text, "") for text in breaches]),
        notices(said),
        notices(profile_warnings(predicted, simulated)),
    )
    _layout(page, program)
    step_sections(page, predicted, simulated, layout, setting.cluster)
    return page


def layouts_page(document: Mapping[str, Any]) -> Page:
    """Return the page of `bench layouts --json`: predicted beside measured, the fastest first."""
    rows = sorted(document["rows"], key=lambda row: row["step_time_s"])
    page = Page(f"{len(rows)} layouts side by side", str(document["machine"]))
    names = [row["layout"] for row in rows]
    unit, scale = time_unit(max(max(r["step_time_s"], r["predicted_step_time_s"]) for r in rows))
    off = [row["predicted_step_time_s"] / row["step_time_s"] - 1 for row in rows]
    sides = [
        (
            "predicted",
            PREDICTED,
            [row["predicted_step_time_s"] * scale for row in rows],
            [
                f"{seconds(row['predicted_step_time_s'])} ({by:+.0%})"
                for row, by in zip(rows, off, strict=True)
            ],
        ),
        (
            "measured",
            MEASURED,
            [row["step_time_s"] * scale for row in rows],
            [f"{seconds(row['step_time_s'])} ± {_spread(row):.0%}" for row in rows],
        ),
    ]
    listed = table(
        ("layout", "step", "fastest to slowest", "predicted", "off by", "tokens/s"),
        [
            (
                row["layout"],
                seconds(row["step_time_s"]),
                f"{seconds(min(row['step_times_s']))} to {seconds(max(row['step_times_s']))}",
                seconds(row["predicted_step_time_s"]),
                f"{by:+.0%}",
                format_count(row["tokens_per_s"]),
            )
            for row, by in zip(rows, off, strict=True)
        ],
    )
    worst = max(off, key=abs)
    times = rows[-1]["step_time_s"] / rows[0]["step_time_s"]
    page.section(
        "headline",
        "At a glance",
        prose(
            f"Fastest is `{names[0]}`, {times:.2f} times as fast as the slowest. Predictions are "
            f"off by {sum(map(abs, off)) / len(off):.0%} on average, by {worst:+.0%} at most."
        ),
        page.chart(
            "layouts",
            "Time of a step, predicted beside measured",
            bars(names, sides, f"time of a step, {unit}", row=46),
            "Medians of steps that took turns, so that the machine's noise hits all alike; ± is "
            "half of the distance between the fastest step and the slowest.",
            listed,
            key=key_of([(name, look) for name, look, _, _ in sides]),
        ),
        listed,
    )
    page.section("memories", "Memory", grid(_peaks(page, rows)))
    return page


def _spread(row: Mapping[str, Any]) -> float:
    times = row["step_times_s"]
    return float((max(times) - min(times)) / row["step_time_s"] / 2)


def _peaks(page: Page, rows: Sequence[Mapping[str, Any]]) -> str:
    known = [row for row in rows if row.get("peak_bytes")]
    if not known:
        return ""
    measured = [max(row["peak_bytes"]) for row in known]
    expected = [max(row["predicted_peak_bytes"]) for row in known]
    unit, size = byte_unit(max(*measured, *expected))
    sides = [
        (name, look, [value / size for value in values], [format_bytes(v) for v in values])
        for name, look, values in (
            ("predicted", PREDICTED, expected),
            ("measured", MEASURED, measured),
        )
    ]
    names = [row["layout"] for row in known]
    found = [
        (name, format_bytes(ours), format_bytes(theirs), f"{ours / theirs - 1:+.1%}")
        for name, ours, theirs in zip(names, expected, measured, strict=True)
    ]
    return page.chart(
        "peaks",
        f"{TENSORS.capitalize()} of the worst rank",
        bars(names, sides, f"peak, {unit}", row=46),
        "Tensors alone, on the rank that needs most.",
        table(("layout", "predicted", "measured", "off by"), found),
        key=key_of([(name, look) for name, look, _, _ in sides]),
    )
