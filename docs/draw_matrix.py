"""Writes `records/support-matrix.md` and its picture from the table of `prove --matrix`.

    python docs/draw_matrix.py

A test compares both with the table.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from meshwright.layout.schedules import SCHEDULES
from meshwright.prove.case import Case
from meshwright.prove.matrix import WORLDS, matrix
from meshwright.prove.refused import refuse
from meshwright.spec.optimizers import OPTIMIZERS

PAGE = Path(__file__).parent / "records" / "support-matrix.md"
PICTURE = Path(__file__).parent / "images" / "support-matrix.svg"

HEAD = """\
# Support matrix

[`meshwright prove --matrix`](../commands/prove.md) runs each of these layouts on local ranks and
compares it with one device. `make prove` runs all of them. On CPUs, ranks sum by themselves under
ZeRO; PyTorch's FSDP2 shards the layouts with `fsdp2`, as it does all of them on GPUs.
`docs/draw_matrix.py` generates this page and its picture from the same table (`prove/matrix.py`),
and a test checks that both are current.

![Number of proven layouts by model family and parallelism, and by pairs of parallelisms](../images/support-matrix.svg)
"""


def parallelisms(case: Case) -> Iterator[str]:
    """Yield the names of the parallelisms that a layout uses."""
    layout = case.layout
    if layout.dp_replicate > 1:
        yield "dp"
    if layout.zero and layout.shard_ranks > 1:
        yield f"ZeRO-{layout.zero}"
    if case.fsdp2:
        yield "FSDP2"
    if layout.tp > 1:
        yield "tp + sp" if layout.sp else "tp"
    if layout.cp > 1:
        yield layout.cp_kind
    if layout.pp > 1:
        yield "pp"
    if layout.ep > 1:
        yield "ep"
    if layout.recompute != "none":
        yield f"{layout.recompute} recompute"
    if layout.offload != "none":
        yield f"offload {layout.offload}"
    if case.train.precision != "fp32":
        yield case.train.precision


NAMES = (
    *("dp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "tp", "tp + sp", "ring", "ulysses", "pp", "ep"),
    *("full recompute", "selective recompute", "offload optimizer", "offload params"),
    *("bf16", "fp16"),
)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def combined(cases: Sequence[Case]) -> Counter[tuple[str, str]]:
    """Return how many layouts use both of two parallelisms."""
    together: Counter[tuple[str, str]] = Counter()
    for case in cases:
        found = list(parallelisms(case))
        together.update((a, b) for a in found for b in found)
    return together


def pairs(cases: Sequence[Case]) -> str:
    """Return the table of how many layouts use both of two parallelisms."""
    together = combined(cases)
    rows = [
        [f"**{a}**", *(together[a, b] or "" for b in NAMES[: at + 1])] for at, a in enumerate(NAMES)
    ]
    width = len(NAMES) + 1
    return table(["", *NAMES], [row + [""] * (width - len(row)) for row in rows])


def schedules(cases: Sequence[Case]) -> str:
    """Return the table of how many layouts have a schedule, and with what."""
    some = [case for case in cases if case.layout.is_pipelined]
    others = [name for name in NAMES if name != "pp"]
    rows = []
    for schedule in SCHEDULES:
        of_it = [case for case in some if case.layout.schedule == schedule]
        found = Counter(name for case in of_it for name in parallelisms(case))
        microbatches = {c.train.batch // c.layout.dp // c.layout.microbatch for c in of_it}
        counts = ", ".join(map(str, sorted(microbatches)))
        rows.append([f"`{schedule}`", len(of_it), counts, *(found[name] or "" for name in others)])
    return table(["schedule", "layouts", "microbatches", *others], rows)


WAYS = ("dp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "HSDP", "tp", "tp + sp", "pp", "ep")
OFFLOADS = ("offload optimizer", "offload params")


def optimizer(case: Case) -> str:
    """Return the optimizer, and what is unusual about what it keeps."""
    name = OPTIMIZERS[case.optimizer.name].label
    return ", ".join(
        (name, *(word for word in case.optimizer_words if word != case.optimizer.name))
    )


def optimizers(cases: Sequence[Case]) -> str:
    """Return the table of how many layouts have an optimizer, and how their weights are sharded."""
    rows = []
    for name in dict.fromkeys(map(optimizer, cases)):
        of_it = [case for case in cases if optimizer(case) == name]
        found = Counter(way for case in of_it for way in parallelisms(case))
        found["HSDP"] = sum(
            case.layout.zero > 0 and min(case.layout.dp_replicate, case.layout.dp_shard) > 1
            for case in of_it
        )
        rows.append([name, len(of_it), *(found[way] or "" for way in (*WAYS, *OFFLOADS))])
    return table(["optimizer", "layouts", *WAYS, *OFFLOADS], rows)


def listed(cases: Sequence[Case]) -> str:
    """Return the table of the layouts, one a line."""
    rows = [
        [
            f"`{case.layout.label}`",
            *case.label.rpartition(", ")[2:],
            optimizer(case),
        ]
        for case in cases
    ]
    return table(["layout", "model, batch", "optimizer"], rows)


def refusals(cases: Sequence[Case]) -> str:
    """Return the table of what is refused, why, and what is near."""
    rows = []
    for case in cases:
        nearest = ", ".join(f"`{text}`" for text in refuse(case).nearest)
        rows.append([f"`{case.layout.label}`", case.refused, nearest])
    return table(["layout", "rule", "nearest legal"], rows)


def draw() -> str:
    """Return the page."""
    found = {world: matrix(world) for world in WORLDS}
    legal = {world: [c for c in cases if c.refused is None] for world, cases in found.items()}
    everything = [case for cases in legal.values() for case in cases]
    counts = ", ".join(f"{len(cases)} on {world} ranks" for world, cases in legal.items())
    parts = [
        HEAD,
        f"{len(everything)} layouts: {counts}.\n",
        "## What is combined\n\nThe number of layouts that use both; on the diagonal, that use it at all.\n",
        pairs(everything),
        "\n## Schedules\n",
        schedules(everything),
        "\n## Optimizers\n\nHSDP is ZeRO with replicas of the sharding ranks.\n",
        optimizers(everything),
        "\n## What is refused\n\nEach rule is broken once, on 8 ranks.\n",
        refusals([case for case in found[8] if case.refused is not None]),
    ]
    for world, cases in legal.items():
        opened = f'<details markdown="1">\n<summary>{len(cases)} layouts</summary>\n'
        parts += [f"\n## The layouts of {world} ranks\n", opened, listed(cases), "\n</details>"]
    return "\n".join(parts) + "\n"


CELL = 48, 26
LEFT, TOP = 150, 140
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #111827 }
.head { font-size: 16px; font-weight: 600 } .cell { text-anchor: middle } .row { text-anchor: end }
.none { fill: #6b7280; text-anchor: middle }"""


