"""`meshwright generate`: continues a text with the model of a run or a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from meshwright.cli.common import add_json, model_folder, print_json
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.evaluate.talk import Sampling, TextModel
from meshwright.parsing import printable

EXAMPLE = """\
example:
  meshwright generate runs/latest --prompt "def main" --max-tokens 200
  meshwright generate runs/latest --chat --prompt "What colour is snow?"
"""
# The widest model whose products with one token's vector one thread computes as fast as several: on
# two cores, a 256 x 256 product takes 18 us by one thread and 13 by two, a 128 x 128 product 6
# and 8. Beside other processes, threads that wait for each other made such models 10 times slower.
_NARROW: Final = 256


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate` to the parser."""
    parser.description = "Continue a prompt with a trained model."
    parser.epilog = EXAMPLE
    parser.add_argument(
        "folder", metavar="RUN_OR_HF_DIR", help="or a PEFT folder, or an id of the Hub"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's, written by the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what comes before the user")
    add_sampling(parser)
    add_json(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options for sampling tokens, and `--tokenizer`, to a parser."""
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="'bytes', 'gpt2' or a tokenizer.json, if not the run's")


@contextmanager
def loaded(args: argparse.Namespace) -> Iterator[TextModel]:
    """Yield the model that the arguments name; torch uses one thread for a narrow model.

    The number of threads is restored at the end of the context.
    """
    model, threads = TextModel(model_folder(args.folder), args.tokenizer), torch.get_num_threads()
    if model.model.spec.dim <= _NARROW:
        torch.set_num_threads(1)
    try:
        yield model
    finally:
        torch.set_num_threads(threads)


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return the sampling settings in the arguments of `add_sampling`."""
    return Sampling(args.max_tokens, args.temperature, args.top_p, args.seed)


def run(args: argparse.Namespace) -> int:
    """Generate text and print it piece by piece; returns the exit code."""
    if args.prompt is None:
        raise ConfigError(
            f"no text to continue; add --prompt TEXT, or talk: meshwright chat {args.folder}"
        )
    if args.system is not None and not args.chat:
        raise ConfigError("--system is what a chat template writes before the user; add --chat")
    with loaded(args) as model:
        return _run(args, model, sampling_of(args))


def _run(args: argparse.Namespace, model: TextModel, sampling: Sampling) -> int:
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        generation = model.answer([*system, {"role": "user", "content": args.prompt}], sampling)
    else:
        generation = model.continued(args.prompt, sampling)
    if not args.json and not args.chat:
        print(safe(args.prompt), end="", flush=True)
    started = time.perf_counter()
    for piece in generation:
        if not args.json:
            print(safe(piece), end="", flush=True)
    seconds = time.perf_counter() - started
    if args.json:
        print_json({"prompt": args.prompt, "text": generation.text, "tokens": generation.count})
        return EXIT_DONE
    print()
    speed = generation.count / max(seconds, 1e-9)
    print(f"{generation.count} tokens, {speed:.0f} tokens/s", file=sys.stderr)
    return EXIT_DONE


def safe(text: str) -> str:
    """Return a text with terminal control characters escaped if stdout is a terminal."""
    return printable(text) if sys.stdout.isatty() else text
