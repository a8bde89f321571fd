"""Rehearse every kind of layout on the stand-in for a GPU, and write the table of what was checked.

Run as `python -m benchmarks.rehearsal --page docs/gpu-rehearsal.md`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.layout import Layout
from meshwright.simulate.on_standin import Watched, watch
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

MODEL = model_spec(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=128, ffn_dim=128)
# Layout, precision, whether rows hold several documents.
KINDS = (
    ("mb2", "bf16", False),
    ("mb4", "fp32", False),
    ("mb2 recompute-selective", "bf16", True),
    ("dp2 mb2", "bf16", False),
    ("dp2 shard2 zero1 mb2", "bf16", False),
    ("shard2 zero2 mb2", "fp16", False),
    ("shard2 zero3 mb2 recompute-full", "bf16", False),
    ("tp2 sp mb2", "bf16", False),
    ("shard2 zero3 tp2 sp mb2 recompute-selective", "bf16", False),
    ("cp2-ring mb2", "bf16", True),
    ("cp2-ulysses mb2", "bf16", True),
    ("pp2 1f1b mb1", "bf16", False),
    ("zero3 pp2 zbv v2 mb1", "bf16", False),
    ("shard2 zero3 pp2 interleaved_zero_bubble v2 mb1", "bf16", False),
    ("mb2 offload-optimizer", "bf16", False),
    ("shard2 zero3 mb2 offload-params", "bf16", False),
)


def case(label: str, precision: str = "bf16", packed: bool = False) -> dict[str, Any]:
    """Return a case of `watch`: a small model in a layout."""
    spec = TrainSpec.model_validate({"batch": 8, "seq_len": 64, "precision": precision})
    documents = {"model": MODEL, "train": spec, "optimizer": OptimizerSpec()}
    found = {name: one.model_dump_json() for name, one in documents.items()}
    layout = Layout.parse(label).model_dump_json()
    return {**found, "layout": layout, "packed": packed, "ranks": [0]}


def page(found: Iterable[Watched]) -> str:
    """Return the table."""
    lines = [
        "# A step on a GPU, rehearsed without one",
        "",
        "Made by `python -m benchmarks.rehearsal`, as `meshwright simulate --device cuda` does:",
        "the branches for CUDA on a stand-in device, with fake tensors and a fake process group.",
        "Nothing here ran on a GPU.",
        "",
        "| layout | precision | rows | messages | host waits | streams, memory and pinned copies |",
        "|---|---|---|---|---|---|",
    ]
    for (label, precision, packed), one in zip(KINDS, found, strict=True):
        waits = "; ".join(one.named) if one.named else "none"
        checks = [
            "the program's" if not one.messages else f"{len(one.messages)} differ",
            waits if not one.syncs else f"FAILED: {', '.join(one.syncs)}",
            "in order" if not one.order else f"FAILED: {len(one.order)}",
        ]
        rows = "packed" if packed else "plain"
        lines.append(f"| `{label}` | {precision} | {rows} | {' | '.join(checks)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, required=True)
    found = []
    args = parser.parse_args()
    for one in watch([case(*kind) for kind in KINDS]):
        print(f"{one.label}: {'passed' if one.passed else one}", file=sys.stderr)
        found.append(one)
    args.page.write_text(page(found), encoding="utf-8")
    return 0 if all(one.passed for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
