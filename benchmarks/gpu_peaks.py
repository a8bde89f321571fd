"""What is in a GPU's memory at the peak of a step, by the lines that allocated it.

    python -m benchmarks.gpu_peaks llama-3-8b --layers 2 --rows 2 --length 4096 train.compile=true

The peak is beside the predicted one. What was there before the step, such as weights and the
optimizer's state, is one number. Of compiled code the line is the compiler's own.
"""

from __future__ import annotations

import argparse
import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from benchmarks.gpu_alone import world_of_one
from benchmarks.gpu_predicted import peak
from benchmarks.gpu_rows import MICROBATCHES
from meshwright.bench.layouts import Stepper
from meshwright.comm.world import World
from meshwright.layout import Layout
from meshwright.prove.case import Case
from meshwright.spec.loading import load_config
from meshwright.units import format_bytes

_EVENTS: Final = 400_000
# Of the lines that led to an allocation.
_LINES: Final = 3
_WIDTH: Final = 90
_COMPILED: Final = "torchinductor"
_LIBRARIES: Final = ("site-packages", "dist-packages", "lib/python")

Event = Mapping[str, Any]


class Held(NamedTuple):
    """Allocations of one size from one place: so many, of so many bytes each."""

    bytes: int
    count: int
    place: str


def at_peak(events: Iterable[Event], place: Callable[[Event], str]) -> tuple[int, list[Held]]:
    """Return the most bytes that allocations add up to, and which these are, the largest first.

    `events` are of torch's memory history: their `action`, `addr` and `size`.
    """
    live: dict[int, Event] = {}
    most, total, best = 0, 0, dict(live)
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            total += event["size"]
        elif event["action"] == "free_completed":
            freed = live.pop(event["addr"], None)
            # Also of what was there before the history began.
            total -= event["size"] if freed is None else freed["size"]
        if total > most:
            most, best = total, dict(live)
    counts = Counter((event["size"], place(event)) for event in best.values())
    found = [Held(size, count, where) for (size, where), count in counts.items()]
    return most, sorted(found, key=lambda one: -one.bytes * one.count)


def line_of(event: Event) -> str:
    """Return the innermost lines of this project, or of compiled code, that led to an event."""
    found: list[str] = []
    for frame in event.get("frames", ()):
        path, at = frame["filename"], frame["line"]
        code = linecache.getline(path, at).strip()[:_WIDTH]
        if _COMPILED in path:
            found.append(f"compiled: {code}")
            break
        if not any(library in path for library in _LIBRARIES) and path.endswith(".py"):
            found.append(f"{Path(path).name}:{at} {code}")
        if len(found) == _LINES:
            break
    return " < ".join(found)


def measure(world: World, case: Case) -> tuple[int, list[Held]]:
    """Return the bytes at the peak of a third step, and those of them that it has allocated."""
    step = Stepper(world, case)
    for _ in range(2):
        step()
    before = torch.cuda.memory_allocated(world.device)
    torch.cuda.memory._record_memory_history(max_entries=_EVENTS, stacks="python")
    step()
    (events,) = torch.cuda.memory._snapshot(world.device)["device_traces"][:1]
    torch.cuda.memory._record_memory_history(enabled=None)
    most, held = at_peak(events, line_of)
    return before + most, held


def main() -> None:
    """Measure a case, and print what is held at its peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layout", default="", help="words of a layout's label")
    parser.add_argument("--most", type=int, default=30, help="lines that are printed")
    parser.add_argument("words", nargs="*", help="overrides of the config")
    args = parser.parse_args()
    words = [f"model.preset={args.preset}", f"model.n_layers={args.layers}"]
    words += [f"train.batch={MICROBATCHES * args.rows}", f"train.seq_len={args.length}"]
    words += ["train.precision=bf16", "cluster.device=cuda", "cluster.devices_per_node=1"]
    config = load_config(None, [*words, "cluster.preset=h200", *args.words])
    layout = Layout.parse(f"mb{args.rows} {args.layout}".strip())
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with world_of_one(device) as world:
        found, held = measure(world, Case(config.model, config.train, layout))
    print(f"{format_bytes(found)} at the peak, {format_bytes(peak(config, layout))} predicted")
    for one in held[: args.most]:
        print(f"{format_bytes(one.bytes * one.count)} = {one.count} x {one.bytes:,}: {one.place}")


if __name__ == "__main__":
    main()
