"""Checks before a run starts, which raise an error or print a note."""
