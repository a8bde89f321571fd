"""The command line: a table of commands, each in a thin file of its own."""

from meshwright.cli.main import main

__all__ = ["main"]
