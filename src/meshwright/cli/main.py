"""`meshwright COMMAND`: finds the command, runs it, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, cast

from meshwright.errors import (
    EXIT_REFUSED,
    EXIT_STOPPED,
    MeshwrightError,
    lacks_training,
    nearest,
)
from meshwright.lines import fitted
from meshwright.parsing import printable
from meshwright.version import __version__

_SHOWN: Final = 100  # characters of a path that is too long
# What the extra `train` brings, and commands that compute import.
_OF_TRAINING: Final = ("torch", "safetensors")

# A command's module is imported when it is called, so that `--help` answers at once.
COMMANDS: Final[Mapping[str, str]] = {
    "train": "train a model: start the ranks, write the run folder",
    "plan": "rank the layouts that fit, by speed, without running anything",
    "predict": "predict memory and step time of rows of measurements",
    "simulate": "rehearse the real program on fake ranks, any number of them",
    "prove": "prove that a layout computes what one device does",
    "bench": "measure the machine, and layouts side by side on it",
    "launch": "write a job for torchrun, Slurm, SkyPilot or Kubernetes, or submit it",
    "generate": "sample text from a run or a Hugging Face folder",
    "chat": "talk with a run, a Hugging Face folder or adapters in the terminal",
    "eval": "perplexity on held-out text, and tasks of lm-evaluation-harness",
    "checkpoint": "list, verify and prune steps; Hugging Face export and import",
    "data": "prepare, inspect and verify corpora",
    "report": "make a page of a run, or of several side by side",
    "clean": "list the disk space of runs and prepared corpora, and remove old ones",
    "doctor": "examine the machine, a config before its start, or a run",
    "config": "show the resolved config with origins, or its schema; import another system's",
    "completion": "complete commands, options and config keys in bash, zsh or fish",
}

EXAMPLE = """\
examples:
  meshwright train                                  a small Llama on the built-in corpus
  meshwright train run.toml train.steps=500         a config, one value changed
  meshwright plan run.toml --top 5                  which layout fits and is fastest?
  meshwright prove run.toml layout.tp=2             does this layout compute the same?
  meshwright generate runs/latest --prompt "def "   what it writes
  meshwright config show run.toml                   every value and where it came from

exit codes: 0 done, 1 a check failed, 2 refused before start, 3 a rank failed,
4 stopped on request after saving, 5 no progress after repeated restarts
"""


def _instead_of_option(arguments: Sequence[str], known: Iterable[str]) -> str:
    """Return a hint on what to write instead of an unknown option, or "".

    `arguments` begin with that option. The hint is a config key of this name, here or in another
    framework, or else the nearest of the `known` options.
    """
    from meshwright.spec.loading import ALIASES, KEYS  # not at the top: `--help` answers at once
    from meshwright.spec.synonyms import instead_of

    option, equals, value = arguments[0].partition("=")
    if not equals:
        value = next((word for word in arguments[1:2] if not word.startswith("-")), "VALUE")
    name = option.lstrip("-").replace("-", "_")
    section, dot, key = name.partition(".")
    keys = [name] if dot and key in KEYS.get(section, ()) else []
    keys += [f"{section}.{key}" for section, known in KEYS.items() for key in known if key == name]
    keys = keys or [alias for alias in (*ALIASES, "model") if alias == name] or instead_of(name)[0]
    if keys:
        return f"; a config's keys have no dashes: {keys[0]}={value}"
    options = nearest(option, known)
    return f"; nearest: {options[0]}" if options else ""


class Command(Protocol):
    """The interface of a command's module."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to the parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; error messages go to stderr.

    `argv` None means that of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    try:
        return _run(arguments)
    except MeshwrightError as error:
        _complain(command, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print("meshwright: interrupted", file=sys.stderr)
        return EXIT_STOPPED
    except BrokenPipeError:  # the reader of our output has gone: nothing is wrong
        sys.stderr.close()
        return 0
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_TRAINING:
            raise
        _complain(command, str(lacks_training("it")))
        return EXIT_REFUSED
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        # Every command takes paths, and asks the system about them in many places.
        _complain(command, _too_long(error))
        return EXIT_REFUSED


def _run(arguments: Sequence[str]) -> int:
    """Parse a command line and run its command."""
    parser = argparse.ArgumentParser(
        prog="meshwright",
        description="Plan, prove, train and explain the parallel training of language models.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshwright {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if arguments and arguments[0] == name:
            module = cast(Command, importlib.import_module(f"meshwright.cli.{name}"))
            module.configure(command)
            command.set_defaults(module=module)
    arguments, program = _with_program(arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        legal = ", ".join(nearest(arguments[0], COMMANDS, 2) or COMMANDS)
        parser.error(f"unknown command {arguments[0]!r}; nearest: {legal}")
    args, unparsed = parser.parse_known_args(arguments)
    args.program = program
    if unparsed:
        # argparse takes overrides from one place only; people add them at the end, after options.
        if not hasattr(args, "words") or any(argument.startswith("-") for argument in unparsed):
            subparser = commands.choices[args.command]
            following = arguments[list(arguments).index(unparsed[0]) :]
            known = re.findall(r"--[\w-]+", subparser.format_usage())
            hint = _instead_of_option(following, known)
            subparser.error(f"unrecognized arguments: {' '.join(unparsed)}{hint}")
        args.words += unparsed
    if any("\0" in argument for argument in arguments):  # from Python: a shell's words have none
        parser.error("an argument has a NUL character, which no file's name may have")
    return cast(Command, args.module).run(args)


def _with_program(arguments: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Return the command's arguments, and the program that follows `--` in `prove -- PROGRAM`."""
    if arguments[:1] != ["prove"] or "--" not in arguments:
        return arguments, []
    separator = arguments.index("--")
    return arguments[:separator], list(arguments[separator + 1 :])


def _complain(command: str, text: str) -> None:
    """Print an error message to stderr, wrapped if that is a terminal."""
    print(fitted(printable(f"meshwright {command}: {text}"), sys.stderr), file=sys.stderr)


def _too_long(error: OSError) -> str:
    """Return a message on a path that is too long for the system."""
    name = str(error.filename)
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
    return f"{shown} is too long for a path: at most 255 bytes between two slashes, 4,095 in all"
