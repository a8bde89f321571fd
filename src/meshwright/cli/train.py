"""`meshwright train`: trains a model and writes its run folder."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.identity import PARTS
from meshwright.cli.common import (
    add_accept,
    add_config_arguments,
    add_json,
    print_json,
    read_config,
    read_words,
)
from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import ConfigError
from meshwright.spec.loading import Config
from meshwright.store import StorePath, is_url
from meshwright.training.in_store import folder_of

if TYPE_CHECKING:
    from meshwright.runtime.checks.start import Resume

EXAMPLE = """\
examples:
  meshwright train run.toml layout.dp_replicate=2 train.steps=100
  meshwright train --resume runs/latest train.steps=200    resume, on any layout
  meshwright train run.toml layout.auto=true               the planner chooses the layout
  meshwright train --plan plan.json                        what `plan --save` has written
  meshwright train --deepspeed ds_config.json run.toml     batch, optimizer, ZeRO of that

Starts the local ranks itself; under torchrun or srun it joins the ranks that are there:
  torchrun --nproc-per-node 2 -m meshwright train run.toml
  srun --ntasks-per-node 8 meshwright train run.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train` to the parser."""
    parser.description = "Train a model and write its run folder."
    parser.epilog = EXAMPLE
    add_config_arguments(parser)
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="resume this run, from its newest good step, with its own config unless one is given",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="plan.json",
        help="run the layout of a saved plan (`plan --save`), if the program is still the same",
    )
    parser.add_argument(
        "--allow-changed",
        metavar="PART[,PART]",
        help=f"with --resume: may differ from the run's ({', '.join(PARTS)})",
    )
    parser.add_argument(
        "--deepspeed",
        type=Path,
        metavar="ds_config.json",
        help="take a DeepSpeed config over the config; every key is honoured, reported or refused",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="say what goes wrong and how it ended, no steps"
    )
    add_accept(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train and return the exit code; with `--json`, stdout has the outcome and stderr the view."""
    # Not at the top: the data and the view that it brings would slow down `--help`.
    from meshwright.runtime.checks.start import Resume
    from meshwright.runtime.session import summarise, train

    resumed_run = _resume(args)
    resume = None if resumed_run is None else Resume(*resumed_run)
    config = _config(args, resume)
    out = sys.stderr if args.json else sys.stdout
    finished = train(config, out=out, resume=resume, quiet=args.quiet)
    rendezvous = Rendezvous.from_environment(os.environ)
    if args.json and (rendezvous is None or rendezvous.rank == 0):
        print_json(summarise(finished))
    assert finished.exit_code is not None  # only a run that was opened has none
    return finished.exit_code


def _config(args: argparse.Namespace, resume: Resume | None) -> Config:
    """Return the config of a saved plan, of a run to resume, or of a config file."""
    default = None if resume is None else resume.run / "config.toml"
    if args.accept and args.deepspeed is None:
        raise ConfigError("--accept is about another system's config: add --deepspeed FILE")
    if args.deepspeed is not None and args.plan is not None:
        raise ConfigError("--plan and --deepspeed are both whole configs: give one of them")
    if args.deepspeed is not None:
        # Not at the top: readers of others' configs would slow down `--help`.
        from meshwright.cli.imports import train_config

        return train_config(args, default, sys.stderr)
    if args.plan is None:
        return read_config(args, default)
    if resume is not None:
        raise ConfigError("--plan starts a run and --resume continues one: give one of them")
    # Not at the top, for the same reason
    from meshwright.planner.saved import load_planned

    file, overrides = read_words(args)
    return load_planned(args.plan, file, overrides)


def _resume(args: argparse.Namespace) -> tuple[Path, tuple[str, ...]] | None:
    """Return the run folder in `--resume` and the names in `--allow-changed`.

    None without `--resume`.
    """
    allowed = tuple(args.allow_changed.split(",")) if args.allow_changed else ()
    if args.resume is None:
        if allowed:
            raise ConfigError("--allow-changed applies to a resumed run: add --resume RUN")
        return None
    if not is_url(args.resume):
        return Path(args.resume), allowed
    log_dir = [word.partition("=")[2] for word in args.words if word.startswith("log.dir=")]
    return folder_of(StorePath.parse(args.resume), *log_dir[-1:]), allowed
