"""`meshwright prove -- COMMAND`: compares any trainer's first steps with one process."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from meshwright.cli.common import print_json, say_line
from meshwright.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DONE,
    EXIT_RANK_FAILED,
    EXIT_REFUSED,
    ConfigError,
)
from meshwright.prove.trainers.report import ISSUE, VERDICT, verdict_lines
from meshwright.runtime import startup
from meshwright.runtime.startup import ORDER, REACHED

FOLDER = "meshwright-watch"


def prove_command(args: argparse.Namespace, out: TextIO) -> int:
    """Run a command with its Python processes watched, and print the verdict; returns the code."""
    folder = Path(args.folder or FOLDER).absolute()
    _refuse_own_command(args.program)
    steps = 2 if args.steps is None else args.steps
    if steps < 1:
        raise ConfigError(f"--steps {steps} must be 1 or more")
    if folder.exists():
        files = [*folder.glob("step-*"), *folder.glob(VERDICT), *folder.glob(f"{REACHED}*")]
        if any(folder.iterdir()) and not files:
            raise ConfigError(f"{folder} is not empty, and no recording: choose another --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        stdout = 2 if args.json else None  # one document alone is on ours
        environ = _environ(folder, steps)
        code = subprocess.run(args.program, env=environ, stdout=stdout, check=False)
    except OSError as error:
        raise ConfigError(f"{args.program[0]} cannot be run: {error.strerror}") from error
    if not (folder / VERDICT).is_file():
        reason = (
            f"no verdict: the command ended with exit code {code.returncode} before it had trained "
            f"{steps} steps of a torch model; {_how_far(folder)}"
        )
        say_line(reason, out)
        if args.json:
            print_json({"passed": False, "refused": reason, "command": args.program, "faults": []})
        return EXIT_RANK_FAILED
    verdict = json.loads((folder / VERDICT).read_text())
    for line in verdict_lines(verdict):
        say_line(line, out)
    if (folder / ISSUE).is_file():
        say_line(f"for an issue tracker: {folder / ISSUE}", out)
    if args.json:
        print_json({**verdict, "command": args.program, "folder": str(folder)})
    if verdict["refused"] is not None:
        return EXIT_REFUSED
    return EXIT_DONE if verdict["passed"] else EXIT_CHECK_FAILED


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


def _environ(folder: Path, steps: int) -> dict[str, str]:
    """Return an environment in which Python runs the hook at startup and finds this package."""
    package = Path(startup.__file__).parents[2]
    paths = [str(Path(startup.__file__).parent), os.environ.get("PYTHONPATH", "")]
    if "site-packages" not in package.parts:  # a checkout
        paths.append(str(package.parent))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        startup.ORDER: json.dumps({"folder": str(folder), "steps": steps}),
    }
