"""`meshwright data`: prepares, inspects and verifies indexed stores, and trains a tokenizer."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from meshwright.cli.common import add_json, print_json
from meshwright.data import Store, load_tokenizer, open_store, prepare, train_bpe, verify
from meshwright.data.corpora import Source
from meshwright.data.dataset import source_of
from meshwright.data.megatron_pair import write_megatron
from meshwright.data.store import Progress as Report
from meshwright.data.view import split
from meshwright.errors import EXIT_CHECK_FAILED, EXIT_DONE, ConfigError, refusal
from meshwright.parsing import printable
from meshwright.runtime.session import cache_folder
from meshwright.spec.loading import load_config
from meshwright.spec.training import DataFormat, DataSpec
from meshwright.units import format_bytes, format_count, format_seconds

TRAINED: Final = "bold green"


def inspect_chat(store: Store, args: argparse.Namespace) -> int:
    """Print a store and one conversation of it, with trained text in colour or [[brackets]]."""
    pieces = _conversation(store, args.document)
    if args.json:
        parts = [{"text": text, "trained": trained} for text, trained in pieces]
        print_json(store_facts(store) | {"document": args.document, "sample": parts})
        return EXIT_DONE
    print_table(store)
    console = Console(soft_wrap=True, highlight=False)
    shown = Text()
    for text, trained in pieces:
        if trained and console.color_system is None:
            text = f"[[{text}]]"
        shown.append(printable(text), TRAINED if trained else "dim")
    mark = "in [[brackets]]" if console.color_system is None else "in green"
    console.print(f"conversation {args.document}; what is trained is {mark}:", markup=False)
    console.print(shown)
    return EXIT_DONE


def _conversation(store: Store, number: int) -> list[tuple[str, bool]]:
    """Return a conversation's text in pieces, each with whether it is trained on.

    `number` counts from 1. Raises `ConfigError` if it is too large.
    """
    tokenizer, before = store.tokenizer(), 0
    for shard in store.shards:
        if number - before <= len(shard.ends):
            index = number - before - 1
            start, stop = (int(shard.ends[index - 1]) if index else 0), int(shard.ends[index])
            ids = shard.read(start, stop)
            mask = shard.read_mask(start, stop).astype(bool)
            edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
            return [
                (tokenizer.decode(ids[a:b].tolist()), bool(mask[a])) for a, b in pairwise(edges)
            ]
        before += len(shard.ends)
    raise ConfigError(refusal(f"--document {number}: {store.folder} has {before}", legal=[before]))


def _trained(store: Store) -> dict[str, str]:
    """Return the table row on the number of trained tokens; empty for a store of texts."""
    if store.manifest.form == "text":
        return {}
    count = sum(shard.supervised or 0 for shard in store.manifest.shards)
    return {"trained": f"{count:,} ({count / store.manifest.tokens:.0%} of all), the assistant's"}


def store_facts(store: Store) -> dict[str, Any]:
    """Return a description of a store as JSON values."""
    manifest = store.manifest
    supervised = {}
    if manifest.form == "chat":
        trained = sum(shard.supervised or 0 for shard in manifest.shards)
        supervised = {"supervised_tokens": trained}
    return {
        "store": str(store.folder),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        **supervised,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "unigram_entropy": manifest.entropy,
        "tokenizer": {
            "name": manifest.tokenizer.name,
            "digest": manifest.tokenizer.digest,
            "eos_id": manifest.tokenizer.eos_id,
        },
        "sources": list(manifest.sources),
        "shards": [
            {
                "file": shard.tokens_file.file,
                "bytes": shard.tokens_file.bytes,
                "tokens": shard.tokens,
                "documents": shard.documents,
                "max_id": shard.max_id,
            }
            for shard in manifest.shards
        ],
        "digest": store.digest,
    }


def print_table(store: Store) -> None:
    """Print a description of a store as a table."""
    manifest = store.manifest
    size = sum(record.bytes for record in manifest.files())
    name = manifest.tokenizer.name
    rows = {
        "documents": f"{manifest.documents:,}",
        "tokens": f"{manifest.tokens:,}",
        **_trained(store),
        "vocabulary": f"{manifest.vocab_size:,} ({name}, document ends with {_eos(store)})",
        "stored as": f"{manifest.dtype}, {len(manifest.shards)} shards, {format_bytes(size)}",
        "unigram entropy": f"{manifest.entropy:.3f} nats per token",
        "sources": ", ".join(str(source.get("kind", "?")) for source in manifest.sources),
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, value in rows.items():
        table.add_row(Text(key, "dim"), Text(value))
    Console(soft_wrap=True).print(table)


def _eos(store: Store) -> str:
    record = store.manifest.tokenizer
    return f"{record.eos_token} = {record.eos_id}" if record.eos_token else str(record.eos_id)


PREPARE = """\
example:
  meshwright data prepare stories --source tinystories:valid --tokenizer bytes
  meshwright train data.source=stories
