"""Starts ranks that prove layouts."""
