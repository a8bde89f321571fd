"""Attention over sequences that are cut over cp."""
