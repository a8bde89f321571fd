"""The page of one run, or of several runs side by side.

The page of a run that failed begins with a banner: the cause, what to do, the command. The page of
several runs says which was the fastest, by how much, and why.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshwright.errors import ConfigError
from meshwright.files import write_atomic
from meshwright.parsing import foreign
from meshwright.program.events import ending
from meshwright.program.profile import CAUSES, StepProfile
from meshwright.report.agreement import MEANINGS, peak_name
from meshwright.report.causes import CAUSE_NAMES, bars, mean_causes
from meshwright.report.curves import compared_curves, run_curves, series
from meshwright.report.expert_load import experts_section
from meshwright.report.figure import (
    MEASURED,
    PREDICTED,
    SERIES,
    byte_unit,
    finite,
    seconds,
    time_unit,
)
from meshwright.report.page import Page, alarm, facts, folded, key_of, notices, prose, table, titled
from meshwright.report.placement import mesh_chart, mesh_words, placement_table
from meshwright.report.record import RunRecord, differing, read_run
from meshwright.report.run_words import headline, peak_memory, run_warnings, verdict
from meshwright.report.steps import step_sections
from meshwright.report.timelines import timeline_chart
from meshwright.units import format_bytes, format_count, format_seconds


def winner(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """Return sentences on the run with the most tokens per second; empty without steps.

    The lead is over the second-fastest run, in medians of logged steps. The reason given is the
    cause that takes the most additional time in that run's recorded step.
    """
    speeds = [statistics.median(rates) if (rates := _speeds(run)) else 0.0 for run in runs]
    order = sorted(range(len(runs)), key=speeds.__getitem__, reverse=True)
    if len(runs) < 2 or not speeds[order[1]]:
        return []
    first, second = order[0], order[1]
    lead = speeds[first] / speeds[second] - 1
    sentences = [
        f"{names[first]} is the fastest: {format_count(speeds[first])} tokens a second, {lead:.0%} "
        f"more than {names[second]}."
    ]
    fastest, runner_up = runs[first].measured, runs[second].measured
    if fastest is None or runner_up is None:
        return sentences
    fastest_causes, runner_up_causes = mean_causes(fastest), mean_causes(runner_up)
    excess = {
        key: runner_up_causes.get(key, 0.0) - fastest_causes.get(key, 0.0)
        for key in {*fastest_causes, *runner_up_causes}
    }
    largest = max(excess, key=excess.__getitem__)
    if excess[largest] > 0:
        fastest_time, runner_up_time = (
            seconds(run_causes.get(largest, 0.0))
            for run_causes in (fastest_causes, runner_up_causes)
        )
        named = CAUSE_NAMES[largest].lower()
        sentences.append(
            f"The largest difference of their recorded steps is {named}: {fastest_time} beside "
            f"{runner_up_time}."
        )
    return sentences


def _speeds(run: RunRecord) -> list[float]:
    return series(run.steps, "tokens_per_s")[1]


# Steps that are looked at together, and by how much a loss may be above the lowest such median.
_WINDOW: Final = 10
_DIVERGED: Final = 1.3
# A run that has written nothing for so many steps, and seconds, was probably killed.
_SILENT_STEPS, _SILENT_S = 20.0, 120.0

# What a failure of each kind is called, and what helps.
_KINDS: Final = {
    "memory": (
        "The run ran out of memory",
        "Plan a layout that fits: more shards, recomputation, a smaller layout.microbatch.",
    ),
    "killed": (
        "A rank was killed",
        "If the system did it because memory ran out, plan a layout that fits; else resume.",
    ),
    "hang": (
        "The run hung",
        "The cause names the ranks that waited. `doctor` shows where each of them was.",
    ),
    "diverged": (
        "The run diverged",
        "Resume with a lower optimizer.lr, train.clip_norm or a longer warm-up.",
    ),
    "other": (
        "The run failed",
        "Mend the cause, then resume: training continues after the last saved step.",
    ),
}


class Banner(NamedTuple):
    """What went wrong with a run, why, what to do, and the commands for it."""

    title: str
    cause: str
    todo: str
    commands: tuple[str, ...]


def banner(run: RunRecord, unix_time: float | None = None) -> Banner | None:
    """Return the banner of a run; None if nothing went wrong or it is still running.

    `unix_time` is the current time in seconds since 1970; None reads the clock.
    """
    folder = shlex.quote(str(run.path.resolve()))
    resume, doctor = f"meshwright train --resume {folder}", f"meshwright doctor {folder}"
    end = ending(run.events)
    if end is not None and end["event"] == "failed":
        kind = str(end.get("kind"))  # earlier versions wrote none
        title, todo = _KINDS.get(kind, _KINDS["other"])
        commands = [doctor, resume]
        if kind in ("memory", "killed"):
            config = shlex.quote(str(run.path.resolve() / "config.toml"))
            commands = [f"meshwright plan {config} --top 5", resume]
        return Banner(title, f"{end['cause']}.", todo, tuple(commands))
    diverged = _diverged(run.steps)
    if diverged is not None:
        todo = "Resume from a step before that with a lower optimizer.lr or another data.seed."
        return Banner("The run diverged", diverged, todo, (resume,))
    silent = _silent(run, time.time() if unix_time is None else unix_time)
    if end is None and silent is not None:
        cause = f"No end is recorded, and nothing was written for {format_seconds(silent)}."
        todo = "If its processes are gone, resume it: training continues after the last saved step."
        return Banner("The run ended without a word", cause, todo, (doctor, resume))
    return None


def _diverged(steps: Sequence[Any]) -> str | None:
    """Return a sentence if the last loss is not finite or far above the lowest, else None."""
    if not steps:
        return None
    last = steps[-1]
    if finite(last.get("loss")) is None:
        return f"The loss of step {last['step']} is {last.get('loss')}."
    xs, losses = series(steps, "loss")
    if len(losses) < 2 * _WINDOW:
        return None
    medians = [
        statistics.median(losses[start : start + _WINDOW])
        for start in range(len(losses) - _WINDOW + 1)
    ]
    lowest = min(medians)
    if medians[-1] <= _DIVERGED * lowest:
        return None
    since = xs[medians.index(lowest) + _WINDOW - 1]
    return f"The loss was {lowest:.3g} at step {since:.0f}, and is {medians[-1]:.3g} at the end."


def _silent(run: RunRecord, unix_time: float) -> float | None:
    """Return the seconds since a run's last event if they exceed what its step time explains.

    None otherwise.
    """
    file = run.path / "events.jsonl"
    times = series(run.steps, "step_time_s")[1]
    if not file.is_file():
        return None
    silence = unix_time - file.stat().st_mtime
    pace = statistics.median(times) if times else 0.0
    return silence if silence > max(_SILENT_S, _SILENT_STEPS * pace) else None


def report(paths: Sequence[Path]) -> str:
    """Return the HTML page of one run folder, or of several side by side.

    Raises `ConfigError` for a folder that is not a run, or has invalid values.
    """
    runs = [read_run(path) for path in paths]
    if not runs:
        raise ConfigError("no run folder is given")
    with foreign(" and ".join(map(str, paths)), ConfigError):
        return (run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)).html()


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of one or several runs, by default to the first one's folder; return its path.

    Raises `ConfigError` for a folder that is not a run, `OSError` if the page cannot be written.
    """
    file = out or paths[0] / "report" / "index.html"
    html = report(paths).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, html)
    return file


