"""`plan --serve`: the plan as a page of this machine, which answers as it is changed."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from meshwright.cli.common import read_words
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.serve.answer import SECTIONS
from meshwright.serve.app import serve
from meshwright.spec.dump import toml_value
from meshwright.spec.loading import read_given


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--serve", action="store_true", help="a page that plans as it is changed, on this machine"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="of --serve; any free one unless given"
    )


def serve_page(args: argparse.Namespace) -> int:
    """Serve the page until it is interrupted; it begins with what the arguments say."""
    file, overrides = read_words(args)
    words = list(overrides)
    if file is not None:
        read = read_given(Path(file))
        given = [
            f"{section}.{key}={toml_value(value.value)}"
            for section in SECTIONS
            for key, value in read[section].items()
        ]
        words = given + words
    if not 0 <= args.port < 1 << 16:
        raise ConfigError(f"--port {args.port} must be from 0 to {(1 << 16) - 1}")
    with suppress(KeyboardInterrupt):
        serve(args.port, words, lambda address: print(f"{address}  Ctrl-C ends it", flush=True))
    return EXIT_DONE
