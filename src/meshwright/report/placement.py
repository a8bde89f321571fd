"""The layout as a picture of its mesh, and the placement of each parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

from meshwright.layout import Layout
from meshwright.layout.mesh import AXES
from meshwright.program.lower import Program
from meshwright.program.shards import Sharding, data_rank
from meshwright.report.colours import BLACK, PAPER, PLACES, SOFT, blend
from meshwright.report.figure import Figure, axis, figure, note
from meshwright.report.page import Page, prose, table
from meshwright.units import format_bytes, format_count

_FP32: Final = 4
# Columns and rows of the picture: what can be read on a screen.
MOST_COLUMNS: Final = 32
MOST_ROWS: Final = 32
# Columns that there is always room for, so that few ranks are no wide bars.
_ROOMY: Final = 12
# Pixels of the cells on a telephone.
_NARROW: Final = 250
_AXIS_NAMES: Final = {
    "pp": "pipeline",
    "dp_replicate": "replicas",
    "dp_shard": "data shards",
    "cp": "context",
    "tp": "tensor",
}

_LETTERS: Final = {"dp_replicate": "r", "dp_shard": "s", "cp": "c", "tp": "t"}


def mesh_words(layout: Layout) -> str:
    """Return a layout in words: `pipeline 4 x tensor 2 = 8 ranks, ...`."""
    degrees = [f"{_AXIS_NAMES[one]} {n}" for one in AXES if (n := layout.mesh.degree(one)) > 1]
    ranks = "1 rank" if layout.world == 1 else f"{layout.world} ranks"
    words = [f"{' × '.join(degrees)} = {ranks}" if degrees else ranks]
    if layout.is_pipelined:
        words.append(f"schedule {layout.schedule}")
    if layout.virtual_stages > 1:
        words.append(f"{layout.virtual_stages} stages a rank")
    if layout.zero:
        words.append(f"ZeRO-{layout.zero}")
    if layout.sp:
        words.append("sequence parallel")
    if layout.cp > 1:
        words.append(f"{layout.cp_kind} attention")
    words.append(f"{layout.microbatch} sequence{'s' * (layout.microbatch > 1)} a microbatch")
    if layout.recompute != "none":
        words.append(f"{layout.recompute} recompute")
    if layout.offload != "none":
        words.append(f"{layout.offload} on the host")
    return ", ".join(words)


class _Cell(NamedTuple):
    rank: int
    part: tuple[int, int]
    hover: str


def mesh_chart(page: Page, program: Program, name: str = "mesh") -> str:
    """Return the picture of which rank holds which part, and its table."""
    layout = program.layout
    columns = list(_columns(layout))
    shown = columns[: _fitting(layout)]
    rows = range(min(layout.pp, MOST_ROWS))
    cells = [[_cell(program, row, column) for column in shown] for row in rows]
    told = (
        "Each cell is a rank, each row a place in the pipeline. Ranks of the same colour hold the "
        "same parameters; a darker or lighter shade is another part of them."
    )
    if len(columns) > 1:
        degrees = ((one, layout.mesh.degree(one)) for one in AXES[1:])
        words = [f"{_LETTERS[one]} is {_AXIS_NAMES[one]}" for one, degree in degrees if degree > 1]
        told += f" Above the columns: {', '.join(words)}."
    if len(shown) < len(columns):
        told += (
            f" Of {len(columns)} columns the first {len(shown)} are drawn, whole groups of "
            f"neighbours; the other {len(columns) - len(shown)} go on alike."
        )
    kinds = [(place, _stage_words(program, place)) for place in range(layout.pp)]
    numbers = table(
        ("pipeline place", "stages and layers", "ranks", "parameters of the stages"),
        [
            (place, words, _ranks(layout, place), format_count(_stage_parameters(program, place)))
            for place, words in kinds
        ],
    )
    return page.chart(
        name, "Which rank holds which part", _mesh(program, shown, cells), told, numbers
    )


def _columns(layout: Layout) -> Iterator[dict[str, int]]:
    """Yield the coordinates of the ranks of one pipeline place, in the order of the mesh."""
    axes = AXES[1:]
    for at in product(*(range(layout.mesh.degree(one)) for one in axes)):
        yield dict(zip(axes, at, strict=True))


def _fitting(layout: Layout) -> int:
    """Return how many columns are drawn: whole groups of neighbours, as there is room."""
    count = layout.world // layout.pp
    if count <= MOST_COLUMNS:
        return count
    whole = 1
    for axis_name in reversed(AXES[1:]):
        degree = layout.mesh.degree(axis_name)
        if whole * degree > MOST_COLUMNS:
            return whole * max(MOST_COLUMNS // whole, 1)
        whole *= degree
    return whole


def _cell(program: Program, place: int, column: Mapping[str, int]) -> _Cell:
    layout = program.layout
    at = {"pp": place, **column}
    rank = layout.mesh.rank(at)
    part = (
        at["tp"],
        data_rank(layout, at) if layout.zero else data_rank(layout, at) % layout.expert_data,
    )
    where = ", ".join(f"{one} {at[one]}" for one in AXES if layout.mesh.degree(one) > 1)
    held = _held(program, place, part)
    lines = [f"<b>rank {rank}</b>", where, _stage_words(program, place)]
    lines.append(f"weights of {format_count(held)} parameters, trained here")
    if layout.tp > 1:
        lines.append(f"tensor part {at['tp'] + 1} of {layout.tp}")
    if layout.shard_ranks > 1:
        lines.append(f"shard {part[1] + 1} of {layout.shard_ranks}")
    return _Cell(rank, part, "<br>".join(line for line in lines if line))


def _held(program: Program, place: int, part: tuple[int, int]) -> int:
    """Return the parameters whose optimizer states a rank keeps."""
    return sum(
        math.prod(program.shardings[name].shape(*part))
        for stage in program.held(place)
        for name in program.parameters(stage)
    )


def _stage_parameters(program: Program, place: int) -> int:
    return sum(
        program.shardings[name].part.numel
        for stage in program.held(place)
        for name in program.parameters(stage)
    )


def _stage_words(program: Program, place: int) -> str:
    """Return what the stages of a pipeline place are: `stage 0: embedding, layers 0 to 3`."""
    words = []
    for stage in program.held(place):
        parts = ["embedding"] if stage.is_first else []
        if len(stage.layers) == 1:
            parts.append(f"layer {stage.first_layer}")
        elif stage.layers:
            parts.append(f"layers {stage.first_layer} to {stage.stop_layer - 1}")
        parts += ["norm and head"] if stage.is_last else []
        words.append(f"stage {stage.index}: {', '.join(parts)}")
    if len(words) > 5:
        words[2:-1] = [f"{len(words) - 3} stages more"]
    return "; ".join(words)


def _ranks(layout: Layout, place: int) -> str:
    size = layout.world // layout.pp
    first = place * size
    return str(first) if size == 1 else f"{first} to {first + size - 1}"


def _mesh(
    program: Program, columns: Sequence[Mapping[str, int]], cells: Sequence[Sequence[_Cell]]
) -> Figure:
    layout = program.layout
    kinds = sorted({cell.part for row in cells for cell in row})
    colours = [
        blend(PLACES[row % len(PLACES)], PAPER, 0.7 * kind / max(len(kinds), 2))
        for row in range(len(cells))
        for kind in range(len(kinds))
    ]
    index = {kind: at for at, kind in enumerate(kinds)}
    last = max(len(colours) - 1, 1)
    scale = [[at / last, colour] for at, colour in enumerate(colours)]
    if len(colours) == 1:
        scale = [[0, colours[0]], [1, colours[0]]]
    names = [_column_name(layout, column) for column in columns]
    side = max(22, min(44, 560 // max(len(cells), 1)))
    data = {
        "type": "heatmap",
        "z": [[row * len(kinds) + index[c.part] for c in line] for row, line in enumerate(cells)],
        "zmin": 0,
        "zmax": last,
        "colorscale": scale,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "text": [[str(cell.rank) for cell in line] for line in cells],
        "texttemplate": "%{text}",
        "textfont": {"size": 11 if len(columns) <= 16 else 9.5, "color": BLACK},
        "customdata": [[cell.hover for cell in line] for line in cells],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    ticks = _ticks(names)
    rows = [_row_name(program, place) for place in range(len(cells))]
    return figure(
        [data],
        side * len(cells) + 36,
        annotations=_labels(program, len(columns), len(cells)),
        margin={"t": 26, "b": 8, "l": 60},
        xaxis=axis(
            side="top",
            linecolor="rgba(0,0,0,0)",
            range=[-0.5, max(len(columns), _ROOMY) - 0.5],
            tickvals=ticks,
            ticktext=[names[at] for at in ticks],
            fixedrange=True,
            showgrid=False,
            ticks="",
            tickangle=0,
        ),
        yaxis=axis(
            range=[len(cells) - 0.5, -0.5],
            tickvals=list(range(len(cells))),
            ticktext=rows,
            fixedrange=True,
            showgrid=False,
            ticks="",
        ),
    )


def _labels(program: Program, columns: int, rows: int) -> list[dict[str, Any]]:
    """Return what the stages hold, right of the cells where these leave room for it."""
    if columns > _ROOMY // 2:
        return []
    place = {"xanchor": "left", "xshift": 8}
    return [
        note(
            f"{format_count(_stage_parameters(program, row))} parameters",
            columns - 0.5,
            row,
            SOFT,
            **place,
        )
        for row in range(rows)
    ]


def _column_name(layout: Layout, column: Mapping[str, int]) -> str:
    return " ".join(
        f"{letter}{column[one]}" for one, letter in _LETTERS.items() if layout.mesh.degree(one) > 1
    )


def _ticks(names: Sequence[str]) -> list[int]:
    """Return which columns are named: all, or so many that names do not touch on a narrow page."""
    if not any(names):
        return []
    slot = _NARROW / max(len(names), _ROOMY)
    step = math.ceil((6.4 * max(map(len, names)) + 10) / slot)
    return list(range(0, len(names), step))


def _row_name(program: Program, place: int) -> str:
    stages = program.held(place)
    first, last = stages[0], stages[-1]
    if len(stages) > 3:
        return f"{len(stages)} stages"
    if len(stages) > 1:
        return "stages " + ", ".join(str(stage.index) for stage in stages)
    if program.layout.pp == 1:
        return "all layers"
    return f"layers {first.first_layer}–{last.stop_layer - 1}"


def placement_table(program: Program) -> str:
    """Return the placement of parameters, with one row for those of all layers."""
    layout = program.layout
    groups: dict[str, list[Sharding]] = {}
    for name, found in program.shardings.items():
        groups.setdefault(re.sub(r"^layers\.\d+\.", "layers.*.", name), []).append(found)
    rows = [_placed(name, found, layout) for name, found in groups.items()]
    headers = ("parameter", "shape", "times", "cut over tp", "cut over data", "on", "a rank holds")
    copies = layout.world // layout.pp
    return prose(
        "What is trained: weights in fp32 as the optimizer sees them. ",
        f"A stage lies on {copies} ranks." if copies > 1 else "Each stage lies on one rank.",
    ) + table(headers, rows, caption="Placement of the parameters, by module")


def _placed(name: str, found: Sequence[Sharding], layout: Layout) -> tuple[Any, ...]:
    one = found[0]
    shape = " × ".join(f"{size:,}" for size in one.part.shape)
    tp = (
        f"dim {one.tp_dim} ({one.part.axes[one.tp_dim]}) in {one.tp}"
        if one.tp_dim is not None
        else "–"
    )
    data = f"dim 0 in {one.shard_ranks}" if one.shard_ranks > 1 else "–"
    held = math.prod(one.shape(0, 0)) * _FP32
    copies = layout.world // layout.pp // one.distinct
    kept = f"{copies} cop{'y' if copies == 1 else 'ies'}"
    return name, shape, len(found), tp, data, kept, format_bytes(held)