def run_page(run: RunRecord) -> Page:
    """Return the page of one run."""
    label = f"layout {run.layout.label}" if run.layout else "layout unknown"
    page = Page(f"Run {run.name}", f"{label}; {run.start.get('device', 'device unknown')}")
    ended = banner(run)
    page.section(
        "headline",
        "At a glance",
        alarm(*ended) if ended else "",
        facts(headline(run)),
        prose(*verdict(run)),
        prose(f"Layout: {mesh_words(run.layout)}." if run.layout else ""),
        notices(run_warnings(run)),
        notices([(text, "") for text in run.missing]),
    )
    page.section("curves", "Learning", *run_curves(page, run))
    experts_section(page, run)
    if run.program is not None:
        page.section(
            "layout",
            "Layout",
            mesh_chart(page, run.program),
            folded("Placement of the parameters, by module", placement_table(run.program)),
        )
    step_sections(page, run.planned, run.measured, run.layout, run.cluster)
    page.section("config", "Config and files", *_config(run))
    return page


def _config(run: RunRecord) -> list[str]:
    rows = [
        (
            f"{section}.{key}",
            "–" if value is None else value,
            run.origins.get(f"{section}.{key}", "?"),
        )
        for section, values in run.values.items()
        for key, value in values.items()
    ]
    given = [row for row in rows if row[2] not in ("default", "?")]
    headers = ("key", "value", "from")
    start = run.start
    versions = [("torch", start.get("torch")), ("device", start.get("device"))]
    versions += [(name, value) for name, value in run.machine.items()]
    files = [
        (str(path.relative_to(run.path)), format_bytes(path.stat().st_size))
        for path in sorted(run.path.glob("*"))
        if path.is_file()
    ]
    return [
        table(headers, given, caption="Values that are not defaults, and where each comes from")
        if given
        else "",
        folded(f"All {len(rows)} values", table(headers, rows)) if rows else "",
        folded("Machine and versions", table(("what", "is"), versions)),
        folded("Files", table(("file", "size"), files)),
        prose(f"Folder: {run.path.resolve()}"),
    ]


