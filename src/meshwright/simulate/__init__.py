"""Dry-runs the real training step on fake ranks: no messages, no memory, any world size, one
core."""