def grid(rows: Sequence[str], counts: Mapping[tuple[str, str], int], top: int) -> Iterator[str]:
    """Yield the elements of a grid of rows x `NAMES`, darker where more layouts are proven."""
    width, height = CELL
    for at, name in enumerate(NAMES):
        x, y = LEFT + at * width + width // 2, top - 8
        yield f'<text transform="translate({x + 4} {y}) rotate(-50)">{escape(name)}</text>'
    most = max(counts.values())
    for line, row in enumerate(rows):
        y = top + line * height
        yield f'<text class="row" x="{LEFT - 8}" y="{y + 18}">{escape(row)}</text>'
        for at, name in enumerate(NAMES):
            x, count = LEFT + at * width, counts.get((row, name), 0)
            share = (count / most) ** 0.5
            shade = "#f1f3f5" if not count else f"hsl(212 70% {round(94 - 34 * share)}%)"
            kind = "cell" if count else "none"
            yield f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" fill="{shade}"/>'
            yield f'<text class="{kind}" x="{x + width // 2 - 1}" y="{y + 17}">{count or "-"}</text>'


def picture(cases: Sequence[Case]) -> str:
    """Return the numbers of layouts as an SVG: by family and by pair of parallelisms."""
    families = Counter((case.model.family, name) for case in cases for name in parallelisms(case))
    names = sorted({family for family, _ in families})
    second = TOP + len(names) * CELL[1] + TOP + 30
    width, height = LEFT + len(NAMES) * CELL[0] + 60, second + len(NAMES) * CELL[1] + 10
    title = f"{len(cases)} layouts that are compared with one device"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="head" x="10" y="24">{title}, by family and parallelism</text>',
        *grid(names, families, TOP),
        f'<text class="head" x="10" y="{second - TOP + 24}">By pairs of parallelisms</text>',
        *grid(NAMES, combined(cases), second),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def legal_cases() -> list[Case]:
    """Return the layouts of all numbers of ranks that are proven."""
    return [case for world in WORLDS for case in matrix(world) if case.refused is None]


if __name__ == "__main__":
    PAGE.write_text(draw(), encoding="utf-8")
    PICTURE.write_text(picture(legal_cases()), encoding="utf-8")
