"""Starts, watches, restarts and ends ranks, and explains why they ended."""
