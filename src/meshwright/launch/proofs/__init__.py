"""Ranks that prove."""
