"""The command line: one module for each command."""

from meshwright.cli.main import main

__all__ = ["main"]
