"""`meshwright train`."""

from __future__ import annotations

import argparse
import os
import sys

from meshwright.cli.common import add_config_arguments, add_json, print_json, read_config
from meshwright.launch.session import summarise, train

EXAMPLE = """\
example:
  meshwright train run.toml layout.dp_replicate=2 train.steps=100

Starts the local ranks itself; under torchrun it joins the ranks that are there:
  torchrun --nproc-per-node 2 -m meshwright train run.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    parser.description = "Train a model and write its run folder."
    parser.epilog = EXAMPLE
    add_config_arguments(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train; with `--json` the outcome is one document on stdout, the view goes to stderr."""
    config = read_config(args)
    finished = train(config, out=sys.stderr if args.json else sys.stdout)
    if args.json and os.environ.get("RANK", "0") == "0":
        print_json(summarise(finished))
    return finished.exit_code
