"""`meshwright generate`: text from a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from meshwright.checkpoint.weights import load_model
from meshwright.cli.common import add_json, print_json
from meshwright.data import load_tokenizer
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.models.generate import generate_tokens
from meshwright.parsing import printable
from meshwright.train.run_folder import tokenizer_of

EXAMPLE = """\
example:
  meshwright generate runs/latest --prompt "def main" --max-tokens 200
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    parser.description = "Continue a prompt with a trained model."
    parser.epilog = EXAMPLE
    parser.add_argument("folder", metavar="RUN_OR_HF_DIR")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="'bytes', 'gpt2' or a tokenizer.json, if not the run's")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Load, sample, and print each piece of text as it comes."""
    folder = Path(args.folder)
    name, eos = (args.tokenizer, None) if args.tokenizer else tokenizer_of(folder)
    tokenizer = load_tokenizer(name, eos)
    model = load_model(folder)
    prompt = tokenizer.encode(args.prompt)
    if len(prompt) == 0:
        raise ConfigError("--prompt is empty: there is nothing to continue")
    ids: list[int] = [int(i) for i in prompt]
    count, shown = len(ids), args.prompt
    # What a model writes may be sequences that a terminal acts on.
    safe = printable if sys.stdout.isatty() else str
    if not args.json:
        print(safe(shown), end="", flush=True)
    started = time.perf_counter()
    for token in generate_tokens(
        model,
        torch.tensor([ids]),
        args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        eos_id=tokenizer.eos_id,
    ):
        ids.append(int(token))
        text = tokenizer.decode(ids)
        # A character of several tokens is printed once it is whole.
        if not args.json and not text.endswith("\ufffd"):
            print(safe(text[len(shown) :]), end="", flush=True)
            shown = text
    seconds = time.perf_counter() - started
    if args.json:
        text = tokenizer.decode(ids)
        print_json({"prompt": args.prompt, "text": text, "tokens": len(ids) - count})
        return EXIT_DONE
    print()
    speed = (len(ids) - count) / max(seconds, 1e-9)
    print(f"{len(ids) - count} tokens, {speed:.0f} tokens/s", file=sys.stderr)
    return EXIT_DONE