def comparison_page(runs: Sequence[RunRecord]) -> Page:
    """Return the page of several runs side by side."""
    names = _names(runs)
    page = Page(f"{len(runs)} runs side by side", ", ".join(names))
    summary = prose(*winner(runs, names))
    page.section("headline", "At a glance", summary, _overview(runs, names), *_ailing(runs, names))
    rows = [(key, *values) for key, values in differing(runs)]
    page.section(
        "config",
        "What differs in their configs",
        table(("key", *names), rows) if rows else prose("Nothing differs."),
    )
    page.section("curves", "Learning", *compared_curves(page, runs, names))
    page.section("time", "Step time", compared_causes(page, _measured(runs), names))
    page.section("memories", "Memory", _peaks(page, runs, names))
    profiles = [profile for run in runs for profile in (run.planned, run.measured) if profile]
    longest = max((profile.step_time_s or 0.0 for profile in profiles), default=0.0)
    charts = [
        timeline_chart(page, [run.planned, run.measured], f"timeline-{index}", longest)
        for index, run in enumerate(runs)
    ]
    each_titled = [titled(name, chart) for name, chart in zip(names, charts, strict=True) if chart]
    page.section("steps", "Timelines", *each_titled)
    missing = [
        (f"{name}: {text}", "")
        for run, name in zip(runs, names, strict=True)
        for text in run.missing
    ]
    page.section("missing", "What is missing", notices(missing))
    return page


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return a distinct name for each run: its folder, with its parent or a number if needed."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(run.path.resolve().parts[-2:]) for run in runs]
    return (
        names
        if len(set(names)) == len(names)
        else [f"{index + 1}: {name}" for index, name in enumerate(names)]
    )


