"""Rehearse layouts and seeded faults on the stand-in for a GPU, and write what was checked.

Run as `python -m benchmarks.rehearsal --page docs/records/gpu-rehearsal.md`. Without a page,
`--only TEXT` for the kinds whose words have a text, `--random N --seed S` for layouts as
`prove --random` has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rehearsal_kinds import ASKED, FAULTS, KINDS, MODELS, Fault
from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.prove.draw import draw
from meshwright.simulate.on_standin import Watched, out_of_order, watch
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import OptimizerSpec, TrainSpec

# More ranks than these are rehearsed by the first and the last alone.
MOST_RANKS = 4


def case(
    label: str, precision: str = "bf16", packed: bool = False, model: str = "llama"
) -> dict[str, Any]:
    """Return a case of `watch`: a small model in a layout."""
    asked = {"batch": 8, "seq_len": 64, "precision": precision, **ASKED.get(model, {})}
    spec = TrainSpec.model_validate(asked)
    return _document(MODELS[model], spec, Layout.parse(label), packed)


def _document(model: ModelSpec, train: TrainSpec, layout: Layout, packed: bool) -> dict[str, Any]:
    specs = {"model": model, "train": train, "layout": layout, "optimizer": OptimizerSpec()}
    found = {name: one.model_dump_json() for name, one in specs.items()}
    ranks = range(layout.world) if layout.world <= MOST_RANKS else (0, layout.world - 1)
    return {**found, "packed": packed, "ranks": list(ranks)}


def at_random(number: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the labels of random layouts, and what their rehearsals find: nothing if all is well.

    Each has a process of its own, so that one that ends leaves the others.
    """
    for one in draw(seed, number):
        document = _document(one.model, one.train, one.layout, one.packed)
        try:
            (found,) = checked([document])
        except MeshwrightError as error:
            yield one.label, str(error)
        else:
            told = "; ".join(f"{check}: {found.faults[check][0]}" for check in found.caught)
            yield one.label, told


class Checked(NamedTuple):
    """What a rehearsal found, by check: sentences, none where all is well; and the named waits."""

    faults: dict[str, tuple[str, ...]]
    named: tuple[str, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[Watched]) -> Checked:
        """Return what was found of the ranks of a case."""
        found = {
            "messages": tuple(text for one in ranks for text in one.messages),
            "between ranks": out_of_order(ranks),
            "host waits": tuple(text for one in ranks for text in one.syncs),
            "order": tuple(text for one in ranks for text in one.order),
        }
        named = dict.fromkeys(text for one in ranks for text in one.named)
        return cls(found, tuple(named), tuple(one.rank for one in ranks))

    @property
    def caught(self) -> list[str]:
        """The checks that something was found by."""
        return [check for check, texts in self.faults.items() if texts]


def checked(
    cases: Sequence[dict[str, Any]], edits: Sequence[Sequence[str]] = ()
) -> Iterator[Checked]:
    """Yield what the rehearsals of some cases find."""
    ranks = watch(cases, edits)
    for one in cases:
        yield Checked.of([next(ranks) for _ in one["ranks"]])
    assert next(ranks, None) is None


def seeded(fault: Fault) -> Checked:
    """Return what is found of a fault."""
    (found,) = checked([case(fault.label)], [fault.edit])
    return found


def page(found: Iterable[Checked], caught: Iterable[Checked]) -> str:
    """Return the tables."""
    lines = [
        "# A step on a GPU, rehearsed without one",
        "",
        "Made by `python -m benchmarks.rehearsal`, as `meshwright simulate --device cuda` does:",
        "the branches for CUDA on a stand-in device, with fake tensors and a fake process group",
        "([why](../decisions/0043-the-path-of-a-gpu.md)).",
        f"Nothing here ran on a GPU. Layouts of up to {MOST_RANKS} ranks are rehearsed by all of",
        "them, others by the first and the last.",
        "",
        "| check | passes if |",
        "|---|---|",
        "| messages | a rank sends what the program says: kinds, axes, bytes, numbers |",
        "| between ranks | the ranks of a group, and each pair of a pipeline, begin their messages"
        " in one order |",
        "| host waits | the host reads nothing from the device within the step, except for what is"
        " named |",
        "| order | each use is ordered after the write before, on streams and on the host; freed"
        " memory is not reused while a stream uses it; pinned memory is read once it has"
        " arrived |",
        "",
        "## Layouts",
        "",
        "| layout | model | precision | rows | ranks | messages | between ranks | host waits |"
        " order |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, one in zip(KINDS, found, strict=True):
        rows = "packed" if kind.packed else "plain"
        words = {check: f"FAILED: {len(texts)}" for check, texts in one.faults.items() if texts}
        named = "; ".join(one.named) or "none"
        checks = (
            words.get("messages", "the program's"),
            words.get("between ranks", "one order" if len(one.ranks) > 1 else "-"),
            words.get("host waits", named),
            words.get("order", "in order"),
        )
        ranks = ", ".join(map(str, one.ranks))
        cells = (f"`{kind.label}`", kind.model, kind.precision, rows, ranks, *checks)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Seeded faults",
        "",
        "Each fault is put into a copy of the source as it is loaded, and must be caught.",
        "",
        "| fault | layout | caught by |",
        "|---|---|---|",
    ]
    for fault, one in zip(FAULTS, caught, strict=True):
        told = ", ".join(one.caught) or "NOTHING"
        lines.append(f"| {fault.what} | `{fault.label}` | {told} |")
    return "\n".join(lines) + "\n"


def rehearse_at_random(number: int, seed: int) -> int:
    """Print what random layouts come to; 1 where something is wrong."""
    failed = 0
    for label, told in at_random(number, seed):
        print(f"{label}: {told or 'passed'}", flush=True)
        failed += bool(told)
    print(f"{number - failed} of {number} random layouts passed, seed {seed}")
    return 1 if failed else 0


def main() -> int:
    """Write the page; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--page", type=Path)
    what.add_argument("--only", metavar="TEXT", help="such as 'cp4-ring mb2 bf16 packed windows'")
    what.add_argument("--random", metavar="N", type=int)
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of --random")
    args = parser.parse_args()
    if args.random is not None:
        return rehearse_at_random(args.random, args.seed)
    kinds = [kind for kind in KINDS if args.only is None or args.only in kind.words]
    found, caught = [], []
    for kind, one in zip(kinds, checked([case(*kind) for kind in kinds]), strict=True):
        print(f"{kind.words}: {one.faults if one.caught else 'passed'}", file=sys.stderr)
        found.append(one)
    if args.only is not None:
        return 0 if found and not any(one.caught for one in found) else 1
    for fault in FAULTS:
        caught.append(seeded(fault))
        print(f"{fault.what}: {', '.join(caught[-1].caught)}", file=sys.stderr)
    args.page.write_text(page(found, caught), encoding="utf-8")
    fine = all(not one.caught for one in found)
    seen = all(fault.check in one.caught for fault, one in zip(FAULTS, caught, strict=True))
    return 0 if fine and seen else 1


if __name__ == "__main__":
    raise SystemExit(main())
