"""Compare the steps of other systems with one process, and write a table of what they do.

Run as `python -m benchmarks.other_trainers --page docs/others.md` with transformers, accelerate,
DeepSpeed, torchtitan and Megatron-Core installed; `--only TEXT` for the systems or families whose
name has a text, `--out FILE` for the rows as JSON lines. A file with rows is continued; a page
keeps the lines that have no row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.other_trainers_cases import cases

WORKER = Path(__file__).with_name("other_trainers_worker.py")
TIMEOUT_S = 300  # of a case: the first of DeepSpeed compiles
HEAD = """\
# Other systems

Two steps of a small random model on ranks of CPU processes (gloo, fp32), compared with the same
microbatches in one process by [`prove`](guides/is-my-training-right.md). "Wrong" names the faults
that were found. A layout that is right here is right for this model and these two steps, no more.
Faults of GPU kernels don't show. accelerate leaves FSDP out on CPU ranks without a word: its check
for an accelerator is passed by.

torchtitan and Megatron-Core expect CUDA: the name of the device is given to them, and the layers,
parallelisms, buffers and sums of gradients are theirs. torchtitan's FSDP sums by an operation that
gloo lacks, so torch's setting for a plain sum is on; its tokens of experts are counted as floats,
since torch counts no integers on CPUs. The loss is divided as torchtitan's trainer does, by the
global number of targets; its DDP averages besides, so that gradients are too small by the number of
ranks. Megatron-Core has no rows for its optimizer and clipping, whose buffers are CUDA's. Without
Transformer Engine, it raises for sequence and context parallelism, and in the router of experts.
Layouts with `pp` have no rows: `prove` refuses pipelines.

`python -m benchmarks.other_trainers --page docs/others.md` writes this table; `--only TEXT` repeats
some of its rows.

"""


def run_cases(some: Sequence[dict[str, Any]], ranks: int, out: Path) -> None:
    """Run cases in one set of processes, and what remains of them in new ones after a crash."""
    rest = list(some)
    while rest:
        before = len(read(out))
        with tempfile.TemporaryDirectory() as folder:
            asked = Path(folder) / "cases.json"
            asked.write_text(json.dumps(rest))
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            words = ["--nproc-per-node", str(ranks), str(WORKER), str(asked), str(out)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            _wait(subprocess.Popen([*launcher, *words], env=environ), out)
        done = len(read(out)) - before
        if done < len(rest):
            with out.open("a") as file:
                row = {**rest[done], "crashed": "the processes ended, or hung"}
                file.write(json.dumps(row) + "\n")
            done += 1
        rest = rest[done:]


def _wait(launcher: subprocess.Popen[bytes], out: Path) -> None:
    """Wait for a launcher's end, and end its ranks if they write no row for a while."""
    before = -1
    while launcher.poll() is None and (rows := len(read(out))) > before:
        before = rows
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(TIMEOUT_S)
    if launcher.poll() is None:
        launcher.terminate()  # it ends its ranks; if killed, it would leave them behind
        launcher.wait()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def outcome(row: dict[str, Any]) -> str:
    """Return what a row says, in a cell."""
    if "crashed" in row:
        return f"raises: {row['crashed'].splitlines()[0][:110]}"
    verdict = row.get("verdict")
    if verdict is None:
        return "no verdict"
    if verdict["refused"]:
        return f"not compared: {verdict['refused'][:110]}"
    if verdict["passed"]:
        return f"right ({verdict['compared']} numbers)"
    return "wrong: " + "; ".join(f"{f['kind']}: {f['sentence']}" for f in verdict["faults"][:2])


def page(rows: Sequence[dict[str, Any]], before: str = "") -> str:
    """Return the page of all cases that have a row, or a line in the page `before`."""
    lines = {_key(line): line for line in before.splitlines() if line.startswith("| ")}
    lines |= {_key(line): line for line in map(_line, rows)}
    order = [(case["system"], *_cells(case)) for case in cases()]
    chosen = [lines[key] for key in order if key in lines]
    table = [
        "| system | model | layout | microbatches | outcome |",
        "|---|---|---|---|---|",
        *chosen,
    ]
    return "\n".join([HEAD, *_summary(chosen), "", *table]) + "\n"


def _summary(lines: Sequence[str]) -> list[str]:
    """Return a table of how many layouts of each system have each outcome."""
    kinds = ("right", "wrong", "not compared", "raises")
    counts = dict[str, list[int]]()
    for line in lines:
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        row = counts.setdefault(cells[0].rpartition(" ")[0], [0] * len(kinds))
        kind = next((n for n, kind in enumerate(kinds) if cells[4].startswith(kind)), None)
        if kind is not None:
            row[kind] += 1
    head = f"| system | {' | '.join(kinds)} |"
    rows = [f"| {system} | {' | '.join(map(str, row))} |" for system, row in counts.items()]
    return [head, "|---|--:|--:|--:|--:|", *rows]


def _cells(case: dict[str, Any]) -> tuple[str, str, str]:
    """Return what a case is about: its model, layout and microbatches."""
    layout = ", ".join(f"{key}={value}" for key, value in case["layout"].items())
    return case["family"], layout, str(case["microbatches"])


def _line(row: dict[str, Any]) -> str:
    system = f"{row['system']} {version(row['system'])}"
    cells = (system, *_cells(row), outcome(row))
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _key(line: str) -> tuple[str, ...]:
    """Return what a line is about: its system without the version, model, layout, microbatches."""
    system, *cells, _ = line.removeprefix("| ").split(" | ", 4)
    return (system.split()[0], *cells)


def main() -> None:
    """Run the cases that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("build/other-trainers.jsonl"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    asked = [case for case in cases() if args.only in f"{case['system']} {case['family']}"]
    keys = ("system", "family", "layout", "microbatches")
    done = [{key: row[key] for key in keys} for row in read(args.out)]
    left = [case for case in asked if {key: case[key] for key in keys} not in done]
    kinds = dict.fromkeys((case["system"], case["ranks"]) for case in left)
    for system, ranks in kinds:
        some = [case for case in left if (case["system"], case["ranks"]) == (system, ranks)]
        # AutoTP leaves state behind: each of its cases gets processes of its own.
        alone = [case for case in some if "autotp_size" in case["layout"]]
        run_cases([case for case in some if case not in alone], ranks, args.out)
        for case in alone:
            run_cases([case], ranks, args.out)
    if args.page is not None:
        before = args.page.read_text() if args.page.is_file() else ""
        args.page.write_text(page(read(args.out), before))


if __name__ == "__main__":
    main()