"""
INSPECT = """\
example:
  meshwright data inspect stories
"""
VERIFY = """\
example:
  meshwright data verify stories && echo intact
"""
EXPORT = """\
example:
  meshwright data export-megatron stories stories-megatron
"""
TRAIN_TOKENIZER = """\
example:
  meshwright data train-tokenizer bpe --source stdlib --vocab-size 4096
  meshwright train data.tokenizer=bpe/tokenizer.json
"""
EXAMPLES = "examples:\n" + "".join(
    text.split("\n", 1)[1] for text in (PREPARE, INSPECT, VERIFY, EXPORT, TRAIN_TOKENIZER)
)
SAMPLE_TOKENS = 48


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `data` and their arguments to the parser."""
    parser.description = "Prepare, inspect and verify indexed stores of tokens."
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    command = _action(actions, "prepare", "tokenise text into an indexed store", PREPARE)
    command.add_argument("out", metavar="OUT", help="the folder to write; continues if interrupted")
    _add_source(command)
    command.add_argument(
        "--tokenizer", default="bytes", help="'bytes', 'gpt2' or the path of a tokenizer.json"
    )
    command.add_argument("--eos", metavar="TOKEN", help="what ends a document, if not found")
    command.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin texts with BOS, or not; else as the tokenizer's files do: data.bos",
    )
    command.add_argument("--workers", type=_positive, metavar="N", help="processes (the cores)")
    command.add_argument(
        "--format", choices=["text", "chat"], default="text", help="what rows hold: data.format"
    )
    command.add_argument("--chat-template", metavar="FILE", help="not the tokenizer's own")
    command.add_argument(
        "--validation",
        type=float,
        default=DataSpec().validation,
        metavar="SHARE",
        help="show how much this share would hold out (data.validation decides, at training)",
    )

    command = _action(actions, "inspect", "what a store holds", INSPECT)
    command.add_argument("store", metavar="STORE")
    command.add_argument(
        "--document", type=_positive, default=1, metavar="N", help="which conversation is shown (1)"
    )

    command = _action(actions, "verify", "read a store again and compare all hashes", VERIFY)
    command.add_argument("store", metavar="STORE")

    command = _action(actions, "export-megatron", "write a store as a .bin/.idx pair", EXPORT)
    command.add_argument("store", metavar="STORE")
    command.add_argument("prefix", metavar="PREFIX", help="of PREFIX.bin and PREFIX.idx")

    command = _action(actions, "train-tokenizer", "train a byte-level BPE", TRAIN_TOKENIZER)
    command.add_argument("out", metavar="OUT", help="a .json file, or a folder for tokenizer.json")
    _add_source(command)
    command.add_argument("--vocab-size", type=_positive, required=True, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Run a subcommand of `data` and return the exit code."""
    actions = {
        "prepare": _prepare,
        "inspect": _inspect,
        "verify": _verify,
        "export-megatron": _export_megatron,
        "train-tokenizer": _train_tokenizer,
    }
    return actions[args.action](args)


def _action(actions: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json(parser)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="stdlib, tinystories, hf:NAME, or files of text or rows, and folders of them",
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="field of rows")
    parser.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="at a file or row without text: stop, or skip it and list what was skipped",
    )
    parser.add_argument(
        "--separator", metavar="TEXT", help=r"ends a document in a text file; '\n\n': blank lines"
    )
    parser.add_argument("--cache", metavar="DIR", help="folder for downloads")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _sources(args: argparse.Namespace) -> list[Source]:
    separator = None if args.separator is None else args.separator.replace("\\n", "\n")
    form: DataFormat = getattr(args, "format", "text")
    packing: Literal["stream", "documents"] = "documents" if form == "chat" else "stream"
    spec = DataSpec(text_key=args.text_key, separator=separator, format=form, packing=packing)
    cache = Path(args.cache) if args.cache else cache_folder(load_config(), os.environ)
    return [source_of(name, spec, cache) for name in args.source]


@contextmanager
def _bar(description: str) -> Iterator[Report]:
    """Yield a callback `(done, total)` that shows a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _prepare(args: argparse.Namespace) -> int:
    if not 0 <= args.validation < 1:
        raise ConfigError(f"--validation {args.validation} must be in [0, 1)")
    started = time.perf_counter()
    with _bar("preparing") as report:
        store = prepare(
            _sources(args),
            args.tokenizer,
            Path(args.out),
            eos=args.eos,
            workers=args.workers,
            say=lambda text: print(text, file=sys.stderr),
            on_error=args.on_error,
            progress=report,
            form=args.format,
            chat_template=args.chat_template,
            bos=args.bos,
        )
    seconds = time.perf_counter() - started
    form, vocab_size = store.manifest.form, store.manifest.vocab_size
    train, validation = split(store.shards, args.validation, vocab_size, divides=form == "text")
    facts = store_facts(store) | {
        "seconds": seconds,
        "validation": {
            "share": args.validation,
            "documents": validation.documents,
            "tokens": len(validation),
            "train_documents": train.documents,
            "train_tokens": len(train),
        },
    }
    if args.json:
        print_json(facts)
        return EXIT_DONE
    print_table(store)
    share = f"{args.validation:g} held out: {format_count(len(validation))} tokens"
    print(f"{share} of {validation.documents} documents; took {format_seconds(seconds)}")
    return EXIT_DONE


def _inspect(args: argparse.Namespace) -> int:
    store = open_store(Path(args.store))
    if store.manifest.form == "chat":
        return inspect_chat(store, args)
    ids = store.shards[0].tokens[:SAMPLE_TOKENS].tolist()
    text = store.tokenizer().decode(ids)
    if args.json:
        print_json(store_facts(store) | {"sample": {"ids": ids, "text": text}})
        return EXIT_DONE
    print_table(store)
    print(f"first {len(ids)} tokens: {text!r}")
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    with _bar("verifying") as report:
        result = verify(Path(args.store), report)
    seconds = time.perf_counter() - started
    passed = not result.problems
    if args.json:
        print_json(
            {
                "store": args.store,
                "passed": passed,
                "problems": list(result.problems),
                "files": result.files,
                "bytes": result.bytes,
                "seconds": seconds,
            }
        )
    elif passed:
        size = f"{result.files} files, {format_bytes(result.bytes)}"
        print(f"{args.store} is intact: {size}, {format_seconds(seconds)}")
    else:
        for problem in result.problems:
            print(f"{args.store}: {problem}")
    return EXIT_DONE if passed else EXIT_CHECK_FAILED


def _export_megatron(args: argparse.Namespace) -> int:
    store, prefix = open_store(Path(args.store)), Path(args.prefix)
    tokens = write_megatron(prefix, store.shards, store.manifest.tokenizer.vocab_size)
    if args.json:
        print_json({"prefix": str(prefix), "tokens": tokens})
    else:
        print(f"{prefix}.bin and {prefix}.idx: {format_count(tokens)} tokens")
    return EXIT_DONE


def _train_tokenizer(args: argparse.Namespace) -> int:
    parts = [(source, part) for source in _sources(args) for part in source.parts()]
    skipped: list[str] = []
    skip = skipped.append if args.on_error == "skip" else None
    texts = (text for source, part in parts for text in source.documents(part, skip))
    if not args.json:
        print("training a tokenizer", file=sys.stderr)
    file = train_bpe(texts, args.vocab_size, Path(args.out))
    for text in skipped:
        print(f"skipped: {text}", file=sys.stderr)
    tokenizer = load_tokenizer(str(file))
    facts = {"file": str(file), "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos_token}
    if args.json:
        print_json(facts | {"digest": tokenizer.digest})
    else:
        print(f"{file}: {tokenizer.vocab_size} entries, {tokenizer.eos_token} ends a document")
    return EXIT_DONE