def _overview(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    facts_of = [{name: value for name, value, _ in headline(run)} for run in runs]
    keys = list(dict.fromkeys(key for run_facts in facts_of for key in run_facts))
    rows: list[tuple[Any, ...]] = [
        ("Layout", *(run.layout.label if run.layout else None for run in runs)),
        *((key, *(run_facts.get(key) for run_facts in facts_of)) for key in keys),
        ("Idle pipeline", *(_idle(run.measured) for run in runs)),
        ("How it ended", *(verdict(run)[0] for run in runs)),
    ]
    return table(("what", *names), rows, caption="The runs in numbers")


def _idle(profile: StepProfile | None) -> str | None:
    return f"{profile.idle:.1%}" if profile and profile.idle is not None else None


def _ailing(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    warnings = [
        (f"{name}: {problem}", todo)
        for run, name in zip(runs, names, strict=True)
        for problem, todo in [*_banner(run), *run_warnings(run)]
    ]
    return [notices(warnings)]


def _banner(run: RunRecord) -> list[tuple[str, str]]:
    ended = banner(run)
    return [(f"{ended.title}: {ended.cause}", ended.todo)] if ended else []


def _measured(runs: Sequence[RunRecord]) -> list[StepProfile | None]:
    return [run.measured for run in runs]


def compared_causes(
    page: Page, profiles: Sequence[StepProfile | None], names: Sequence[str], name: str = "causes"
) -> str:
    """Return the chart of several runs' step time by cause, or "" if fewer than two are known."""
    known = [
        (name, means)
        for name, profile in zip(names, profiles, strict=True)
        if (means := mean_causes(profile))
    ]
    if len(known) < 2:
        return ""
    causes = [cause for cause in CAUSES if any(cause in means for _, means in known)]
    unit, scale = time_unit(max(value for _, means in known for value in means.values()))
    sides = [
        (
            run,
            SERIES[index % len(SERIES)],
            [means.get(cause, 0.0) * scale for cause in causes],
            [seconds(means.get(cause, 0.0)) for cause in causes],
        )
        for index, (run, means) in enumerate(known)
    ]
    rows = [
        (CAUSE_NAMES[cause], *(seconds(means.get(cause, 0.0)) for _, means in known))
        for cause in causes
    ]
    rows.append(("step", *(seconds(sum(means.values())) for _, means in known)))
    drawn = bars(
        [CAUSE_NAMES[c] for c in causes], sides, f"time of a step, {unit}", row=18 * len(known) + 12
    )
    return page.chart(
        name,
        "Step time by cause",
        drawn,
        "Of the recorded step, the mean of the ranks.",
        table(("cause", *(run for run, _ in known)), rows),
        key=key_of([(run, look) for run, look, _, _ in sides]),
    )


def _peaks(page: Page, runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return the chart of each run's peak memory, from step profiles or else from events."""
    sides = [("predicted", PREDICTED), ("measured", MEASURED)]
    profiles = [(run.planned, run.measured) for run in runs]
    peaks = [
        [profile.worst.peak if profile and profile.worst else None for profile in side_profiles]
        for side_profiles in zip(*profiles, strict=True)
    ]
    values = [[peak.total if peak else None for peak in side_peaks] for side_peaks in peaks]
    known = [peak for side_peaks in peaks for peak in side_peaks if peak]
    name = peak_name(known[-1]) if known else ""
    if not known:
        run_peaks = [peak_memory(run) for run in runs]
        if not any(run_peaks):
            return ""
        name = next(run_peak[2] for run_peak in run_peaks if run_peak)
        sides, values = sides[1:], [[run_peak[1] if run_peak else None for run_peak in run_peaks]]
    unit, unit_bytes = byte_unit(
        max(value for side_values in values for value in side_values if value)
    )
    shown = [
        (
            side,
            look,
            [value / unit_bytes if value else None for value in side_values],
            [format_bytes(value) if value else "" for value in side_values],
        )
        for (side, look), side_values in zip(sides, values, strict=True)
    ]
    texts = [printed for _, _, _, printed in shown]
    rows = [
        (name, *(side_texts[index] for side_texts in texts)) for index, name in enumerate(names)
    ]
    return page.chart(
        "peaks",
        f"{name.capitalize()} of the worst rank",
        bars(names, shown, f"peak, {unit}", row=24 * len(shown) + 10),
        f"{MEANINGS[name].capitalize()}, on the rank that needs most, in each run.",
        table(("run", *(side for side, _ in sides)), rows),
        key=key_of(sides),
    )
