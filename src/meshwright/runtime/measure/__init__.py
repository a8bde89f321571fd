"""Starts ranks that measure this machine."""
