"""Checks before a run starts: refusals and notes."""
