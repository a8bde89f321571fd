"""Charts over steps of one or several runs: loss, gradient norm, learning rate, throughput."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshwright.report.figure import (
    HATCH,
    HELD_OUT,
    INK,
    SERIES,
    SOFT,
    Figure,
    Look,
    axis,
    bounds,
    end_label,
    escape,
    figure,
    finite,
    spread,
    thin,
)
from meshwright.report.page import Page, grid, key_of, table
from meshwright.report.record import RunRecord
from meshwright.units import format_count

_HIGH, _LOW = 320, 190
# Pixels between the labels of two lines.
_GAP: Final = 15
# Steps whose median is shown over a noisy curve; fewer points are shown as they are.
_WINDOW: Final = 15


def series(events: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Return the steps and the values of a key of events, without non-finite values."""
    pairs = [(float(e["step"]), finite(e.get(key))) for e in events]
    known = [(step, value) for step, value in pairs if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def line(
    name: str, xs: Sequence[float], ys: Sequence[float], colour: str, **properties: Any
) -> Any:
    """Return a plotly line trace, thinned to the resolution of a screen."""
    style = {"color": colour, "width": 2, **properties.pop("line", {})}
    mode = "lines+markers" if len(xs) <= 24 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": escape(name),
        "x": thin(xs),
        "y": thin(ys),
        "line": style,
        "marker": {"size": 5, "color": style["color"]},
        "hovertemplate": f"{escape(name)}: %{{y:.5g}}<extra></extra>",
        **properties,
    }


