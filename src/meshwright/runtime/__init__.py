"""Starts, watches and ends the ranks of a run."""
