"""Tokens sent to the ranks of their experts."""
