"""`meshwright chat`: a conversation with a stored model, or with adapters, in a terminal."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Final

from meshwright.cli.generate import add_sampling, loaded, safe, sampling_of
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.evaluate.talk import Generation, Sampling, TextModel

EXAMPLE: Final = """\
example:
  meshwright chat runs/latest --system "You answer in one sentence."

/new starts a new conversation; /quit or Ctrl-D ends; Ctrl-C ends an answer.
"""
_ENDS: Final = ("/quit", "/exit")
_NEW: Final = "/new"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `chat` to the parser."""
    parser.description = "Talk with a model that was trained on conversations."
    parser.epilog = EXAMPLE
    parser.add_argument(
        "folder", metavar="RUN_OR_HF_DIR", help="or a PEFT folder, or an id of the Hub"
    )
    parser.add_argument("--system", metavar="TEXT", help="what comes before the first message")
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """Answer each line of stdin, as part of one conversation, until the user ends it."""
    with loaded(args) as model:
        _converse(model, args.system, sampling_of(args))
    return EXIT_DONE


def _converse(model: TextModel, system_text: str | None, sampling: Sampling) -> None:
    system = [] if system_text is None else [{"role": "system", "content": system_text}]
    turns: list[dict[str, str]] = []
    while (text := _read()) is not None and text not in _ENDS:
        if text == _NEW:
            turns = []
        elif text:
            turns.append({"role": "user", "content": text})
            turns, generation = _fitting(model, system, turns, sampling)
            _show(generation)
            turns.append({"role": "assistant", "content": generation.text})
            sampling = replace(sampling, seed=sampling.seed + 1)


def _read() -> str | None:
    """Return the user's next line, or None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _fitting(
    model: TextModel,
    system: list[dict[str, str]],
    turns: list[dict[str, str]],
    sampling: Sampling,
) -> tuple[list[dict[str, str]], Generation]:
    """Return the newest turns that fit into the model's context, and the answer to them.

    Older turns are dropped with a note. Raises `ConfigError` if even the last does not fit.
    """
    while True:
        try:
            return turns, model.answer([*system, *turns], sampling)
        except ConfigError as error:
            if len(turns) < 3:
                raise
            print(f"note: the oldest turn is left out: {error}", file=sys.stderr)
            turns = turns[2:]


def _show(generation: Generation) -> None:
    """Print an answer as it is generated; Ctrl-C ends the answer."""
    try:
        for piece in generation:
            print(safe(piece), end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)
