"""The arguments of `meshwright prove`, and the check of which go together."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from meshwright.cli.common import add_config_arguments, add_json
from meshwright.errors import ConfigError, refusal
from meshwright.prove.draw import MOST_RANKS
from meshwright.prove.draw import WORLDS as DRAWN_WORLDS
from meshwright.prove.matrix import WORLDS

EXAMPLE = """\
examples:
  meshwright prove run.toml layout.tp=2 layout.sp=true    does this layout compute the same?
  meshwright prove --matrix --world 4                     the whole table of 4 ranks
  meshwright prove --matrix --only zbv --json             those whose label contains a text
  meshwright prove --matrix --draw 9 --seed 4             nine random layouts of the table
  meshwright prove --random 20 --seed 7                   random layouts of 2 to 6 ranks
  meshwright prove --matrix --minutes 5                   as many of the table as 5 minutes allow
  meshwright prove run.toml layout.pp=8 --check-order     can its order deadlock? nothing runs
  meshwright prove run.toml layout.pp=2 --resume          is a resumed run the same run?
  meshwright prove -- torchrun --nproc-per-node 2 train.py    are any trainer's gradients right?
  meshwright prove --smallest -- torchrun --nproc-per-node 8 train.py    where does it begin?

exit codes: 0 all verdicts are good, 1 one is not, 2 refused
"""


def _or(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `prove` to the parser."""
    parser.description = (
        "Prove on local ranks that a layout computes what one device does: loss, every gradient, "
        "what steps of the optimizer add to the weights, its state, and an evaluation."
    )
    parser.epilog = EXAMPLE
    add_config_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--matrix", action="store_true", help="the table instead of a config")
    source.add_argument("--random", type=int, metavar="N", help="N random legal layouts")
    source.add_argument(
        "--case", metavar="JSON", help="what a failure of --random, or --smallest, printed"
    )
    parser.add_argument("--draw", type=int, metavar="N", help="N random layouts of the table")
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="of --random, --draw and --minutes: the same seed, the same layouts; 0 unless given",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="of the table or --random, in random order, what can be proven in M minutes",
    )
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help=f"ranks of the table: {_or(WORLDS)} (default: 8); of --random: 2 to {MOST_RANKS} "
        f"(default: {_or(DRAWN_WORLDS)})",
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="of the table or --random, labels that contain it"
    )
    parser.add_argument(
        "--check-order",
        action="store_true",
        help="check without running anything that the pipeline's order cannot deadlock",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="certify that a run that is interrupted and resumed is the same run",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the ranks compute; one device is a CPU in any case (default: cpu)",
    )
    _add_those_of_commands(parser)
    add_json(parser)


def _add_those_of_commands(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that go before `-- COMMAND`."""
    parser.add_argument(
        "--steps", type=int, metavar="N", help="of COMMAND, the first N (default: 2)"
    )
    parser.add_argument("--folder", metavar="DIR", help="of the recording of COMMAND's steps")
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="if COMMAND is wrong, run it again with less, down to the smallest case",
    )


def refuse_mixed(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for arguments that cannot be combined."""
    if args.program:
        flags = (args.matrix, args.random, args.minutes, args.check_order, args.resume)
        if any(flags) or args.words:
            raise ConfigError(
                "before -- COMMAND go --steps, --folder, --smallest, --case and --json alone"
            )
        return
    if args.smallest:
        raise ConfigError("--smallest needs a command: prove --smallest -- torchrun ...")
    if args.steps is not None or args.folder is not None:
        raise ConfigError("--steps and --folder need a command: prove --steps 3 -- torchrun ...")
    source = "--matrix" if args.matrix else "--random" if args.random is not None else None
    if args.case is not None:
        source = "--case"
    if source is not None and args.words:
        raise ConfigError(f"{source} has its own layouts; leave out {' '.join(args.words)}")
    if source not in ("--matrix", "--random") and (args.world is not None or args.only is not None):
        raise ConfigError("--world and --only need --matrix, or --random N")
    if args.draw is not None and source != "--matrix":
        raise ConfigError("--draw needs --matrix")
    if args.minutes is not None:
        _refuse_minutes(args.minutes, source, args.check_order)
    elif source != "--random" and args.draw is None and args.seed is not None:
        raise ConfigError("--seed needs --random N, --matrix --draw N, or --minutes M")
    if args.resume and (source is not None or args.check_order):
        conflicting = source or "--check-order"
        raise ConfigError(f"--resume certifies a config: leave out {conflicting}")


def _refuse_minutes(minutes: float, source: str | None, only_order: bool) -> None:
    if source not in ("--matrix", "--random"):
        raise ConfigError("--minutes needs --matrix, or --random N")
    if only_order:
        raise ConfigError("--check-order takes no time: leave out --minutes")
    if not 0 < minutes < math.inf:
        raise ConfigError(
            refusal(f"--minutes {minutes:g} is not enough time to prove in", legal=["1"])
        )
