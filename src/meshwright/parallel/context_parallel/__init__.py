"""Attention over sequences that are sharded over cp."""
