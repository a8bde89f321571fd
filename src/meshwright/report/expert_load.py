"""Charts of the tokens per expert, by layer and over time, and of the busiest rank's excess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshwright.program.events import dropped_share
from meshwright.program.profile import StepProfile
from meshwright.report.causes import mean_causes
from meshwright.report.curves import line, lines, series
from meshwright.report.figure import INK, TOKENS, Figure, axis, figure, finite, thin
from meshwright.report.page import Page, grid, prose, table
from meshwright.report.record import RunRecord
from meshwright.units import counted

_HIGH: Final = 220
# Dead experts that are named; more are counted.
_NAMED: Final = 12


def experts_section(page: Page, run: RunRecord) -> None:
    """Add a section on a run's `experts` events to the page, if there are any."""
    events = run.by_step("experts")
    if not events:
        return
    last = events[-1]
    charts = [
        _curve(page, events, key, *texts)
        for key, texts in {
            "excess": ("Busiest rank above the mean", "excess"),
            "expert_excess": ("Busiest expert above the mean", "busiest-expert"),
        }.items()
        if key == "expert_excess" or (run.layout is not None and run.layout.ep > 1)
    ]
    maps = _map(page, last), _map_over_time(page, events)
    page.section("experts", "Experts", prose(*words(last, run)), *maps, grid(*charts))


def words(event: Mapping[str, Any], run: RunRecord) -> list[str]:
    """Return sentences on an `experts` event."""
    if event.get("routing") == "balanced":
        return [
            'Balance was forced: with train.routing = "balanced" tokens meet experts in turn, '
            "whatever their scores. Times are those of an even routing; the model is of no use."
        ]
    sentences = []
    busiest, excess = finite(event.get("expert_excess")), finite(event.get("excess"))
    first, steps = event["step"] - event.get("steps", 1) + 1, event["step"]
    if busiest is not None:
        sentences.append(
            f"In steps {first} to {steps} the busiest expert of a layer met {1 + busiest:.2f} "
            "times the mean number of tokens."
        )
    ep = 1 if run.layout is None else run.layout.ep
    if excess is not None and ep > 1:
        sentences.append(
            f"The busiest of {ep} ranks that share out the experts computed {excess:.0%} more than "
            f"the mean, for which the others waited{_cost(run.measured)}."
        )
    if share := dropped_share(event):
        sentences.append(
            f"{share:.1%} of the pairs of a token and its expert were dropped, since the expert "
            "was full: train.expert_capacity is what it takes of a sequence, in even shares."
        )
    dead = event["dead"]
    total = sum(len(row) for row in event["tokens"])
    if dead:
        named = ", ".join(f"{expert} of layer {layer}" for layer, expert in dead[:_NAMED])
        suffix = f" and {len(dead) - _NAMED} more" if len(dead) > _NAMED else ""
        sentences.append(
            f"{len(dead)} of {counted(total, 'expert')} met no token: {named}{suffix}. "
            "train.router_aux_loss (0.01, say) has tokens meet all."
        )
    else:
        sentences.append(f"Each of {counted(total, 'expert')} met tokens.")
    return sentences


def _cost(measured: StepProfile | None) -> str:
    """Return a phrase on the share of a measured step spent on ep messages, or "" without one."""
    if measured is None:
        return ""
    causes = mean_causes(measured)
    total = sum(causes.values())
    share = causes.get("ep", 0.0) / total if total else 0.0
    return f" (messages to experts and waits for them: {share:.0%} of the measured step)"


def _map(page: Page, event: Mapping[str, Any]) -> str:
    """Return a heat map of tokens by layer and expert, relative to an equal share (1)."""
    tokens_by_layer = event["tokens"]
    shares = [
        [count * len(counts) / total if (total := sum(counts)) else 0.0 for count in counts]
        for counts in tokens_by_layer
    ]
    caption = (
        "Tokens of each expert in the last reported steps, divided by the mean of its layer: 1 is "
        "an equal share, 0 an expert without tokens."
    )
    headers = ("layer", *(str(expert) for expert in range(len(tokens_by_layer[0]))))
    layers = event["layers"]
    listed = [(layer, *counts) for layer, counts in zip(layers, tokens_by_layer, strict=True)]
    shown = table(headers, thin(listed, 60)) if len(tokens_by_layer[0]) <= 64 else ""
    heat = _heat(shares, layers, ("layer", "expert"), range(len(tokens_by_layer[0])))
    return page.chart("experts-map", "Tokens by expert", heat, caption, shown)


def _map_over_time(page: Page, events: Sequence[Mapping[str, Any]]) -> str:
    """Return a heat map of tokens by expert and step, for the least balanced layer at the end."""
    shown_events, last = thin(events, 120), events[-1]
    if len(shown_events) < 2:
        return ""
    busiest_shares = [max(row) / max(sum(row), 1) for row in last["tokens"]]
    layer_index = busiest_shares.index(max(busiest_shares))
    layer = last["layers"][layer_index]
    tokens_by_step = [event["tokens"][layer_index] for event in shown_events]
    shares = [
        [row[expert] * len(row) / max(sum(row), 1) for row in tokens_by_step]
        for expert in range(len(tokens_by_step[0]))
    ]
    caption = (
        f"Tokens of each expert of layer {layer}, whose busiest expert met most at last, over "
        "their mean, in the steps up to each event."
    )
    steps = [event["step"] for event in shown_events]
    heat = _heat(shares, range(len(shares)), ("expert", "step"), steps)
    return page.chart(
        "experts-by-step", f"Tokens by expert of layer {layer}, by step", heat, caption, ""
    )


def _heat(
    shares: Sequence[Sequence[float]],
    rows: Sequence[int],
    names: tuple[str, str],
    columns: Sequence[int],
) -> Figure:
    """Return a heat map figure; `names` name its axes, `rows` and `columns` label them."""
    down, along = names
    highest = max(2.0, *(share for row in shares for share in row))
    side = max(8, min(28, 480 // len(shares)))
    data = {
        "type": "heatmap",
        "x": list(columns),
        "z": [list(row) for row in shares],
        "zmin": 0,
        "zmax": highest,
        "colorscale": [[0, TOKENS[0]], [1e-6, TOKENS[1]], [1, TOKENS[2]]],
        "colorbar": {"thickness": 10, "outlinewidth": 0},
        "hovertemplate": f"{along} %{{x}}, {down} %{{customdata}}: %{{z:.2f}} of an equal share"
        "<extra></extra>",
        "customdata": [[number] * len(row) for number, row in zip(rows, shares, strict=True)],
    }
    places = thin(range(len(rows)), 16)
    return figure(
        [data],
        side * len(shares) + 60,
        margin={"t": 8, "b": 40, "l": 60},
        xaxis=axis(along, showgrid=False),
        yaxis=axis(
            down,
            autorange="reversed",
            showgrid=False,
            tickvals=places,
            ticktext=[str(rows[row_index]) for row_index in places],
        ),
    )


def _curve(page: Page, events: Sequence[Mapping[str, Any]], key: str, title: str, name: str) -> str:
    xs, ys = series(events, key)
    if not xs:
        return ""
    y_options: dict[str, Any] = {"tickformat": ".0%", "range": [0, max(0.1, *ys) * 1.1]}
    drawn = lines([line(title, xs, ys, INK)], "above the mean", _HIGH, labels=False, **y_options)
    rows = [(event["step"], f"{finite(event.get(key)) or 0:.1%}") for event in thin(events, 60)]
    caption = f"Last {ys[-1]:.0%}."
    return page.chart(name, title, drawn, caption, table(("step", "above the mean"), rows))
