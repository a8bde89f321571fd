"""Ranks that measure."""
