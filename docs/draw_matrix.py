"""Writes `support-matrix.md` from the table of `prove --matrix`: `python docs/draw_matrix.py`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from meshwright.layout.schedules import SCHEDULES
from meshwright.prove.case import OPTIMIZERS, Case
from meshwright.prove.matrix import WORLDS, matrix
from meshwright.prove.refused import refuse

PAGE = Path(__file__).with_name("support-matrix.md")

HEAD = """\
# Support matrix

What [`meshwright prove --matrix`](commands/prove.md) proves: each of these layouts is run on local
ranks and compared with one device. This page is drawn from the same table (`prove/matrix.py`) by
`docs/draw_matrix.py`; a test holds it to be current. `make prove` runs all of it.
"""


def parallelisms(case: Case) -> Iterator[str]:
    """Yield the names of the parallelisms that a layout uses."""
    layout = case.layout
    if layout.dp_replicate > 1:
        yield "dp"
    if layout.zero and layout.shard_ranks > 1:
        yield f"ZeRO-{layout.zero}"
    if layout.tp > 1:
        yield "tp + sp" if layout.sp else "tp"
    if layout.cp > 1:
        yield layout.cp_kind
    if layout.pp > 1:
        yield "pp"
    if layout.recompute != "none":
        yield f"{layout.recompute} recompute"
    if layout.offload != "none":
        yield f"offload {layout.offload}"
    if case.train.precision != "fp32":
        yield case.train.precision


NAMES = (
    *("dp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tp", "tp + sp", "ring", "ulysses", "pp"),
    *("full recompute", "selective recompute", "offload optimizer", "offload params"),
    *("bf16", "fp16"),
)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def pairs(cases: Sequence[Case]) -> str:
    """Return the table of how many layouts have two things at once."""
    together: Counter[tuple[str, str]] = Counter()
    for case in cases:
        found = list(parallelisms(case))
        together.update((a, b) for a in found for b in found)
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


def listed(cases: Sequence[Case]) -> str:
    """Return the table of the layouts, one a line."""
    rows = [
        [
            f"`{case.layout.label}`",
            *case.label.rpartition(", ")[2:],
            OPTIMIZERS[case.optimizer],
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
        "## What meets what\n\nHow many of the layouts have both; the diagonal has them at all.\n",
        pairs(everything),
        "\n## Schedules\n",
        schedules(everything),
        "\n## What is refused\n\nEach rule broken once, on 8 ranks.\n",
        refusals([case for case in found[8] if case.refused is not None]),
    ]
    for world, cases in legal.items():
        parts += [f"\n## The layouts of {world} ranks\n", listed(cases)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(draw(), encoding="utf-8")
