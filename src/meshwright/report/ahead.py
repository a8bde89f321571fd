"""Pages of a simulation, and of layouts that were measured side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cost.inputs import CostInputs
from meshwright.program.lower import Program
from meshwright.program.profile import StepProfile
from meshwright.report.agreement import TENSORS, peak_name
from meshwright.report.causes import bars
from meshwright.report.figure import MEASURED, PREDICTED, byte_unit, seconds, time_unit
from meshwright.report.page import (
    Page,
    facts,
    folded,
    grid,
    key_of,
    notices,
    prose,
    table,
)
from meshwright.report.placement import mesh_chart, mesh_words, placement_table
from meshwright.report.run_words import profile_warnings
from meshwright.report.steps import step_sections
from meshwright.spec.parts import parameter_count
from meshwright.units import counted, format_bytes, format_count


def _asked(setting: CostInputs) -> str:
    train, cluster = setting.train, setting.cluster
    count = format_count(parameter_count(setting.model))
    return (
        f"{count} parameters; batch {train.batch} x {train.seq_len} tokens, {train.precision}; "
        f"{cluster.topology}"
    )


def _layout(page: Page, program: Program) -> None:
    page.section(
        "layout",
        "Layout",
        mesh_chart(page, program),
        folded("Placement of the parameters, by module", placement_table(program)),
    )


def simulation_page(
    program: Program,
    setting: CostInputs,
    predicted: StepProfile | None,
    simulated: StepProfile,
    differences: Mapping[int, Sequence[str]],
    breaches: Sequence[str],
) -> Page:
    """Return the page of a simulation, which shows simulated ranks beside their prediction.

    `differences` lists by rank how it differs from the program; `breaches` are sentences on ranks
    that run out of memory.
    """
    layout = program.layout
    page = Page(f"Simulation of {layout.world} ranks", f"{_asked(setting)}; {layout.label}")
    worst = simulated.worst
    peak = worst.peak if worst else None
    difference_notes = [
        (f"Rank {rank}: {text}", "") for rank, texts in differences.items() for text in texts[:6]
    ]
    no_difference = (
        ["Every message and every FLOP of the simulated ranks is the program's."]
        if not difference_notes
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
        context = f"rank {worst.rank} at {peak.at}{of_limit}"
        numbers.append((peak_name(peak).capitalize(), format_bytes(peak.total), context))
    page.section(
        "headline",
        "At a glance",
        facts(numbers),
        prose(f"Layout: {mesh_words(layout)}.", *no_difference),
        notices([(text, "") for text in breaches]),
        notices(difference_notes),
        notices(profile_warnings(predicted, simulated)),
    )
    _layout(page, program)
    step_sections(page, predicted, simulated, layout, setting.cluster)
    return page


def layouts_page(document: Mapping[str, Any]) -> Page:
    """Return the page of `bench layouts --json`: predicted beside measured, fastest first."""
    rows = sorted(document["rows"], key=lambda row: row["step_time_s"])
    page = Page(f"{len(rows)} layouts side by side", str(document["machine"]))
    names = [row["layout"] for row in rows]
    unit, scale = time_unit(max(max(r["step_time_s"], r["predicted_step_time_s"]) for r in rows))
    errors = [row["predicted_step_time_s"] / row["step_time_s"] - 1 for row in rows]
    sides = [
        (
            "predicted",
            PREDICTED,
            [row["predicted_step_time_s"] * scale for row in rows],
            [
                f"{seconds(row['predicted_step_time_s'])} ({error:+.0%})"
                for row, error in zip(rows, errors, strict=True)
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
        ("layout", "step", "fastest to slowest", "predicted", "error", "tokens/s"),
        [
            (
                row["layout"],
                seconds(row["step_time_s"]),
                f"{seconds(min(row['step_times_s']))} to {seconds(max(row['step_times_s']))}",
                seconds(row["predicted_step_time_s"]),
                f"{error:+.0%}",
                format_count(row["tokens_per_s"]),
            )
            for row, error in zip(rows, errors, strict=True)
        ],
    )
    page.section(
        "headline",
        "At a glance",
        prose(_fastest(rows, errors)),
        page.chart(
            "layouts",
            "Time of a step, predicted and measured",
            bars(names, sides, f"time of a step, {unit}", row=46),
            "Medians of alternating steps, so that the machine's noise affects all alike; ± is "
            "half of the distance between the fastest step and the slowest.",
            listed,
            key=key_of([(name, look) for name, look, _, _ in sides]),
        ),
        listed,
    )
    page.section("memories", "Memory", grid(_peaks(page, rows)))
    return page


def _fastest(rows: Sequence[Mapping[str, Any]], errors: Sequence[float]) -> str:
    """Return sentences on the fastest layout, and on the errors of the predictions.

    `rows` are sorted by measured time; `errors` are relative.
    """
    worst, ratio = max(errors, key=abs), rows[-1]["step_time_s"] / rows[0]["step_time_s"]
    return (
        f"Fastest is `{rows[0]['layout']}`, {ratio:.2f} times as fast as the slowest. The mean "
        f"error of the predictions is {sum(map(abs, errors)) / len(errors):.0%}; the largest is "
        f"{abs(worst):.0%} too {'long' if worst > 0 else 'short'}."
    )


def _spread(row: Mapping[str, Any]) -> float:
    times = row["step_times_s"]
    return float((max(times) - min(times)) / row["step_time_s"] / 2)


def _peaks(page: Page, rows: Sequence[Mapping[str, Any]]) -> str:
    known = [row for row in rows if row.get("peak_bytes")]
    if not known:
        return ""
    measured = [max(row["peak_bytes"]) for row in known]
    expected = [max(row["predicted_peak_bytes"]) for row in known]
    unit, unit_bytes = byte_unit(max(*measured, *expected))
    sides = [
        (name, look, [value / unit_bytes for value in values], [format_bytes(v) for v in values])
        for name, look, values in (
            ("predicted", PREDICTED, expected),
            ("measured", MEASURED, measured),
        )
    ]
    names = [row["layout"] for row in known]
    peak_rows = [
        (
            name,
            format_bytes(predicted_peak),
            format_bytes(measured_peak),
            f"{predicted_peak / measured_peak - 1:+.1%}",
        )
        for name, predicted_peak, measured_peak in zip(names, expected, measured, strict=True)
    ]
    return page.chart(
        "peaks",
        f"{TENSORS.capitalize()} of the worst rank",
        bars(names, sides, f"peak, {unit}", row=46),
        "Tensors alone, on the rank that needs most.",
        table(("layout", "predicted", "measured", "error"), peak_rows),
        key=key_of([(name, look) for name, look, _, _ in sides]),
    )
