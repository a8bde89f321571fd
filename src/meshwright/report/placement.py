"""Draws a layout's mesh of ranks, and tabulates the placement of each parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

from meshwright.layout import Layout
from meshwright.layout.layout import AXES
from meshwright.program.lower import Program
from meshwright.program.shards import Sharding, data_rank
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.report.figure import BLACK, PAPER, PLACES, SOFT, Figure, axis, blend, figure, note
from meshwright.report.page import Page, prose, table
from meshwright.units import format_bytes, format_count

# Columns and rows of the picture: what can be read on a screen.
MOST_COLUMNS: Final = 32
MOST_ROWS: Final = 32
# Columns that there is always room for, so that few ranks are not wide bars.
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
    """Return a layout in words, such as `pipeline 4 × tensor 2 = 8 ranks, schedule 1f1b`."""
    degrees = [
        f"{_AXIS_NAMES[axis_name]} {degree}"
        for axis_name in AXES
        if (degree := layout.mesh.degree(axis_name)) > 1
    ]
    ranks = "1 rank" if layout.world == 1 else f"{layout.world} ranks"
    phrases = [f"{' × '.join(degrees)} = {ranks}" if degrees else ranks]
    if layout.is_pipelined:
        phrases.append(f"schedule {layout.schedule}")
    if layout.virtual_stages > 1:
        phrases.append(f"{layout.virtual_stages} stages a rank")
    if layout.zero:
        phrases.append(f"ZeRO-{layout.zero}")
    if layout.sp:
        phrases.append("sequence parallel")
    if layout.cp > 1:
        phrases.append(f"{layout.cp_kind} attention")
    phrases.append(f"{layout.microbatch} sequence{'s' * (layout.microbatch > 1)} a microbatch")
    if layout.recompute != "none":
        phrases.append(f"{layout.recompute} recompute")
    if layout.offload != "none":
        phrases.append(f"{layout.offload} on the host")
    return ", ".join(phrases)


class _Cell(NamedTuple):
    rank: int
    part: tuple[int, int]
    hover: str


def mesh_chart(page: Page, program: Program, name: str = "mesh") -> str:
    """Return the chart of which rank holds which shard of which stages, with its table."""
    layout = program.layout
    columns = list(_columns(layout))
    shown = columns[: _fitting(layout)]
    rows = range(min(layout.pp, MOST_ROWS))
    cells = [[_cell(program, row, column) for column in shown] for row in rows]
    caption = (
        "Each cell is a rank, each row a place in the pipeline. Ranks of the same colour hold the "
        "same parameters; a darker or lighter shade is another part of them."
    )
    if len(columns) > 1:
        degrees = ((axis_name, layout.mesh.degree(axis_name)) for axis_name in AXES[1:])
        letters = [
            f"{_LETTERS[axis_name]} is {_AXIS_NAMES[axis_name]}"
            for axis_name, degree in degrees
            if degree > 1
        ]
        caption += f" Above the columns: {', '.join(letters)}."
    if len(shown) < len(columns):
        caption += (
            f" Of {len(columns)} columns the first {len(shown)} are drawn, whole groups of "
            f"neighbours; the other {len(columns) - len(shown)} go on alike."
        )
    kinds = [(pp_rank, _stage_words(program, pp_rank)) for pp_rank in range(layout.pp)]
    numbers = table(
        ("pipeline place", "stages and layers", "ranks", "parameters of the stages"),
        [
            (
                pp_rank,
                stages,
                _ranks(layout, pp_rank),
                format_count(_stage_parameters(program, pp_rank)),
            )
            for pp_rank, stages in kinds
        ],
    )
    return page.chart(
        name, "Which rank holds which part", _mesh(program, shown, cells), caption, numbers
    )


def _columns(layout: Layout) -> Iterator[dict[str, int]]:
    """Yield the mesh coordinates, apart from pp, of the ranks of one pipeline stage, in order."""
    axes = AXES[1:]
    for position in product(*(range(layout.mesh.degree(axis_name)) for axis_name in axes)):
        yield dict(zip(axes, position, strict=True))


def _fitting(layout: Layout) -> int:
    """Return how many ranks per pipeline stage to draw: as many whole groups of an axis as fit."""
    count = layout.world // layout.pp
    if count <= MOST_COLUMNS:
        return count
    group_columns = 1
    for axis_name in reversed(AXES[1:]):
        degree = layout.mesh.degree(axis_name)
        if group_columns * degree > MOST_COLUMNS:
            return group_columns * max(MOST_COLUMNS // group_columns, 1)
        group_columns *= degree
    return group_columns


def _cell(program: Program, pp_rank: int, column: Mapping[str, int]) -> _Cell:
    layout = program.layout
    coordinates = {"pp": pp_rank, **column}
    rank = layout.mesh.rank(coordinates)
    part = (
        coordinates["tp"],
        data_rank(layout, coordinates)
        if layout.zero
        else data_rank(layout, coordinates) % layout.expert_data,
    )
    position = ", ".join(
        f"{axis_name} {coordinates[axis_name]}"
        for axis_name in AXES
        if layout.mesh.degree(axis_name) > 1
    )
    parameters = _held(program, pp_rank, part)
    lines = [f"<b>rank {rank}</b>", position, _stage_words(program, pp_rank)]
    lines.append(f"weights of {format_count(parameters)} parameters, trained here")
    if layout.tp > 1:
        lines.append(f"tensor part {coordinates['tp'] + 1} of {layout.tp}")
    if layout.shard_ranks > 1:
        lines.append(f"shard {part[1] + 1} of {layout.shard_ranks}")
    return _Cell(rank, part, "<br>".join(line for line in lines if line))


def _held(program: Program, pp_rank: int, part: tuple[int, int]) -> int:
    """Return the number of parameters whose optimizer states a rank stores.

    `part` is the rank's coordinates in the sharding.
    """
    return sum(
        math.prod(program.shardings[name].shape(*part))
        for stage in program.held(pp_rank)
        for name in program.parameters(stage)
    )


def _stage_parameters(program: Program, pp_rank: int) -> int:
    return sum(
        program.shardings[name].part.numel
        for stage in program.held(pp_rank)
        for name in program.parameters(stage)
    )


def _stage_words(program: Program, pp_rank: int) -> str:
    """Return in words what a pipeline rank's stages contain: `stage 0: embedding, layers 0 to 3`.

    Stages in the middle of a long list are only counted.
    """
    descriptions = []
    for stage in program.held(pp_rank):
        contents = ["embedding"] if stage.is_first else []
        if len(stage.layers) == 1:
            contents.append(f"layer {stage.first_layer}")
        elif stage.layers:
            contents.append(f"layers {stage.first_layer} to {stage.stop_layer - 1}")
        contents += ["norm and head"] if stage.is_last else []
        descriptions.append(f"stage {stage.index}: {', '.join(contents)}")
    if len(descriptions) > 5:
        descriptions[2:-1] = [f"{len(descriptions) - 3} stages more"]
    return "; ".join(descriptions)


def _ranks(layout: Layout, pp_rank: int) -> str:
    count = layout.world // layout.pp
    first = pp_rank * count
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


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
    index = {kind: number for number, kind in enumerate(kinds)}
    last = max(len(colours) - 1, 1)
    scale = [[number / last, colour] for number, colour in enumerate(colours)]
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
    row_names = [_row_name(program, pp_rank) for pp_rank in range(len(cells))]
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
            ticktext=[names[number] for number in ticks],
            fixedrange=True,
            showgrid=False,
            ticks="",
            tickangle=0,
        ),
        yaxis=axis(
            range=[len(cells) - 0.5, -0.5],
            tickvals=list(range(len(cells))),
            ticktext=row_names,
            fixedrange=True,
            showgrid=False,
            ticks="",
        ),
    )


def _labels(program: Program, columns: int, rows: int) -> list[dict[str, Any]]:
    """Return annotations with each pipeline rank's number of parameters, if there is space."""
    if columns > _ROOMY // 2:
        return []
    anchor = {"xanchor": "left", "xshift": 8}
    return [
        note(
            f"{format_count(_stage_parameters(program, row))} parameters",
            columns - 0.5,
            row,
            SOFT,
            **anchor,
        )
        for row in range(rows)
    ]


