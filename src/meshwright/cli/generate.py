"""`meshwright generate`: text from a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from meshwright.checkpoint.weights import load_model
from meshwright.cli.common import add_json, print_json
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.data.boundaries import ends_of
from meshwright.data.encoders import ChatEncoder, encoder_of
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.models.generate import generate_tokens
from meshwright.parsing import printable
from meshwright.spec.stored import StoredTokenizer
from meshwright.training.run_folder import tokenizer_of

EXAMPLE = """\
example:
  meshwright generate runs/latest --prompt "def main" --max-tokens 200
  meshwright generate runs/latest --chat --prompt "What colour is snow?"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    parser.description = "Continue a prompt with a trained model."
    parser.epilog = EXAMPLE
    parser.add_argument("folder", metavar="RUN_OR_HF_DIR")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's, written by the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what comes before the user")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="'bytes', 'gpt2' or a tokenizer.json, if not the run's")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Load, sample, and print each piece of text as it comes."""
    folder = Path(args.folder)
    stored = StoredTokenizer(args.tokenizer) if args.tokenizer else tokenizer_of(folder)
    tokenizer = load_tokenizer(stored.name, stored.eos, stored.bos)
    prompt = _chat(args, tokenizer) if args.chat else _continued(args, tokenizer)
    ends = ends_of(tokenizer, "chat" if args.chat else stored.form)
    model = load_model(folder)
    if not args.json and not args.chat:
        print(_safe(args.prompt), end="", flush=True)
    new: list[int] = []
    # Of a text, the prompt is part of what is decoded: a character may begin in it.
    before = [] if args.chat else prompt[len(tokenizer.bos_ids) :]
    shown = "" if args.chat else args.prompt
    started = time.perf_counter()
    for token in generate_tokens(
        model,
        torch.tensor([prompt]),
        args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        eos_id=ends,
    ):
        new.append(int(token))
        if args.chat and new[-1] in ends:
            break
        text = tokenizer.decode([*before, *new])
        # A character of several tokens is printed once it is whole.
        if not args.json and not text.endswith("\ufffd"):
            print(_safe(text[len(shown) :]), end="", flush=True)
            shown = text
    seconds = time.perf_counter() - started
    if args.json:
        answer_ids = new[:-1] if args.chat and new and new[-1] in ends else new
        text = tokenizer.decode([*before, *answer_ids])
        print_json({"prompt": args.prompt, "text": text, "tokens": len(new)})
        return EXIT_DONE
    print()
    speed = len(new) / max(seconds, 1e-9)
    print(f"{len(new)} tokens, {speed:.0f} tokens/s", file=sys.stderr)
    return EXIT_DONE


def _safe(text: str) -> str:
    """Return a text as stdout takes it: what a model writes may be sequences of a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def _continued(args: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text to continue, after those that begin every text."""
    if args.system is not None:
        raise ConfigError("--system is what a chat template writes before the user; add --chat")
    prompt = [*tokenizer.bos_ids, *map(int, tokenizer.encode(args.prompt))]
    if not prompt:
        raise ConfigError("--prompt is empty: there is nothing to continue")
    return prompt


def _chat(args: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """Return the ids after which the assistant speaks."""
    encoder = encoder_of(tokenizer, "chat")
    assert isinstance(encoder, ChatEncoder)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    try:
        return encoder.prompt([*system, {"role": "user", "content": args.prompt}])
    except ValueError as error:
        raise ConfigError(f"--prompt: {error}") from error
