"""The output of `meshwright data` for a store: its table, and a conversation with its mask."""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.cli.common import print_json
from meshwright.data import Store
from meshwright.errors import EXIT_DONE, ConfigError, refusal
from meshwright.parsing import printable
from meshwright.units import format_bytes

TRAINED: Final = "bold green"


def inspect_chat(store: Store, args: argparse.Namespace) -> int:
    """Show a store and one of its conversations, trained parts in colour or [[brackets]]."""
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
    """Return the texts of a conversation, cut where what is trained begins and ends."""
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
    """Return the table's row of what is trained, where not all is."""
    if store.manifest.form == "text":
        return {}
    count = sum(shard.supervised or 0 for shard in store.manifest.shards)
    return {"trained": f"{count:,} ({count / store.manifest.tokens:.0%} of all), the assistant's"}


def store_facts(store: Store) -> dict[str, Any]:
    """Return the contents of a store as JSON values."""
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
    """Print the contents of a store."""
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