def _column_name(layout: Layout, column: Mapping[str, int]) -> str:
    return " ".join(
        f"{letter}{column[axis_name]}"
        for axis_name, letter in _LETTERS.items()
        if layout.mesh.degree(axis_name) > 1
    )


def _ticks(names: Sequence[str]) -> list[int]:
    """Return the indices of columns to label, so that labels do not overlap on a narrow page."""
    if not any(names):
        return []
    slot = _NARROW / max(len(names), _ROOMY)
    step = math.ceil((6.4 * max(map(len, names)) + 10) / slot)
    return list(range(0, len(names), step))


def _row_name(program: Program, pp_rank: int) -> str:
    stages = program.held(pp_rank)
    first, last = stages[0], stages[-1]
    if len(stages) > 3:
        return f"{len(stages)} stages"
    if len(stages) > 1:
        return "stages " + ", ".join(str(stage.index) for stage in stages)
    if program.layout.pp == 1:
        return "all layers"
    return f"layers {first.first_layer}–{last.stop_layer - 1}"


def placement_table(program: Program) -> str:
    """Return a table of how parameters are sharded, with one row for a parameter of all layers."""
    layout = program.layout
    groups: dict[str, list[Sharding]] = {}
    for name, sharding in program.shardings.items():
        groups.setdefault(re.sub(r"^layers\.\d+\.", "layers.*.", name), []).append(sharding)
    element = ELEMENT_BYTES[program.train.weight_dtype]
    rows = [_placed(name, shardings, layout, element) for name, shardings in groups.items()]
    headers = ("parameter", "shape", "times", "cut over tp", "cut over data", "on", "a rank holds")
    copies = layout.world // layout.pp
    return prose(
        f"What is trained: weights in {program.train.weight_dtype} as the optimizer sees them. ",
        f"A stage lies on {copies} ranks." if copies > 1 else "Each stage lies on one rank.",
    ) + table(headers, rows, caption="Placement of the parameters, by module")


def _placed(
    name: str, shardings: Sequence[Sharding], layout: Layout, element: int
) -> tuple[Any, ...]:
    sharding = shardings[0]
    shape = " × ".join(f"{size:,}" for size in sharding.part.shape)
    tp = (
        f"dim {sharding.tp_dim} ({sharding.part.axes[sharding.tp_dim]}) in {sharding.tp}"
        if sharding.tp_dim is not None
        else "–"
    )
    data = f"dim 0 in {sharding.shard_ranks}" if sharding.shard_ranks > 1 else "–"
    rank_bytes = math.prod(sharding.shape(0, 0)) * element
    copies = layout.world // layout.pp // sharding.distinct
    copies_text = f"{copies} cop{'y' if copies == 1 else 'ies'}"
    return name, shape, len(shardings), tp, data, copies_text, format_bytes(rank_bytes)
