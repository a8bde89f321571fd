"""`meshwright prove -- COMMAND`: compares any trainer's first steps with one process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from meshwright.cli.common import print_json, say_line
from meshwright.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DONE,
    EXIT_RANK_FAILED,
    EXIT_REFUSED,
    ConfigError,
)
from meshwright.prove.trainers.reduction import Reduction
from meshwright.prove.trainers.report import ISSUE, VERDICT, issue_text, verdict_lines
from meshwright.prove.trainers.smallest import SmallCase, SmallestSearch
from meshwright.prove.trainers.standalone import EXIT_WRONG, SCRIPT, standalone_script
from meshwright.runtime import startup
from meshwright.runtime.startup import ORDER, REACHED
from meshwright.units import counted

FOLDER = "meshwright-watch"


def prove_command(args: argparse.Namespace, out: TextIO) -> int:
    """Run a command with its Python processes watched, and print the verdict; returns the code."""
    folder = Path(args.folder or FOLDER).absolute()
    _refuse_own_command(args.program)
    steps = 2 if args.steps is None else args.steps
    if steps < 1:
        raise ConfigError(f"--steps {steps} must be 1 or more")
    reduction = Reduction() if args.case is None else Reduction.from_json(args.case)
    small = SmallCase(tuple(args.program), steps, reduction)
    _empty(folder)
    started = time.perf_counter()
    code = _run(small, folder, out_of_json=bool(args.json))
    seconds = time.perf_counter() - started
    if not (folder / VERDICT).is_file():
        reason = (
            f"no verdict: the command ended with exit code {code} before it had trained "
            f"{steps} steps of a torch model; {_how_far(folder)}"
        )
        say_line(reason, out)
        if args.json:
            print_json({"passed": False, "refused": reason, "command": args.program, "faults": []})
        return EXIT_RANK_FAILED
    verdict = json.loads((folder / VERDICT).read_text())
    for line in verdict_lines(verdict):
        say_line(line, out)
    reduced = dict[str, Any]()
    if verdict["faults"] and args.smallest:
        reduced["smallest"] = _look_for_smallest(small, verdict, folder, seconds, out)
    elif verdict["faults"]:
        say_line("--smallest looks for the smallest case that shows it: it runs COMMAND again", out)
    if (folder / ISSUE).is_file():
        say_line(f"for an issue tracker: {folder / ISSUE}", out)
    if args.json:
        print_json({**verdict, **reduced, "command": args.program, "folder": str(folder)})
    if verdict["refused"] is not None:
        return EXIT_REFUSED
    return EXIT_DONE if verdict["passed"] else EXIT_CHECK_FAILED


def _empty(folder: Path) -> None:
    """Make an empty folder, in place of an earlier recording; refuses to remove other files."""
    if folder.exists():
        files = [*folder.glob("step-*"), *folder.glob(VERDICT), *folder.glob(f"{REACHED}*")]
        if any(folder.iterdir()) and not files:
            raise ConfigError(f"{folder} is not empty, and no recording: choose another --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _run(
    small: SmallCase, folder: Path, *, out_of_json: bool = False, seconds: float | None = None
) -> int | None:
    """Run a case's command, watched; returns its exit code, None if `seconds` were too few.

    With `out_of_json`, what it prints goes to stderr; with `seconds`, nowhere.
    """
    stdout = subprocess.DEVNULL if seconds else 2 if out_of_json else None
    try:
        process = subprocess.Popen(
            small.command,
            env=_environ(folder, small),
            stdout=stdout,
            stderr=subprocess.DEVNULL if seconds else None,
            start_new_session=seconds is not None,  # so that its ranks can be ended with it
        )
    except OSError as error:
        raise ConfigError(f"{small.command[0]} cannot be run: {error.strerror}") from error
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if seconds is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _look_for_smallest(
    small: SmallCase, verdict: dict[str, Any], folder: Path, seconds: float, out: TextIO
) -> dict[str, Any]:
    """Reduce a case that has a fault, write it into the text for issue trackers; return JSON."""
    place = folder / "smaller"
    patience = max(60.0, 4 * seconds)  # the fault may be that a smaller program hangs

    def run(case: SmallCase) -> dict[str, Any] | None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        _run(case, place, seconds=patience)
        file = place / VERDICT
        return json.loads(file.read_text()) if file.is_file() else None

    say_line("looking for the smallest case that shows the first fault", out)
    search = SmallestSearch(small, verdict, run, lambda line: say_line(line, out))
    case = search.search()
    options = ["--steps", str(case.steps)]
    options += ["--case", case.reduction.as_json()] if case.reduction != Reduction() else []
    repeat = shlex.join(["meshwright", "prove", *options, "--", *case.command])
    has_script = _write_script(search.verdict, folder, patience)
    facts = search.verdict["case"]
    counts = {**facts["layers"], **case.reduction.layers, **facts["sizes"]}
    text = [
        "### The smallest case that shows it",
        "",
        f"{counted(search.verdict['world'], 'rank')}, {counted(case.steps, 'step')}, "
        f"{facts['microbatches']} microbatches of {facts['rows']} x "
        f"{facts['length']} a step and rank; "
        + ", ".join(f"{n} {name}" for name, n in counts.items()),
        "",
        "```",
        repeat,
        "```",
        "",
        _about_script(has_script),
        "",
        "What was tried:",
        "",
        *(f"- {attempt}" for attempt in search.attempts),
        "",
    ]
    if has_script:
        text += ["```py", (folder / SCRIPT).read_text().rstrip(), "```", ""]
    (folder / ISSUE).write_text(issue_text(verdict, text))
    say_line(f"  smallest: {text[2]}", out)
    say_line(f"  {text[8]}", out)
    say_line(f"  repeat: {repeat}", out)
    return {
        "repeat": repeat,
        "case": facts,
        "attempts": [asdict(attempt) for attempt in search.attempts],
        "script": str(folder / SCRIPT) if has_script else None,
    }


def _write_script(verdict: dict[str, Any], folder: Path, seconds: float) -> bool | None:
    """Write a script without the program if it shows the fault; None if there can be none."""
    script = standalone_script(verdict)
    if script is None:
        return None
    file = folder / SCRIPT
    file.write_text(script)
    launcher = [verdict["case"]["python"], "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(verdict["world"]), str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        shows = f"exitcode  : {EXIT_WRONG} " in done.stderr
    except subprocess.TimeoutExpired:
        shows = False
    if not shows:
        file.unlink()
    return shows


def _about_script(has_script: bool | None) -> str:
    """Return a sentence on the script that stands by itself."""
    if has_script is None:
        return (
            "There is no script without the program: one is written for gradients of models of "
            "transformers that a DistributedConfig shards."
        )
    if has_script:
        return f"{SCRIPT} shows it without the program, on random tokens."
    return (
        "A script with the same model, layout and random tokens does not show it: it depends on "
        "the program's own code or data."
    )


def _refuse_own_command(program: Sequence[str]) -> None:
    """Raise `ConfigError` for `meshwright train`, whose proof is `meshwright prove CONFIG`."""
    arguments = [Path(word).name for word in program]
    if "train" in arguments and "meshwright" in arguments[: arguments.index("train")]:
        raise ConfigError(
            "a run of `meshwright train` is proven by `meshwright prove CONFIG.toml`, with the "
            "same keys; `prove -- COMMAND` is for other trainers"
        )


def _how_far(folder: Path) -> str:
    """Return a clause on whether the command started Python processes that could be watched."""
    watched = sum(1 for _ in folder.glob(f"{REACHED}*"))
    if watched:
        return f"it started {watched} Python processes with torch, which did not come so far"
    return (
        "no Python process of it imported torch and had the environment of this command: "
        f"PYTHONPATH and {ORDER} must reach it. `python -I`, `-E` and `-S`, `env -i`, `sudo`, "
        "containers and `srun --export=NONE` leave them out: pass them on, or use `mw.watch` in "
        "the script"
    )


def _environ(folder: Path, small: SmallCase) -> dict[str, str]:
    """Return an environment in which Python runs the hook at startup and finds this package."""
    package = Path(startup.__file__).parents[2]
    paths = [str(Path(startup.__file__).parent), os.environ.get("PYTHONPATH", "")]
    if "site-packages" not in package.parts:  # a checkout
        paths.append(str(package.parent))
    order = {"folder": str(folder), "steps": small.steps, "reduction": asdict(small.reduction)}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        startup.ORDER: json.dumps(order),
    }
