"""The arguments of `plan --for` and `plan --like`, without what reads and writes configs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from meshwright.cli.common import add_accept
from meshwright.errors import ConfigError, refusal
from meshwright.interop.trainers import TRAINERS

# Questions that `plan` answers for layouts of Meshwright alone.
_OWN: Final = (
    *("explain", "after_oom", "devices", "fewest", "largest_batch", "longest_context"),
    *("fine_tune", "cheapest", "html", "serve", "save"),
)


def add_trainers(parser: argparse.ArgumentParser) -> None:
    """Add the options `--for`, `--like`, `--save-config` and `--accept` to a parser."""
    parser.add_argument(
        "--for", dest="trainer", choices=TRAINERS, help="plan for another trainer, as its config"
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FILE",
        help="another trainer's config: whether it fits, and what would be faster",
    )
    parser.add_argument(
        "--save-config", type=Path, metavar="FILE", help="write the trainer's config here"
    )
    add_accept(parser)


def check_trainers(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for options that do not apply to a plan for another trainer."""
    if args.trainer is None and args.like is None:
        if args.save_config is not None:
            legal = [f"--for {name}" for name in TRAINERS]
            rule = "--save-config writes another trainer's config; it needs its name"
            raise ConfigError(refusal(rule, legal=legal[:3]))
        return
    for name in _OWN:
        if getattr(args, name, None):
            flag = f"--{name.replace('_', '-')}"
            mode = "--for" if args.trainer else "--like"
            raise ConfigError(f"{flag} is answered for layouts of Meshwright; leave {mode} out")