def smooth(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Return the running median of values; towards both ends its window becomes smaller.

    The window always has as many values before as after, so that a falling curve does not begin
    below its first value.
    """
    last = len(values) - 1
    halves = [min(window // 2, index, last - index) for index in range(len(values))]
    return [
        statistics.median(values[index - half : index + half + 1])
        for index, half in enumerate(halves)
    ]


def lines(
    traces: Sequence[dict[str, Any]],
    title: str,
    height: int,
    x_title: str = "step",
    labels: bool = True,
    **y: Any,
) -> Figure:
    """Return a figure of line traces, each labelled at its end; labels do not overlap.

    `y` are options of the y axis.
    """
    low, high = y.pop("range", None) or bounds(v for trace in traces for v in trace["y"])
    last = max((trace["x"][-1] for trace in traces if trace["x"]), default=1.0)
    first = min((trace["x"][0] for trace in traces if trace["x"]), default=0.0)
    named = (
        [trace for trace in traces if trace["x"] and trace.get("hoverinfo") != "skip"]
        if labels
        else []
    )
    gap = (high - low) * _GAP / (height - 60)
    ends = spread([min(max(trace["y"][-1], low), high) for trace in named], gap, low, high)
    notes = [
        end_label(trace["name"], label_y, trace["line"]["color"])
        for trace, label_y in zip(named, ends, strict=True)
    ]
    longest = max((len(trace["name"]) for trace in named), default=0)
    return figure(
        traces,
        height,
        hovermode="x unified",
        annotations=notes,
        margin={"r": min(18 + round(6.4 * longest), 150) if labels else 16, "b": 42, "l": 52},
        xaxis=axis(x_title, range=[first, last if last > first else first + 1], showgrid=False),
        yaxis=axis(title, range=[low, high], **y),
    )


def run_curves(page: Page, run: RunRecord) -> list[str]:
    """Return the charts of one run as HTML; empty if it has no step."""
    steps, evals = run.steps, run.by_step("eval")
    if not steps:
        return []
    first = _loss_chart(page, run, steps, evals)
    small = [
        _small(page, steps, key, *texts)
        for key, texts in {
            "grad_norm": ("Gradient norm, before clipping", "norm", "norm"),
            "lr": ("Learning rate", "learning rate", "rate"),
            "tokens_per_s": ("Throughput", "tokens/s", "speed"),
            "data_time_share": ("Waiting for data, worst rank", "share of the step", "input"),
        }.items()
    ]
    return [first, grid(*small)]


def _loss_chart(
    page: Page,
    run: RunRecord,
    steps: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
) -> str:
    xs, ys = series(steps, "loss")
    if not xs:
        return ""
    traces = []
    if len(xs) > 3 * _WINDOW:
        raw = line("each step", xs, ys, HATCH, line={"width": 1}, hoverinfo="skip")
        traces = [{key: value for key, value in raw.items() if key != "hovertemplate"}]
        ys = smooth(ys)
    traces.append(line("training", xs, ys, INK))
    held_out_steps, held_out_losses = series(evals, "loss")
    if held_out_steps:
        traces.append(
            line("held out", held_out_steps, held_out_losses, HELD_OUT, mode="lines+markers")
        )
    entropy = finite(run.start.get("unigram_entropy"))
    caption = "Nats for each target token."
    if len(traces) > 1 and traces[0]["name"] == "each step":
        caption += f" Grey: each logged step; dark: the median of {_WINDOW}, of fewer at the ends."
    if entropy is not None:
        ends = [xs[0], max([xs[-1], *held_out_steps])]
        dashed = {"dash": "dash", "width": 1.5}
        traces.append(line("unigram", ends, [entropy, entropy], SOFT, line=dashed, mode="lines"))
        caption += " Unigram: what a model reaches that only knows how frequent each token is."
    values = dict(zip(held_out_steps, held_out_losses, strict=True))
    rows = [
        (event["step"], _short(event.get("loss")), _short(values.get(event["step"])))
        for event in thin(steps, 60)
    ]
    drawn = lines(traces, "loss, nats a token", _HIGH)
    return page.chart("loss", "Loss", drawn, caption, table(("step", "training", "held out"), rows))


def _small(
    page: Page, steps: Sequence[Mapping[str, Any]], key: str, title: str, unit: str, name: str
) -> str:
    xs, ys = series(steps, key)
    if not xs:
        return ""
    y_options: dict[str, Any] = {}
    if key == "data_time_share":
        y_options = {"tickformat": ".0%", "range": [0, max(0.05, *ys) * 1.1]}
    elif key in ("tokens_per_s", "lr"):
        y_options = {"range": [0, max(ys) * 1.1 or 1.0]}
    drawn = lines([line(title, xs, ys, INK)], unit, _LOW, labels=False, **y_options)
    last, usual = ys[-1], statistics.median(ys)
    printed = _percent if key == "data_time_share" else _short
    shown_unit = " tokens/s" if key == "tokens_per_s" else ""
    caption = f"Last {printed(last)}{shown_unit}, median {printed(usual)}{shown_unit}."
    rows = [(event["step"], printed(event.get(key))) for event in thin(steps, 60)]
    return page.chart(name, title, drawn, caption, table(("step", unit), rows))


def _percent(value: Any) -> str | None:
    number = finite(value)
    return None if number is None else f"{number:.1%}"


def _short(value: Any) -> str | None:
    number = finite(value)
    if number is None:
        return None if value is None else str(value)
    return format_count(number) if abs(number) >= 1e4 else f"{number:.4g}"


def compared_curves(page: Page, runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """Return charts of several runs overlaid: loss by step and by time, and throughput."""
    by_step, by_time, speed, rows, looks = [], [], [], [], []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        steps, look = run.steps, SERIES[index % len(SERIES)]
        xs, ys = series(steps, "loss")
        if not xs:
            continue
        shown = smooth(ys) if len(ys) > 3 * _WINDOW else ys
        by_step.append(_run_line(name, xs, shown, look))
        by_time.append(_run_line(name, _elapsed(steps, xs), shown, look))
        speed.append(_run_line(name, *series(steps, "tokens_per_s"), look))
        rates = series(steps, "tokens_per_s")[1]
        median = format_count(statistics.median(rates)) if rates else None
        looks.append((name, look))
        rows.append((name, int(xs[-1]), _short(ys[-1]), median))
    if not by_step:
        return []
    numbers = table(("run", "last step", "last loss", "median tokens/s"), rows)
    key = key_of(looks, is_lines=True)
    highest = max((max(t["y"]) for t in speed if t["y"]), default=1.0)
    caption = "Nats per token. Runs that compute the same coincide: only the last one is visible."
    unit = "tokens/s"
    return [
        grid(
            page.chart(
                "loss-step",
                "Loss by step",
                lines(by_step, "loss, nats a token", _HIGH, labels=False),
                caption,
                numbers,
                key=key,
            ),
            page.chart(
                "loss-time",
                "Loss by time",
                lines(by_time, "loss, nats a token", _HIGH, "seconds of steps", labels=False),
                "The same over the seconds that the steps took: evaluation and saving left out.",
                numbers,
                key=key,
            ),
        ),
        page.chart(
            "speed",
            "Throughput",
            lines(speed, unit, 230, labels=False, range=[0, highest * 1.1]),
            "Tokens a second over all ranks.",
            numbers,
            key=key,
        ),
    ]


def _run_line(name: str, xs: Sequence[float], ys: Sequence[float], look: Look) -> Any:
    return line(name, xs, ys, look.colour, line={"dash": look.dash})


def _elapsed(steps: Sequence[Mapping[str, Any]], wanted: Sequence[float]) -> list[float]:
    """Return the training time in seconds up to each of the `wanted` steps.

    A step event has the mean step time since the previous event.
    """
    total, last_step, elapsed = 0.0, 0.0, {}
    for event in steps:
        total += (finite(event.get("step_time_s")) or 0.0) * (event["step"] - last_step)
        last_step = event["step"]
        elapsed[float(event["step"])] = total
    return [elapsed[step] for step in wanted]
