"""Checks and benchmarks on one GPU, useful in any time, from a bare checkout.

    python -m benchmarks.gpu --minutes 5 --out docs/benchmarks

Trains the shapes of Llama-3.2-1B, Llama-3-8B and OLMoE-1B-7B with AdamW and as many layers as are
predicted to fit, eager and compiled; calibrates the GPU, and proves layouts of one rank on it:
step time, MFU and peak memory beside what was predicted, and what a step runs. What is needed is
looked at first. What is worth most comes first, and each row is in gpu.jsonl as soon as it is
measured: a second call with the same versions and the same GPU goes on with what is missing.
`--plan` says what a time is enough for. `--device cpu --tiny` tries the whole of it without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check import compiler_advice, lacking
from benchmarks.gpu_rows import PARTS, Row, plan, rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 done, 1 something is wrong or nothing is there, 2 refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this itself")
    parser.add_argument(
        "--preset",
        default="h200",
        help="a device of the catalogue that a GPU which is not in it is like",
    )
    parser.add_argument("--minutes", type=float, default=9, help="what there is time for")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--plan", action="store_true", help="say what there is time for, and end")
    parser.add_argument("--out", type=Path, help="the folder of gpu.jsonl and gpu.md")
    args = parser.parse_args(argv)
    until = time.monotonic() + 60 * args.minutes
    if args.plan:
        print(planned(60 * args.minutes, rows(args.only, tiny=args.tiny)))
        return 0
    why = lacking(args.device, os.environ)
    if why is not None:
        print(f"make gpu: {why}", file=sys.stderr)
        return 2
    return measure(args, until)


def measure(args: argparse.Namespace, until: float) -> int:
    """Measure what there is time for, and print the page."""
    # Only now: they need what was looked for.
    from benchmarks.gpu_run import Run, has_failed
    from meshwright.cost.catalogue import find_device

    find_device(args.preset)
    lacks = compiler_advice(os.environ, args.device)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.device, args.tiny, until, args.preset, lacks, args.out)
    try:
        why = run.look()
        if why is not None:
            print(f"make gpu: {why}", file=sys.stderr)
            return 2
        if lacks is not None:
            run.say(lacks)
        asked = rows(args.only, tiny=args.tiny, compiles=lacks is None)
        run.measure(asked)
    finally:
        run.worker.end()
    run.write()
    print(f"\n{run.page()}")
    return 1 if has_failed(run.results.found, asked) else 0


def planned(seconds: float, asked: Sequence[Row]) -> str:
    """Return in lines what so many seconds are enough for, and how much is left out."""
    found = list(plan(seconds, asked))
    lines = [f"{one.begins:5.0f} s: {one.row.key}" for one in found]
    return "\n".join([*lines, f"{len(found)} of {len(asked)} rows"])


if __name__ == "__main__":
    sys.exit(main())
